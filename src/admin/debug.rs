//! Debug pages, in Istio's forms. They read the latest snapshot and query the push loop's thread; they change nothing.
//!
//! The scope of each caller is a [`DebugScope`] in the extensions of its request; a request without one is an error.

mod forms;
mod redact;
pub mod wire;

use std::sync::Arc;

use axum::{
    Extension, Router,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{MethodRouter, get},
};
use futures::{FutureExt, future::BoxFuture};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::{
    access::{Access, DebugScope, PREFIX, Readers},
    renderer::Renderer,
};
use crate::{
    generate::{ResourceSnapshot, ResourceType, patch::set, store::ConfigStore},
    ingest::{
        jwks::KeyReports,
        remote::{RemoteClusters, SyncStatus},
    },
    kube::health::WatchMetrics,
    model::{MeshSnapshot, World},
    proto::json,
    push::push_loop::{Inspect, PushHandle},
    table::Cx,
    xds::registry::Registry,
};

/// Data of the pages.
pub struct Sources {
    /// Latest snapshot.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Thread that owns the store.
    pub inspect: mpsc::Sender<Inspect>,
    /// Live connections.
    pub connections: Arc<Registry>,
    /// Remote clusters, if Kubernetes is a source.
    pub remote: Option<watch::Receiver<Arc<RemoteClusters>>>,
    /// Watches of all clusters.
    pub watches: WatchMetrics,
    /// Keys that validate tokens.
    pub keys: KeyReports,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Parameters {
    #[serde(rename = "proxyID")]
    proxy_id: String,
    types: String,
    include_eds: Option<String>,
    namespace: String,
    pretty: Option<String>,
}

const NOT_CONNECTED: &str = "Proxy not connected to this Pilot instance. It may be connected to another instance.\n";

/// Origin of a page's URL and form.
enum Origin {
    Istio,
    Own,
}

/// A page below `/debug/`.
struct Page {
    name: &'static str,
    readers: Readers,
    origin: Origin,
    /// Content and query parameters, for the index.
    description: &'static str,
    handler: fn() -> MethodRouter<Arc<Sources>>,
}

const fn page(name: &'static str, handler: fn() -> MethodRouter<Arc<Sources>>, description: &'static str) -> Page {
    Page {
        name,
        readers: Readers::ControlPlane,
        origin: Origin::Istio,
        description,
        handler,
    }
}

/// Returns a page that Istio does not have.
const fn own_page(name: &'static str, handler: fn() -> MethodRouter<Arc<Sources>>, description: &'static str) -> Page {
    Page {
        origin: Origin::Own,
        ..page(name, handler, description)
    }
}

const fn proxy_page(
    name: &'static str,
    handler: fn() -> MethodRouter<Arc<Sources>>,
    description: &'static str,
) -> Page {
    Page {
        readers: Readers::ProxyNamespace,
        ..page(name, handler, description)
    }
}

/// All pages, by name.
const PAGES: &[Page] = &[
    page(
        "adsz",
        || get(adsz),
        "connected clients with the resources that they watch; proxyID filters",
    ),
    page(
        "clusterz",
        || get(clusterz),
        "clusters with their state and kubeconfig errors",
    ),
    proxy_page(
        "config_dump",
        || get(config_dump),
        "resources of a proxy: proxyID, types, include_eds",
    ),
    page("configz", || get(of_mesh(forms::configs)), "configuration objects"),
    page("connections", || get(connections), "connections"),
    page(
        "ecdsz",
        || get(of_type(ResourceType::Extension)),
        "extension configurations of a proxy",
    ),
    proxy_page("edsz", || get(of_type(ResourceType::Endpoint)), "endpoints of a proxy"),
    page(
        "endpointShardz",
        || get(of_mesh(forms::endpoint_shards)),
        "endpoints by service and cluster",
    ),
    own_page(
        "jwksz",
        || get(jwksz),
        "servers of JWT keys with the last fetch and error",
    ),
    page("list", || get(list), "names of the pages"),
    page("mcsz", || get(of_mesh(forms::mcs)), "multi-cluster services"),
    page("mesh", || get(of_mesh(mesh_config)), "mesh config"),
    proxy_page(
        "ndsz",
        || get(of_type(ResourceType::NameTable)),
        "DNS name table of a proxy",
    ),
    page("networkz", || get(of_mesh(forms::networks)), "gateways of networks"),
    own_page(
        "notez",
        || get(notez),
        "findings of generation: conflicts, filters left out, missing references, patches without effect",
    ),
    page("registryz", || get(of_mesh(forms::registry)), "services"),
    page(
        "syncz",
        || get(syncz),
        "configuration that each proxy was sent and acknowledged",
    ),
    own_page("watchz", || get(watchz), "watches of all clusters with their state"),
];

/// Returns the readers of a page by its name.
fn readers_of(name: &str) -> Readers {
    let page = PAGES.iter().find(|page| page.name == name);
    page.map_or(Readers::ControlPlane, |page| page.readers)
}

/// Returns all pages under `/debug`, unguarded.
fn pages(sources: Arc<Sources>) -> Router {
    let index = || get(index);
    let router = Router::new().route("/debug", index()).route(PREFIX, index());
    let router = PAGES.iter().fold(router, |router, page| {
        router.route(&format!("{PREFIX}{}", page.name), (page.handler)())
    });
    router.with_state(sources)
}

/// Returns all pages under `/debug`, with these access rules, rendered beside serving.
pub fn guarded_pages(sources: Arc<Sources>, access: &Access, renderer: &Renderer) -> Router {
    access.guard(renderer.render(pages(sources)), readers_of)
}

type Shown = State<Arc<Sources>>;

fn reply(parameters: &Parameters, value: Value) -> Response {
    let text = if parameters.pretty.is_some() {
        format!("{value:#}")
    } else {
        value.to_string()
    };
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// Returns the HTML of the index. Handlers must not name [`PAGES`] themselves: the table contains them, and the
/// compiler would need the type of one to check the other.
fn index_text() -> String {
    let links: String = PAGES.iter().map(index_entry).collect();
    format!("<html><head><title>istiod debug pages</title></head><body><ul>{links}</ul></body></html>")
}

fn index_entry(page: &Page) -> String {
    let Page { name, description, .. } = page;
    let mark = match page.origin {
        Origin::Istio => "",
        Origin::Own => " (not Istio's)",
    };
    format!("<li><a href=\"/debug/{name}\">{name}</a>: {description}{mark}</li>")
}

fn names() -> Vec<&'static str> {
    PAGES.iter().map(|page| page.name).collect()
}

async fn index() -> Html<String> {
    Html(index_text())
}

async fn list(Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, json!(names()))
}

fn mesh_config(mesh: &MeshSnapshot) -> Value {
    json::to_json(mesh.mesh_config(&Cx::untracked()))
}

/// Returns a page that is a function of the snapshot.
fn of_mesh(
    form: fn(&MeshSnapshot) -> Value,
) -> impl Fn(Shown, Query<Parameters>) -> std::future::Ready<Response> + Clone + Send + 'static {
    move |State(sources), Query(parameters)| {
        let mesh = sources.mesh.borrow().clone();
        std::future::ready(reply(&parameters, form(&mesh)))
    }
}

async fn connections(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let clients: Vec<Value> = sources
        .connections
        .connections()
        .iter()
        .map(|c| forms::connection(c))
        .collect();
    reply(
        &parameters,
        json!({ "totalClients": clients.len(), "clients": clients }),
    )
}

async fn adsz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let connections = sources.connections.connections();
    let shown = connections.iter().filter(|c| c.id.contains(&parameters.proxy_id));
    let clients: Vec<Value> = shown.map(|c| forms::client(c)).collect();
    reply(
        &parameters,
        json!({ "totalClients": clients.len(), "clients": clients }),
    )
}

async fn syncz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let mut connections = sources.connections.connections();
    connections.sort_by(|a, b| a.id.cmp(&b.id));
    let is_selected = |namespace: &str| parameters.namespace.is_empty() || namespace == parameters.namespace;
    let rows = connections
        .iter()
        .filter(|c| is_selected(&c.proxy.node.namespace))
        .map(|c| forms::sync(c))
        .collect();
    reply(&parameters, Value::Array(rows))
}

/// Lists the config cluster, then the remote ones.
async fn clusterz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let (cluster, is_synced) = {
        let mesh = sources.mesh.borrow();
        (mesh.installation.cluster.clone(), mesh.revision.0 > 0)
    };
    let status = if is_synced {
        SyncStatus::Synced
    } else {
        SyncStatus::Syncing
    };
    let own = json!({ "id": cluster.as_str(), "secretName": "", "syncStatus": status.name() });
    let remote = sources.remote.as_ref().map(|remote| remote.borrow().dump());
    let rows = std::iter::once(own).chain(remote.unwrap_or_default()).collect();
    reply(&parameters, Value::Array(rows))
}

/// Returns the resources of the first connection visible to the caller whose id contains `proxyID`.
async fn resources_of(
    sources: &Sources,
    scope: &DebugScope,
    parameters: &Parameters,
) -> Result<Arc<ResourceSnapshot>, Response> {
    if parameters.proxy_id.is_empty() {
        return Err((
            StatusCode::BAD_REQUEST,
            "You must provide a proxyID in the query string\n",
        )
            .into_response());
    }
    let resources = sources.resources_of(scope, &parameters.proxy_id).await;
    resources.ok_or_else(|| (StatusCode::NOT_FOUND, NOT_CONNECTED).into_response())
}

impl Sources {
    /// Returns the resources like [`resources_of`]; `None` if no visible connection matches.
    async fn resources_of(&self, scope: &DebugScope, proxy_id: &str) -> Option<Arc<ResourceSnapshot>> {
        let connections = self.connections.connections();
        let mut seen = connections.iter().filter(|c| scope.sees(&c.proxy.node.namespace));
        let subscription = seen.find(|c| c.id.contains(proxy_id))?.subscription;
        let snapshot = PushHandle::ask(&self.inspect, move |_, store| {
            store
                .group_of(subscription)
                .and_then(|key| store.snapshot(key))
                .cloned()
        });
        snapshot.await.flatten()
    }
}

/// Returns a page with a proxy's resources of one type.
fn of_type(
    resource_type: ResourceType,
) -> impl Fn(Shown, Extension<DebugScope>, Query<Parameters>) -> BoxFuture<'static, Response> + Clone + Send + Sync {
    move |State(sources), Extension(scope), Query(parameters)| {
        let page = async move {
            match resources_of(&sources, &scope, &parameters).await {
                Ok(resources) => {
                    let configs = forms::bodies(&resources, resource_type);
                    reply(&parameters, json!({ "configs": configs }))
                }
                Err(response) => response,
            }
        };
        page.boxed()
    }
}

async fn config_dump(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let types: Vec<&str> = parameters.types.split(',').filter(|name| !name.is_empty()).collect();
    match resources_of(&sources, &scope, &parameters).await {
        Ok(resources) => {
            let configs = if types.is_empty() {
                forms::config_dump(&resources, parameters.include_eds.is_some())
            } else {
                forms::of_types(&resources, &types)
            };
            reply(&parameters, json!({ "configs": configs }))
        }
        Err(response) => response,
    }
}

/// Lists the notes of generation: conflicts, omitted filters, missing references, patches without effect.
async fn notez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let noted = |world: &World, store: &ConfigStore| {
        let mut notes = store.notes();
        let unused = set::unused(&world.snapshot(), &notes);
        notes.retain(|note| note.code != set::STATUS);
        notes.extend(unused);
        notes
    };
    let notes = PushHandle::ask(&sources.inspect, noted).await.unwrap_or_default();
    let rows = notes
        .iter()
        .map(|note| json!({ "code": note.code, "detail": note.detail.as_str() }))
        .collect();
    reply(&parameters, Value::Array(rows))
}

/// Lists the state of every watch of every cluster.
async fn watchz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, json!(sources.watches.reports()))
}

/// Lists the state of fetching JWT keys.
async fn jwksz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, json!(sources.keys.all()))
}

#[cfg(test)]
mod tests;
