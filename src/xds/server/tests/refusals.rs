//! Tests of resources that clients refuse.

use super::*;

impl Sotw {
    /// Refuses listener `a` in the last response.
    async fn refuse(&mut self) {
        let response = self.response().await;
        let refusal = DiscoveryRequest {
            node: node(),
            type_url: ResourceType::Listener.url().into(),
            response_nonce: response.nonce,
            error_detail: Some(rpc::Status {
                message: "Error adding/updating listener(s) a: bad".into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.requests.send(refusal).await.expect("the stream is open");
    }
}

#[tokio::test]
async fn r20_what_a_client_holds_is_not_withheld_from_others() {
    for is_held in [true, false] {
        let fixture = Fixture::new(&ServerOptions::default());
        fixture.publish(1, &[(ResourceType::Listener, "a", "1")]);
        let mut client = fixture.client().await;
        let mut streams = Vec::new();
        let mut open = async || {
            let stream = Sotw::open(&mut client).await.expect("an accepted stream");
            stream.request(ResourceType::Listener, &[], "").await;
            stream
        };
        if is_held {
            let mut holder = open().await;
            let listeners = holder.response().await;
            holder.request(ResourceType::Listener, &[], &listeners.nonce).await;
            // Requests of a stream are handled in order.
            holder.request(ResourceType::Cluster, &[], "").await;
            holder.response().await;
            streams.push(holder);
        }
        for refusals in 1..=3 {
            let mut refuser = open().await;
            refuser.refuse().await;
            fixture
                .until("istiod_refused_resources_total", f64::from(refusals))
                .await;
            streams.push(refuser);
        }
        let listeners = open().await.response().await;
        assert_eq!(texts(&listeners).len(), usize::from(is_held));
    }
}
