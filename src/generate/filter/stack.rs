//! Builder context of the filters of one listener, which also collects notes.

use std::{
    cell::{OnceCell, RefCell},
    hash::Hash,
};

use smol_str::SmolStr;

use super::{
    memo::{FilterMemo, Noted, StackKey},
    proxy_view::{FilterProxyView, ListenerClass},
    security_filters::SecurityFilters,
    telemetry::Telemetries,
};
use crate::{
    api::Config,
    base::{Hashed, Hostname, Shared},
    generate::{BuildContext, name, resource::Note},
    model::features::Features,
    proto::{
        envoy::{
            config::{accesslog::v3::AccessLog, listener::v3::Filter},
            extensions::filters::network::http_connection_manager::v3::HttpFilter,
        },
        istio::{mesh::v1alpha1::MeshConfig, security::v1beta1::AuthorizationPolicy},
    },
    table::{Memo, Memoized},
};

/// Code of the note about a provider whose service does not exist, or exists in several namespaces; also the name of
/// the metric that counts these notes.
pub const LOOKUP_FAILURE: &str = "provider_lookup_cluster_failures";

/// Returns the kind of the provider that a note with the code [`LOOKUP_FAILURE`] is about.
pub fn failed_lookup(note: &Note) -> Option<&str> {
    let (kind, _) = note.detail.split_once(' ')?;
    (note.code == LOOKUP_FAILURE).then_some(kind)
}

/// Position of a log, which decides the logged events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPosition {
    /// An HTTP connection manager.
    Http,
    /// A TCP proxy.
    Tcp,
    /// A listener: connections without a matching filter chain.
    Listener,
    /// The TCP proxy that originates HBONE tunnels: upstream failures.
    HboneOrigination,
    /// The TCP proxy that forwards inner tunnels: upstream failures, and with the logs of the mesh config all.
    HboneForwarding,
    /// The connection manager that terminates HBONE tunnels: responses of 400 and above.
    HboneTermination,
}

/// Filters of one listener, built once, because all its chains of a kind have the same. The index of an array is a
/// [`PeerSource`](super::PeerSource).
#[derive(Default)]
pub struct BuiltSecurity {
    /// AuthorizationPolicies of the proxy, read on first use.
    pub(super) policies: OnceCell<Vec<Shared<Config<AuthorizationPolicy>>>>,
    pub(super) http: [OnceCell<Memoized<Noted<SecurityFilters<HttpFilter>>>>; 2],
    pub(super) network: [OnceCell<Memoized<Noted<SecurityFilters<Filter>>>>; 2],
}

/// Context of one listener's filters: the mesh, the proxy, the direction.
pub struct FilterStack<'a> {
    /// Context of the build.
    pub ctx: BuildContext<'a>,
    /// Attributes of the proxy.
    pub client: &'a Hashed<FilterProxyView>,
    /// Direction.
    pub class: ListenerClass,
    /// Mesh config.
    pub mesh: &'a MeshConfig,
    /// Telemetries that apply.
    pub telemetries: Telemetries<'a>,
    /// Security filters, built on first use.
    pub security: BuiltSecurity,
    /// Access logs built so far, by position.
    pub(crate) logs: RefCell<Vec<(LogPosition, Vec<AccessLog>)>>,
    notes: RefCell<Vec<Note>>,
}

impl<'a> FilterStack<'a> {
    /// Looks up the inputs of the filters.
    pub fn new(ctx: &BuildContext<'a>, client: &'a Hashed<FilterProxyView>, class: ListenerClass) -> Self {
        Self {
            ctx: *ctx,
            client,
            class,
            mesh: ctx.mesh_config(),
            telemetries: Telemetries::of(ctx, &client.telemetries),
            security: BuiltSecurity::default(),
            logs: RefCell::default(),
            notes: RefCell::default(),
        }
    }

    /// Returns the feature variables.
    pub fn features(&self) -> &'a Features {
        &self.ctx.mesh.installation.features
    }

    /// Adds a note.
    pub fn note(&self, code: &'static str, detail: impl Into<SmolStr>) {
        self.notes.borrow_mut().push(Note {
            code,
            detail: detail.into(),
        });
    }

    /// Returns the notes, sorted and unique.
    pub fn into_notes(self) -> Vec<Note> {
        let mut notes = self.notes.into_inner();
        notes.sort_unstable();
        notes.dedup();
        notes
    }

    /// Returns true if the proxy has an auxiliary extension, and notes its absence. Must not be used for security
    /// extensions, which are always sent.
    pub fn has_extension(&self, name: &'static str) -> bool {
        let has = self.client.extensions.has(name);
        if !has {
            self.note("proxy_extension_missing", name);
        }
        has
    }

    /// Returns true if metadata exchange is enabled and the proxy supports it.
    pub fn has_metadata_exchange(&self) -> bool {
        self.features().pilot_enable_metadata_exchange && self.has_extension("istio.metadata_exchange")
    }

    /// Returns host and cluster of the service of a provider, and notes a failure. `kind` is the kind of the provider
    /// as the label of Istio's metric names it.
    pub fn provider_cluster(&self, kind: &str, service: &str, port: u32) -> Option<ProviderCluster> {
        let found = self.service_cluster(service, port);
        if found.is_none() {
            self.note(LOOKUP_FAILURE, format!("{kind} {service}"));
        }
        found
    }

    /// Returns host and cluster of a service (`host` or `namespace/host`); `None` if it does not exist, or exists in
    /// several namespaces.
    pub fn service_cluster(&self, service: &str, port: u32) -> Option<ProviderCluster> {
        self.provider_host(service).map(|host| ProviderCluster {
            cluster: name::outbound_cluster(port, "", &host),
            host: host.to_string(),
        })
    }

    /// Returns the host if the service exists; without a namespace it must exist in exactly one.
    fn provider_host(&self, service: &str) -> Option<Hostname> {
        let (namespace, host) = match service.split_once('/') {
            Some((namespace, host)) if !host.contains('/') => (Some(namespace), host),
            _ => (None, service),
        };
        let host = Hostname::new(host);
        let mut keys = self
            .ctx
            .mesh
            .services_by_host
            .get(self.ctx.cx, &host)
            .filter(|(key, _)| namespace.is_none_or(|namespace| key.namespace == *namespace));
        (keys.next().is_some() && keys.next().is_none()).then(|| host.clone())
    }
}

/// Destination of a provider.
pub struct ProviderCluster {
    /// Host name, sent as authority.
    pub host: String,
    /// Cluster.
    pub cluster: String,
}

impl FilterStack<'_> {
    /// The key of what depends on the stack alone.
    pub(super) fn key(&self) -> StackKey {
        (self.client.clone(), self.class)
    }

    /// Returns a shared value, built on first use, and repeats its notes.
    pub(super) fn shared<K: Eq + Hash, T>(
        &self,
        memo: &Memo<K, Noted<T>>,
        key: K,
        build: impl FnOnce(&FilterStack) -> T,
    ) -> Memoized<Noted<T>> {
        let shared = memo.get(self.ctx.cx, key, |cx| {
            let own = FilterStack::new(&BuildContext { cx, ..self.ctx }, self.client, self.class);
            let value = build(&own);
            let notes = own.into_notes();
            Noted { value, notes }
        });
        for note in &shared.notes {
            self.note(note.code, note.detail.clone());
        }
        shared
    }

    /// The values that filter stacks share.
    pub(super) fn memo(&self) -> &FilterMemo {
        self.ctx.memo.get()
    }
}
