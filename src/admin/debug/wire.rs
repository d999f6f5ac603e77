//! Debug pages over xDS, for `istioctl proxy-status`, `version` and `x internal-debug`.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
};
use futures::{FutureExt, future::BoxFuture};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use smol_str::SmolStr;
use tower::ServiceExt;

use super::{Sources, table};
use crate::{
    admin::{
        access::{Access, DebugScope, PREFIX, Readers},
        metrics::ISTIO_VERSION,
        renderer::{Busy, Renderer},
    },
    generate::{EncodedResource, ProxyType},
    proto::{
        envoy::{
            admin::v3::{ClientResourceStatus, UpdateFailureState},
            config::core::v3::Node,
            service::status::v3::{ClientConfig, ConfigStatus, client_config::GenericXdsConfig},
        },
        json::{Unknown, any_from_json, struct_from_json},
    },
    xds::{
        debug::{CONFIG_DUMP, DebugError, DebugHandler, DebugRequest, DebugResponse, PAGE, SYNC_STATUS},
        registry::{LiveConnection, TypeStatus},
    },
};

/// Response for an unknown page; clients match this text.
const NOT_FOUND: &str = "404 page not found\n";

/// Handler of debug requests over xDS.
pub struct XdsDebugHandler {
    sources: Arc<Sources>,
    access: Access,
    /// Pages; access is decided before.
    pages: Router,
    renderer: Renderer,
    /// Name of this control plane, as `istioctl` distinguishes them.
    control_plane: String,
}

impl XdsDebugHandler {
    /// Returns a handler for `sources` with these access rules. `instance` is the name of the pod.
    ///
    /// Parity (pilot/pkg/xds/debug.go): without pages over HTTP there are none over xDS. The states of proxies and
    /// their dumps stay.
    pub fn new(sources: Arc<Sources>, access: Access, renderer: Renderer, instance: &str) -> Self {
        let info = json!({ "version": ISTIO_VERSION, "revision": env!("CARGO_PKG_VERSION"), "golang_version": "",
            "status": "Clean", "tag": ISTIO_VERSION });
        let pages = if sources.mesh().installation.features.enable_debug_on_http {
            table::pages(sources.clone()).merge(table::waiting_pages(sources.clone(), &renderer))
        } else {
            Router::new()
        };
        Self {
            pages: pages.fallback(async || (StatusCode::NOT_FOUND, NOT_FOUND)),
            sources,
            access,
            renderer,
            control_plane: json!({ "Component": "istiod", "ID": instance, "Info": info }).to_string(),
        }
    }

    /// Returns the caller's scope for clients. Without enforcement, callers need not be authenticated.
    fn client_scope(&self, question: &DebugRequest) -> Result<DebugScope, DebugError> {
        if !self.access.is_enforced() {
            return Ok(DebugScope::All);
        }
        self.scope(question)
    }

    fn scope(&self, question: &DebugRequest) -> Result<DebugScope, DebugError> {
        let caller = question.caller.as_ref().ok_or(DebugError::Unauthenticated)?;
        let scope = self.access.scope(&caller.identities);
        scope.ok_or_else(|| DebugError::Forbidden(caller.identities.clone()))
    }

    async fn answer(&self, question: DebugRequest) -> Result<DebugResponse, DebugError> {
        let resources = match question.type_url.as_str() {
            PAGE => vec![self.page(&question).await?],
            SYNC_STATUS => self.sync_status(&self.client_scope(&question)?),
            CONFIG_DUMP => self.config_dump(&self.client_scope(&question)?, &question).await,
            // The set of types is not public either.
            _ => self.client_scope(&question).map(|_| Vec::new())?,
        };
        Ok(DebugResponse {
            control_plane: (question.type_url == SYNC_STATUS).then(|| self.control_plane.clone()),
            version: self.sources.mesh.borrow().revision.0.to_string(),
            resources,
        })
    }

    /// Returns a debug page, named by its path after `/debug/`.
    ///
    /// Parity (pilot/pkg/xds/debuggen.go): pages about more than one proxy are for the control plane, also where access
    /// is not enforced. Its namespace counts besides the root namespace: tools use an account of it.
    async fn page(&self, question: &DebugRequest) -> Result<Arc<EncodedResource>, DebugError> {
        let scope = self.scope(question)?;
        let [name] = question.names.as_slice() else {
            return Err(DebugError::Malformed("exactly one debug request is required"));
        };
        let request = Request::get(format!("{PREFIX}{name}")).body(Body::empty());
        let mut request = request.map_err(|_| DebugError::Malformed("the name is not the address of a debug page"))?;
        // Access check and lookup use the same path.
        let page = request.uri().path().strip_prefix(PREFIX).unwrap_or_default();
        let identities = question.caller.as_ref().map(|caller| caller.identities.clone());
        let identities = identities.unwrap_or_default();
        if table::readers_of(page) == Readers::ControlPlane && !self.access.is_of_control_plane(&identities) {
            return Err(DebugError::Forbidden(identities));
        }
        request.extensions_mut().insert(scope);
        let response = self.pages.clone().oneshot(request).await;
        let body = match response {
            Ok(response) => response
                .into_body()
                .collect()
                .await
                .map(http_body_util::Collected::to_bytes),
            Err(never) => match never {},
        };
        let body = body.unwrap_or_default();
        Ok(Arc::new(EncodedResource::from_bytes(name.clone(), PAGE, &body)))
    }

    /// Returns the acknowledged state of each proxy. Clients that are not proxies have none.
    fn sync_status(&self, scope: &DebugScope) -> Vec<Arc<EncodedResource>> {
        let connections = self.sources.connections.connections();
        let is_proxy = |live: &LiveConnection| {
            live.proxy.node.proxy_config.is_some() || live.proxy.node.proxy_type == ProxyType::Ztunnel
        };
        let seen = connections
            .iter()
            .filter(|live| is_proxy(live) && scope.sees(&live.proxy.node.namespace));
        let statuses = seen.map(|live| Arc::new(EncodedResource::new(live.proxy.id.clone(), &client(live))));
        statuses.collect()
    }

    /// Returns the configuration of the named client; nothing if it is not connected or not visible.
    async fn config_dump(&self, scope: &DebugScope, question: &DebugRequest) -> Vec<Arc<EncodedResource>> {
        let [name] = question.names.as_slice() else {
            tracing::info!(
                names = question.names.len(),
                "a configuration dump must be requested for exactly one client"
            );
            return Vec::new();
        };
        let Some(live) = self.sources.connection(scope, name) else {
            return Vec::new();
        };
        let dump = self.sources.dump(&live).await;
        let sections = dump.map(|dump| dump.sections(false)).unwrap_or_default();
        sections.iter().filter_map(encoded).collect()
    }
}

impl DebugHandler for XdsDebugHandler {
    fn answer(&self, question: DebugRequest) -> BoxFuture<'static, Result<DebugResponse, DebugError>> {
        let handler = Self {
            sources: self.sources.clone(),
            access: self.access.clone(),
            pages: self.pages.clone(),
            renderer: self.renderer.clone(),
            control_plane: self.control_plane.clone(),
        };
        async move {
            let (url, caller) = (question.type_url.clone(), question.caller.clone());
            let renderer = handler.renderer.clone();
            let answer = if waits(&question) {
                handler.answer(question).await
            } else {
                match renderer.run(async move { handler.answer(question).await }).await {
                    Ok(Some(answer)) => answer,
                    Ok(None) | Err(Busy) => Err(DebugError::Busy),
                }
            };
            if let Err(denial) = &answer {
                tracing::warn!(r#type = url, ?caller, %denial, "debug request denied");
            }
            answer
        }
        .boxed()
    }
}

/// Returns true if the answer waits for other replicas, so that it must not keep others from their turn.
fn waits(question: &DebugRequest) -> bool {
    let pages = || {
        question
            .names
            .iter()
            .map(|name| name.split('?').next().unwrap_or_default())
    };
    question.type_url == PAGE && pages().any(table::waits)
}

fn encoded(section: &Value) -> Option<Arc<EncodedResource>> {
    match any_from_json(section, Unknown::Ignore) {
        Ok(any) => Some(Arc::new(EncodedResource::from_bytes(
            SmolStr::default(),
            &any.type_url,
            &any.value,
        ))),
        Err(error) => {
            tracing::error!(%error, "failed to encode config dump; this is a bug in istiod");
            None
        }
    }
}

fn client(live: &LiveConnection) -> ClientConfig {
    let proxy = &live.proxy;
    let mut metadata = serde_json::Map::new();
    for (key, value) in [
        ("CLUSTER_ID", proxy.node.cluster.as_str()),
        ("NAMESPACE", proxy.node.namespace.as_str()),
        ("ISTIO_VERSION", proxy.node.version_text.as_str()),
    ] {
        if !value.is_empty() {
            metadata.insert(key.to_owned(), json!(value));
        }
    }
    let mut types = live.types();
    types.sort_by_key(|status| status.resource_type.url());
    ClientConfig {
        node: Some(Node {
            id: proxy.id.to_string(),
            metadata: Some(struct_from_json(&metadata)),
            ..Default::default()
        }),
        generic_xds_configs: types.iter().map(type_config).collect(),
        ..Default::default()
    }
}

fn type_config(status: &TypeStatus) -> GenericXdsConfig {
    let config_status = match status {
        status if status.last_error.is_some() => ConfigStatus::Error,
        status if status.nonce_sent.is_empty() => ConfigStatus::NotSent,
        status if status.nonce_sent == status.nonce_acked => ConfigStatus::Synced,
        _ => ConfigStatus::Stale,
    };
    let sent_at = status.sent_at.map(timestamp);
    GenericXdsConfig {
        type_url: status.resource_type.url().to_owned(),
        config_status: config_status.into(),
        client_status: ClientResourceStatus::Unknown.into(),
        last_updated: sent_at,
        error_state: status.last_error.as_ref().map(|details| UpdateFailureState {
            last_update_attempt: sent_at,
            details: details.clone(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn timestamp(time: SystemTime) -> prost_types::Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    prost_types::Timestamp {
        seconds: since.as_secs() as i64,
        nanos: since.subsec_nanos() as i32,
    }
}

#[cfg(test)]
mod tests;
