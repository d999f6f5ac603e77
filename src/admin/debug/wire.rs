//! The same information over xDS: what `istioctl proxy-status`, `version` and `x internal-debug` read.

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

use super::{Sources, forms};
use crate::{
    admin::{
        access::{Access, PREFIX, Sight},
        metrics::ISTIO_VERSION,
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

/// What is told of a page that there is not; clients look for this text.
const NOT_FOUND: &str = "404 page not found\n";

/// Answers questions about the control plane that come over xDS.
pub struct Wire {
    sources: Arc<Sources>,
    access: Access,
    /// The pages; who asks for them was decided before.
    pages: Router,
    /// Who answers, as `istioctl` tells control planes apart.
    control_plane: String,
}

impl Wire {
    /// Answers from `sources` to those who may know. `instance` is the name of our pod.
    pub fn new(sources: Arc<Sources>, access: Access, instance: &str) -> Self {
        let info = json!({ "version": ISTIO_VERSION, "revision": env!("CARGO_PKG_VERSION"), "golang_version": "",
            "status": "Clean", "tag": ISTIO_VERSION });
        Self {
            pages: super::pages(sources.clone()).fallback(async || (StatusCode::NOT_FOUND, NOT_FOUND)),
            sources,
            access,
            control_plane: json!({ "Component": "istiod", "ID": instance, "Info": info }).to_string(),
        }
    }

    /// What the caller may see of clients. Where callers are not told apart, nobody has to be known.
    fn sight_of_clients(&self, question: &DebugRequest) -> Result<Sight, DebugError> {
        if !self.access.is_enforced() {
            return Ok(Sight::All);
        }
        self.sight(question)
    }

    fn sight(&self, question: &DebugRequest) -> Result<Sight, DebugError> {
        let caller = question.caller.as_ref().ok_or(DebugError::Unauthenticated)?;
        let sight = self.access.sight(&caller.identities);
        sight.ok_or_else(|| DebugError::Forbidden(caller.identities.clone()))
    }

    async fn told(&self, question: DebugRequest) -> Result<DebugResponse, DebugError> {
        let resources = match question.type_url.as_str() {
            PAGE => vec![self.page(&question).await?],
            SYNC_STATUS => self.sync_status(&self.sight_of_clients(&question)?),
            CONFIG_DUMP => self.config_dump(&self.sight_of_clients(&question)?, &question).await,
            // As the types that there are: not for everybody to find out.
            _ => self.sight_of_clients(&question).map(|_| Vec::new())?,
        };
        Ok(DebugResponse {
            control_plane: (question.type_url == SYNC_STATUS).then(|| self.control_plane.clone()),
            version: self.sources.mesh.borrow().revision.0.to_string(),
            resources,
        })
    }

    /// A debug page, named as its address goes on behind `/debug/`.
    async fn page(&self, question: &DebugRequest) -> Result<Arc<EncodedResource>, DebugError> {
        let sight = self.sight(question)?;
        let [name] = question.names.as_slice() else {
            return Err(DebugError::Malformed("exactly one debug request is required"));
        };
        let request = Request::get(format!("{PREFIX}{name}")).body(Body::empty());
        let mut request = request.map_err(|_| DebugError::Malformed("the name is no address of a debug page"))?;
        // What is asked for is what is looked up: both see one and the same path.
        let page = request.uri().path().strip_prefix(PREFIX).unwrap_or_default();
        if !sight.permits(page) {
            let identities = question.caller.as_ref().map(|caller| caller.identities.clone());
            return Err(DebugError::Forbidden(identities.unwrap_or_default()));
        }
        request.extensions_mut().insert(sight);
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

    /// What each proxy has acknowledged. Clients that are no proxies say nothing of their configuration.
    fn sync_status(&self, sight: &Sight) -> Vec<Arc<EncodedResource>> {
        let connections = self.sources.connections.connections();
        let is_proxy =
            |live: &LiveConnection| live.proxy.proxy_config.is_some() || live.proxy.proxy_type == ProxyType::Ztunnel;
        let seen = connections
            .iter()
            .filter(|live| is_proxy(live) && sight.sees(&live.proxy.namespace));
        let statuses = seen.map(|live| Arc::new(EncodedResource::new(live.proxy.id.clone(), &client(live))));
        statuses.collect()
    }

    /// The configuration of the client that is named: nothing if it is not here, or not to be seen.
    async fn config_dump(&self, sight: &Sight, question: &DebugRequest) -> Vec<Arc<EncodedResource>> {
        let [name] = question.names.as_slice() else {
            tracing::info!(
                names = question.names.len(),
                "a dump is asked for of other than one client"
            );
            return Vec::new();
        };
        let Some(resources) = self.sources.resources_of(sight, name).await else {
            return Vec::new();
        };
        let configs = forms::config_dump(&resources, false);
        configs.iter().filter_map(encoded).collect()
    }
}

impl DebugHandler for Wire {
    fn answer(&self, question: DebugRequest) -> BoxFuture<'static, Result<DebugResponse, DebugError>> {
        let wire = Self {
            sources: self.sources.clone(),
            access: self.access.clone(),
            pages: self.pages.clone(),
            control_plane: self.control_plane.clone(),
        };
        async move {
            let (url, caller) = (question.type_url.clone(), question.caller.clone());
            let told = wire.told(question).await;
            if let Err(denial) = &told {
                tracing::warn!(r#type = url, ?caller, %denial, "a question about the control plane is refused");
            }
            told
        }
        .boxed()
    }
}

fn encoded(section: &Value) -> Option<Arc<EncodedResource>> {
    match any_from_json(section, Unknown::Ignore) {
        Ok(any) => Some(Arc::new(EncodedResource::from_bytes(
            SmolStr::default(),
            &any.type_url,
            &any.value,
        ))),
        Err(error) => {
            tracing::error!(%error, "a dump cannot be encoded; this is a defect of istiod");
            None
        }
    }
}

fn client(live: &LiveConnection) -> ClientConfig {
    let proxy = &live.proxy;
    let mut metadata = serde_json::Map::new();
    for (key, value) in [
        ("CLUSTER_ID", proxy.cluster.as_str()),
        ("NAMESPACE", proxy.namespace.as_str()),
        ("ISTIO_VERSION", proxy.version_text.as_str()),
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
