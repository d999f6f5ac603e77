//! `istiod convert FILE...`: turns objects of old releases into today's kinds.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::Value;

use super::{FAILURE, print};
use crate::{
    api::yaml::{self, MAX_FILE_BYTES},
    convert::{self, Options},
};

/// Flags of `convert`.
#[derive(Args)]
pub struct ConvertFlags {
    /// Files with old objects, and with the Services that they name; - for standard input.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// DNS suffix of Kubernetes services.
    #[arg(long, default_value = "cluster.local")]
    domain: String,
    /// Root namespace, for objects of the whole mesh.
    #[arg(long = "rootNamespace", default_value = "istio-system")]
    root_namespace: String,
}

/// Writes the converted objects to the output, and what cannot be mapped to the error output.
pub fn run(flags: &ConvertFlags) -> ExitCode {
    let mut objects = Vec::new();
    for file in &flags.files {
        match read(file) {
            Ok(read) => objects.extend(read),
            Err(error) => {
                eprintln!("error: {}: {error}", file.display());
                return ExitCode::from(FAILURE);
            }
        }
    }
    let options = Options {
        domain: flags.domain.clone(),
        root_namespace: flags.root_namespace.clone(),
    };
    let conversion = convert::convert(&objects, &options);
    let documents: Vec<String> = conversion.objects.iter().map(yaml::to_text).collect();
    for note in conversion.notes {
        eprintln!("{note}");
    }
    print(&documents.join("---\n"), ExitCode::SUCCESS)
}

fn read(file: &Path) -> Result<Vec<Value>, String> {
    let bytes = if file == Path::new("-") {
        let mut bytes = Vec::new();
        let limited = std::io::Read::take(std::io::stdin(), MAX_FILE_BYTES as u64 + 1);
        let mut limited = limited;
        std::io::Read::read_to_end(&mut limited, &mut bytes).map_err(|error| error.to_string())?;
        bytes
    } else {
        std::fs::read(file).map_err(|error| error.to_string())?
    };
    let text = yaml::text(&bytes).map_err(|error| error.to_string())?;
    let documents = yaml::documents(text).into_iter();
    documents
        .map(|document| document.parse().map_err(|error| error.to_string()))
        .collect()
}
