//! The cluster of a wildcard host whose address the proxy resolves from each request.

use super::Context;
use crate::{
    generate::cluster::{builder::ClusterBuilder, dynamic::dns_cache},
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

/// Returns the cluster of a wildcard host.
pub(super) fn cluster(context: &Context) -> ClusterBuilder {
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
    let mut builder = ClusterBuilder::of(context.key.name(), kind);
    builder.cluster.set_lb_policy(LbPolicy::ClusterProvided);
    context.set_protocol(&mut builder);
    context.apply_pool(&mut builder);
    context.apply_outlier(&mut builder);
    let is_vip = context.key.mode.is_vip();
    if is_vip {
        context.apply_tunnel(&mut builder);
    } else {
        context.apply_tls(&mut builder);
    }
    if context.key.client.metadata_exchange && !is_vip {
        builder.exchange_metadata(&context.ctx.mesh.installation.features.pilot_mx_additional_labels);
    }
    if is_vip {
        context.set_service(&mut builder);
    }
    context.set_metadata(&mut builder);
    builder
}
