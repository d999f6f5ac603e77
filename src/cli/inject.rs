//! `istiod inject -f FILE`: adds the sidecar to the workloads of a file, as the webhook would to their pods.
//!
//! The templates, values and mesh config come from files, or from the ConfigMaps of a cluster. The flags are those of
//! `istioctl kube-inject`.

mod built_in;
mod cluster;
mod diff;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use clap::Args;

use super::FAILURE;
use crate::{
    api::{FieldError, mesh_config, yaml},
    inject::{
        ConfigError, Environment, InjectError, Injector, Mesh, Namespace, NativeSidecars, Platform,
        workload::inject_text,
    },
    kube::client::ClientError,
    settings::process_variables,
    webhook::host::ProcessHost,
};

/// Flags of `inject`.
#[derive(Args)]
pub struct InjectFlags {
    /// File with Kubernetes objects as YAML; - for standard input.
    #[arg(short, long)]
    filename: PathBuf,
    /// Output file (default: standard output).
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Print what injection changes, in place of the injected objects.
    #[arg(long)]
    diff: bool,
    /// Use the templates and values that the chart of this version installs by default, in place of a cluster's.
    #[arg(long = "builtIn", conflicts_with_all = ["kubeconfig", "context"])]
    built_in: bool,
    /// File with the key config of the injector's ConfigMap: policy and templates.
    #[arg(long = "injectConfigFile")]
    inject_config_file: Option<PathBuf>,
    /// File with the key values of the injector's ConfigMap.
    #[arg(long = "valuesFile")]
    values_file: Option<PathBuf>,
    /// File with the mesh config.
    #[arg(long = "meshConfigFile")]
    mesh_config_file: Option<PathBuf>,
    /// Name of the injector's ConfigMap, without revision.
    #[arg(long = "injectConfigMapName", default_value = "istio-sidecar-injector")]
    inject_config_map_name: String,
    /// Name of the ConfigMap of the mesh config, without revision.
    #[arg(long = "meshConfigMapName", default_value = "istio")]
    mesh_config_map_name: String,
    /// Revision of the control plane.
    #[arg(short, long, default_value = "")]
    revision: String,
    /// Namespace of the control plane.
    #[arg(short = 'i', long = "istioNamespace", default_value = "istio-system")]
    istio_namespace: String,
    /// Namespace of workloads that name none.
    #[arg(short, long, default_value = "")]
    namespace: String,
    /// Kubeconfig of the cluster with the ConfigMaps (default: KUBECONFIG, then ~/.kube/config).
    #[arg(short = 'c', long)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig (default: its current one).
    #[arg(long)]
    context: Option<String>,
    /// Use of native sidecars: true, false or auto.
    #[arg(long, env = "ENABLE_NATIVE_SIDECARS", default_value = "auto", hide = true)]
    native_sidecars: String,
    /// Platform of the cluster.
    #[arg(long, env = "PLATFORM", default_value = "", hide = true)]
    platform: String,
    /// Compliance policy of the proxies.
    #[arg(long, env = "COMPLIANCE_POLICY", default_value = "", hide = true)]
    compliance_policy: String,
}

/// Reason why nothing was injected.
#[derive(Debug, thiserror::Error)]
enum InjectCommandError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("the injector's configuration is invalid: {0}")]
    Config(#[from] ConfigError),
    #[error("the mesh config is invalid: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Mesh(Vec<FieldError>),
    #[error("the mesh config is not YAML: {0}")]
    MeshText(#[from] yaml::YamlError),
    #[error("ENABLE_NATIVE_SIDECARS: {0:?} is not true, false or auto")]
    NativeSidecars(String),
    #[error("{path}: {source}")]
    Inject { path: PathBuf, source: InjectError },
    #[error(
        "cannot use the kubeconfig: {0} (hint: --builtIn needs no cluster, nor do --injectConfigFile, --valuesFile and \
         --meshConfigFile together)"
    )]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot read {what}: {message}")]
    Request { what: String, message: String },
    #[error("ConfigMap {namespace}/{name} has no key {key:?}")]
    NoKey {
        namespace: String,
        name: String,
        key: &'static str,
    },
}

/// The texts that decide about injection, from files or a cluster.
struct Sources {
    config: String,
    values: String,
    mesh: String,
    kubelets: BTreeMap<String, u32>,
}

/// Injects the file and prints the result.
pub fn run(flags: &InjectFlags) -> ExitCode {
    match inject(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(FAILURE)
        }
    }
}

fn inject(flags: &InjectFlags) -> Result<(), InjectCommandError> {
    let sources = sources(flags)?;
    let injector = Injector::parse(&sources.config, &sources.values)?;
    let environment = environment(flags, &sources)?;
    let path = &flags.filename;
    let input = read_input(path)?;
    let result = inject_text(&injector, &environment, &input).map_err(|source| InjectCommandError::Inject {
        path: path.clone(),
        source,
    })?;
    for warning in &result.warnings {
        eprintln!("{warning}");
    }
    let output = if flags.diff {
        diff::unified(&path.display().to_string(), &result.before, &result.text)
    } else {
        result.text
    };
    match &flags.output {
        Some(path) => fs::write(path, output).map_err(file_error(path)),
        None => std::io::stdout()
            .write_all(output.as_bytes())
            .map_err(file_error(Path::new("standard output"))),
    }
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> InjectCommandError {
    let path = path.to_owned();
    move |source| InjectCommandError::File { path, source }
}

fn read_file(path: &Path) -> Result<String, InjectCommandError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn read_input(path: &Path) -> Result<String, InjectCommandError> {
    if path != Path::new("-") {
        return read_file(path);
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(file_error(Path::new("standard input")))?;
    Ok(text)
}

/// Reads files, and the cluster for what no file is given.
fn sources(flags: &InjectFlags) -> Result<Sources, InjectCommandError> {
    let file = |path: &Option<PathBuf>| path.as_deref().map(read_file).transpose();
    let config = file(&flags.inject_config_file)?;
    let values = file(&flags.values_file)?;
    let mesh = file(&flags.mesh_config_file)?;
    if let (Some(config), Some(values), Some(mesh)) = (&config, &values, &mesh) {
        return Ok(Sources {
            config: config.clone(),
            values: values.clone(),
            mesh: mesh.clone(),
            kubelets: Default::default(),
        });
    }
    let found = if flags.built_in {
        built_in::sources(flags)?
    } else {
        cluster::read(flags)?
    };
    Ok(Sources {
        config: config.unwrap_or(found.config),
        values: values.unwrap_or(found.values),
        mesh: mesh.unwrap_or(found.mesh),
        kubelets: found.kubelets,
    })
}

fn environment(flags: &InjectFlags, sources: &Sources) -> Result<Environment, InjectCommandError> {
    let documents = yaml::documents(&sources.mesh);
    let mesh = documents.first().map(yaml::Document::parse).transpose()?;
    let mesh = mesh_config::parse(&mesh.unwrap_or_default()).map_err(InjectCommandError::Mesh)?;
    let native = &flags.native_sidecars;
    Ok(Environment {
        mesh: Arc::new(Mesh::new(mesh.config)),
        revision: flags.revision.clone(),
        namespace: Arc::new(Namespace {
            name: flags.namespace.clone(),
            ..Namespace::default()
        }),
        kubelets: Arc::new(sources.kubelets.clone()),
        native_sidecars: NativeSidecars::parse(native)
            .ok_or_else(|| InjectCommandError::NativeSidecars(native.clone()))?,
        platform: match flags.platform.as_str() {
            "openshift" => Platform::OpenShift,
            _ => Platform::Other,
        },
        compliance_policy: flags.compliance_policy.clone(),
        host: Arc::new(ProcessHost::new(Arc::new(process_variables()), None)),
        ..Environment::default()
    })
}
