//! Reads the objects of clusters.

use kube::{
    Api, Client,
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
/// The kinds that are read from further clusters.
const REMOTE: [Kind; 4] = [Kind::Namespace, Kind::Node, Kind::Pod, Kind::Service];

/// Reads the objects of the config cluster and of further clusters, the mesh config and the networks.
pub(super) fn read(flags: &AnalyzeFlags) -> Result<Source, AnalyzeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(AnalyzeError::file(std::path::Path::new("tokio")))?;
    runtime.block_on(async {
        let reading = tokio::time::timeout(flags.timeout, clusters(flags));
        reading.await.unwrap_or(Err(AnalyzeError::Timeout(flags.timeout)))
    })
}

async fn clusters(flags: &AnalyzeFlags) -> Result<Source, AnalyzeError> {
    let mut source = Source::default();
    let client = connect(flags, flags.context.as_deref()).await?;
    let has_several = !flags.remote_contexts.is_empty();
    for kind in Type::all() {
        let own = if has_several { CONFIG_CLUSTER } else { "" };
        source.objects.extend(list(&client, kind, flags, own).await?);
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
    let is_config = |it: &&Object| it.kind == Kind::ConfigMap.into() && it.name == name;
    let config = source.objects.iter().find(is_config);
    let key = |key: &str| Some(config?.manifest["data"][key].as_str()?.to_owned());
    (source.mesh_config, source.mesh_networks) = (key("mesh"), key("meshNetworks"));
    Ok(source)
}

async fn connect(flags: &AnalyzeFlags, context: Option<&str>) -> Result<Client, AnalyzeError> {
    client::install_cryptography();
    let config = selected_config(flags.kubeconfig.as_deref(), context).await?;
    let unlimited = Rate {
        per_second: 0.0,
        burst: 0,
    };
    Ok(client::client(&Access::Given(Box::new(config)), unlimited).await?)
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
                return Ok(objects
                    .filter(|object| is_of_revision(object, &flags.revision))
                    .collect());
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                return Err(AnalyzeError::Request {
                    what: kind.plural().to_owned(),
                    message: match error {
                        kube::Error::Api(status) => status.message.clone(),
                        other => other.to_string(),
                    },
                });
            }
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
