//! Feature variables (`PILOT_*` and others), parsed once.
//!
//! A field has the name of its variable, in lower case. Values are parsed as in Go (`strconv.ParseBool`,
//! `time.ParseDuration`). A bad value keeps the default and is reported. Note: the fields of the ambient group are off
//! unless `PILOT_ENABLE_AMBIENT` is set, whatever the values of their own variables.

pub mod other;
mod value;

use std::{collections::BTreeMap, time::Duration};

use smol_str::SmolStr;

use self::value::Value;

/// A variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("variable {variable} has the value {value:?}, want {expected}; using the default")]
pub struct FeatureError {
    /// Name of the variable.
    pub variable: &'static str,
    /// Value.
    pub value: String,
    /// Expected form.
    pub expected: &'static str,
}

/// Fetcher of the keys that validate JWTs (`PILOT_JWT_ENABLE_REMOTE_JWKS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum RemoteJwks {
    /// The control plane (`false`, `istiod` and any other text).
    #[default]
    Istiod,
    /// Envoy if a cluster for the host exists, otherwise the control plane (`true`, `hybrid`).
    Hybrid,
    /// Always Envoy (`envoy`).
    Envoy,
}

/// Parses one variable, or returns the default if it is unset or invalid.
fn variable<T: Value>(
    variables: &BTreeMap<String, String>,
    errors: &mut Vec<FeatureError>,
    name: &'static str,
    default: T,
) -> T {
    let Some(text) = variables.get(name) else {
        return default;
    };
    T::read(text.trim()).unwrap_or_else(|| {
        errors.push(FeatureError {
            variable: name,
            value: text.clone(),
            expected: T::EXPECTED,
        });
        default
    })
}

fn list() -> Vec<SmolStr> {
    Vec::new()
}

const fn text(text: &'static str) -> SmolStr {
    SmolStr::new_static(text)
}

const fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

macro_rules! features {
    (
        always { $($(#[doc = $doc:literal])* $name:ident $field:ident: $type:ty = $default:expr;)* }
        ambient {
            $($(#[doc = $adoc:literal])* $aname:ident $afield:ident: $atype:ty = $adefault:expr, else $aoff:expr;)*
        }
    ) => {
        /// All feature variables with an effect, with Istio's defaults.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Features {
            $($(#[doc = $doc])* pub $field: $type,)*
            $($(#[doc = $adoc])* pub $afield: $atype,)*
        }

        impl Default for Features {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    $($afield: $aoff,)*
                }
            }
        }

        impl Features {
            /// Names of all variables.
            pub const VARIABLES: &'static [&'static str] = &[$(stringify!($name),)* $(stringify!($aname),)*];

            /// Lists the variables with their defaults, then those of the ambient group with theirs.
            #[cfg(test)]
            fn documentation() -> [Vec<tests::Row>; 2] {
                let row = |name, default: &dyn tests::Shown, meaning: &'static str| tests::Row {
                    name,
                    default: default.show(),
                    meaning: meaning.trim(),
                };
                [
                    vec![$(row(stringify!($name), &{ let default: $type = $default; default }, concat!($($doc),*)),)*],
                    vec![$(
                        row(stringify!($aname), &{ let default: $atype = $adefault; default }, concat!($($adoc),*)),
                    )*],
                ]
            }

            /// Parses all variables, in Go's syntax, and ignores other names in the map.
            pub fn parse(variables: &BTreeMap<String, String>) -> (Self, Vec<FeatureError>) {
                let mut errors = Vec::new();
                let ambient = variable(variables, &mut errors, "PILOT_ENABLE_AMBIENT", false);
                errors.clear();
                let mut features = Self {
                    $($field: variable(variables, &mut errors, stringify!($name), $default),)*
                    $($afield: if ambient {
                        variable(variables, &mut errors, stringify!($aname), $adefault)
                    } else {
                        $aoff
                    },)*
                };
                features.check(variables, &mut errors);
                (features, errors)
            }
        }
    };
}

features! {
    always {
        // xDS and push.
        /// Quiet time after the last change before a push.
        PILOT_DEBOUNCE_AFTER pilot_debounce_after: Duration = millis(100);
        /// Longest time that changes are held back.
        PILOT_DEBOUNCE_MAX pilot_debounce_max: Duration = seconds(10);
        /// Debounces endpoint changes; without it they are pushed at once.
        PILOT_ENABLE_EDS_DEBOUNCE pilot_enable_eds_debounce: bool = true;
        /// Number of proxies pushed to concurrently; 0 for one per processor.
        PILOT_PUSH_THROTTLE pilot_push_throttle: u32 = 0;
        /// New streams per second; 0 for limits by work instead of rate.
        PILOT_MAX_REQUESTS_PER_SECOND pilot_max_requests_per_second: f64 = 0.0;
        /// Concurrent streams of one HTTP/2 connection; 0 for no limit.
        ISTIO_GPRC_MAXSTREAMS istio_gprc_maxstreams: u32 = 100_000;
        /// Largest message that is received, in bytes.
        ISTIO_GPRC_MAXRECVMSGSIZE istio_gprc_maxrecvmsgsize: u32 = 4_194_304;
        /// Not Istio's. Memory in MiB that the subscriptions of all clients may hold: names, and placeholders for those
        /// that do not exist. Beyond it, the largest ones of the source that holds most end.
        PILOT_XDS_SUBSCRIPTION_MEMORY_MB pilot_xds_subscription_memory_mb: u32 = 256;
        /// Not Istio's. Withholds a resource that proxies refused until it changes; otherwise it is sent again with the
        /// next change.
        PILOT_ENABLE_XDS_QUARANTINE pilot_enable_xds_quarantine: bool = true;
        /// Not Istio's. Writes Kubernetes Events about objects whose configuration proxies refuse.
        PILOT_ENABLE_REFUSAL_EVENTS pilot_enable_refusal_events: bool = true;
        /// Caches encoded resources.
        PILOT_ENABLE_XDS_CACHE pilot_enable_xds_cache: bool = true;
        /// Caches encoded clusters.
        PILOT_ENABLE_CDS_CACHE pilot_enable_cds_cache: bool = true;
        /// Caches encoded routes.
        PILOT_ENABLE_RDS_CACHE pilot_enable_rds_cache: bool = true;
        /// Authenticates callers of xDS. Without it, requests for certificates and for remote debug pages are denied.
        XDS_AUTH xds_auth: bool = true;
        /// Authenticates callers without TLS, also those that request certificates, like those with TLS.
        XDS_AUTH_PLAINTEXT xds_auth_plaintext: bool = false;
        /// Requires that a proxy's node agrees with its identity.
        PILOT_ENABLE_XDS_IDENTITY_CHECK pilot_enable_xds_identity_check: bool = true;
        /// Address ranges whose `x-forwarded-client-cert` header is accepted.
        TRUSTED_GATEWAY_CIDR trusted_gateway_cidr: Vec<SmolStr> = list();
        /// Offers delta xDS to agents.
        ISTIO_DELTA_XDS istio_delta_xds: bool = true;

        // Networking.
        /// Accepts HTTP/1.0 on all listeners.
        PILOT_HTTP10 pilot_http10: bool = false;
        /// Adds the `istio.alpn` filter to outbound HTTP.
        PILOT_ENABLE_ALPN_FILTER pilot_enable_alpn_filter: bool = true;
        /// Removes `istio-peer-exchange` from ALPN.
        PILOT_DISABLE_MX_ALPN pilot_disable_mx_alpn: bool = false;
        /// Adds the metadata exchange filters.
        PILOT_ENABLE_METADATA_EXCHANGE pilot_enable_metadata_exchange: bool = true;
        /// Additional labels in metadata exchange.
        PILOT_MX_ADDITIONAL_LABELS pilot_mx_additional_labels: Vec<SmolStr> = list();
        /// Adds telemetry metadata to clusters.
        PILOT_ENABLE_TELEMETRY_LABEL pilot_enable_telemetry_label: bool = true;
        /// Adds workload metadata to endpoints.
        PILOT_ENDPOINT_TELEMETRY_LABEL pilot_endpoint_telemetry_label: bool = true;
        /// Adds the mongo filter to ports of that protocol.
        PILOT_ENABLE_MONGO_FILTER pilot_enable_mongo_filter: bool = true;
        /// Adds the mysql filter to ports of that protocol.
        PILOT_ENABLE_MYSQL_FILTER pilot_enable_mysql_filter: bool = false;
        /// Adds the redis filter to ports of that protocol.
        PILOT_ENABLE_REDIS_FILTER pilot_enable_redis_filter: bool = false;
        /// Uses EDS instead of original-destination clusters for headless services.
        PILOT_ENABLE_EDS_FOR_HEADLESS_SERVICES pilot_enable_eds_for_headless_services: bool = false;
        /// Sends endpoints that are not ready, as unhealthy.
        PILOT_SEND_UNHEALTHY_ENDPOINTS pilot_send_unhealthy_endpoints: bool = false;
        /// Enables persistent sessions for services with the label.
        PILOT_ENABLE_PERSISTENT_SESSION_FILTER pilot_enable_persistent_session_filter: bool = false;
        /// Label with the name of the session cookie.
        PILOT_PERSISTENT_SESSION_LABEL pilot_persistent_session_label: SmolStr = text("istio.io/persistent-session");
        /// Label with the name of the session header.
        PILOT_PERSISTENT_SESSION_HEADER_LABEL pilot_persistent_session_header_label: SmolStr =
            text("istio.io/persistent-session-header");
        /// Label of draining endpoints.
        PILOT_DRAINING_LABEL pilot_draining_label: SmolStr = text("istio.io/draining");
        /// Adds QUIC listeners to HTTPS servers of gateways.
        PILOT_ENABLE_QUIC_LISTENERS pilot_enable_quic_listeners: bool = false;
        /// Sends gateways only the clusters that their routes refer to.
        PILOT_FILTER_GATEWAY_CLUSTER_CONFIG pilot_filter_gateway_cluster_config: bool = false;
        /// Restricts Gateways to workloads of their own namespace.
        PILOT_SCOPE_GATEWAY_TO_NAMESPACE pilot_scope_gateway_to_namespace: bool = false;
        /// Merges equal virtual hosts on gateways.
        PILOT_ENABLE_ROUTE_COLLAPSE_OPTIMIZATION pilot_enable_route_collapse_optimization: bool = true;
        /// Adds `name.` (with a trailing dot) to the domains of virtual hosts.
        PILOT_ENABLE_ABSOLUTE_FQDN_VHOST_DOMAIN pilot_enable_absolute_fqdn_vhost_domain: bool = true;
        /// Timeout of TLS handshakes on gateways; 0 for none.
        PILOT_GATEWAY_TRANSPORT_SOCKET_CONNECT_TIMEOUT
            pilot_gateway_transport_socket_connect_timeout: Duration = seconds(15);
        /// Connections accepted per event loop iteration of Envoy; 0 for no limit.
        MAX_CONNECTIONS_PER_SOCKET_EVENT_LOOP max_connections_per_socket_event_loop: u32 = 1;
        /// Queries per UDP channel of the DNS resolver; 0 for no limit.
        PILOT_DNS_CARES_UDP_MAX_QUERIES pilot_dns_cares_udp_max_queries: u32 = 100;
        /// Jitter of DNS refreshes.
        PILOT_DNS_JITTER_DURATION pilot_dns_jitter_duration: Duration = millis(100);
        /// Proxies `100-continue`.
        ENABLE_100_CONTINUE_HEADERS enable_100_continue_headers: bool = true;
        /// Takes internal address ranges from meshNetworks.
        ENABLE_HCM_INTERNAL_NETWORKS enable_hcm_internal_networks: bool = false;
        /// Adds locality weighted load balancing to clusters.
        ENABLE_LOCALITY_WEIGHTED_LB_CONFIG enable_locality_weighted_lb_config: bool = false;
        /// Applies the TLS settings of Sidecar ingress listeners.
        ENABLE_TLS_ON_SIDECAR_INGRESS enable_tls_on_sidecar_ingress: bool = false;
        /// Merges inbound ports of services with those of a Sidecar.
        PILOT_ALLOW_SIDECAR_SERVICE_INBOUND_LISTENER_MERGE
            pilot_allow_sidecar_service_inbound_listener_merge: bool = false;
        /// Uses the remote address as the client's address in outbound listeners of sidecars.
        PILOT_SIDECAR_USE_REMOTE_ADDRESS pilot_sidecar_use_remote_address: bool = false;
        /// Does not append `-shadow` to the host of mirrored requests.
        DISABLE_SHADOW_HOST_SUFFIX disable_shadow_host_suffix: bool = true;
        /// Disables `trackRemaining` in circuit breakers.
        DISABLE_TRACK_REMAINING_CB_METRICS disable_track_remaining_cb_metrics: bool = true;
        /// Prefers TLS settings of a DestinationRule over those for external services.
        PREFER_DESTINATIONRULE_TLS_FOR_EXTERNAL_SERVICES prefer_destinationrule_tls_for_external_services: bool = true;
        /// Supports wildcard ServiceEntry hosts with dynamic DNS for TLS.
        ENABLE_WILDCARD_HOST_SERVICE_ENTRIES_FOR_TLS enable_wildcard_host_service_entries_for_tls: bool = false;
        /// Enables both IP families.
        ISTIO_DUAL_STACK istio_dual_stack: bool = false;
        /// Adds IPv4 outbound listeners in IPv6 clusters.
        ISTIO_ENABLE_IPV4_OUTBOUND_LISTENER_FOR_IPV6_CLUSTERS
            istio_enable_ipv4_outbound_listener_for_ipv6_clusters: bool = false;
        /// Percentage of traced requests, 0 to 100.
        PILOT_TRACE_SAMPLING pilot_trace_sampling: f64 = 1.0;
        /// Creates a span for upstream requests of gateways.
        PILOT_SPAWN_UPSTREAM_SPAN_FOR_GATEWAY pilot_spawn_upstream_span_for_gateway: bool = true;
        /// Enables metrics of EnvoyFilter patches.
        PILOT_ENVOY_FILTER_STATS pilot_envoy_filter_stats: bool = false;

        // Scoping.
        /// Builds scopes of Sidecars on demand.
        ENABLE_LAZY_SIDECAR_EVALUATION enable_lazy_sidecar_evaluation: bool = true;
        /// Number of scopes of Sidecars that are built concurrently.
        PILOT_CONVERT_SIDECAR_SCOPE_CONCURRENCY pilot_convert_sidecar_scope_concurrency: u32 = 1;
        /// Builds the default scope like a Sidecar with `*/*`.
        PILOT_UNIFIED_SIDECAR_SCOPE pilot_unified_sidecar_scope: bool = true;
        /// Lets a Sidecar pick the best of several namespaces that define a host.
        PILOT_SIDECAR_PICK_BEST_SERVICE_NAMESPACE pilot_sidecar_pick_best_service_namespace: bool = true;
        /// Merges DestinationRules of a host only if `exportTo` and selector are equal.
        ENABLE_ENHANCED_DESTINATIONRULE_MERGE enable_enhanced_destinationrule_merge: bool = true;

        // Registry.
        /// Lets Services select WorkloadEntries. Without it, those of remote clusters are not read.
        PILOT_ENABLE_K8S_SELECT_WORKLOAD_ENTRIES pilot_enable_k8s_select_workload_entries: bool = true;
        /// Lets ServiceEntries select pods.
        PILOT_ENABLE_SERVICEENTRY_SELECT_PODS pilot_enable_serviceentry_select_pods: bool = true;
        /// Uses WorkloadEntries of all clusters, with `PILOT_ENABLE_K8S_SELECT_WORKLOAD_ENTRIES`.
        PILOT_ENABLE_CROSS_CLUSTER_WORKLOAD_ENTRY pilot_enable_cross_cluster_workload_entry: bool = true;
        /// Creates WorkloadEntries for virtual machines that connect.
        PILOT_ENABLE_WORKLOAD_ENTRY_AUTOREGISTRATION pilot_enable_workload_entry_autoregistration: bool = true;
        /// Uses the health checks of virtual machines.
        PILOT_ENABLE_WORKLOAD_ENTRY_HEALTHCHECKS pilot_enable_workload_entry_healthchecks: bool = true;
        /// Time from a virtual machine's disconnect to the deletion of its WorkloadEntry.
        PILOT_WORKLOAD_ENTRY_GRACE_PERIOD pilot_workload_entry_grace_period: Duration = seconds(10);
        /// Requires a virtual machine's identity to match its WorkloadEntry.
        ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY istio_workload_entry_validate_identity: bool = true;
        /// Elects one replica for writes; otherwise every replica writes.
        ENABLE_LEADER_ELECTION enable_leader_election: bool = true;
        /// Analyzes the config cluster and writes messages into statuses.
        PILOT_ENABLE_ANALYSIS pilot_enable_analysis: bool = false;
        /// Longest delay of an analysis after a change.
        PILOT_ANALYSIS_INTERVAL pilot_analysis_interval: Duration = seconds(10);
        /// Not Istio 1.30's. Writes the condition `Reconciled` of Istio's objects: how many proxies run them.
        PILOT_ENABLE_STATUS pilot_enable_status: bool = false;
        /// Removes a taint from nodes where the CNI plugin is ready.
        PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS pilot_enable_node_untaint_controllers: bool = false;
        /// Key of the taint that the untaint controller removes.
        PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME pilot_node_untaint_controllers_taint_name: SmolStr =
            text("cni.istio.io/not-ready");
        /// Allocates addresses in the status of ServiceEntries without one.
        PILOT_ENABLE_IP_AUTOALLOCATE pilot_enable_ip_autoallocate: bool = true;
        /// Range of allocated IPv4 addresses.
        PILOT_IP_AUTOALLOCATE_IPV4_PREFIX pilot_ip_autoallocate_ipv4_prefix: SmolStr = text("240.240.0.0/16");
        /// Range of allocated IPv6 addresses.
        PILOT_IP_AUTOALLOCATE_IPV6_PREFIX pilot_ip_autoallocate_ipv6_prefix: SmolStr = text("2001:2::/48");
        /// Finds the pod of a proxy with an unknown name by its address.
        ENABLE_PROXY_FIND_POD_BY_IP enable_proxy_find_pod_by_ip: bool = false;
        /// Custom resources (`plural.group`, or `*.` and the end of such names) that are not read.
        PILOT_IGNORE_RESOURCES pilot_ignore_resources: Vec<SmolStr> = list();
        /// Exceptions from ignored resources.
        PILOT_INCLUDE_RESOURCES pilot_include_resources: Vec<SmolStr> = list();
        /// Adds canonical names to services of mesh-external ServiceEntries.
        LABEL_CANONICAL_SERVICES_FOR_MESH_EXTERNAL_SERVICE_ENTRIES
            label_canonical_services_for_mesh_external_service_entries: bool = false;

        // Multicluster.
        /// Time after which the start no longer waits for a remote cluster.
        PILOT_REMOTE_CLUSTER_TIMEOUT pilot_remote_cluster_timeout: Duration = seconds(30);
        /// Allowed kubeconfig options that are unsafe, such as `exec`.
        PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS
            pilot_insecure_multicluster_kubeconfig_options: Vec<SmolStr> = list();
        /// Folder of kubeconfigs instead of Secrets.
        PILOT_MULTICLUSTER_KUBECONFIG_PATH pilot_multicluster_kubeconfig_path: SmolStr = text("");
        /// Reads remote Secrets from the local cluster.
        LOCAL_CLUSTER_SECRET_WATCHER local_cluster_secret_watcher: bool = false;
        /// Resolves host names of network gateways.
        RESOLVE_HOSTNAME_GATEWAYS resolve_hostname_gateways: bool = true;
        /// Discovers network gateways among Gateway API gateways.
        PILOT_MULTI_NETWORK_DISCOVER_GATEWAY_API pilot_multi_network_discover_gateway_api: bool = true;
        /// Adds pods of all clusters to the names of headless services.
        ENABLE_MULTICLUSTER_HEADLESS enable_multicluster_headless: bool = true;
        /// Uses endpoints of other clusters only for exported services.
        ENABLE_MCS_SERVICE_DISCOVERY enable_mcs_service_discovery: bool = false;
        /// Adds `clusterset.local` hosts, with `ENABLE_MCS_SERVICE_DISCOVERY`.
        ENABLE_MCS_HOST enable_mcs_host: bool = false;
        /// Makes `cluster.local` hosts cluster-local, with `ENABLE_MCS_HOST`.
        ENABLE_MCS_CLUSTER_LOCAL enable_mcs_cluster_local: bool = false;
        /// Exports every service.
        ENABLE_MCS_AUTO_EXPORT enable_mcs_auto_export: bool = false;
        /// Namespace of the ingress gateway, in which Gateways made from Ingresses are.
        K8S_INGRESS_NS k8s_ingress_ns: SmolStr = text("istio-system");
        /// Group of the MCS API.
        MCS_API_GROUP mcs_api_group: SmolStr = text("multicluster.x-k8s.io");
        /// Version of the MCS API.
        MCS_API_VERSION mcs_api_version: SmolStr = text("v1alpha1");

        // Gateway API.
        /// Converts Gateway API objects. Gateways of networks, and waypoints, do not depend on it.
        PILOT_ENABLE_GATEWAY_API pilot_enable_gateway_api: bool = true;
        /// Writes the status of Gateway API objects.
        PILOT_ENABLE_GATEWAY_API_STATUS pilot_enable_gateway_api_status: bool = true;
        /// Deploys Gateway API gateways.
        PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER pilot_enable_gateway_api_deployment_controller: bool = true;
        /// Creates the GatewayClasses.
        PILOT_ENABLE_GATEWAY_API_GATEWAYCLASS_CONTROLLER pilot_enable_gateway_api_gatewayclass_controller: bool = true;
        /// Copies labels and annotations of a Gateway to its deployment.
        PILOT_ENABLE_GATEWAY_API_COPY_LABELS_ANNOTATIONS pilot_enable_gateway_api_copy_labels_annotations: bool = true;
        /// Enables alpha kinds of the Gateway API.
        PILOT_ENABLE_ALPHA_GATEWAY_API pilot_enable_alpha_gateway_api: bool = false;
        /// Lets Gateways refer to a manual deployment.
        ENABLE_GATEWAY_API_MANUAL_DEPLOYMENT enable_gateway_api_manual_deployment: bool = true;
        /// Controller name of this control plane.
        PILOT_GATEWAY_API_CONTROLLER_NAME
            pilot_gateway_api_controller_name: SmolStr = text("istio.io/gateway-controller");
        /// Default GatewayClass of this control plane.
        PILOT_GATEWAY_API_DEFAULT_GATEWAYCLASS_NAME
            pilot_gateway_api_default_gatewayclass_name: SmolStr = text("istio");
        /// Enables inference pools.
        ENABLE_GATEWAY_API_INFERENCE_EXTENSION enable_gateway_api_inference_extension: bool = false;
        /// Applies policies with a selector to Gateway API gateways.
        ENABLE_SELECTOR_BASED_K8S_GATEWAY_POLICY enable_selector_based_k8s_gateway_policy: bool = true;
        /// Not Istio's. Reports references to CA certificates for clients that are invalid with the reasons of the
        /// Gateway API's specification in place of Istio's; the listener is then not accepted.
        PILOT_GATEWAY_API_STANDARD_REASONS pilot_gateway_api_standard_reasons: bool = false;
        /// Not Istio's. Lets a VirtualService of gateway `mesh` route clients of other namespaces only if its namespace
        /// owns all its hosts, or is the root namespace.
        PILOT_STRICT_HOST_OWNERSHIP pilot_strict_host_ownership: bool = false;
        /// Not Istio's. Routes of one VirtualService, over all its hosts and servers of Gateways; large ones count
        /// several times. Requests to hosts beyond the limit are refused. Also the hosts of one route of the Gateway
        /// API, over all its listeners and services; a route beyond the limit does not apply. 0 for no limit.
        PILOT_MAX_ROUTES_PER_OBJECT pilot_max_routes_per_object: u32 = 10_000;
        /// Not Istio's. Routes of the VirtualServices of one namespace, except those with at most 20 routes; requests
        /// to the hosts of later ones are refused. The same for the hosts of its routes of the Gateway API, of which
        /// later ones do not apply. 0 for no limit.
        PILOT_MAX_ROUTES_PER_NAMESPACE pilot_max_routes_per_namespace: u32 = 30_000;
        /// Not Istio's. Subsets of one DestinationRule; those with large policies count several times. Those beyond the
        /// limit have no clusters. 0 for no limit.
        PILOT_MAX_SUBSETS_PER_OBJECT pilot_max_subsets_per_object: u32 = 1000;
        /// Not Istio's. Subsets of the DestinationRules of one namespace, except those with at most 20 subsets; the
        /// subsets of later ones have no clusters. 0 for no limit.
        PILOT_MAX_SUBSETS_PER_NAMESPACE pilot_max_subsets_per_namespace: u32 = 10_000;
        /// Not Istio's. Ports and endpoints of one ServiceEntry, for each of its addresses and hosts, and its
        /// `subjectAltNames` and `exportTo`, for each of its hosts; hosts beyond it do not apply, except the first one
        /// up to ten times the limit. A Service has at most ten times as many endpoints in a cluster. 0 for no limit.
        PILOT_MAX_ENDPOINTS_PER_OBJECT pilot_max_endpoints_per_object: u32 = 100_000;
        /// Not Istio's. Ports and endpoints of the ServiceEntries of one namespace, except those with at most 20; later
        /// ones do not apply. 0 for no limit.
        PILOT_MAX_ENDPOINTS_PER_NAMESPACE pilot_max_endpoints_per_namespace: u32 = 1_000_000;
        /// Enables agentgateway proxies.
        PILOT_ENABLE_AGENTGATEWAY pilot_enable_agentgateway: bool = false;

        // Ambient, independent of PILOT_ENABLE_AMBIENT.
        /// Enables ambient mode.
        PILOT_ENABLE_AMBIENT pilot_enable_ambient: bool = false;
        /// Applies the policies of a service and of its waypoint.
        ENABLE_LAYERED_WAYPOINT_AUTHORIZATION_POLICIES enable_layered_waypoint_authorization_policies: bool = false;
        /// Pushes only addresses in its own scope to a ztunnel.
        AMBIENT_SCOPED_ADDRESS_PUSHES ambient_scoped_address_pushes: bool = true;

        // Security.
        /// `fips-140-2`, `pqc` or empty.
        COMPLIANCE_POLICY compliance_policy: SmolStr = text("");
        /// Accepted audiences of tokens.
        TOKEN_AUDIENCES token_audiences: Vec<SmolStr> = vec![text("istio-ca")];
        /// Sends trust bundles with several roots to proxies.
        ISTIO_MULTIROOT_MESH istio_multiroot_mesh: bool = false;
        /// Skips the check of the peers' trust domain.
        PILOT_SKIP_VALIDATE_TRUST_DOMAIN pilot_skip_validate_trust_domain: bool = false;
        /// Serves revocation lists of the CA.
        PILOT_ENABLE_CA_CRL pilot_enable_ca_crl: bool = true;
        /// ConfigMap with the root certificate.
        PILOT_CA_CERT_CONFIGMAP pilot_ca_cert_configmap: SmolStr = text("istio-ca-root-cert");
        /// ConfigMap with the revocation list.
        PILOT_CRL_CONFIGMAP pilot_crl_configmap: SmolStr = text("istio-ca-crl");
        /// Uses ClusterTrustBundles instead of ConfigMaps.
        ENABLE_CLUSTER_TRUST_BUNDLE_API enable_cluster_trust_bundle_api: bool = false;
        /// Accounts (`namespace/name`) of node proxies that may request certificates for others.
        CA_TRUSTED_NODE_ACCOUNTS ca_trusted_node_accounts: Vec<SmolStr> = list();
        /// Fetcher of JWT keys: `istiod` (or `false`), `envoy`, or `hybrid` (or `true`), which is Envoy if the mesh has
        /// the host of the keys, otherwise istiod.
        PILOT_JWT_ENABLE_REMOTE_JWKS pilot_jwt_enable_remote_jwks: RemoteJwks = RemoteJwks::Istiod;
        /// Interval of fetching JWT keys.
        PILOT_JWT_PUB_KEY_REFRESH_INTERVAL pilot_jwt_pub_key_refresh_interval: Duration = seconds(1200);
        /// Skips the check of key servers' certificates.
        JWKS_RESOLVER_INSECURE_SKIP_VERIFY jwks_resolver_insecure_skip_verify: bool = false;
        /// Address ranges from which keys are never fetched.
        BLOCKED_CIDRS_IN_JWKS_URIS blocked_cidrs_in_jwks_uris: Vec<SmolStr> = list();
        /// Supports several CUSTOM providers for one workload.
        PILOT_ENABLE_MULTIPLE_CUSTOM_AUTHZ_PROVIDERS pilot_enable_multiple_custom_authz_providers: bool = false;

        // Certificates.
        /// Serves the CA.
        ENABLE_CA_SERVER enable_ca_server: bool = true;

        // Debugging.
        /// Serves debug pages, over HTTP and xDS.
        ENABLE_DEBUG_ON_HTTP enable_debug_on_http: bool = true;
        /// Authenticates callers of debug pages.
        ENABLE_DEBUG_ENDPOINT_AUTH enable_debug_endpoint_auth: bool = true;
        /// Namespaces whose accounts may read all debug pages.
        DEBUG_ENDPOINT_AUTH_ALLOWED_NAMESPACES debug_endpoint_auth_allowed_namespaces: Vec<SmolStr> = list();
        /// Serves `/debug/force_disconnect`.
        UNSAFE_ENABLE_ADMIN_ENDPOINTS unsafe_enable_admin_endpoints: bool = false;
        /// Enables expensive runtime assertions.
        UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS unsafe_pilot_enable_runtime_assertions: bool = false;
    }
    ambient {
        /// Enables waypoints.
        PILOT_ENABLE_AMBIENT_WAYPOINTS pilot_enable_ambient_waypoints: bool = true, else false;
        /// Sends HBONE from sidecars and gateways.
        PILOT_ENABLE_SENDING_HBONE pilot_enable_sending_hbone: bool = true, else false;
        /// Accepts HBONE in sidecars.
        PILOT_ENABLE_SIDECAR_LISTENING_HBONE pilot_enable_sidecar_listening_hbone: bool = true, else false;
        /// Writes conditions of ambient objects.
        AMBIENT_ENABLE_STATUS ambient_enable_status: bool = true, else false;
        /// Lets gateways route through waypoints.
        ENABLE_INGRESS_WAYPOINT_ROUTING enable_ingress_waypoint_routing: bool = true, else false;
        /// Prefers HBONE over mTLS if both are possible.
        PILOT_PREFER_SENDING_HBONE pilot_prefer_sending_hbone: bool = false, else false;
        /// Makes workloads with a waypoint accept only its traffic.
        PILOT_AUTO_ALLOW_WAYPOINT_POLICY pilot_auto_allow_waypoint_policy: bool = false, else false;
        /// Ztunnels know services of all clusters, and other networks by their gateways. Waypoints tell services apart
        /// by host name before address, and gateways between networks serve the services that span clusters.
        AMBIENT_ENABLE_MULTI_NETWORK ambient_enable_multi_network: bool = false, else false;
        /// Waypoints reach other networks by nested tunnels; otherwise they use endpoints of their own network.
        AMBIENT_ENABLE_MULTI_NETWORK_WAYPOINT ambient_enable_multi_network_waypoint: bool = true, else false;
        /// Ingress gateways reach other networks by nested tunnels; otherwise they use endpoints of their own network.
        AMBIENT_ENABLE_MULTI_NETWORK_INGRESS ambient_enable_multi_network_ingress: bool = false, else false;
        /// Sends peer metadata as baggage.
        AMBIENT_ENABLE_BAGGAGE ambient_enable_baggage: bool = false, else false;
        /// Sends dry-run policies to ztunnel.
        AMBIENT_ENABLE_DRY_RUN_AUTHORIZATION_POLICY
            ambient_enable_dry_run_authorization_policy: bool = false, else false;
        /// Window of a new HBONE stream in bytes; 0 for Envoy's default.
        PILOT_HBONE_INITIAL_STREAM_WINDOW_SIZE pilot_hbone_initial_stream_window_size: u32 = 0, else 0;
        /// Window of a new HBONE connection in bytes; 0 for Envoy's default.
        PILOT_HBONE_INITIAL_CONNECTION_WINDOW_SIZE pilot_hbone_initial_connection_window_size: u32 = 0, else 0;
    }
}

impl Features {
    /// Checks rules that types cannot express.
    fn check(&mut self, variables: &BTreeMap<String, String>, errors: &mut Vec<FeatureError>) {
        if self.pilot_trace_sampling > 100.0 {
            const NAME: &str = "PILOT_TRACE_SAMPLING";
            errors.push(FeatureError {
                variable: NAME,
                value: variables.get(NAME).cloned().unwrap_or_default(),
                expected: "a percentage from 0 to 100",
            });
            self.pilot_trace_sampling = Self::default().pilot_trace_sampling;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    /// A row of `docs/feature-variables.md`.
    pub(super) struct Row {
        pub(super) name: &'static str,
        pub(super) default: String,
        pub(super) meaning: &'static str,
    }

    /// Text of a default.
    pub(super) trait Shown {
        fn show(&self) -> String;
    }

    impl Shown for bool {
        fn show(&self) -> String {
            self.to_string()
        }
    }

    impl Shown for u32 {
        fn show(&self) -> String {
            self.to_string()
        }
    }

    impl Shown for f64 {
        fn show(&self) -> String {
            self.to_string()
        }
    }

    impl Shown for Duration {
        fn show(&self) -> String {
            match self.subsec_millis() {
                0 => format!("{}s", self.as_secs()),
                _ => format!("{}ms", self.as_millis()),
            }
        }
    }

    impl Shown for SmolStr {
        fn show(&self) -> String {
            self.to_string()
        }
    }

    impl Shown for Vec<SmolStr> {
        fn show(&self) -> String {
            self.join(",")
        }
    }

    impl Shown for RemoteJwks {
        fn show(&self) -> String {
            format!("{self:?}").to_lowercase()
        }
    }

    fn table(rows: Vec<Row>) -> String {
        let mut rows: Vec<String> = rows
            .into_iter()
            .map(|row| {
                let default = if row.default.is_empty() {
                    String::new()
                } else {
                    format!("`{}`", row.default)
                };
                format!("| `{}` | {default} | {} |\n", row.name, row.meaning)
            })
            .collect();
        rows.sort();
        format!("| Variable | Default | Meaning |\n|---|---|---|\n{}", rows.concat())
    }

    fn described(column: &str, rows: &[other::Described]) -> String {
        let rows = rows.iter().map(|(name, text)| format!("| `{name}` | {text} |\n"));
        let rows: Vec<String> = rows.collect();
        format!("| Variable | {column} |\n|---|---|\n{}", rows.concat())
    }

    /// Compares `docs/feature-variables.md` with the table above. `UPDATE_GOLDEN=1` rewrites the file.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "a developer asks the test to rewrite its file")]
    fn documentation_is_current() {
        let without_effect = |name: &str| other::WITHOUT_EFFECT.iter().any(|(other, _)| *other == name);
        let [always, ambient] = Features::documentation().map(|mut rows| {
            rows.retain(|row| !without_effect(row.name));
            rows
        });
        let text = format!(
            "# Feature variables\n\n\
             Environment variables of the Deployment, with Istio's names and defaults. This file is generated from\n\
             `src/model/features.rs`. Values have Go's syntax (`true`, `100ms`). A bad value is logged, and the default\n\
             stays.\n\n{}\n\
             ## Ambient\n\nThese have an effect only with `PILOT_ENABLE_AMBIENT=true`; otherwise they are off.\n\n{}\n\
             ## Other variables\n\n{}\n\
             ## Without effect\n\nThese are variables of Istio 1.30. istiod warns at the start if one of them is set.\n\n{}",
            table(always),
            table(ambient),
            described("Meaning", other::OTHER_VARIABLES),
            described("Reason", other::WITHOUT_EFFECT)
        );
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/feature-variables.md");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, &text).expect("the file is writable");
        }
        let current = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            current == text,
            "docs/feature-variables.md is stale, run UPDATE_GOLDEN=1 cargo test --lib documentation"
        );
    }

    fn parse(variables: &[(&str, &str)]) -> (Features, Vec<FeatureError>) {
        Features::parse(
            &variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn unset_variables_have_their_defaults() {
        let (features, errors) = parse(&[]);
        assert_eq!(features, Features::default());
        assert!(errors.is_empty());
        assert!(!features.pilot_enable_sending_hbone);
    }

    #[test]
    fn fields_are_named_like_variables() {
        let debug = format!("{:?}", Features::default());
        for name in Features::VARIABLES {
            assert!(debug.contains(&format!("{}: ", name.to_lowercase())), "{name}");
        }
    }

    #[test]
    fn values_parse_as_in_go() {
        let (features, errors) = parse(&[
            ("PILOT_HTTP10", "T"),
            ("PILOT_DEBOUNCE_AFTER", "1m30s"),
            ("PILOT_PUSH_THROTTLE", "+7"),
            ("PILOT_MX_ADDITIONAL_LABELS", "role, zone,"),
            ("PILOT_JWT_ENABLE_REMOTE_JWKS", "true"),
        ]);
        assert!(errors.is_empty(), "{errors:?}");
        assert!(features.pilot_http10);
        assert_eq!(features.pilot_debounce_after, seconds(90));
        assert_eq!(features.pilot_push_throttle, 7);
        assert_eq!(features.pilot_mx_additional_labels, ["role", "zone"]);
        assert_eq!(features.pilot_jwt_enable_remote_jwks, RemoteJwks::Hybrid);
    }

    #[test]
    fn a_bad_value_names_its_variable_and_keeps_the_default() {
        let (features, errors) = parse(&[
            ("PILOT_HTTP10", "yes"),
            ("PILOT_DEBOUNCE_MAX", "10"),
            ("PILOT_TRACE_SAMPLING", "101"),
            ("PILOT_ENABLE_AMBIENT", "on"),
        ]);
        assert_eq!(features, Features::default());
        let names: Vec<_> = errors.iter().map(|error| error.variable).collect();
        assert_eq!(
            names,
            [
                "PILOT_DEBOUNCE_MAX",
                "PILOT_HTTP10",
                "PILOT_ENABLE_AMBIENT",
                "PILOT_TRACE_SAMPLING"
            ]
        );
        assert!(errors[1].to_string().contains("\"yes\""));
    }

    #[test]
    fn ambient_variables_count_only_in_ambient_mode() {
        let (features, _) = parse(&[
            ("PILOT_ENABLE_SENDING_HBONE", "true"),
            ("PILOT_PREFER_SENDING_HBONE", "true"),
        ]);
        assert_eq!(features, Features::default());
        let (features, _) = parse(&[
            ("PILOT_ENABLE_AMBIENT", "true"),
            ("PILOT_ENABLE_SIDECAR_LISTENING_HBONE", "0"),
        ]);
        assert!(features.pilot_enable_sending_hbone && !features.pilot_enable_sidecar_listening_hbone);
    }
}
