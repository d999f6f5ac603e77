//! `istiod status [KIND/NAME[.NAMESPACE]]`: asks the running istiod which proxies run an object.

mod output;
pub mod wait;

use std::{io, path::PathBuf, process::ExitCode, time::Duration};

use bytes::{Bytes, BytesMut};
use clap::{Args, ValueEnum};
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use kube::{Api, api::DynamicObject, config::KubeconfigError};
use tokio::time::Instant;
use url::form_urlencoded::Serializer;

use super::{FAILURE, print, retry::Retry};
use crate::{
    api::Kind,
    base::duration,
    distribution::{overview::Overview, report::ObjectReport},
    kube::{
        client::{self, Access, ClientError, Rate},
        kubeconfig::selected_config,
    },
    status::store::resource,
};

/// Exit code if the change has not arrived at all proxies.
const NOT_ARRIVED: u8 = 1;
/// The time that the answer may take beyond the time-out.
const MARGIN: Duration = Duration::from_secs(30);
/// The largest event, in bytes.
const MAX_EVENT: usize = 256 << 20;

/// Arguments of `status`.
#[derive(Args)]
pub struct StatusFlags {
    /// KIND/NAME, KIND/NAME.NAMESPACE, KIND NAME or KIND NAMESPACE/NAME; without an object, the status of all proxies.
    #[arg(num_args = 0..=2, value_name = "OBJECT")]
    object: Vec<String>,
    /// Namespace of the object.
    #[arg(long, short)]
    namespace: Option<String>,
    /// Show only proxies whose id contains this text.
    #[arg(long, default_value = "")]
    proxy: String,
    /// Wait until all proxies have answered.
    #[arg(long)]
    wait: bool,
    /// Longest time to wait.
    #[arg(long, default_value = "60s", value_parser = duration::parse)]
    timeout: Duration,
    /// Resource version that must have arrived; the default with --wait is that of the object in the cluster.
    #[arg(long)]
    resource_version: Option<u64>,
    /// List all proxies, not only those that have not acknowledged everything.
    #[arg(long)]
    all: bool,
    /// Output format.
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    servers: ServerFlags,
}

/// Arguments that say where istiod and the object are.
#[derive(Args)]
struct ServerFlags {
    /// Port of the monitoring address of istiod on this machine.
    #[arg(long, default_value_t = 15014)]
    port: u16,
    /// Kubeconfig file for the version of the object.
    #[arg(long, short = 'c')]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig.
    #[arg(long)]
    context: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table for people.
    Table,
    /// JSON, as the HTTP API returns it.
    Json,
}

/// Reason why there is no answer to print.
#[derive(Debug, thiserror::Error)]
enum StatusError {
    #[error("{0:?} does not name an object; hint: want KIND/NAME, KIND/NAME.NAMESPACE or KIND NAMESPACE/NAME")]
    Object(String),
    #[error("{0:?} is not a kind; hint: want a kind such as VirtualService or vs")]
    Kind(String),
    #[error("--wait needs an object; hint: name one, such as virtualservice/reviews.shop")]
    NothingToWaitFor,
    #[error("no response from {0}: {1}; hint: check that istiod runs on this machine")]
    Unreachable(String, String),
    #[error("no response from istiod within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("received status code {0}: {1}")]
    Status(u16, String),
    #[error("the answer is not readable: {0}; hint: is --port that of --monitoringAddr?")]
    Malformed(String),
    #[error("cannot verify the generation: {0}")]
    Generation(ClusterError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Reason why it is unknown which version of an object the cluster has.
#[derive(Debug, thiserror::Error)]
enum ClusterError {
    #[error("no kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot read the object from the cluster: {0}")]
    Request(String),
}

impl From<kube::Error> for ClusterError {
    fn from(error: kube::Error) -> Self {
        Self::Request(client::message(&error))
    }
}

/// An object as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named {
    kind: String,
    namespace: String,
    name: String,
}

impl Named {
    /// Reads the words that name an object.
    fn of(words: &[String], namespace: Option<&str>) -> Result<Option<Self>, StatusError> {
        let (kind, rest) = match words {
            [] => return Ok(None),
            [whole] => whole
                .split_once('/')
                .ok_or_else(|| StatusError::Object(whole.clone()))?,
            [kind, name, ..] => (kind.as_str(), name.as_str()),
        };
        let (own, name) = match (namespace, rest.split_once('/')) {
            (_, Some((namespace, name))) => (Some(namespace), name),
            (Some(namespace), None) => (Some(namespace), rest),
            (None, None) => match rest.rsplit_once('.') {
                Some((name, namespace)) => (Some(namespace), name),
                None => (None, rest),
            },
        };
        if kind.is_empty() || name.is_empty() {
            return Err(StatusError::Object(words.join(" ")));
        }
        if Kind::named(kind).is_empty() {
            return Err(StatusError::Kind(kind.to_owned()));
        }
        Ok(Some(Self {
            kind: kind.to_owned(),
            namespace: own.unwrap_or("default").to_owned(),
            name: name.to_owned(),
        }))
    }
}

/// Asks and prints the answer.
pub fn run(flags: &StatusFlags) -> ExitCode {
    finish(answer(flags))
}

/// Runs a command to its end. Returns its exit code, and prints the reason if it failed.
fn finish(command: impl Future<Output = Result<ExitCode, StatusError>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let code = match runtime {
        Ok(runtime) => runtime.block_on(command),
        Err(error) => Err(error.into()),
    };
    code.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(FAILURE)
    })
}

async fn answer(flags: &StatusFlags) -> Result<ExitCode, StatusError> {
    let Some(object) = Named::of(&flags.object, flags.namespace.as_deref())? else {
        if flags.wait {
            return Err(StatusError::NothingToWaitFor);
        }
        let mut answers = ask(flags, "status", "", MARGIN).await?;
        let text = answers.rest().await?;
        let overview: Overview = parse(&text)?;
        let shown = in_format(flags, text, output::overview(&overview, flags.all));
        return Ok(print(&shown, ExitCode::SUCCESS));
    };
    let deadline = Instant::now() + flags.timeout;
    let resource_version = match flags.resource_version {
        None if flags.wait => {
            let found = in_cluster(flags, &object, flags.timeout).await;
            or_warn(found).and_then(|found| found.version)
        }
        given => given,
    };
    let mut query = query(&object, &flags.proxy, resource_version);
    let text = if flags.wait {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = format!("{}ms", left.as_millis());
        let query = query.append_pair("timeout", &timeout).finish();
        wait(flags, &query, left).await?
    } else {
        ask(flags, "status", &query.finish(), MARGIN).await?.rest().await?
    };
    let report: ObjectReport = parse(&text)?;
    let table = output::object(&report, flags.all || !flags.proxy.is_empty());
    let code = if report.has_arrived() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_ARRIVED)
    };
    Ok(print(&in_format(flags, text, table), code))
}

/// Returns the query about an object.
fn query(object: &Named, proxy: &str, resource_version: Option<u64>) -> Serializer<'static, String> {
    let mut query = Serializer::new(String::new());
    query
        .append_pair("kind", &object.kind)
        .append_pair("namespace", &object.namespace);
    query.append_pair("name", &object.name).append_pair("proxyID", proxy);
    if let Some(version) = resource_version {
        query.append_pair("resourceVersion", &version.to_string());
    }
    query
}

fn in_format(flags: &StatusFlags, json: String, table: String) -> String {
    match flags.output {
        Format::Json => json + "\n",
        Format::Table => table,
    }
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, StatusError> {
    serde_json::from_str(text).map_err(|error| StatusError::Malformed(error.to_string()))
}

/// Reads events until the last one, which is the answer. Shows progress on a terminal.
async fn wait(flags: &StatusFlags, query: &str, timeout: Duration) -> Result<String, StatusError> {
    use std::io::IsTerminal;
    let mut answers = ask(flags, "status_events", query, timeout + MARGIN).await?;
    let shows_progress = flags.output == Format::Table && io::stderr().is_terminal();
    let mut last = None;
    while let Some(event) = answers.event().await? {
        if shows_progress {
            let report: ObjectReport = parse(&event)?;
            eprint!("\r\x1b[K{}", output::headline(&report));
        }
        last = Some(event);
    }
    if shows_progress {
        eprint!("\r\x1b[K");
    }
    last.ok_or_else(|| StatusError::Malformed("it ended without an event".to_owned()))
}

/// The version of an object in the cluster.
struct InCluster {
    version: Option<u64>,
    generation: Option<i64>,
}

/// Returns the version of the object in the cluster; `None` without the object. Repeats failed requests for this time.
async fn in_cluster(flags: &StatusFlags, object: &Named, limit: Duration) -> Result<Option<InCluster>, ClusterError> {
    let retry = Retry::within(limit);
    client::install_cryptography();
    let servers = &flags.servers;
    let config = selected_config(servers.kubeconfig.as_deref(), servers.context.as_deref()).await?;
    let client = client::client(&Access::Given(Box::new(config)), Rate::UNLIMITED).await?;
    let mut refused = None;
    for kind in Kind::named(&object.kind) {
        for version in kind.versions() {
            let resource = resource(kind.group(), version, kind.name(), kind.plural());
            let api: Api<DynamicObject> = if kind.is_cluster_scoped() {
                Api::all_with(client.clone(), &resource)
            } else {
                Api::namespaced_with(client.clone(), &object.namespace, &resource)
            };
            match retry.send(|| api.get_metadata_opt(&object.name)).await {
                Ok(None) => {}
                Ok(Some(found)) => {
                    return Ok(Some(InCluster {
                        version: found.metadata.resource_version.and_then(|version| version.parse().ok()),
                        generation: found.metadata.generation,
                    }));
                }
                // The object may be of another kind with the same name, which the user may read.
                Err(error @ kube::Error::Api(_)) => refused = refused.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
    }
    refused.map_or(Ok(None), |error| Err(error.into()))
}

/// Returns what the cluster has; warns if that is unknown.
fn or_warn(found: Result<Option<InCluster>, ClusterError>) -> Option<InCluster> {
    found.unwrap_or_else(|error| {
        eprintln!(
            "warning: {error}; the answer may be about an earlier version of the object; hint: check KUBECONFIG or \
             --kubeconfig"
        );
        None
    })
}

/// The body of an answer.
struct Answers {
    body: hyper::body::Incoming,
    buffer: BytesMut,
    until: tokio::time::Instant,
    timeout: Duration,
    uri: String,
}

/// Sends a request and returns the successful answer.
async fn ask(flags: &StatusFlags, page: &str, query: &str, timeout: Duration) -> Result<Answers, StatusError> {
    let uri = format!("http://127.0.0.1:{}/debug/{page}?{query}", flags.servers.port);
    let until = tokio::time::Instant::now() + timeout;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let unreachable = |error: String| StatusError::Unreachable(uri.clone(), error);
    let parsed = uri
        .parse()
        .map_err(|error: http::uri::InvalidUri| unreachable(error.to_string()))?;
    let response = tokio::time::timeout_at(until, client.get(parsed)).await;
    let response = response.map_err(|_| StatusError::Timeout(timeout))?;
    let response = response.map_err(|error| unreachable(error.to_string()))?;
    let status = response.status();
    let mut answers = Answers {
        body: response.into_body(),
        buffer: BytesMut::new(),
        until,
        timeout,
        uri: uri.clone(),
    };
    if !status.is_success() {
        let text = answers.rest().await?;
        return Err(StatusError::Status(status.as_u16(), text.trim().to_owned()));
    }
    Ok(answers)
}

impl Answers {
    /// Reads some more. Returns false at the end.
    async fn more(&mut self) -> Result<bool, StatusError> {
        let frame = tokio::time::timeout_at(self.until, self.body.frame()).await;
        match frame.map_err(|_| StatusError::Timeout(self.timeout))? {
            None => Ok(false),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    self.buffer.extend_from_slice(&data);
                }
                if self.buffer.len() > MAX_EVENT {
                    return Err(StatusError::Malformed("it is too long".to_owned()));
                }
                Ok(true)
            }
            Some(Err(error)) => Err(StatusError::Unreachable(self.uri.clone(), error.to_string())),
        }
    }

    /// Returns the whole text.
    async fn rest(&mut self) -> Result<String, StatusError> {
        while self.more().await? {}
        Ok(String::from_utf8_lossy(&self.buffer).into_owned())
    }

    /// Returns the data of the next event; `None` at the end.
    async fn event(&mut self) -> Result<Option<String>, StatusError> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event = self.buffer.split_to(end + 2);
                let event = String::from_utf8_lossy(&event);
                let lines = event.lines().filter_map(|line| line.strip_prefix("data:"));
                let data: Vec<&str> = lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
                // Without data it is a comment that keeps the connection open.
                if !data.is_empty() {
                    return Ok(Some(data.join("\n")));
                }
            } else if !self.more().await? {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The flags of an istiod and a cluster that do not answer, with a kubeconfig in this folder.
    pub(super) fn unreachable(folder: &Path) -> ServerFlags {
        let kubeconfig = folder.join("kubeconfig");
        let text = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": {}}]}"#;
        std::fs::write(&kubeconfig, text).expect("a folder");
        ServerFlags {
            port: 1,
            kubeconfig: Some(kubeconfig),
            context: None,
        }
    }

    #[tokio::test]
    async fn a_cluster_that_does_not_answer_is_not_one_without_the_object() {
        let folder = tempfile::tempdir().expect("a folder");
        let flags = StatusFlags {
            object: Vec::new(),
            namespace: None,
            proxy: String::new(),
            wait: true,
            timeout: Duration::ZERO,
            resource_version: None,
            all: false,
            output: Format::Table,
            servers: unreachable(folder.path()),
        };
        let object = Named {
            kind: "VirtualService".to_owned(),
            namespace: "default".to_owned(),
            name: "reviews".to_owned(),
        };
        let found = in_cluster(&flags, &object, Duration::from_millis(1)).await;
        assert!(matches!(found, Err(ClusterError::Request(_))));
    }

    #[test]
    fn objects_are_named_in_several_ways() {
        let named = |words: &[&str], namespace: Option<&str>| {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            let named = Named::of(&words, namespace).ok().flatten()?;
            Some(format!("{} {}/{}", named.kind, named.namespace, named.name))
        };
        for (words, namespace, expected) in [
            (&["vs/reviews"][..], None, Some("vs default/reviews")),
            (&["vs/reviews.shop"], None, Some("vs shop/reviews")),
            (&["vs/reviews.shop"], Some("a"), Some("vs a/reviews.shop")),
            (
                &["VirtualService", "shop/reviews"],
                None,
                Some("VirtualService shop/reviews"),
            ),
            (&["vs", "reviews"], Some("shop"), Some("vs shop/reviews")),
            (&["reviews"], None, None),
            (&["x/reviews"], None, None),
            (&["vs/"], None, None),
        ] {
            assert_eq!(named(words, namespace).as_deref(), expected, "{words:?}");
        }
    }
}
