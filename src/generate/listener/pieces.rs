//! What the listeners of one client, the parts of one router and all default routes have in common: made once in an
//! update and not once for each of a hundred resources.
//!
//! What one would get wrong: who takes a piece that is there already has read, and has to remark, all that was read and
//! remarked when it was made.

use std::{
    hash::Hash,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
};

use prost::Message;
use rustc_hash::FxHashMap;

use super::{
    access_log::LogPlace,
    client::{FilterProxyView, ListenerClass},
    hcm::HttpConnection,
    stack::FilterStack,
};
use crate::{
    base::Hashed,
    generate::{BuildContext, GatewayView, group::Note, route::DefaultRoutes, security::SecurityFilters},
    model::gateway::MergedGateway,
    proto::{
        Any,
        envoy::{
            config::listener::v3::Filter,
            extensions::filters::network::{http_connection_manager::v3::HttpFilter, tcp_proxy::v3::TcpProxy},
        },
    },
    table::{Cx, ReadKey},
};

/// The pieces of all clients, while an update lasts.
#[derive(Default)]
pub struct Pieces {
    managers: Once<ManagerKey, Vec<u8>>,
    logs: Once<StackKey, Vec<u8>>,
    stats: Once<StackKey, Vec<Any>>,
    http_security: Once<(StackKey, bool), SecurityFilters<HttpFilter>>,
    network_security: Once<(StackKey, bool), SecurityFilters<Filter>>,
    gateways: Once<GatewayView, MergedGateway>,
    default_routes: Once<(), DefaultRoutes>,
}

impl Pieces {
    /// The routes of services that no VirtualService speaks of.
    pub(crate) fn default_routes(&self, ctx: &BuildContext) -> Piece<DefaultRoutes> {
        let make = |cx: &Cx| DefaultRoutes::new(&BuildContext { cx, ..*ctx });
        self.default_routes.get(ctx.cx, (), |cx| (make(cx), Vec::new()))
    }

    /// What a router serves.
    pub fn merged_gateway(&self, ctx: &BuildContext, gateway: &GatewayView) -> Piece<MergedGateway> {
        let merged = |cx: &Cx| MergedGateway::of(cx, ctx.mesh, &gateway.gateways, &gateway.exposed);
        self.gateways
            .get(ctx.cx, gateway.clone(), |cx| (merged(cx), Vec::new()))
    }
}

/// Values that are made by whoever asks first.
struct Once<K, T>(Mutex<FxHashMap<K, Piece<T>>>);

impl<K, T> Default for Once<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// A value, and what its making came with.
pub struct Piece<T>(Arc<Made<T>>);

impl<T> Clone for Piece<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Deref for Piece<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.value
    }
}

struct Made<T> {
    value: T,
    reads: Box<[ReadKey]>,
    notes: Vec<Note>,
}

type StackKey = (Hashed<FilterProxyView>, ListenerClass);

/// All that makes connection managers differ but their statistics and routes.
#[derive(PartialEq, Eq, Hash)]
struct ManagerKey {
    stack: StackKey,
    base: Vec<u8>,
    is_grpc_web: bool,
    use_remote_address: bool,
    /// 0 unless there are extensions, which match it.
    port: u32,
    tunneled: bool,
    mesh_only_exchange: bool,
    http3: bool,
}

impl<K: Eq + Hash, T> Once<K, T> {
    /// The value of a key, which is made with the remarks that come with it if nobody has asked before.
    fn get(&self, cx: &Cx, key: K, make: impl FnOnce(&Cx) -> (T, Vec<Note>)) -> Piece<T> {
        // Nothing can panic while it is locked.
        let held = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = held().get(&key).cloned();
        let made = known.unwrap_or_else(|| {
            let made = Piece(Arc::new(Made::by(make)));
            held().insert(key, made.clone());
            made
        });
        cx.record_all(&made.0.reads);
        made
    }
}

impl<T> Made<T> {
    fn by(make: impl FnOnce(&Cx) -> (T, Vec<Note>)) -> Self {
        let cx = Cx::recording();
        let (value, notes) = make(&cx);
        Self {
            value,
            reads: cx.into_reads(),
            notes,
        }
    }
}

impl FilterStack<'_> {
    fn key(&self) -> StackKey {
        (self.client.clone(), self.class)
    }

    fn piece<K: Eq + Hash, T>(&self, once: &Once<K, T>, key: K, make: impl FnOnce(&FilterStack) -> T) -> Piece<T> {
        let piece = once.get(self.ctx.cx, key, |cx| {
            let own = FilterStack::new(&BuildContext { cx, ..self.ctx }, self.client, self.class);
            (make(&own), own.into_notes())
        });
        for note in &piece.0.notes {
            self.note(note.code, note.detail.clone());
        }
        piece
    }

    /// The connection manager encoded, without the prefix of its statistics and its routes.
    pub(super) fn manager_piece(&self, http: &HttpConnection) -> Piece<Vec<u8>> {
        let key = ManagerKey {
            stack: self.key(),
            base: http.base.encode_to_vec(),
            is_grpc_web: http.is_grpc_web(),
            use_remote_address: http.use_remote_address,
            port: if self.client.extension_filters.is_empty() {
                0
            } else {
                http.port
            },
            tunneled: http.tunneled,
            mesh_only_exchange: http.mesh_only_exchange,
            http3: http.http3,
        };
        let managers = &self.ctx.pieces.managers;
        self.piece(managers, key, |stack| stack.http_connection_manager(http))
    }

    /// The access logs of TCP proxies, encoded as fields of these.
    pub(super) fn tcp_log_piece(&self) -> Piece<Vec<u8>> {
        self.piece(&self.ctx.pieces.logs, self.key(), |stack| {
            let proxy = TcpProxy {
                access_log: stack.access_logs(LogPlace::Tcp),
                ..Default::default()
            };
            proxy.encode_to_vec()
        })
    }

    /// The security filters of HTTP chains.
    pub(in crate::generate) fn http_security_piece(&self, tunneled: bool) -> Piece<SecurityFilters<HttpFilter>> {
        let pieces = &self.ctx.pieces.http_security;
        self.piece(pieces, (self.key(), tunneled), |stack| {
            stack.make_http_security(tunneled)
        })
    }

    /// The security filters of TCP chains.
    pub(in crate::generate) fn network_security_piece(&self, tunneled: bool) -> Piece<SecurityFilters<Filter>> {
        let pieces = &self.ctx.pieces.network_security;
        self.piece(pieces, (self.key(), tunneled), |stack| {
            stack.make_network_security(tunneled)
        })
    }

    /// The configuration of each stats filter: one for each Prometheus provider that measures, by provider name.
    pub fn stats_configs(&self) -> Piece<Vec<Any>> {
        let pieces = &self.ctx.pieces.stats;
        #[allow(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself is of one lifetime only"
        )]
        self.piece(pieces, self.key(), |stack| stack.make_stats_configs())
    }
}
