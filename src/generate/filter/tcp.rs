//! Network filters: TCP proxies, protocol filters, and the filters before them.

use prost_types::Duration;

use super::{
    chain_fields::NetworkFilters,
    chain_limit::TCP_CHAINS,
    extension::{self, ExtensionPhase},
    http_filters::dns_cache_name,
    memo::Noted,
    security_filters::{PeerSource, SecurityStage},
    stack::{FilterStack, LogPosition},
    stats::STATS_FILTER,
};
use crate::{
    base::{Hostname, address::host_port},
    generate::{
        constant::{METADATA_EXCHANGE, metadata_exchange, network_filter},
        name::BLACK_HOLE,
        wire::Encoded,
    },
    model::{destination_rule::DestinationRule, extension::ExtensionLayer, service::Protocol},
    proto::{
        Any,
        envoy::{
            config::{cluster::v3::cluster::DnsLookupFamily, listener::v3::Filter},
            extensions::{
                common::dynamic_forward_proxy::v3::DnsCacheConfig,
                filters::network::{
                    mongo_proxy::v3::MongoProxy,
                    mysql_proxy::v3::MySqlProxy,
                    redis_proxy::v3::{
                        RedisProxy,
                        redis_proxy::{ConnPoolSettings, PrefixRoutes, prefix_routes::Route},
                    },
                    sni_dynamic_forward_proxy::{v3 as sni_forward_proxy, v3::filter_config::PortSpecifier},
                    tcp_proxy::v3::{
                        TcpProxy,
                        tcp_proxy::{
                            ClusterSpecifier, TunnelingConfig, WeightedCluster, weighted_cluster::ClusterWeight,
                        },
                    },
                },
            },
            r#type::v3::{HashPolicy, hash_policy},
        },
        field::tcp_proxy,
        istio::networking::v1alpha3::{
            TrafficPolicy,
            load_balancer_settings::{ConsistentHashLb, LbPolicy, consistent_hash_lb::HashKey},
        },
    },
    table::Memoized,
};

/// Name of the TCP proxy filter.
pub const TCP_PROXY: &str = "envoy.filters.network.tcp_proxy";
/// Name of the filter that resolves a wildcard host from the SNI.
pub const SNI_FORWARD_PROXY: &str = "envoy.extensions.filters.network.sni_dynamic_forward_proxy";
const MONGO_PROXY: &str = "envoy.filters.network.mongo_proxy";
const MYSQL_PROXY: &str = "envoy.filters.network.mysql_proxy";
const REDIS_PROXY: &str = "envoy.filters.network.redis_proxy";

/// Destination of a TCP chain.
pub struct TcpUpstream<'r> {
    /// Statistics prefix.
    pub stat_prefix: String,
    /// Clusters.
    pub clusters: TcpClusters,
    /// Subset, if a single destination has one.
    pub subset: &'r str,
    /// DestinationRule of the (first) destination.
    pub rule: Option<&'r DestinationRule>,
    /// True if tunnel settings of the rule apply.
    pub may_tunnel: bool,
    /// Wildcard host whose upstream is resolved from the SNI.
    pub dynamic_dns: Option<Hostname>,
}

/// Clusters of a TCP chain.
pub enum TcpClusters {
    /// A single cluster.
    Single(String),
    /// Clusters by weight, never empty.
    Weighted(Vec<(String, u32)>),
}

impl TcpClusters {
    /// Returns the first cluster.
    pub fn first(&self) -> &str {
        match self {
            Self::Single(cluster) => cluster,
            Self::Weighted(clusters) => &clusters[0].0,
        }
    }

    fn specifier(&self) -> ClusterSpecifier {
        match self {
            Self::Single(cluster) => ClusterSpecifier::Cluster(cluster.clone()),
            Self::Weighted(clusters) => ClusterSpecifier::WeightedClusters(WeightedCluster {
                clusters: clusters
                    .iter()
                    .map(|(name, weight)| ClusterWeight {
                        name: name.clone(),
                        weight: *weight,
                        ..Default::default()
                    })
                    .collect(),
            }),
        }
    }
}

/// Options of the filters around the terminal filters of a TCP chain.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpChain {
    /// Port that extensions match.
    pub port: u32,
    /// True if peers exchange metadata.
    pub exchanges_metadata: bool,
    /// Source of the identity of the peer.
    pub peer_source: PeerSource,
    /// True if only the destination authorises its clients.
    pub authorized_by_destination: bool,
}

impl FilterStack<'_> {
    /// Returns the access logs of TCP proxies, encoded as their fields.
    fn shared_tcp_logs(&self) -> Memoized<Noted<Encoded<TcpProxy>>> {
        self.shared(&self.memo().logs, self.key(), |stack| {
            Encoded::of(&TcpProxy {
                access_log: stack.access_logs(LogPosition::Tcp),
                ..Default::default()
            })
        })
    }

    /// Returns a whole chain to an upstream.
    pub fn tcp_chain(&self, chain: TcpChain, protocol: Protocol, upstream: &TcpUpstream) -> NetworkFilters {
        let rule_policy = upstream.rule.and_then(|rule| rule.spec.traffic_policy.as_deref());
        let tcp = rule_policy
            .and_then(|policy| policy.connection_pool.as_ref())
            .and_then(|pool| pool.tcp.as_ref());
        let proxy = TcpProxy {
            stat_prefix: upstream.stat_prefix.clone(),
            cluster_specifier: Some(upstream.clusters.specifier()),
            idle_timeout: tcp.and_then(|tcp| tcp.idle_timeout),
            max_downstream_connection_duration: tcp.and_then(|tcp| tcp.max_connection_duration),
            hash_policy: hash_policy(upstream.rule, upstream.subset),
            tunneling_config: upstream
                .may_tunnel
                .then(|| tunnel(upstream.rule, upstream.subset))
                .flatten(),
            ..Default::default()
        };
        self.complete_tcp_chain(chain, upstream.dynamic_dns.as_ref(), |filters| {
            self.add_protocol_filters(filters, protocol, proxy, upstream.clusters.first());
        })
    }

    /// Returns the terminal filters with all filters before them.
    pub fn complete_tcp_chain(
        &self,
        chain: TcpChain,
        dynamic_dns: Option<&Hostname>,
        add_terminal: impl FnOnce(&mut NetworkFilters),
    ) -> NetworkFilters {
        let mut filters = NetworkFilters::new();
        if chain.exchanges_metadata {
            self.add_metadata_exchange(&mut filters);
        }
        let secured = (!chain.authorized_by_destination).then(|| self.network_security(chain.peer_source));
        let add_security = |filters: &mut NetworkFilters, stage| {
            let of_stage = secured.map(|secured| secured.of(stage)).unwrap_or_default();
            for filter in of_stage {
                filters.push(filter);
            }
        };
        add_security(&mut filters, SecurityStage::Custom);
        self.add_extensions(&mut filters, ExtensionPhase::Authentication, chain.port);
        self.add_extensions(&mut filters, ExtensionPhase::Authorization, chain.port);
        add_security(&mut filters, SecurityStage::Authorization);
        self.add_extensions(&mut filters, ExtensionPhase::Stats, chain.port);
        self.add_extensions(&mut filters, ExtensionPhase::Unspecified, chain.port);
        self.add_stats(&mut filters);
        if let Some(host) = dynamic_dns {
            filters.push(&sni_forward_proxy(host, chain.port));
            filters.resolves_sni = true;
        }
        if self.exceeds_inbound_limit(TCP_CHAINS, || {
            filters.fields().len() + self.shared_tcp_logs().value.len()
        }) {
            filters = NetworkFilters::new();
            add_black_hole(&mut filters);
            return filters;
        }
        let lacks_plugin = extension::denies(self, &[ExtensionLayer::Network], chain.port);
        if lacks_plugin || secured.is_some_and(|secured| secured.denied) {
            add_black_hole(&mut filters);
        } else {
            add_terminal(&mut filters);
        }
        filters
    }

    /// Returns the size of what the TCP chains of a gateway's servers with this port repeat.
    pub fn repeated_tcp_size(&self, port: u32, authorized_by_destination: bool) -> usize {
        let chain = TcpChain {
            port: if self.client.extension_filters.is_empty() {
                0
            } else {
                port
            },
            authorized_by_destination,
            ..Default::default()
        };
        let memo = &self.memo().tcp_sizes;
        let shared = self.shared(memo, (self.key(), chain.port, authorized_by_destination), |stack| {
            let filters = stack.complete_tcp_chain(chain, None, |filters| {
                stack.add_tcp_proxy(filters, TcpProxy::default());
            });
            filters.fields().len()
        });
        shared.value
    }

    fn add_extensions(&self, filters: &mut NetworkFilters, phase: ExtensionPhase, port: u32) {
        for filter in extension::network_filters(self, phase, port) {
            filters.push(&filter);
        }
    }

    /// Returns the filters before a connection manager: metadata exchange and network extensions.
    pub fn filters_before_http(&self, port: u32, exchanges_metadata: bool) -> NetworkFilters {
        let mut filters = NetworkFilters::new();
        if exchanges_metadata {
            self.add_metadata_exchange(&mut filters);
        }
        for phase in ExtensionPhase::ALL {
            self.add_extensions(&mut filters, phase, port);
        }
        filters
    }

    /// Adds the stats filters of network chains.
    pub fn add_stats(&self, filters: &mut NetworkFilters) {
        for config in &self.stats_configs().value {
            filters.push_config(STATS_FILTER, config);
        }
    }

    /// Adds the TCP metadata exchange if the proxy supports it.
    pub fn add_metadata_exchange(&self, filters: &mut NetworkFilters) {
        if self.has_metadata_exchange() {
            let labels = &self.features().pilot_mx_additional_labels;
            filters.push_config(METADATA_EXCHANGE, &metadata_exchange(labels));
        }
    }

    /// Adds the terminal filters of a protocol: the TCP proxy, and a protocol filter before it.
    pub fn add_protocol_filters(
        &self,
        filters: &mut NetworkFilters,
        protocol: Protocol,
        proxy: TcpProxy,
        cluster: &str,
    ) {
        let features = self.features();
        let stat_prefix = proxy.stat_prefix.clone();
        match protocol {
            Protocol::Mongo if features.pilot_enable_mongo_filter && self.has_extension(MONGO_PROXY) => {
                let mongo = MongoProxy {
                    stat_prefix,
                    ..Default::default()
                };
                filters.push_config(MONGO_PROXY, &Any::pack(&mongo));
            }
            Protocol::Redis if features.pilot_enable_redis_filter && self.has_extension(REDIS_PROXY) => {
                filters.push(&redis(stat_prefix, cluster));
                return;
            }
            Protocol::Mysql if features.pilot_enable_mysql_filter && self.has_extension(MYSQL_PROXY) => {
                let mysql = MySqlProxy {
                    stat_prefix,
                    ..Default::default()
                };
                filters.push_config(MYSQL_PROXY, &Any::pack(&mysql));
            }
            _ => {}
        }
        self.add_tcp_proxy(filters, proxy);
    }

    /// Adds a TCP proxy with the proxy's idle timeout and access logs.
    pub fn add_tcp_proxy(&self, filters: &mut NetworkFilters, mut proxy: TcpProxy) {
        proxy.idle_timeout = proxy.idle_timeout.or_else(|| self.client.idle_timeout());
        proxy.access_log.clear();
        let logs = self.shared_tcp_logs();
        filters.write(TCP_PROXY, |out| out.spliced(&proxy, [&logs.value]));
    }
}

/// Returns a TCP proxy to one cluster without further settings.
pub fn plain_proxy(cluster: &str) -> TcpProxy {
    TcpProxy {
        stat_prefix: cluster.to_owned(),
        cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.to_owned())),
        ..Default::default()
    }
}

/// Adds a filter that drops traffic which would loop to the listener. It is not logged.
pub fn add_black_hole(filters: &mut NetworkFilters) {
    filters.write(TCP_PROXY, |out| {
        out.text(tcp_proxy::STAT_PREFIX, BLACK_HOLE);
        out.text(tcp_proxy::CLUSTER, BLACK_HOLE);
    });
}

fn hash_policy(rule: Option<&DestinationRule>, subset: &str) -> Vec<HashPolicy> {
    let uses_source_ip = |policy: &TrafficPolicy| {
        let balancer = policy.load_balancer.as_ref()?;
        Some(matches!(
            &balancer.lb_policy,
            Some(LbPolicy::ConsistentHash(ConsistentHashLb {
                hash_key: Some(HashKey::UseSourceIp(true)),
                ..
            }))
        ))
    };
    let of_rule = rule
        .and_then(|rule| rule.spec.traffic_policy.as_deref())
        .and_then(uses_source_ip);
    let of_subset = rule
        .and_then(|rule| rule.subset(subset)?.traffic_policy.as_deref())
        .and_then(uses_source_ip);
    if !of_subset.or(of_rule).unwrap_or_default() {
        return Vec::new();
    }
    vec![HashPolicy {
        policy_specifier: Some(hash_policy::PolicySpecifier::SourceIp(hash_policy::SourceIp {})),
    }]
}

fn tunnel(rule: Option<&DestinationRule>, subset: &str) -> Option<TunnelingConfig> {
    let tunnel = rule?.own_policy(subset)?.tunnel.as_ref()?;
    Some(TunnelingConfig {
        hostname: host_port(&tunnel.target_host, tunnel.target_port),
        use_post: tunnel.protocol == "POST",
        ..Default::default()
    })
}

fn redis(stat_prefix: String, cluster: &str) -> Filter {
    let redis = RedisProxy {
        stat_prefix,
        latency_in_micros: true,
        settings: Some(ConnPoolSettings {
            op_timeout: Some(Duration { seconds: 5, nanos: 0 }),
            ..Default::default()
        }),
        prefix_routes: Some(PrefixRoutes {
            catch_all_route: Some(Route {
                cluster: cluster.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    network_filter(REDIS_PROXY, Any::pack(&redis))
}

fn sni_forward_proxy(host: &Hostname, port: u32) -> Filter {
    let config = sni_forward_proxy::FilterConfig {
        dns_cache_config: Some(DnsCacheConfig {
            name: dns_cache_name(host),
            dns_lookup_family: DnsLookupFamily::V4Only as i32,
            ..Default::default()
        }),
        port_specifier: Some(PortSpecifier::PortValue(port)),
        ..Default::default()
    };
    network_filter(SNI_FORWARD_PROXY, Any::pack(&config))
}
