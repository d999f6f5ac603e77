//! Routes of VirtualServices in the chains of a waypoint.

use serde_json::Value;

use super::{A80, chain, main_internal, store};

#[test]
fn large_direct_responses_raise_the_limit_of_envoy() {
    let limit = |length: usize| {
        let body = "x".repeat(length);
        let route = format!(
            "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: maintenance}}
spec:
  hosts: [a.default.svc.cluster.local]
  http: [{{directResponse: {{status: 503, body: {{string: {body}}}}}}}]
"
        );
        let listener = main_internal(&store(&route));
        let routes = &chain(&listener, A80)["filters"][0]["typedConfig"]["routeConfig"];
        let response = &routes["virtualHosts"][0]["routes"][0]["directResponse"];
        assert_eq!(response["body"]["inlineString"], body);
        routes["maxDirectResponseBodySizeBytes"].clone()
    };
    assert_eq!(limit(4096), Value::Null);
    assert_eq!(limit(4097), 1 << 20);
}
