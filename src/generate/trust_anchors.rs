//! The trust bundle of workloads (PCDS): one unnamed resource, with `ISTIO_MULTIROOT_MESH` only.

use super::{BuildContext, EncodedResource, resource::Built};
use crate::{api::trust_anchors::TrustAnchors, proto::istio::mesh::v1alpha1::ProxyConfig};

/// The resource. All proxies receive the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustAnchorsKey(());

/// Returns the trust bundle of a proxy.
pub fn select(ctx: &BuildContext) -> Option<TrustAnchorsKey> {
    let features = &ctx.mesh.installation.features;
    features.istio_multiroot_mesh.then_some(TrustAnchorsKey(()))
}

impl TrustAnchorsKey {
    /// Builds the resource.
    ///
    /// Parity (pilot/pkg/xds/pcds.go): a proxy config with nothing but the certificates.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let key = TrustAnchors::key(&ctx.mesh.installation.cluster);
        let Some(anchors) = ctx.mesh.trust_anchors.get(ctx.cx, &key) else {
            return Built::none();
        };
        let message = ProxyConfig {
            ca_certificates_pem: anchors.certificates.clone(),
            ..Default::default()
        };
        Built::new(EncodedResource::new("", &message))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::{
        api::trust_anchors::TrustAnchors,
        generate::{RequestedResources, ResourceType, fixture},
        model::{change::Change, features::Features, fixture::folder_world, installation::Installation},
    };

    #[test]
    fn proxies_receive_the_trust_bundle_of_a_multi_root_mesh() {
        for is_multi_root in [false, true] {
            let installation = Installation {
                features: Features {
                    istio_multiroot_mesh: is_multi_root,
                    ..Features::default()
                },
                ..Installation::default()
            };
            let anchors = TrustAnchors {
                key: TrustAnchors::key(&installation.cluster),
                certificates: vec!["one".to_owned(), "two".to_owned()],
            };
            let node = "sidecar~10.0.0.1~a.default~default.svc.cluster.local";
            // The second one is proxyless.
            let proxies = [json!({}), json!({"GENERATOR": "grpc"})].map(|metadata| fixture::client(node, &metadata));
            let mut world = folder_world(installation, &[("mesh.yaml", "{}")]);
            let _ = world.commit(vec![Change::Upsert(anchors.into())]);
            let store = fixture::store_of_world(&world, proxies.into(), &RequestedResources::default());
            for client in [0, 1] {
                let found = fixture::resource(&store, client, ResourceType::ProxyConfig, "");
                let want = json!(["one", "two"]);
                assert_eq!(found["caCertificatesPem"] == want, is_multi_root, "{client}: {found}");
            }
        }
    }
}
