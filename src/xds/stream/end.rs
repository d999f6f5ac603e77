//! The end of a stream: its reason, the gRPC status for it, and the events that cause it.

use std::sync::Arc;

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use smol_str::SmolStr;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::{
    generate::proxy::NodeError,
    rpc::{body::Disconnected, framing::TooLarge},
    xds::{
        admission::Busy,
        connection::SubscriptionError,
        debug::DebugError,
        events::Rejection,
        message::ResponseSender,
        registry::{Eviction, LiveConnection, SubscriptionMemory},
        request::RequestError,
    },
};

/// The reason why the server ended a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::xds) enum EndReason {
    #[error("the client closed the stream")]
    Disconnected,
    #[error("the connection is closing; connect again")]
    Draining,
    #[error("an operator has closed the connection; connect again")]
    Closed,
    #[error("the control plane is shutting down")]
    ShuttingDown,
    #[error("the first request did not arrive in time")]
    Silent,
    #[error("the answer to the debug request was not read in time; try again")]
    UnreadAnswer,
    #[error("the credentials of the client have expired; connect again")]
    Expired,
    #[error("type {0:?} of ADS v2 is no longer served; hint: request the type of v3 (resource_api_version: V3)")]
    OldType(String),
    #[error("ztunnel requires PILOT_ENABLE_AMBIENT=true")]
    NoAmbient,
    #[error("authorization failed: {0}")]
    Forbidden(String),
    #[error(
        "identities {0:?} may not read the configuration of all namespaces; hint: use a service account of the control \
         plane's namespace, or set DEBUG_ENDPOINT_AUTH_ALLOWED_NAMESPACES"
    )]
    NoConfigAccess(Vec<SmolStr>),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Busy(#[from] Busy),
    #[error(transparent)]
    Subscription(#[from] SubscriptionError),
    #[error(transparent)]
    SubscriptionMemory(#[from] SubscriptionMemory),
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Denied(#[from] DebugError),
}

impl From<Disconnected> for EndReason {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl EndReason {
    /// Returns the limit that ended the stream, for metrics.
    pub(in crate::xds) fn limit(&self) -> Option<&'static str> {
        match self {
            Self::Busy(_) => Some("first_configurations"),
            Self::Subscription(_) => Some("names"),
            Self::SubscriptionMemory(_) => Some("subscription_memory"),
            Self::Request(RequestError::Slow | RequestError::Evicted) => Some("slow_request"),
            Self::Request(RequestError::TooLarge { .. } | RequestError::TooMany | RequestError::TooManyOfNode) => {
                Some("request_size")
            }
            Self::Denied(DebugError::Busy) | Self::UnreadAnswer => Some("debug_requests"),
            _ => None,
        }
    }

    /// Returns true if a response that was not written for this reason counts as an error.
    ///
    /// Parity (pilot/pkg/xds/monitoring.go, `isUnexpectedError`): connections close all the time.
    pub(super) fn is_send_error(&self) -> bool {
        !matches!(self.status().code(), Code::Unavailable | Code::Cancelled)
    }

    /// Returns the gRPC status of a stream that ended for this reason.
    pub(in crate::xds) fn status(&self) -> Status {
        let code = match self {
            Self::Disconnected => Code::Cancelled,
            Self::Draining | Self::Closed | Self::ShuttingDown => Code::Unavailable,
            Self::Silent | Self::UnreadAnswer => Code::DeadlineExceeded,
            Self::Expired => Code::Unauthenticated,
            Self::NoAmbient => Code::Unknown,
            Self::Forbidden(_) | Self::NoConfigAccess(_) => Code::PermissionDenied,
            Self::Node(_) | Self::OldType(_) => Code::InvalidArgument,
            Self::Busy { .. }
            | Self::Subscription(_)
            | Self::SubscriptionMemory(_)
            | Self::Request(
                RequestError::TooLarge { .. }
                | RequestError::TooMany
                | RequestError::TooManyOfNode
                | RequestError::Slow
                | RequestError::Evicted,
            ) => Code::ResourceExhausted,
            Self::Request(RequestError::Compressed) => Code::Unimplemented,
            Self::Request(RequestError::Malformed(_)) | Self::TooLarge(_) => Code::Internal,
            Self::Request(RequestError::Broken(_)) => Code::Cancelled,
            Self::Denied(DebugError::Unauthenticated) => Code::Unauthenticated,
            Self::Denied(DebugError::Malformed(_)) => Code::InvalidArgument,
            Self::Denied(DebugError::Forbidden(_)) => Code::PermissionDenied,
            Self::Denied(DebugError::Busy) => Code::Unavailable,
            Self::Rejected(Rejection::Missing(_)) => Code::FailedPrecondition,
            Self::Rejected(Rejection::Forbidden(_)) => Code::PermissionDenied,
            Self::Rejected(Rejection::Failed(_)) => Code::Unavailable,
        };
        Status::new(code, self.to_string())
    }
}

/// The events that end a stream at any time. Each is polled only when it was woken, since a stream waits several times
/// for every response.
pub(super) struct EndSignals {
    signals: FuturesUnordered<BoxFuture<'static, EndReason>>,
    /// True if the stream ends once [`Self::finishes_first`] allows it.
    is_draining: bool,
    finishes_first: bool,
}

impl EndSignals {
    pub(super) fn new(sender: &ResponseSender, draining: &CancellationToken) -> Self {
        let (sender, draining) = (sender.clone(), draining.clone());
        let signals = FuturesUnordered::<BoxFuture<EndReason>>::new();
        signals.push(Box::pin(async move {
            sender.closed().await;
            EndReason::Disconnected
        }));
        signals.push(Box::pin(draining.cancelled_owned().map(|()| EndReason::Draining)));
        Self::of(signals)
    }

    fn of(signals: FuturesUnordered<BoxFuture<'static, EndReason>>) -> Self {
        Self {
            signals,
            is_draining: false,
            finishes_first: false,
        }
    }

    /// Decides whether the stream outlives the draining of its connection, until this is false or the connection is
    /// cut.
    pub(super) fn set_finishes_first(&mut self, finishes_first: bool) {
        self.finishes_first = finishes_first;
    }

    /// Adds the eviction of the connection: for subscriptions that hold too much memory, or by an operator.
    pub(super) fn add_eviction(&mut self, connection: Arc<LiveConnection>, limit_bytes: usize) {
        let limit_mib = limit_bytes >> 20;
        self.signals.push(Box::pin(async move {
            match connection.evicted().await {
                Eviction::Memory => EndReason::SubscriptionMemory(SubscriptionMemory { limit_mib }),
                Eviction::Closed => EndReason::Closed,
            }
        }));
    }

    /// Waits until the stream must end, and returns the reason.
    pub(super) async fn next(&mut self) -> EndReason {
        loop {
            if self.is_draining && !self.finishes_first {
                return EndReason::Draining;
            }
            match self.signals.next().await {
                Some(EndReason::Draining) => self.is_draining = true,
                Some(reason) => return reason,
                None => return EndReason::Disconnected,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_connections_are_no_send_errors() {
        for expected in [
            EndReason::Disconnected,
            EndReason::Draining,
            EndReason::Closed,
            EndReason::ShuttingDown,
        ] {
            assert!(!expected.is_send_error(), "{expected}");
        }
        let evicted = EndReason::SubscriptionMemory(SubscriptionMemory { limit_mib: 1 });
        assert!(evicted.is_send_error(), "{evicted}");
    }

    #[test]
    fn a_stream_may_finish_before_it_is_drained() {
        let signals = FuturesUnordered::<BoxFuture<EndReason>>::new();
        signals.push(Box::pin(std::future::ready(EndReason::Draining)));
        signals.push(Box::pin(std::future::pending()));
        let mut ends = EndSignals::of(signals);
        ends.set_finishes_first(true);
        assert_eq!(ends.next().now_or_never(), None);
        ends.set_finishes_first(false);
        assert_eq!(ends.next().now_or_never(), Some(EndReason::Draining));
    }
}
