//! The method by which other replicas ask this one. Only callers with the identity of the control plane's own service
//! account may call it, over TLS.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{
    FutureExt, StreamExt,
    future::{self, BoxFuture},
    stream,
};
use prost::Message;
use smol_str::SmolStr;
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::METHOD;
use crate::{
    auth::Authenticators,
    base::{Namespace, SpiffeId},
    distribution::Distribution,
    environment,
    model::MeshSnapshot,
    rpc::{Call, Messages, ServerStream},
    table::Cx,
    task::Tasks,
};

/// The maximum size of a query.
const MAX_QUERY_BYTES: usize = 64 << 10;

/// The server of the method. A query is a `google.protobuf.StringValue` and its answers are
/// `google.protobuf.BytesValue`, both with JSON, so that replicas of different versions understand each other.
pub(in crate::app) struct ReplicaService {
    pub(in crate::app) distribution: Arc<Distribution>,
    pub(in crate::app) authenticators: Authenticators,
    pub(in crate::app) mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The service account of the control plane.
    pub(in crate::app) account: SmolStr,
    pub(in crate::app) tasks: Tasks,
    /// The runtime with low priority that answers queries.
    pub(in crate::app) runtime: Handle,
}

impl ReplicaService {
    /// Returns the messages of a query, or why there are none.
    async fn answer(&self, mut call: Call) -> Result<Messages, Status> {
        let caller = match self.authenticators.authenticate(call.credentials()).await {
            Ok(caller) => caller,
            Err(refused) => {
                tracing::warn!(%refused, "replica authentication failed");
                call.record_violation();
                return Err(if refused.is_unavailable() {
                    Status::unavailable("the caller cannot be authenticated now; try again")
                } else {
                    Status::unauthenticated("authentication failure")
                });
            }
        };
        let mesh = self.mesh.borrow().clone();
        if !is_control_plane(&mesh, &self.account, &caller.identities) {
            tracing::warn!(identities = ?caller.identities, "replica access denied");
            call.record_violation();
            return Err(Status::permission_denied("only replicas of the control plane may ask"));
        }
        call.admit();
        let malformed = |error: String| Status::invalid_argument(format!("malformed query: {error}"));
        let message = call.message(MAX_QUERY_BYTES).await?;
        let query = String::decode(message).map_err(|error| malformed(error.to_string()))?;
        let busy = || Status::resource_exhausted("too many replicas are waiting; retry later");
        let permit = self.distribution.replica_permit().ok_or_else(busy)?;
        let (sender, answers) = mpsc::channel::<Bytes>(1);
        let answering = self.distribution.clone().answer(&query, sender).map_err(malformed)?;
        let expires_in = caller.expires_at.map_or(Duration::MAX, |at| {
            at.duration_since(environment::wall_clock()).unwrap_or_default()
        });
        let (ending, end) = oneshot::channel();
        self.tasks.spawn_on(&self.runtime, "replica query", async move {
            let ended = tokio::time::timeout(expires_in, answering).await;
            drop(permit);
            // The caller may have left.
            let _ = ending.send(ended.map_err(|_| Status::unauthenticated("the credential has expired")));
        });
        Ok(messages(answers, end))
    }
}

/// Returns the messages of these answers. Without `end`, they are not complete.
fn messages(answers: mpsc::Receiver<Bytes>, end: oneshot::Receiver<Result<(), Status>>) -> Messages {
    let messages = ReceiverStream::new(answers).map(|answer| Ok(answer.encode_to_vec().into()));
    let error = async {
        let ended = end.await;
        ended
            .unwrap_or_else(|_| Err(Status::unavailable("the query was cancelled")))
            .err()
    };
    let error = stream::once(error).filter_map(|error| future::ready(error.map(Err)));
    messages.chain(error).boxed()
}

impl ServerStream for ReplicaService {
    fn path(&self) -> &'static str {
        METHOD
    }

    fn open(&self, call: Call) -> BoxFuture<'_, Result<Messages, Status>> {
        self.answer(call).boxed()
    }
}

/// Returns true if one of the identities is that of the control plane's service account.
fn is_control_plane(mesh: &MeshSnapshot, account: &SmolStr, identities: &[SmolStr]) -> bool {
    let config = mesh.mesh_config(&Cx::untracked());
    let namespace: &Namespace = &mesh.installation.namespace;
    let mut domains = std::iter::once(&config.trust_domain).chain(&config.trust_domain_aliases);
    domains.any(|domain| {
        let own = SpiffeId::new(domain, namespace.clone(), account.clone()).to_string();
        identities.iter().any(|identity| *identity == own)
    })
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::model::{Installation, fixture::folder_world};

    #[tokio::test]
    async fn only_ended_queries_are_complete() {
        let read = |ended: Option<Result<(), Status>>| async {
            let (sender, answers) = mpsc::channel(1);
            let (ending, end) = oneshot::channel();
            sender.try_send(Bytes::from_static(b"{}")).expect("an empty channel");
            drop(sender);
            match ended {
                Some(ended) => ending.send(ended).expect("a receiver"),
                None => drop(ending),
            }
            let read: Vec<_> = messages(answers, end).collect().await;
            let codes = read.iter().map(|message| message.as_ref().err().map(Status::code));
            codes.collect::<Vec<_>>()
        };
        assert_eq!(read(Some(Ok(()))).await, [None]);
        let expired = Err(Status::unauthenticated("expired"));
        assert_eq!(read(Some(expired)).await, [None, Some(Code::Unauthenticated)]);
        assert_eq!(read(None).await, [None, Some(Code::Unavailable)]);
    }

    #[test]
    fn only_the_control_plane_may_ask() {
        let installation = Installation {
            namespace: "istio-system".into(),
            ..Installation::default()
        };
        let mesh = folder_world(installation, &[("mesh.yaml", "")]).snapshot();
        let may = |identity: &str| is_control_plane(&mesh, &"istiod".into(), &[identity.into()]);
        assert!(may("spiffe://cluster.local/ns/istio-system/sa/istiod"));
        for other in [
            "spiffe://cluster.local/ns/istio-system/sa/default",
            "spiffe://cluster.local/ns/shop/sa/istiod",
            "spiffe://other/ns/istio-system/sa/istiod",
            "istiod.istio-system.svc",
            "",
        ] {
            assert!(!may(other), "{other}");
        }
    }
}
