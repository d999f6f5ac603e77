//! The cluster of a wildcard host whose address the proxy resolves from each request.

use super::Context;
use crate::{
    generate::cluster::{draft::Draft, dynamic::dns_cache},
    proto::{
        Any,
        envoy::{
            config::cluster::v3::cluster::{ClusterDiscoveryType, CustomClusterType, LbPolicy},
            extensions::clusters::dynamic_forward_proxy::v3::{
                ClusterConfig, cluster_config::ClusterImplementationSpecifier,
            },
        },
    },
};

const DYNAMIC_CLUSTER: &str = "envoy.clusters.dynamic_forward_proxy";

/// The cluster of a wildcard host.
pub(super) fn cluster(context: &Context) -> Draft {
    let config = ClusterConfig {
        cluster_implementation_specifier: Some(ClusterImplementationSpecifier::DnsCacheConfig(dns_cache(
            &context.service.key.hostname,
        ))),
        ..Default::default()
    };
    let kind = ClusterDiscoveryType::ClusterType(CustomClusterType {
        name: DYNAMIC_CLUSTER.to_owned(),
        typed_config: Some(Any::pack(&config)),
    });
    let mut draft = Draft::of(context.key.name(), kind);
    draft.cluster.set_lb_policy(LbPolicy::ClusterProvided);
    context.set_protocol(&mut draft);
    context.apply_pool(&mut draft);
    context.apply_outlier(&mut draft);
    context.apply_tls(&mut draft);
    if context.key.client.metadata_exchange {
        draft.exchange_metadata();
    }
    context.set_metadata(&mut draft, false);
    draft
}
