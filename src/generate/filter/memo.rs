//! Parts of filter chains that many listeners of one update share, each built once and not for each of a hundred listeners.
//!
//! Note: a hit replays the reads and the notes that were recorded when the value was built.

use std::hash::Hash;

use prost::Message;

use super::{
    access_log::LogPlace,
    hcm::HttpConnection,
    proxy_view::{FilterProxyView, ListenerClass},
    security::SecurityFilters,
    stack::FilterStack,
};
use crate::{
    base::Hashed,
    generate::{BuildContext, resource::Note},
    proto::{
        Any,
        envoy::{
            config::listener::v3::Filter,
            extensions::filters::network::{http_connection_manager::v3::HttpFilter, tcp_proxy::v3::TcpProxy},
        },
    },
    table::{Memo, Memoized},
};

/// What filter chains of one proxy view and direction share, for the time of one update.
#[derive(Default)]
pub struct FilterMemo {
    managers: Memo<ManagerKey, Noted<Vec<u8>>>,
    logs: Memo<StackKey, Noted<Vec<u8>>>,
    stats: Memo<StackKey, Noted<Vec<Any>>>,
    http_security: Memo<(StackKey, bool), Noted<SecurityFilters<HttpFilter>>>,
    network_security: Memo<(StackKey, bool), Noted<SecurityFilters<Filter>>>,
}

/// A value with the notes that a user of it repeats.
pub struct Noted<T> {
    /// The value.
    pub value: T,
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

impl FilterStack<'_> {
    fn key(&self) -> StackKey {
        (self.client.clone(), self.class)
    }

    fn shared<K: Eq + Hash, T>(
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

    fn memo(&self) -> &FilterMemo {
        self.ctx.memo.get()
    }

    /// The connection manager encoded, without the prefix of its statistics and its routes.
    pub(crate) fn shared_manager(&self, http: &HttpConnection) -> Memoized<Noted<Vec<u8>>> {
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
        let managers = &self.memo().managers;
        self.shared(managers, key, |stack| stack.http_connection_manager(http))
    }

    /// The access logs of TCP proxies, encoded as fields of these.
    pub(crate) fn shared_tcp_logs(&self) -> Memoized<Noted<Vec<u8>>> {
        self.shared(&self.memo().logs, self.key(), |stack| {
            let proxy = TcpProxy {
                access_log: stack.access_logs(LogPlace::Tcp),
                ..Default::default()
            };
            proxy.encode_to_vec()
        })
    }

    /// The security filters of HTTP chains.
    pub(in crate::generate) fn shared_http_security(
        &self,
        tunneled: bool,
    ) -> Memoized<Noted<SecurityFilters<HttpFilter>>> {
        let memo = &self.memo().http_security;
        self.shared(memo, (self.key(), tunneled), |stack| stack.make_http_security(tunneled))
    }

    /// The security filters of TCP chains.
    pub(in crate::generate) fn shared_network_security(
        &self,
        tunneled: bool,
    ) -> Memoized<Noted<SecurityFilters<Filter>>> {
        let memo = &self.memo().network_security;
        self.shared(memo, (self.key(), tunneled), |stack| {
            stack.make_network_security(tunneled)
        })
    }

    /// The configuration of each stats filter: one for each Prometheus provider that measures, by provider name.
    pub fn stats_configs(&self) -> Memoized<Noted<Vec<Any>>> {
        let memo = &self.memo().stats;
        #[allow(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself is of one lifetime only"
        )]
        self.shared(memo, self.key(), |stack| stack.make_stats_configs())
    }
}
