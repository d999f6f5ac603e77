//! `istiod create-remote-secret`: prints a Secret with which a control plane in another cluster can read the cluster of
//! the current context. Flags, names and output are those of `istioctl create-remote-secret`.
//!
//! Note: only the account and its token are written, both in the cluster to be read. The Secret itself is printed, to
//! be applied to the other cluster.

mod account;
mod output;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, config::KubeconfigError};

use self::output::{Access, Credentials};
use super::{FAILURE, print, retry::Retry};
use crate::{
    api::names::is_label,
    kube::{
        client::{self, ClientError, Rate},
        kubeconfig::selected_config,
    },
    settings::BooleanFlag,
};

/// Time for all attempts of the requests before the token, and for the token. A busy cluster needs several seconds to
/// fill a token Secret.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Flags of `create-remote-secret`.
#[derive(Args)]
pub struct CreateRemoteSecretFlags {
    /// Id of the cluster (default: the UID of its namespace kube-system).
    #[arg(long)]
    name: Option<String>,
    /// remote: for a control plane that also reads this cluster; config: for one whose configuration is in this
    /// cluster.
    #[arg(long = "type", value_enum, default_value_t = SecretType::Remote)]
    secret_type: SecretType,
    /// Authentication of the control plane.
    #[arg(long, value_enum, default_value_t = AuthType::BearerToken)]
    auth_type: AuthType,
    /// Name of the auth provider, with --auth-type=plugin.
    #[arg(long, default_value = "")]
    auth_plugin_name: String,
    /// Settings of the auth provider, as key=value separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = setting)]
    auth_plugin_config: Vec<(String, String)>,
    /// Address of the API server for the control plane (default: that of the current context).
    #[arg(long)]
    server: Option<String>,
    /// Name in the API server's certificate (default: the host of its address).
    #[arg(long)]
    tls_server_name: Option<String>,
    /// Service account of the token (default: istio-reader-service-account; istiod with --type=config).
    #[arg(long)]
    service_account: Option<String>,
    /// Create the service account with its read permissions if it does not exist.
    #[arg(long, default_value_t = true, optional_value())]
    create_service_account: bool,
    /// Token Secret of the service account to use.
    #[arg(long)]
    secret_name: Option<String>,
    /// Namespace of the service account, and of the Secret (default: --istioNamespace).
    #[arg(short, long)]
    namespace: Option<String>,
    /// Namespace of the control plane.
    #[arg(short = 'i', long = "istioNamespace", default_value = "istio-system")]
    istio_namespace: String,
    /// Kubeconfig of the cluster to be read (default: KUBECONFIG, then ~/.kube/config).
    #[arg(short = 'c', long)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig (default: its current one).
    #[arg(long)]
    context: Option<String>,
    /// Output format of the Secret.
    #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
    output: Format,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum SecretType {
    Remote,
    Config,
}

#[derive(Clone, Copy, ValueEnum)]
enum AuthType {
    BearerToken,
    Plugin,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Yaml,
    Json,
}

/// Reason why there is no Secret to print.
#[derive(Debug, thiserror::Error)]
enum CreateError {
    #[error("{0} is not a valid DNS 1123 label")]
    Name(String),
    #[error("cannot use the kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("could not {0}: {1}")]
    Request(String, String),
    #[error(
        "failed retrieving service account {account}.{namespace} required for creating the remote secret \
         (hint: {hint}): {error}"
    )]
    NoAccount {
        account: String,
        namespace: String,
        hint: &'static str,
        error: String,
    },
    #[error("secret {namespace}/{name} does not reference ServiceAccount {account}")]
    NotOfAccount {
        namespace: String,
        name: String,
        account: String,
    },
    #[error(
        "the token Secret {namespace}/{name} has no {key:?} data \
         (hint: kube-controller-manager writes it; does it run in that cluster?)"
    )]
    NotFilled {
        namespace: String,
        name: String,
        key: &'static str,
    },
    #[error(transparent)]
    System(#[from] std::io::Error),
}

/// Prints the Secret.
pub fn run(flags: &CreateRemoteSecretFlags) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let created = runtime
        .map_err(CreateError::from)
        .and_then(|runtime| runtime.block_on(create(flags)));
    match created {
        Ok(text) => print(&text, ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(FAILURE)
        }
    }
}

async fn create(flags: &CreateRemoteSecretFlags) -> Result<String, CreateError> {
    let name = given_name(flags.name.as_deref())?;
    client::install_cryptography();
    let config = selected_config(flags.kubeconfig.as_deref(), flags.context.as_deref()).await?;
    let current = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    let client = client::client(&client::Access::Given(Box::new(config)), Rate::UNLIMITED).await?;
    let cluster = match name {
        Some(name) => name.to_owned(),
        None => cluster_uid(client.clone(), &Retry::within(TIMEOUT)).await?,
    };
    let namespace = flags.namespace.as_ref().unwrap_or(&flags.istio_namespace).clone();
    let account = account::AccountRequest {
        name: service_account(flags).to_owned(),
        secret: flags.secret_name.clone(),
        create: flags.create_service_account && flags.secret_type == SecretType::Remote,
        namespace: namespace.clone(),
        hint: match flags.secret_type {
            SecretType::Remote => {
                "install the chart base in that cluster first, or run with --create-service-account=true"
            }
            SecretType::Config => {
                "install the chart istiod there first, with global.configCluster=true if no control plane runs there"
            }
        },
    };
    let token = account::token(client, &account).await?;
    let server = server(flags, current);
    let access = Access {
        cluster,
        server,
        tls_server_name: flags.tls_server_name.clone(),
        authority: token.authority,
        credentials: match flags.auth_type {
            AuthType::BearerToken => Credentials::Token(token.token),
            AuthType::Plugin => Credentials::Plugin {
                name: flags.auth_plugin_name.clone(),
                settings: flags.auth_plugin_config.iter().cloned().collect(),
            },
        },
    };
    let secret = output::secret(&access, &namespace, flags.secret_type);
    Ok(match flags.output {
        Format::Yaml => output::yaml(&secret),
        Format::Json => format!("{secret:#}\n"),
    })
}

/// Returns the id of the cluster that the command line gives; an empty one counts as none.
fn given_name(name: Option<&str>) -> Result<Option<&str>, CreateError> {
    let given = name.filter(|name| !name.is_empty());
    match given {
        Some(name) if !is_label(name) => Err(CreateError::Name(name.to_owned())),
        given => Ok(given),
    }
}

fn service_account(flags: &CreateRemoteSecretFlags) -> &str {
    match (&flags.service_account, flags.secret_type) {
        (Some(name), _) if !name.is_empty() => name,
        (_, SecretType::Remote) => account::READER,
        (_, SecretType::Config) => "istiod",
    }
}

fn server(flags: &CreateRemoteSecretFlags, current: String) -> String {
    if let Some(server) = flags.server.as_ref().filter(|server| !server.is_empty()) {
        return server.clone();
    }
    if current.contains("127.0.0.1") || current.contains("localhost") {
        eprintln!(
            "warn: the server in the kubeconfig is {current}, which a control plane in another cluster most likely \
             cannot reach; give --server an address that it can, such as that of the node's container with Kubernetes in Docker"
        );
    }
    current
}

async fn cluster_uid(client: kube::Client, retry: &Retry) -> Result<String, CreateError> {
    let namespaces: Api<Namespace> = Api::all(client);
    let purpose = "read the namespace kube-system, whose UID is the default of --name";
    let namespace = retry.request(purpose, || namespaces.get("kube-system")).await?;
    Ok(namespace.metadata.uid.unwrap_or_default())
}

impl Retry {
    /// Like [`Self::send`], with an error that has the purpose of the request.
    async fn request<T, F>(&self, purpose: impl Into<String>, request: impl Fn() -> F) -> Result<T, CreateError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let sent = self.send(request).await;
        sent.map_err(|error| CreateError::Request(purpose.into(), client::message(&error)))
    }
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is not of the form key=value"))?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_name_is_none() {
        assert!(matches!(given_name(Some("")), Ok(None)));
        assert!(matches!(given_name(Some("c0")), Ok(Some("c0"))));
        assert!(matches!(given_name(Some("c_0")), Err(CreateError::Name(_))));
    }
}
