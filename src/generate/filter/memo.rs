//! Parts of filter chains that many listeners of one update share, each built once and not for each of a hundred
//! listeners. Without it, 100 listeners take 1.9 times as long (bench `suite`, case `auto`).
//!
//! Note: a hit replays the reads and the notes that were recorded when the value was built.

use super::{
    proxy_view::{FilterProxyView, ListenerClass},
    security_filters::{PeerSource, SecurityFilters},
};
use crate::{
    base::Hashed,
    generate::{resource::Note, wire::Encoded},
    proto::{
        Any,
        envoy::{
            config::listener::v3::Filter,
            extensions::filters::network::{
                http_connection_manager::v3::{HttpConnectionManager, HttpFilter},
                tcp_proxy::v3::TcpProxy,
            },
        },
    },
    table::Memo,
};

/// Values that filter chains of one proxy view and direction share during one update.
#[derive(Default)]
pub struct FilterMemo {
    pub(super) managers: Memo<ManagerKey, Noted<Encoded<HttpConnectionManager>>>,
    pub(super) logs: Memo<StackKey, Noted<Encoded<TcpProxy>>>,
    /// Sizes of what TCP chains repeat, by port and by whether only the destination authorises its clients.
    pub(super) tcp_sizes: Memo<(StackKey, u32, bool), Noted<usize>>,
    pub(super) stats: Memo<StackKey, Noted<Vec<Any>>>,
    pub(super) http_security: Memo<(StackKey, PeerSource), Noted<SecurityFilters<HttpFilter>>>,
    pub(super) network_security: Memo<(StackKey, PeerSource), Noted<SecurityFilters<Filter>>>,
}

/// A value with the notes to repeat for each use.
pub struct Noted<T> {
    /// Value.
    pub value: T,
    /// The notes.
    pub(super) notes: Vec<Note>,
}

/// The inputs of a filter stack besides the mesh.
pub(super) type StackKey = (Hashed<FilterProxyView>, ListenerClass);

/// Inputs of a connection manager, except its statistics prefix and routes.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct ManagerKey {
    pub(super) stack: StackKey,
    pub(super) base: Vec<u8>,
    pub(super) is_grpc_web: bool,
    pub(super) use_remote_address: bool,
    /// Port that extensions match; 0 without extensions.
    pub(super) port: u32,
    pub(super) peer_source: PeerSource,
    pub(super) exchanges_metadata: bool,
    pub(super) mesh_only_exchange: bool,
    pub(super) http3: bool,
}
