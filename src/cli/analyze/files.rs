//! Reads files and folders.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use super::AnalyzeError;
use crate::{
    analyze::{self, Object, object::Content},
    api::yaml::MAX_FILE_BYTES,
    base::SmolStr,
};

/// The extensions of files that are read.
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];
/// The maximum depth of folders.
const MAX_DEPTH: usize = 32;

/// Reads the files, those of the folders, and standard input for `-`, as objects of this cluster.
pub(super) fn read(paths: &[PathBuf], default_namespace: &str, cluster: &str) -> Result<Content, AnalyzeError> {
    let mut files = Vec::new();
    for path in paths {
        if path == Path::new("-") {
            files.push(path.clone());
            continue;
        }
        collect(path, MAX_DEPTH, &mut files)?;
    }
    let mut content = Content::default();
    for path in files {
        let bytes = bytes(&path).map_err(AnalyzeError::file(&path))?;
        let file = analyze::read(&path.display().to_string(), &bytes, default_namespace);
        content.objects.extend(file.objects.into_iter().map(|object| Object {
            cluster: SmolStr::new(cluster),
            ..object
        }));
        content.problems.extend(file.problems);
    }
    Ok(content)
}

/// Reads at most one byte above the limit, which the parser then reports.
fn bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = MAX_FILE_BYTES as u64 + 1;
    if path == Path::new("-") {
        std::io::stdin().take(limit).read_to_end(&mut bytes)?;
    } else {
        fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn collect(path: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), AnalyzeError> {
    let is_folder = fs::metadata(path).map_err(AnalyzeError::file(path))?.is_dir();
    if is_folder && depth > 0 {
        let entries = fs::read_dir(path).map_err(AnalyzeError::file(path))?;
        let entries: Result<Vec<PathBuf>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
        let mut entries = entries.map_err(AnalyzeError::file(path))?;
        entries.sort();
        return entries.iter().try_for_each(|entry| collect(entry, depth - 1, files));
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
        files.push(path.to_owned());
    } else {
        eprintln!("skipped {}: files end in .{}", path.display(), EXTENSIONS.join(", ."));
    }
    Ok(())
}
