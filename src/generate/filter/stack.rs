//! `FilterStack`: what is at hand while the filters of one listener are built, and where remarks are noted.

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
    generate::{BuildContext, resource::Note},
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

/// Where a log stands; decides which events it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPlace {
    /// An HTTP connection manager.
    Http,
    /// A TCP proxy.
    Tcp,
    /// A listener: connections for which no filter chain was found.
    Listener,
    /// The TCP proxy that opens HBONE tunnels: failures upstream.
    HboneOrigination,
    /// The connection manager that ends HBONE tunnels: responses of 400 and above.
    HboneTermination,
}

/// The filters of one listener, built once: all its chains of a kind have the same. The second of each pair is for
/// traffic that comes out of an HBONE tunnel.
#[derive(Default)]
pub struct BuiltSecurity {
    /// The AuthorizationPolicies of the client, once read.
    pub(super) policies: OnceCell<Vec<Shared<Config<AuthorizationPolicy>>>>,
    pub(super) http: [OnceCell<Memoized<Noted<SecurityFilters<HttpFilter>>>>; 2],
    pub(super) network: [OnceCell<Memoized<Noted<SecurityFilters<Filter>>>>; 2],
}

/// The surroundings of one listener's filters: the mesh, the client, the direction.
pub struct FilterStack<'a> {
    /// The mesh.
    pub ctx: BuildContext<'a>,
    /// The client.
    pub client: &'a Hashed<FilterProxyView>,
    /// The direction.
    pub class: ListenerClass,
    /// The mesh config.
    pub mesh: &'a MeshConfig,
    /// The Telemetries that apply.
    pub telemetries: Telemetries<'a>,
    /// The security filters, once built.
    pub security: BuiltSecurity,
    /// The access logs made so far, by place.
    pub(crate) logs: RefCell<Vec<(LogPlace, Vec<AccessLog>)>>,
    notes: RefCell<Vec<Note>>,
}

impl<'a> FilterStack<'a> {
    /// Looks up what the filters need.
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

    /// The feature variables.
    pub fn features(&self) -> &'a Features {
        &self.ctx.mesh.installation.features
    }

    /// Notes a remark.
    pub fn note(&self, code: &'static str, detail: impl Into<SmolStr>) {
        self.notes.borrow_mut().push(Note {
            code,
            detail: detail.into(),
        });
    }

    /// The remarks so far, sorted and unique.
    pub fn into_notes(self) -> Vec<Note> {
        let mut notes = self.notes.into_inner();
        notes.sort_unstable();
        notes.dedup();
        notes
    }

    /// True if the client has an auxiliary extension; its absence is noted. Never ask for a security extension here:
    /// those are sent whatever the client says.
    pub fn has_extension(&self, name: &'static str) -> bool {
        let has = self.client.extensions.has(name);
        if !has {
            self.note("proxy_extension_missing", name);
        }
        has
    }

    /// True if metadata exchange is on and the client can run it.
    pub fn has_metadata_exchange(&self) -> bool {
        self.features().pilot_enable_metadata_exchange && self.has_extension("istio.metadata_exchange")
    }

    /// The host and cluster of a provider's service (`host` or `namespace/host`); a failure is noted.
    pub fn provider_cluster(&self, provider: &str, service: &str, port: u32) -> Option<ProviderCluster> {
        let found = self.provider_host(service).map(|host| ProviderCluster {
            cluster: format!("outbound|{port}||{host}"),
            host: host.to_string(),
        });
        if found.is_none() {
            self.note("provider_lookup_cluster_failures", provider);
        }
        found
    }

    /// The host if the service exists; without a namespace it must exist in exactly one.
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

/// Where a provider is reached.
pub struct ProviderCluster {
    /// The host name, sent as authority.
    pub host: String,
    /// The cluster.
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
