//! Debug requests on an xDS stream.

use std::sync::Arc;

use tokio::time::timeout;

use super::{
    end::{EndReason, EndSignals},
    shared::Shared,
};
use crate::{
    auth::Caller,
    xds::{
        admission::Source,
        debug::{self, DebugRequest},
        message::{Message, ResponseSender},
        protocol::Protocol,
        request::{IncomingRequest, RequestContent},
    },
};

/// Answers the debug requests of a stream.
pub(super) struct DebugResponder {
    pub(super) shared: Arc<Shared>,
    pub(super) protocol: Protocol,
    pub(super) caller: Option<Caller>,
    pub(super) source: Source,
    pub(super) sender: ResponseSender,
}

impl DebugResponder {
    /// Answers a debug request once, unless the stream must end before. The response is not acknowledged and there are
    /// no updates.
    pub(super) async fn answer(
        &self,
        ends: &mut EndSignals,
        mut request: Box<IncomingRequest>,
    ) -> Result<(), EndReason> {
        self.shared.metrics.received(request.size_bytes);
        let RequestContent::Debug(names) = &mut request.content else {
            return Ok(());
        };
        let names = std::mem::take(names);
        let type_url = std::mem::take(&mut request.type_url);
        // A client that waits for its answer, or does not read it, must not delay the requests of others.
        drop(request);
        let Some(debug_handler) = self.shared.debug_handler.get() else {
            return Ok(());
        };
        let _permit = tokio::select! {
            permit = self.shared.admission.debug_answer(&self.source) => permit,
            end = ends.next() => return Err(end),
        };
        let label = debug::metric_label(&type_url);
        let debug_request = DebugRequest {
            type_url: type_url.clone(),
            names,
            caller: self.caller.clone(),
        };
        let rendering = (self.shared.clock)();
        let answer = tokio::select! {
            answer = debug_handler.answer(debug_request) => answer?,
            end = ends.next() => return Err(end),
        };
        let message = Message::of_debug(self.protocol, type_url, answer)?;
        let written = async {
            let written = self.shared.write(&self.source, &self.sender, message, rendering);
            let sent = timeout(self.shared.timeouts.debug_answer, written).await;
            let sent = sent.map_err(|_| EndReason::UnreadAnswer)??;
            self.shared.metrics.sent_debug(label, &sent);
            Ok(())
        };
        tokio::select! {
            // A client that has read the answer may end the stream at once; the answer counts all the same.
            biased;
            written = written => written,
            end = ends.next() => Err(end),
        }
    }
}
