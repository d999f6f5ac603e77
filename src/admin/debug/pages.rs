//! Handlers of the pages.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    SharedSources, Sources,
    forms::{certificate, client, dump::Dump, endpoint, exposure, policy, proxy, scope, state},
};
use crate::{
    admin::access::DebugScope,
    base::Hostname,
    environment::wall_clock,
    generate::{ResourceType, patch::set, store},
    ingest::remote::SyncStatus,
    model::{MeshSnapshot, ScopeKey},
    proto::json,
    push::push_loop::PushHandle,
    table::Cx,
    xds::registry::LiveConnection,
};

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Parameters {
    #[serde(rename = "proxyID")]
    proxy_id: String,
    types: String,
    include_eds: Option<String>,
    namespace: String,
    pretty: Option<String>,
    push: String,
    clear: String,
    sizes: String,
    host: String,
}

const NOT_CONNECTED: &str = "Proxy not connected to this Pilot instance. It may be connected to another instance.\n";
const NO_HOST: &str = "host: is required, such as reviews.default.svc.cluster.local\n";
const NO_SERVICE: &str = "no service has this host and namespace\n";
const NO_PROXY: &str = "You must provide a proxyID in the query string\n";

pub(super) type Shown = State<SharedSources>;

pub(super) fn reply(parameters: &Parameters, value: &Value) -> Response {
    written(parameters, value)
}

/// Returns a page that is made while it is written.
fn written(parameters: &Parameters, page: &impl Serialize) -> Response {
    let text = if parameters.pretty.is_some() {
        serde_json::to_string_pretty(page)
    } else {
        serde_json::to_string(page)
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Returns a page that is a function of the snapshot.
pub(super) fn of_mesh(
    form: fn(&MeshSnapshot) -> Value,
) -> impl Fn(Shown, Query<Parameters>) -> std::future::Ready<Response> + Clone + Send + 'static {
    move |State(sources), Query(parameters)| std::future::ready(reply(&parameters, &form(&sources.mesh())))
}

pub(super) fn mesh_config(mesh: &MeshSnapshot) -> Value {
    json::to_json(mesh.mesh_config(&Cx::untracked()))
}

/// The response without the proxy that a request names.
type NoProxy = (StatusCode, &'static str);

/// Returns the connection that `proxyID` names, or the response without one.
fn connection(sources: &Sources, scope: &DebugScope, parameters: &Parameters) -> Result<Arc<LiveConnection>, NoProxy> {
    if parameters.proxy_id.is_empty() {
        return Err((StatusCode::BAD_REQUEST, NO_PROXY));
    }
    let found = sources.connection(scope, &parameters.proxy_id);
    found.ok_or((StatusCode::NOT_FOUND, NOT_CONNECTED))
}

/// Returns the resources of the proxy that `proxyID` names, or the response without one.
async fn dump(sources: &Sources, scope: &DebugScope, parameters: &Parameters) -> Result<Dump, NoProxy> {
    let live = connection(sources, scope, parameters)?;
    sources.dump(&live).await.ok_or((StatusCode::NOT_FOUND, NOT_CONNECTED))
}

/// Returns a page with a proxy's resources of one type.
pub(super) fn of_type(
    resource_type: ResourceType,
) -> impl Fn(Shown, Extension<DebugScope>, Query<Parameters>) -> BoxFuture<'static, Result<Response, NoProxy>>
+ Clone
+ Send
+ Sync {
    move |State(sources), Extension(scope), Query(parameters)| {
        let page = async move {
            let dump = dump(&sources, &scope, &parameters).await?;
            Ok(reply(&parameters, &dump.of_types(&[resource_type.short_name()])))
        };
        page.boxed()
    }
}

pub(super) async fn config_dump(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    let types: Vec<&str> = parameters.types.split(',').filter(|name| !name.is_empty()).collect();
    let dump = dump(&sources, &scope, &parameters).await?;
    Ok(if types.is_empty() {
        reply(&parameters, &dump.whole(parameters.include_eds.is_some()))
    } else {
        reply(&parameters, &dump.of_types(&types))
    })
}

fn by_id(sources: &Sources) -> Vec<Arc<LiveConnection>> {
    let mut connections = sources.connections.connections();
    connections.sort_by(|a, b| a.id.cmp(&b.id));
    connections
}

pub(super) async fn connections(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let clients = by_id(&sources).iter().map(|live| client::connection(live)).collect();
    reply(&parameters, &client::clients(clients))
}

pub(super) async fn adsz(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    if !parameters.push.is_empty() {
        sources.flushes.flush().await;
        return Ok(format!("Pushed to {} servers\n", sources.connections.len()).into_response());
    }
    let shown = if parameters.proxy_id.is_empty() {
        by_id(&sources)
    } else {
        vec![connection(&sources, &scope, &parameters)?]
    };
    let classes = sources.classes(&shown).await;
    let mut left = client::NamesLeft::of_page(parameters.proxy_id.is_empty());
    let clients = shown.iter().zip(&classes);
    let clients = clients.map(|(live, class)| client::client(live, class.as_deref(), &mut left));
    Ok(reply(&parameters, &client::clients(clients.collect())))
}

pub(super) async fn syncz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let is_selected = |namespace: &str| parameters.namespace.is_empty() || namespace == parameters.namespace;
    let connections = by_id(&sources);
    let rows = connections
        .iter()
        .filter(|live| is_selected(&live.proxy.node.namespace));
    reply(&parameters, &rows.map(|live| client::sync(live)).collect())
}

pub(super) async fn instancesz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let connections = sources.connections.connections();
    let classes = sources.classes(&connections).await;
    let clients = connections.iter().map(|live| &**live);
    let clients = clients.zip(classes.iter().map(Option::as_ref));
    written(&parameters, &client::Instances::new(&sources.mesh(), clients))
}

pub(super) async fn endpoint_shards(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    written(&parameters, &endpoint::Shards(&sources.mesh()))
}

pub(super) async fn krtz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    written(&parameters, &state::Tables(&sources.mesh()))
}

pub(super) async fn sidecarz(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    let live = connection(&sources, &scope, &parameters)?;
    let subscription = live.subscription;
    let found = PushHandle::ask(&sources.inspect, move |world, store| {
        let key = &store.group_of(subscription)?.scope;
        let scope = store.scopes().get(&Cx::untracked(), key)?.clone();
        Some((world.snapshot(), scope, store.class_of(subscription)?.clone()))
    });
    let (mesh, visible, class) = found.await.flatten().ok_or((StatusCode::NOT_FOUND, NOT_CONNECTED))?;
    Ok(reply(&parameters, &scope::scope(&mesh, &visible, &class.labels)))
}

/// Shows a proxy: its scope, its group and what it refused.
pub(super) async fn proxyz(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    let live = connection(&sources, &scope, &parameters)?;
    let id = live.subscription;
    let connections = sources.connections.connections().into_iter();
    let ids: Vec<_> = connections.map(|live| live.subscription).collect();
    let found = PushHandle::ask(&sources.inspect, move |_, store| {
        let group = store.group_of(id)?;
        let members = ids.iter().filter(|other| store.group_of(**other) == Some(group));
        Some(proxy::Membership {
            class: store.class_of(id).cloned(),
            scope: store.scopes().get(&Cx::untracked(), &group.scope).cloned(),
            proxies: members.count(),
            resources: store.snapshot(group).cloned(),
        })
    });
    let membership = found.await.flatten().ok_or((StatusCode::NOT_FOUND, NOT_CONNECTED))?;
    let refusals = sources.distribution.refusals_of(&live);
    Ok(reply(&parameters, &proxy::proxy(&live, &membership, &refusals)))
}

/// Lists certificates by expiry.
pub(super) async fn certificatez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let (authority, anchors) = (sources.authority.borrow().clone(), sources.anchors.borrow().clone());
    let rows = certificate::certificates(&sources.mesh(), authority.as_deref(), &anchors, wall_clock());
    reply(&parameters, &rows)
}

/// Shows the services of a host as their clients meet them.
pub(super) async fn servicez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    if parameters.host.is_empty() {
        return (StatusCode::BAD_REQUEST, NO_HOST).into_response();
    }
    let connections = sources.connections.connections().into_iter();
    let ids: Vec<_> = connections.map(|live| live.subscription).collect();
    let found = PushHandle::ask(&sources.inspect, move |world, store| {
        let mut proxies: BTreeMap<&ScopeKey, usize> = BTreeMap::new();
        for group in ids.iter().filter_map(|id| store.group_of(*id)) {
            *proxies.entry(&group.scope).or_default() += 1;
        }
        let scope = |(key, proxies)| Some((store.scopes().get(&Cx::untracked(), key)?.clone(), proxies));
        let scopes: exposure::Scopes = proxies.into_iter().filter_map(scope).collect();
        (world.snapshot(), scopes)
    });
    let Some((mesh, scopes)) = found.await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let keys = exposure::named(&mesh, &Hostname::new(&parameters.host), &parameters.namespace);
    let services = keys.into_iter();
    let services: Vec<_> = services
        .filter_map(|key| exposure::of_service(&mesh, key, &scopes))
        .collect();
    if services.is_empty() {
        return (StatusCode::NOT_FOUND, NO_SERVICE).into_response();
    }
    reply(&parameters, &json!(services))
}

pub(super) async fn telemetryz(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    if parameters.proxy_id.is_empty() {
        return Ok(reply(&parameters, &policy::telemetry(&sources.mesh())));
    }
    let live = connection(&sources, &scope, &parameters)?;
    match sources.classes(&[live]).await.as_slice() {
        [Some(class)] => Ok(reply(&parameters, &policy::telemetry_of(&sources.mesh(), class))),
        _ => Err((StatusCode::NOT_FOUND, NOT_CONNECTED)),
    }
}

/// Closes the connection that `proxyID` names.
pub(super) async fn force_disconnect(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Result<Response, NoProxy> {
    let live = connection(&sources, &scope, &parameters)?;
    tracing::warn!(connection = %live.id, "connection closed by an operator");
    live.close();
    Ok("OK".into_response())
}

/// Lists the generated resources, which proxies share.
pub(super) async fn cachez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    if !parameters.clear.is_empty() {
        sources.connections.clear_responses();
        return "Cache cleared\n".into_response();
    }
    let resources = PushHandle::ask(&sources.inspect, |_, store| store.resources().clone()).await;
    let Some(resources) = resources else {
        return reply(&parameters, &json!({}));
    };
    let generated = state::Generated(resources);
    if parameters.sizes.is_empty() {
        reply(&parameters, &generated.names())
    } else {
        reply(&parameters, &generated.sizes())
    }
}

pub(super) async fn inject(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    match sources.templates.as_ref().and_then(|templates| templates()) {
        Some(templates) => reply(&parameters, &json!(templates)),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Lists the config cluster, then the remote ones.
pub(super) async fn clusterz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let mesh = sources.mesh();
    let status = if mesh.revision.0 > 0 {
        SyncStatus::Synced
    } else {
        SyncStatus::Syncing
    };
    let cluster = mesh.installation.cluster.as_str();
    let own = json!({ "id": cluster, "secretName": "", "syncStatus": status.name() });
    let remote = sources.remote.as_ref().map(|remote| remote.borrow().dump());
    let rows = std::iter::once(own).chain(remote.unwrap_or_default()).collect();
    reply(&parameters, &Value::Array(rows))
}

/// Lists the findings of generation in the form of Istio's push status.
pub(super) async fn push_status(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let resources = PushHandle::ask(&sources.inspect, |_, store| store.resources().clone()).await;
    let notes = resources.map(|resources| store::notes(&resources));
    reply(&parameters, &state::push_status(&notes.unwrap_or_default()))
}

/// Lists the notes of generation: conflicts, omitted filters, missing references, patches without effect.
pub(super) async fn notez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let copied = PushHandle::ask(&sources.inspect, |world, store| {
        (world.snapshot(), store.resources().clone())
    });
    let noted = copied.await.map(|(mesh, resources)| {
        let mut notes = store::notes(&resources);
        let unused = set::unused(&mesh, &notes);
        notes.retain(|note| note.code != set::STATUS);
        notes.extend(unused);
        notes
    });
    let notes = noted.unwrap_or_default();
    let rows = notes
        .iter()
        .map(|note| json!({ "code": note.code, "detail": note.detail.as_str() }))
        .collect();
    reply(&parameters, &Value::Array(rows))
}

/// Lists the state of every watch of every cluster.
pub(super) async fn watchz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, &json!(sources.watches.reports()))
}

/// Lists the state of fetching JWT keys.
pub(super) async fn jwksz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, &json!(sources.keys.all()))
}
