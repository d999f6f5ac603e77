//! Debug pages, in the forms of Istio's. They read the latest snapshot and ask the pump's thread; they change nothing.

mod forms;

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Router,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::{
    generate::{ResourceSnapshot, ResourceType, store::MemberId},
    model::MeshSnapshot,
    proto::json,
    push::pump::{Inspect, Pump},
    table::Cx,
};

/// A connected proxy as debug pages show it.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    /// `<proxy id>-<n>`.
    pub id: String,
    /// The member in its group.
    pub member: MemberId,
    /// The client's address.
    pub peer: String,
    /// When it connected, RFC 3339.
    pub connected_at: String,
    /// What it watches.
    pub watches: BTreeMap<ResourceType, WatchInfo>,
}

/// One watched type of a connection.
#[derive(Clone, Debug, Default)]
pub struct WatchInfo {
    /// Nonce of the last response.
    pub sent: String,
    /// Nonce of the last accepted response.
    pub acked: String,
    /// When the last response was sent, RFC 3339; empty if none was.
    pub sent_at: String,
    /// Why the last response was refused, empty if it was not.
    pub error: String,
    /// Names asked for.
    pub names: Vec<String>,
}

/// Where the pages get what they show.
pub struct Sources {
    /// The latest snapshot.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The thread that owns the store.
    pub inspect: mpsc::Sender<Inspect>,
    /// The live connections, sorted by id.
    pub connections: Box<dyn Fn() -> Vec<ConnectionInfo> + Send + Sync>,
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

/// The pages that there are, as `/debug/list` names them.
const PAGES: [&str; 12] = [
    "adsz",
    "config_dump",
    "configz",
    "connections",
    "edsz",
    "endpointShardz",
    "list",
    "mesh",
    "networkz",
    "notez",
    "registryz",
    "syncz",
];

/// All pages under `/debug`.
pub fn pages(sources: Arc<Sources>) -> Router {
    Router::new()
        .route("/debug", get(index))
        .route("/debug/", get(index))
        .route(
            "/debug/list",
            get(async |Query(p): Query<Parameters>| reply(&p, json!(PAGES))),
        )
        .route("/debug/adsz", get(adsz))
        .route("/debug/connections", get(connections))
        .route("/debug/syncz", get(syncz))
        .route("/debug/registryz", get(of_mesh(forms::registry)))
        .route("/debug/endpointShardz", get(of_mesh(forms::endpoint_shards)))
        .route("/debug/configz", get(of_mesh(forms::configs)))
        .route(
            "/debug/mesh",
            get(of_mesh(|mesh| json::to_json(mesh.mesh_config(&Cx::untracked())))),
        )
        .route("/debug/networkz", get(of_mesh(forms::networks)))
        .route("/debug/edsz", get(edsz))
        .route("/debug/config_dump", get(config_dump))
        .route("/debug/notez", get(notez))
        .with_state(sources)
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

async fn index() -> Html<String> {
    let links: String = PAGES
        .iter()
        .map(|page| format!("<li><a href=\"/debug/{page}\">{page}</a></li>"))
        .collect();
    Html(format!(
        "<html><head><title>istiod debug pages</title></head><body><ul>{links}</ul></body></html>"
    ))
}

/// A page that is a function of the snapshot.
fn of_mesh(
    form: fn(&MeshSnapshot) -> Value,
) -> impl Fn(Shown, Query<Parameters>) -> std::future::Ready<Response> + Clone + Send + 'static {
    move |State(sources), Query(parameters)| {
        let mesh = sources.mesh.borrow().clone();
        std::future::ready(reply(&parameters, form(&mesh)))
    }
}

async fn connections(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let clients: Vec<Value> = (sources.connections)()
        .into_iter()
        .map(|c| json!({ "connectionId": c.id, "connectedAt": c.connected_at, "address": c.peer }))
        .collect();
    reply(
        &parameters,
        json!({ "totalClients": clients.len(), "clients": clients }),
    )
}

async fn adsz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let infos: Vec<ConnectionInfo> = (sources.connections)()
        .into_iter()
        .filter(|c| c.id.contains(&parameters.proxy_id))
        .collect();
    let members: Vec<MemberId> = infos.iter().map(|info| info.member).collect();
    let proxies = Pump::ask(&sources.inspect, move |_, store| {
        members
            .into_iter()
            .map(|member| store.proxy(member).cloned())
            .collect::<Vec<_>>()
    });
    let proxies = proxies.await.unwrap_or_default();
    let clients: Vec<Value> = infos
        .iter()
        .zip(proxies)
        .map(|(info, proxy)| forms::client(info, proxy.as_deref()))
        .collect();
    reply(
        &parameters,
        json!({ "totalClients": clients.len(), "clients": clients }),
    )
}

async fn syncz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let infos = (sources.connections)();
    let members: Vec<MemberId> = infos.iter().map(|info| info.member).collect();
    let proxies = Pump::ask(&sources.inspect, move |_, store| {
        members
            .into_iter()
            .map(|member| store.proxy(member).cloned())
            .collect::<Vec<_>>()
    });
    let rows: Vec<Value> = infos
        .iter()
        .zip(proxies.await.unwrap_or_default())
        .filter_map(|(info, proxy)| Some((info, proxy?)))
        .filter(|(_, proxy)| parameters.namespace.is_empty() || proxy.namespace == parameters.namespace.as_str())
        .map(|(info, proxy)| forms::sync(info, &proxy))
        .collect();
    reply(&parameters, Value::Array(rows))
}

/// The resources of the first connection whose id contains `proxyID`.
async fn resources_of(sources: &Sources, parameters: &Parameters) -> Result<Arc<ResourceSnapshot>, Response> {
    if parameters.proxy_id.is_empty() {
        return Err((
            StatusCode::BAD_REQUEST,
            "You must provide a proxyID in the query string\n",
        )
            .into_response());
    }
    let found = (sources.connections)()
        .into_iter()
        .find(|c| c.id.contains(&parameters.proxy_id));
    let member = found.map(|info| info.member).ok_or_else(not_connected)?;
    let snapshot = Pump::ask(&sources.inspect, move |_, store| {
        store.group_of(member).and_then(|key| store.snapshot(key)).cloned()
    });
    snapshot.await.flatten().ok_or_else(not_connected)
}

fn not_connected() -> Response {
    (StatusCode::NOT_FOUND, NOT_CONNECTED).into_response()
}

async fn edsz(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    match resources_of(&sources, &parameters).await {
        Ok(resources) => reply(
            &parameters,
            Value::Array(forms::bodies(&resources, ResourceType::Endpoint)),
        ),
        Err(response) => response,
    }
}

async fn config_dump(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let types: Vec<&str> = parameters.types.split(',').filter(|name| !name.is_empty()).collect();
    match resources_of(&sources, &parameters).await {
        Ok(resources) => reply(
            &parameters,
            forms::config_dump(&resources, &types, parameters.include_eds.is_some()),
        ),
        Err(response) => response,
    }
}

/// What was noticed while generating: conflicts, filters left out, missing references.
async fn notez(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    let notes = Pump::ask(&sources.inspect, |_, store| store.notes())
        .await
        .unwrap_or_default();
    let rows = notes
        .iter()
        .map(|note| json!({ "code": note.code, "detail": note.detail.as_str() }))
        .collect();
    reply(&parameters, Value::Array(rows))
}
