//! Debug pages, in Istio's forms. They read the latest snapshot and query the push loop's thread. Only pages whose
//! parameters say so have an effect: a push, a cleared cache, a closed connection.
//!
//! The scope of each caller is a [`DebugScope`] in the extensions of its request; a request without one is an error.

mod forms;
mod pages;
mod redact;
mod status;
mod table;
pub mod wire;

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use axum::Router;
use tokio::sync::{mpsc, watch};

use self::forms::dump::Dump;
use super::{
    access::{Access, DebugScope},
    renderer::Renderer,
};
use crate::{
    ca::authority::Authority,
    distribution::Distribution,
    generate::{ProxyType, proxy_class::ProxyClassKey},
    ingest::{jwks::KeyReports, remote::RemoteClusters},
    kube::health::WatchMetrics,
    model::MeshSnapshot,
    push::push_loop::{Flushes, Inspect, PushHandle},
    xds::registry::{ConnectionRegistry, LiveConnection},
};

/// Returns the texts of the injection templates by name; `None` before they are known.
pub type InjectionTemplates = Box<dyn Fn() -> Option<BTreeMap<String, String>> + Send + Sync>;

/// Data of the pages.
pub struct Sources {
    /// Latest snapshot whose configuration is published.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Latest snapshot, for readers of objects.
    pub committed: watch::Receiver<Arc<MeshSnapshot>>,
    /// Thread that owns the store.
    pub inspect: mpsc::Sender<Inspect>,
    /// Pushes that do not wait for debouncing.
    pub flushes: Flushes,
    /// Live connections.
    pub connections: Arc<ConnectionRegistry>,
    /// Remote clusters, if Kubernetes is a source.
    pub remote: Option<watch::Receiver<Arc<RemoteClusters>>>,
    /// Watches of all clusters.
    pub watches: WatchMetrics,
    /// Keys that validate tokens.
    pub keys: KeyReports,
    /// The CA of this process, once it has one.
    pub authority: watch::Receiver<Option<Arc<Authority>>>,
    /// Roots that workloads trust, as PEM.
    pub anchors: watch::Receiver<Arc<Vec<String>>>,
    /// Distribution status.
    pub distribution: Arc<Distribution>,
    /// The injection templates, unless injection is off.
    pub templates: Option<InjectionTemplates>,
}

/// The data of the pages, as handlers have it. A trait object declares that it may be shared between threads. Without
/// one, the compiler would prove that of the whole model for every type of the router, for a sixth of its time.
#[derive(Clone)]
struct SharedSources(Arc<dyn Deref<Target = Sources> + Send + Sync>);

impl SharedSources {
    fn new(sources: Arc<Sources>) -> Self {
        Self(Arc::new(sources))
    }
}

impl Deref for SharedSources {
    type Target = Sources;

    fn deref(&self) -> &Sources {
        &self.0
    }
}

impl Sources {
    fn mesh(&self) -> Arc<MeshSnapshot> {
        self.mesh.borrow().clone()
    }

    /// Returns the first connection visible to the caller whose id contains this text.
    fn connection(&self, scope: &DebugScope, proxy_id: &str) -> Option<Arc<LiveConnection>> {
        let connections = self.connections.connections().into_iter();
        let mut seen = connections.filter(|live| scope.sees(&live.proxy.node.namespace));
        seen.find(|live| live.id.contains(proxy_id))
    }

    /// Returns the resources of a connection; `None` before they are generated.
    async fn dump(&self, live: &LiveConnection) -> Option<Dump> {
        let subscription = live.subscription;
        let resources = PushHandle::ask(&self.inspect, move |_, store| {
            let group = store.group_of(subscription)?;
            store.snapshot(group).cloned()
        });
        let resources = resources.await.flatten()?;
        Some(Dump {
            resources,
            types: live.types(),
            is_ztunnel: live.proxy.node.proxy_type == ProxyType::Ztunnel,
        })
    }

    /// Returns the class of each connection that has one.
    async fn classes(&self, connections: &[Arc<LiveConnection>]) -> Vec<Option<ProxyClassKey>> {
        let ids: Vec<_> = connections.iter().map(|live| live.subscription).collect();
        let number = ids.len();
        let classes = PushHandle::ask(&self.inspect, move |_, store| -> Vec<Option<ProxyClassKey>> {
            ids.into_iter().map(|id| store.class_of(id).cloned()).collect()
        });
        classes.await.unwrap_or_else(|| vec![None; number])
    }
}

/// Returns all pages under `/debug`, with these access rules, rendered beside serving.
pub fn guarded_pages(sources: Arc<Sources>, access: &Access, renderer: &Renderer) -> Router {
    let rendered = renderer.render(table::pages(sources.clone()));
    let waiting = table::waiting_pages(sources.clone(), renderer);
    let pages = rendered.merge(waiting).merge(table::event_pages(sources));
    access.guard(pages, table::readers_of)
}

#[cfg(test)]
mod tests;
