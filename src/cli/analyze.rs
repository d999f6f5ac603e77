//! `istiod analyze [FILE|FOLDER]...`: reports mistakes in the configuration of a cluster, of files, or of a cluster
//! with the files applied. The flags, the output and the exit codes are those of `istioctl analyze`.

mod cluster;
mod files;
mod output;

use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::{print, write};
use crate::{
    analyze::{self, Level, Mesh, Message, Object, Scope, Settings, Suppression, SuppressionError, message, table},
    api::{FieldError, mesh_config, mesh_networks, yaml},
    base::{boolean, duration},
    environment,
    kube::client::ClientError,
    model::features::Features,
    proto::json::to_json,
    settings::{BooleanFlag, process_variables},
};

/// Exit code of wrong flags.
///
/// Parity (istioctl/cmd/sysexits.go).
pub const INCORRECT_USAGE: u8 = 64;
/// Exit code of files that cannot be parsed.
const BAD_DATA: u8 = 65;
/// Exit code of messages at or above the threshold.
const FOUND_ISSUES: u8 = 79;
/// Exit code of other failures.
const FAILED: u8 = 1;

/// Flags of `analyze`.
#[derive(Args)]
#[command(args_override_self = true)]
pub struct AnalyzeFlags {
    /// Files, folders (with their subfolders), or - for standard input.
    paths: Vec<PathBuf>,
    /// Read the cluster; --use-kube=false reads the files alone.
    #[arg(short = 'k', long, default_value_t = true, value_parser = parse_boolean, optional_value())]
    use_kube: bool,
    /// Kubeconfig of the cluster (default: KUBECONFIG, then ~/.kube/config).
    #[arg(short = 'c', long)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig (default: its current one).
    #[arg(long)]
    context: Option<String>,
    /// Contexts of further clusters of the mesh. May be repeated.
    #[arg(long)]
    remote_contexts: Vec<String>,
    /// Namespace whose messages are shown, and of objects in files that name none (default: that of the context).
    #[arg(short, long)]
    namespace: Option<String>,
    /// Show the messages of all namespaces.
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Namespace of the control plane.
    #[arg(short = 'i', long = "istioNamespace", default_value = "istio-system")]
    istio_namespace: String,
    /// Revision whose configuration is read.
    #[arg(short, long, default_value = "default")]
    revision: String,
    /// File with the mesh config.
    #[arg(long = "meshConfigFile")]
    mesh_config_file: Option<PathBuf>,
    /// Analyzer that runs, in place of all. May be repeated.
    #[arg(long)]
    analyzer: Vec<String>,
    /// List the analyzers.
    #[arg(short = 'L', long)]
    list_analyzers: bool,
    /// Message to omit: CODE=KIND NAME, with * for any text, such as "IST0103=Pod default/*". May be repeated.
    #[arg(short = 'S', long)]
    suppress: Vec<String>,
    /// Level of messages at which the command fails: Info, Warning or Error.
    #[arg(long, value_parser = parse_level, default_value = "Error")]
    failure_threshold: Level,
    /// Level of messages that are shown: Info, Warning or Error.
    #[arg(long, value_parser = parse_level, default_value = "Info")]
    output_threshold: Level,
    /// Output format.
    #[arg(short, long, value_enum, ignore_case = true, default_value = "log")]
    output: Format,
    /// Colour the levels (default: on a terminal).
    #[arg(long, value_parser = parse_boolean, optional_value())]
    color: Option<bool>,
    /// Ignore documents that cannot be parsed.
    #[arg(long)]
    ignore_unknown: bool,
    /// Has no effect: folders are always read with their subfolders.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Print which analyzers run.
    #[arg(short, long)]
    verbose: bool,
    /// Time limit of reading clusters.
    #[arg(long, value_parser = parse_duration, default_value = "30s")]
    timeout: Duration,
}

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One line for each message.
    Log,
    /// A JSON list.
    Json,
    /// A YAML list.
    Yaml,
}

fn parse_boolean(text: &str) -> Result<bool, String> {
    boolean::parse(text).ok_or_else(|| format!("{text:?} is not a boolean"))
}

fn parse_level(text: &str) -> Result<Level, String> {
    Level::parse(text).ok_or_else(|| format!("{text:?} is not Info, Warning or Error"))
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|error| error.to_string())
}

/// Reason why nothing was analyzed.
#[derive(Debug, thiserror::Error)]
enum AnalyzeError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("nothing to analyze: no file is given, and --use-kube=false reads no cluster")]
    NoSource,
    #[error(transparent)]
    Suppression(#[from] SuppressionError),
    #[error("the {what} is not YAML: {error}")]
    Text { what: &'static str, error: yaml::YamlError },
    #[error("the {what} is invalid: {}", .errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Fields {
        what: &'static str,
        errors: Vec<FieldError>,
    },
    #[error("cannot use the kubeconfig: {0} (hint: --use-kube=false reads files alone)")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot read {what}: {message}")]
    Request { what: String, message: String },
    #[error("the cluster did not answer within {}", duration::format_seconds(*.0))]
    Timeout(Duration),
    #[error("namespace {0:?} not found")]
    NoNamespace(String),
}

impl AnalyzeError {
    fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// The input of an analysis.
#[derive(Default)]
struct Source {
    objects: Vec<Object>,
    /// Texts of the mesh config and of the networks.
    mesh_config: Option<String>,
    mesh_networks: Option<String>,
}

/// The result of an analysis.
struct Outcome {
    /// The namespace whose messages are shown; `None` for all.
    namespace: Option<String>,
    messages: Vec<Message>,
    /// Documents of files that cannot be read.
    problems: Vec<String>,
}

/// Runs the subcommand.
pub fn run(flags: &AnalyzeFlags) -> ExitCode {
    if flags.list_analyzers {
        return print(&output::list(), ExitCode::SUCCESS);
    }
    match analysis(flags) {
        Ok(outcome) => ExitCode::from(finish(flags, &outcome)),
        // Parity (istioctl/pkg/analyze/analyze.go): a sentence in place of a result.
        Err(error @ AnalyzeError::NoNamespace(_)) => {
            eprintln!("{error}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(FAILED)
        }
    }
}

fn analysis(flags: &AnalyzeFlags) -> Result<Outcome, AnalyzeError> {
    if flags.paths.is_empty() && !flags.use_kube {
        return Err(AnalyzeError::NoSource);
    }
    let scope = scope(flags)?;
    let files = files::read(
        &flags.paths,
        scope.namespace.as_deref().unwrap_or_default(),
        cluster::own_cluster(flags),
    )?;
    let source = if flags.use_kube {
        cluster::read(flags, scope.namespace.as_deref())?
    } else {
        Source::default()
    };
    let settings = settings(flags, &source)?;
    let defaults = if flags.use_kube {
        Vec::new()
    } else {
        analyze::default_objects(&settings)
    };
    // Files come last, because they replace objects of the cluster.
    let objects = defaults.into_iter().chain(source.objects).chain(files.objects);
    let mesh = Mesh::new(objects, settings);
    Ok(Outcome {
        messages: analyze::analyze(&mesh, &scope),
        problems: files.problems,
        namespace: scope.namespace,
    })
}

fn scope(flags: &AnalyzeFlags) -> Result<Scope, AnalyzeError> {
    let suppressions = flags.suppress.iter().map(|text| Suppression::parse(text));
    let suppressions: Vec<Suppression> = suppressions.collect::<Result<_, _>>()?;
    for suppression in suppressions
        .iter()
        .filter(|suppression| !message::is_known(&suppression.code))
    {
        eprintln!("warning: --suppress: no message has the code {}", suppression.code);
    }
    let analyzers = table::all();
    for name in flags
        .analyzer
        .iter()
        .filter(|name| analyzers.iter().all(|analyzer| analyzer.name != **name))
    {
        eprintln!("warning: --analyzer: there is no {name} (hint: --list-analyzers)");
    }
    Ok(Scope {
        namespace: namespace(flags)?,
        suppressions,
        analyzers: flags.analyzer.clone(),
    })
}

/// Returns the namespace whose messages are shown; `None` for all.
///
/// Parity (istioctl/pkg/cli/option.go): without a flag, it is that of the kubeconfig's context.
fn namespace(flags: &AnalyzeFlags) -> Result<Option<String>, AnalyzeError> {
    let given = flags.namespace.as_ref().filter(|namespace| !namespace.is_empty());
    match given {
        _ if flags.all_namespaces => Ok(None),
        Some(namespace) => Ok(Some(namespace.clone())),
        None if flags.use_kube => cluster::default_namespace(flags).map(Some),
        None => Ok(Some("default".to_owned())),
    }
}

fn settings(flags: &AnalyzeFlags, source: &Source) -> Result<Settings, AnalyzeError> {
    let file = flags.mesh_config_file.as_ref();
    let file = file
        .map(|path| std::fs::read_to_string(path).map_err(AnalyzeError::file(path)))
        .transpose()?;
    let config = value("mesh config", file.as_ref().or(source.mesh_config.as_ref()))?;
    let fields = |what| move |errors| AnalyzeError::Fields { what, errors };
    let config = mesh_config::parse(&config).map_err(fields("mesh config"))?;
    let networks = value("mesh networks", source.mesh_networks.as_ref())?;
    let networks = mesh_networks::parse(&networks).map_err(fields("mesh networks"))?;
    let now = environment::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    // An invalid variable has its default, as for the control plane.
    let (features, _) = Features::parse(&process_variables());
    Ok(Settings {
        config: to_json(&config.config),
        networks: to_json(&networks.networks),
        istio_namespace: flags.istio_namespace.clone(),
        scopes_gateways: features.pilot_scope_gateway_to_namespace,
        now: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
    })
}

/// Parses a text that may be missing.
fn value(what: &'static str, text: Option<&String>) -> Result<Value, AnalyzeError> {
    let documents = text.map(|text| yaml::documents(text)).unwrap_or_default();
    let first = documents.first().map(yaml::Document::parse).transpose();
    let first = first.map_err(|error| AnalyzeError::Text { what, error })?;
    Ok(first.unwrap_or_else(|| Value::Object(serde_json::Map::new())))
}

/// Prints the messages and returns the exit code. As in Istio, only the format log has exit codes for findings.
fn finish(flags: &AnalyzeFlags, outcome: &Outcome) -> u8 {
    for problem in &outcome.problems {
        eprintln!("error: {problem}");
    }
    if flags.verbose {
        output::executed(&flags.analyzer);
    }
    let shown = outcome
        .messages
        .iter()
        .filter(|message| message.level <= flags.output_threshold);
    let shown: Vec<&Message> = shown.collect();
    let is_coloured = flags.color.unwrap_or_else(|| std::io::stdout().is_terminal());
    // The findings decide about the exit code, also if the reader stops early.
    let _ = write(&output::messages(&shown, flags.output, is_coloured));
    if shown.is_empty() {
        eprintln!("No issues found in {}.", target(outcome));
    }
    let fails = outcome
        .messages
        .iter()
        .any(|message| message.level <= flags.failure_threshold);
    match flags.output {
        Format::Log if fails => {
            eprintln!("error: issues found in {}", target(outcome));
            FOUND_ISSUES
        }
        Format::Log if !outcome.problems.is_empty() && !flags.ignore_unknown => BAD_DATA,
        _ => 0,
    }
}

fn target(outcome: &Outcome) -> String {
    match &outcome.namespace {
        None => "all namespaces".to_owned(),
        Some(namespace) => format!("namespace {namespace}"),
    }
}
