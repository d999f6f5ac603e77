//! Service account of the token.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{
    core::v1::{Namespace, Secret, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use kube::{
    Api, Client,
    api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{CreateError, TIMEOUT};
use crate::cli::retry::Retry;

/// Account of the charts for control planes of other clusters.
pub(super) const READER: &str = "istio-reader-service-account";

/// Type of Secrets that Kubernetes fills with a token.
const TOKEN_TYPE: &str = "kubernetes.io/service-account-token";
/// Annotation with the account of such a Secret.
const OF_ACCOUNT: &str = "kubernetes.io/service-account.name";
/// Delay between two readings of a token Secret.
const READ_AFTER: Duration = Duration::from_secs(1);

/// Requested account.
pub(super) struct AccountRequest {
    /// Service account.
    pub(super) name: String,
    /// Namespace.
    pub(super) namespace: String,
    /// Token Secret to use.
    pub(super) secret: Option<String>,
    /// True to create it if it does not exist.
    pub(super) create: bool,
    /// Ways to create it, for errors.
    pub(super) hint: &'static str,
}

/// Content of a token Secret.
pub(super) struct Token {
    /// `ca.crt`: CA certificates of the API server, as PEM.
    pub(super) authority: Vec<u8>,
    /// `token`.
    pub(super) token: String,
}

/// Returns the token of a service account; creates both if needed.
pub(super) async fn token(client: Client, request: &AccountRequest) -> Result<Token, CreateError> {
    let retry = Retry::within(TIMEOUT);
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &request.namespace);
    if let Err(error) = retry.send(|| accounts.get(&request.name)).await {
        if !request.create {
            return Err(CreateError::NoAccount {
                account: request.name.clone(),
                namespace: request.namespace.clone(),
                hint: request.hint,
                error: error.to_string(),
            });
        }
        create(&client, request, &retry).await?;
    }
    let secrets: Api<Secret> = Api::namespaced(client, &request.namespace);
    let mut secret = token_secret(&secrets, request, &retry).await?;
    let retry = Retry::within(TIMEOUT);
    loop {
        match content(&secret, request) {
            Err(_) if !retry.is_over() => tokio::time::sleep(READ_AFTER).await,
            content => return content,
        }
        let name = secret.metadata.name.clone().unwrap_or_default();
        secret = retry
            .request(format!("read the Secret {name}"), || secrets.get(&name))
            .await?;
    }
}

async fn token_secret(secrets: &Api<Secret>, request: &AccountRequest, retry: &Retry) -> Result<Secret, CreateError> {
    let namespace = &request.namespace;
    if let Some(name) = request.secret.as_ref().filter(|name| !name.is_empty()) {
        let purpose = format!("get specified secret {namespace}/{name}");
        let secret = retry.request(purpose, || secrets.get(name)).await?;
        if !is_of(&secret, &request.name) {
            return Err(CreateError::NotOfAccount {
                namespace: namespace.clone(),
                name: name.clone(),
                account: request.name.clone(),
            });
        }
        return Ok(secret);
    }
    let of_type = ListParams::default().fields(&format!("type={TOKEN_TYPE}"));
    let purpose = format!("list the Secrets of {namespace}");
    let listed = retry.request(purpose, || secrets.list(&of_type)).await?;
    if let Some(secret) = listed.items.into_iter().find(|secret| is_of(secret, &request.name)) {
        return Ok(secret);
    }
    let name = format!("{}-istio-remote-secret-token", request.name);
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            annotations: Some(BTreeMap::from([(OF_ACCOUNT.to_owned(), request.name.clone())])),
            ..ObjectMeta::default()
        },
        type_: Some(TOKEN_TYPE.to_owned()),
        ..Secret::default()
    };
    let purpose = format!("create a token Secret in {namespace}");
    retry
        .request(purpose, || async {
            match secrets.create(&PostParams::default(), &secret).await {
                // An attempt whose answer was lost created it.
                Err(error) if exists(&error) => {
                    let found = secrets.get(&name).await?;
                    if is_of(&found, &request.name) {
                        Ok(found)
                    } else {
                        Err(error)
                    }
                }
                created => created,
            }
        })
        .await
}

/// Returns true if the object of a request exists already.
fn exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

fn is_of(secret: &Secret, account: &str) -> bool {
    let annotations = secret.metadata.annotations.as_ref();
    let named = annotations.and_then(|annotations| annotations.get(OF_ACCOUNT));
    secret.type_.as_deref() == Some(TOKEN_TYPE) && named.is_some_and(|name| name == account)
}

fn content(secret: &Secret, request: &AccountRequest) -> Result<Token, CreateError> {
    let field = |key: &'static str| {
        let data = secret.data.as_ref().and_then(|data| data.get(key));
        data.map(|data| data.0.clone()).ok_or_else(|| CreateError::NotFilled {
            namespace: request.namespace.clone(),
            name: secret.metadata.name.clone().unwrap_or_default(),
            key,
        })
    };
    let (authority, token) = (field("ca.crt")?, field("token")?);
    Ok(Token {
        authority,
        token: String::from_utf8_lossy(&token).trim().to_owned(),
    })
}

/// Creates the account, its namespace, and its permissions.
async fn create(client: &Client, request: &AccountRequest, retry: &Retry) -> Result<(), CreateError> {
    let AccountRequest { name, namespace, .. } = request;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let purpose = format!("read the namespace {namespace}");
    if retry
        .request(purpose, || namespaces.get_opt(namespace))
        .await?
        .is_none()
    {
        let new = Namespace {
            metadata: ObjectMeta {
                name: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let create = || async {
            match namespaces.create(&PostParams::default(), &new).await {
                Err(error) if !exists(&error) => Err(error),
                _ => Ok(()),
            }
        };
        retry
            .request(format!("create the namespace {namespace}"), create)
            .await?;
    }
    let role = format!("istio-reader-clusterrole-{namespace}");
    let apply = PatchParams::apply("istiod").force();
    let labels = json!({ "app": "istio-reader" });
    let account = Patch::Apply(json!({ "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": name, "namespace": namespace, "labels": labels } }));
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let purpose = format!("create the service account {name}.{namespace}");
    retry
        .request(purpose, || accounts.patch(name, &apply, &account))
        .await?;
    let rules = Patch::Apply(
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": { "name": role, "labels": labels }, "rules": rules() }),
    );
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let purpose = format!("create the ClusterRole {role}");
    retry.request(purpose, || roles.patch(&role, &apply, &rules)).await?;
    let binding = Patch::Apply(
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": role, "labels": labels },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
        "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": namespace }] }),
    );
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let purpose = format!("create the ClusterRoleBinding {role}");
    retry
        .request(purpose, || bindings.patch(&role, &apply, &binding))
        .await?;
    Ok(())
}

/// Returns the permissions: reads and reviews, as in the chart istiod for the default group of the MCS API.
fn rules() -> Value {
    let rule = |group: &str, resources: &[&str]| json!({ "apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch"] });
    let question =
        |group: &str, resource: &str| json!({ "apiGroups": [group], "resources": [resource], "verbs": ["create"] });
    let mut mesh = rule("", &["configmaps"]);
    mesh["resourceNames"] = json!(["istio"]);
    json!([
        rule("", &["namespaces", "nodes", "pods", "secrets", "services"]),
        mesh,
        question("authentication.k8s.io", "tokenreviews"),
        question("authorization.k8s.io", "subjectaccessreviews"),
        rule("discovery.k8s.io", &["endpointslices"]),
        rule("apiextensions.k8s.io", &["customresourcedefinitions"]),
        rule("gateway.networking.k8s.io", &["gateways"]),
        rule("networking.istio.io", &["workloadentries"]),
        rule("multicluster.x-k8s.io", &["serviceexports", "serviceimports"]),
    ])
}
