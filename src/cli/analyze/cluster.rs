//! Reads the objects of clusters.

use kube::{
    Api, Client, Config,
    api::{DynamicObject, ListParams},
};

use super::{AnalyzeError, AnalyzeFlags, Source};
use crate::{
    analyze::{Object, Type, is_of_revision},
    api::Kind,
    base::SmolStr,
    kube::{
        client::{self, Access, Rate},
        kubeconfig::selected_config,
    },
    status::store::resource,
};

/// The number of objects in one answer.
const PAGE: u32 = 500;
/// The name of the config cluster in a mesh of several.
const CONFIG_CLUSTER: &str = "default";
/// The kinds that are read from further clusters. The Secret of a Gateway is in the cluster of its pods.
const REMOTE: [Kind; 5] = [Kind::Namespace, Kind::Node, Kind::Pod, Kind::Secret, Kind::Service];

/// Returns the name of the config cluster, to which files belong, too; empty without further clusters.
pub(super) fn own_cluster(flags: &AnalyzeFlags) -> &'static str {
    if flags.use_kube && !flags.remote_contexts.is_empty() {
        CONFIG_CLUSTER
    } else {
        ""
    }
}

/// Returns the namespace of the kubeconfig's context.
pub(super) fn default_namespace(flags: &AnalyzeFlags) -> Result<String, AnalyzeError> {
    let config = block_on(flags, config(flags, flags.context.as_deref()))?;
    let named = Some(config.default_namespace).filter(|namespace| !namespace.is_empty());
    Ok(named.unwrap_or_else(|| "default".to_owned()))
}

/// Reads the objects of the config cluster and of further clusters, the mesh config and the networks. Fails if the
/// config cluster has no such namespace.
pub(super) fn read(flags: &AnalyzeFlags, namespace: Option<&str>) -> Result<Source, AnalyzeError> {
    block_on(flags, clusters(flags, namespace))
}

fn block_on<T>(
    flags: &AnalyzeFlags,
    reading: impl Future<Output = Result<T, AnalyzeError>>,
) -> Result<T, AnalyzeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(AnalyzeError::file(std::path::Path::new("tokio")))?;
    runtime.block_on(async {
        let reading = tokio::time::timeout(flags.timeout, reading);
        reading.await.unwrap_or(Err(AnalyzeError::Timeout(flags.timeout)))
    })
}

async fn clusters(flags: &AnalyzeFlags, namespace: Option<&str>) -> Result<Source, AnalyzeError> {
    let mut source = Source::default();
    let client = connect(flags, flags.context.as_deref()).await?;
    if let Some(namespace) = namespace
        && !exists(&client, namespace).await?
    {
        return Err(AnalyzeError::NoNamespace(namespace.to_owned()));
    }
    for kind in Type::all() {
        let objects = list(&client, kind, flags, own_cluster(flags)).await?;
        source.objects.extend(objects);
    }
    for context in &flags.remote_contexts {
        let client = connect(flags, Some(context)).await?;
        for kind in REMOTE {
            source.objects.extend(list(&client, kind.into(), flags, context).await?);
        }
    }
    let name = match flags.revision.as_str() {
        "" | "default" => "istio".to_owned(),
        revision => format!("istio-{revision}"),
    };
    let is_config = |object: &&Object| object.kind == Kind::ConfigMap.into() && object.name == name;
    let config = source.objects.iter().find(is_config);
    let key = |key: &str| Some(config?.manifest["data"][key].as_str()?.to_owned());
    (source.mesh_config, source.mesh_networks) = (key("mesh"), key("meshNetworks"));
    Ok(source)
}

async fn config(flags: &AnalyzeFlags, context: Option<&str>) -> Result<Config, AnalyzeError> {
    Ok(selected_config(flags.kubeconfig.as_deref(), context).await?)
}

async fn connect(flags: &AnalyzeFlags, context: Option<&str>) -> Result<Client, AnalyzeError> {
    client::install_cryptography();
    let config = config(flags, context).await?;
    Ok(client::client(&Access::Given(Box::new(config)), Rate::UNLIMITED).await?)
}

/// Returns true if the cluster has this namespace.
async fn exists(client: &Client, namespace: &str) -> Result<bool, AnalyzeError> {
    let kind = Kind::Namespace;
    let resource = resource(kind.group(), "v1", kind.name(), kind.plural());
    let namespaces: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let found = namespaces.get_opt(namespace).await;
    let found = found.map_err(|error| request_error(&format!("namespace {namespace}"), &error))?;
    Ok(found.is_some())
}

fn request_error(what: &str, error: &kube::Error) -> AnalyzeError {
    AnalyzeError::Request {
        what: what.to_owned(),
        message: client::message(error),
    }
}

/// Lists the objects of a kind in the first version that the cluster serves; none if it serves no version.
async fn list(client: &Client, kind: Type, flags: &AnalyzeFlags, cluster: &str) -> Result<Vec<Object>, AnalyzeError> {
    for version in kind.served_versions() {
        let resource = resource(kind.group(), version, kind.name(), kind.plural());
        let api: Api<DynamicObject> = match kind {
            Type::Known(Kind::ConfigMap) => Api::namespaced_with(client.clone(), &flags.istio_namespace, &resource),
            _ => Api::all_with(client.clone(), &resource),
        };
        match pages(&api, kind).await {
            Ok(objects) => {
                let objects = objects
                    .into_iter()
                    .filter_map(|object| read_object(kind, object, cluster));
                let counts = |object: &Object| !kind.has_revisions() || is_of_revision(object, &flags.revision, None);
                return Ok(objects.filter(counts).collect());
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(request_error(kind.plural(), &error)),
        }
    }
    Ok(Vec::new())
}

async fn pages(api: &Api<DynamicObject>, kind: Type) -> Result<Vec<DynamicObject>, kube::Error> {
    let mut parameters = ListParams::default().limit(PAGE);
    if let Some(fields) = kind.field_selector() {
        parameters = parameters.fields(fields);
    }
    let mut objects = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

fn read_object(kind: Type, mut object: DynamicObject, cluster: &str) -> Option<Object> {
    object.metadata.managed_fields = None;
    let manifest = serde_json::to_value(object).ok()?;
    let object = Object::of(kind, manifest, "")?;
    Some(Object {
        cluster: SmolStr::new(cluster),
        ..object
    })
}
