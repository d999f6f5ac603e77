//! What the listeners of one client have in common, made once in an update and not once for each of a hundred listeners.
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
    client::{FilterClient, ListenerClass},
    hcm::HttpConnection,
    stack::FilterStack,
};
use crate::{
    base::Hashed,
    generate::{View, group::Note, security::SecurityFilters},
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

type StackKey = (Hashed<FilterClient>, ListenerClass);

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
    fn get(&self, stack: &FilterStack, key: K, make: impl FnOnce(&FilterStack) -> T) -> Piece<T> {
        // Nothing can panic while it is locked.
        let held = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = held().get(&key).cloned();
        let made = known.unwrap_or_else(|| {
            let made = Piece(Arc::new(Made::by(stack, make)));
            held().insert(key, made.clone());
            made
        });
        stack.view.cx.record_all(&made.0.reads);
        for note in &made.0.notes {
            stack.note(note.code, note.detail.clone());
        }
        made
    }
}

impl<T> Made<T> {
    fn by(stack: &FilterStack, make: impl FnOnce(&FilterStack) -> T) -> Self {
        let cx = Cx::recording();
        let view = View { cx: &cx, ..stack.view };
        let own = FilterStack::new(&view, stack.client, stack.class);
        let value = make(&own);
        let notes = own.into_notes();
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
        let managers = &self.view.pieces.managers;
        managers.get(self, key, |stack| stack.http_connection_manager(http))
    }

    /// The access logs of TCP proxies, encoded as fields of these.
    pub(super) fn tcp_log_piece(&self) -> Piece<Vec<u8>> {
        self.view.pieces.logs.get(self, self.key(), |stack| {
            let proxy = TcpProxy {
                access_log: stack.access_logs(LogPlace::Tcp),
                ..Default::default()
            };
            proxy.encode_to_vec()
        })
    }

    /// The security filters of HTTP chains.
    pub(in crate::generate) fn http_security_piece(&self, tunneled: bool) -> Piece<SecurityFilters<HttpFilter>> {
        let pieces = &self.view.pieces.http_security;
        pieces.get(self, (self.key(), tunneled), |stack| stack.make_http_security(tunneled))
    }

    /// The security filters of TCP chains.
    pub(in crate::generate) fn network_security_piece(&self, tunneled: bool) -> Piece<SecurityFilters<Filter>> {
        let pieces = &self.view.pieces.network_security;
        pieces.get(self, (self.key(), tunneled), |stack| {
            stack.make_network_security(tunneled)
        })
    }

    /// The configuration of each stats filter: one for each Prometheus provider that measures, by provider name.
    pub fn stats_configs(&self) -> Piece<Vec<Any>> {
        let pieces = &self.view.pieces.stats;
        #[allow(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself is of one lifetime only"
        )]
        pieces.get(self, self.key(), |stack| stack.make_stats_configs())
    }
}
