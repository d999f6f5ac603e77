//! Feature variables (`PILOT_*` and others), parsed once.
//!
//! A field has the name of its variable, in lower case. Values are parsed as in Go (`strconv.ParseBool`,
//! `time.ParseDuration`). A bad value keeps the default and is reported. Note: the fields of the ambient group are off
//! unless `PILOT_ENABLE_AMBIENT` is set, whatever their own variables say.

use std::{collections::BTreeMap, time::Duration};

use smol_str::SmolStr;

use crate::base::duration;

/// A variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("variable {variable} has the value {value:?}, want {expected}; its default stands")]
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

/// A type of variables.
trait Value: Sized {
    /// Expected form, for messages.
    const EXPECTED: &'static str;
    /// Parses a value as Go does.
    fn read(text: &str) -> Option<Self>;
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";
    fn read(text: &str) -> Option<Self> {
        match text {
            "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
            "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
            _ => None,
        }
    }
}

impl Value for u32 {
    const EXPECTED: &'static str = "a whole number that is not negative";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Value for f64 {
    const EXPECTED: &'static str = "a number that is not negative";
    fn read(text: &str) -> Option<Self> {
        text.parse()
            .ok()
            .filter(|number: &f64| number.is_finite() && *number >= 0.0)
    }
}

impl Value for Duration {
    const EXPECTED: &'static str = "a duration such as 100ms, 10s or 1h30m";
    fn read(text: &str) -> Option<Self> {
        duration::parse(text).ok()
    }
}

impl Value for SmolStr {
    const EXPECTED: &'static str = "text";
    fn read(text: &str) -> Option<Self> {
        Some(Self::new(text))
    }
}

impl Value for Vec<SmolStr> {
    const EXPECTED: &'static str = "a list separated by commas";
    fn read(text: &str) -> Option<Self> {
        Some(
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(SmolStr::new)
                .collect(),
        )
    }
}

impl Value for RemoteJwks {
    const EXPECTED: &'static str = "istiod, hybrid or envoy";
    fn read(text: &str) -> Option<Self> {
        Some(match text {
            "true" | "hybrid" => Self::Hybrid,
            "envoy" => Self::Envoy,
            _ => Self::Istiod,
        })
    }
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

const fn hours(count: u64) -> Duration {
    seconds(count * 3600)
}

macro_rules! features {
    (
        always { $($(#[$doc:meta])* $name:ident $field:ident: $type:ty = $default:expr;)* }
        ambient { $($(#[$adoc:meta])* $aname:ident $afield:ident: $atype:ty = $adefault:expr, else $aoff:expr;)* }
    ) => {
        /// All feature variables with an effect, with Istio's defaults.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Features {
            $($(#[$doc])* pub $field: $type,)*
            $($(#[$adoc])* pub $afield: $atype,)*
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
        /// Whether endpoint changes are debounced; if false they are pushed at once.
        PILOT_ENABLE_EDS_DEBOUNCE pilot_enable_eds_debounce: bool = true;
        /// Number of proxies pushed to concurrently; 0 for one per processor.
        PILOT_PUSH_THROTTLE pilot_push_throttle: u32 = 0;
        /// New streams and requests per second; 0 for limits by work instead of rate.
        PILOT_MAX_REQUESTS_PER_SECOND pilot_max_requests_per_second: f64 = 0.0;
        /// Concurrent streams of one HTTP/2 connection.
        ISTIO_GPRC_MAXSTREAMS istio_gprc_maxstreams: u32 = 100_000;
        /// Largest message that is received, in bytes.
        ISTIO_GPRC_MAXRECVMSGSIZE istio_gprc_maxrecvmsgsize: u32 = 4_194_304;
        /// Kept for configz: encoded resources are always shared here.
        PILOT_ENABLE_XDS_CACHE pilot_enable_xds_cache: bool = true;
        /// Kept for configz, as above.
        PILOT_ENABLE_CDS_CACHE pilot_enable_cds_cache: bool = true;
        /// Kept for configz, as above.
        PILOT_ENABLE_RDS_CACHE pilot_enable_rds_cache: bool = true;
        /// Whether callers of xDS are authenticated.
        XDS_AUTH xds_auth: bool = true;
        /// Whether plaintext streams are authenticated like those with TLS.
        XDS_AUTH_PLAINTEXT xds_auth_plaintext: bool = false;
        /// Whether a proxy's node must agree with its identity.
        PILOT_ENABLE_XDS_IDENTITY_CHECK pilot_enable_xds_identity_check: bool = true;
        /// Addresses whose `x-forwarded-client-cert` is believed.
        TRUSTED_GATEWAY_CIDR trusted_gateway_cidr: Vec<SmolStr> = list();
        /// Whether delta xDS is offered to agents.
        ISTIO_DELTA_XDS istio_delta_xds: bool = true;

        // Networking.
        /// HTTP/1.0 is accepted everywhere.
        PILOT_HTTP10 pilot_http10: bool = false;
        /// The `istio.alpn` filter on outbound HTTP.
        PILOT_ENABLE_ALPN_FILTER pilot_enable_alpn_filter: bool = true;
        /// No `istio-peer-exchange` in ALPN.
        PILOT_DISABLE_MX_ALPN pilot_disable_mx_alpn: bool = false;
        /// The metadata exchange filters.
        PILOT_ENABLE_METADATA_EXCHANGE pilot_enable_metadata_exchange: bool = true;
        /// Further labels that metadata exchange carries.
        PILOT_MX_ADDITIONAL_LABELS pilot_mx_additional_labels: Vec<SmolStr> = list();
        /// Telemetry metadata on clusters.
        PILOT_ENABLE_TELEMETRY_LABEL pilot_enable_telemetry_label: bool = true;
        /// Workload metadata on endpoints.
        PILOT_ENDPOINT_TELEMETRY_LABEL pilot_endpoint_telemetry_label: bool = true;
        /// The mongo filter for ports of that protocol.
        PILOT_ENABLE_MONGO_FILTER pilot_enable_mongo_filter: bool = true;
        /// The mysql filter for ports of that protocol.
        PILOT_ENABLE_MYSQL_FILTER pilot_enable_mysql_filter: bool = false;
        /// The redis filter for ports of that protocol.
        PILOT_ENABLE_REDIS_FILTER pilot_enable_redis_filter: bool = false;
        /// EDS instead of original-destination clusters for headless services.
        PILOT_ENABLE_EDS_FOR_HEADLESS_SERVICES pilot_enable_eds_for_headless_services: bool = false;
        /// Endpoints that are not ready are sent as unhealthy.
        PILOT_SEND_UNHEALTHY_ENDPOINTS pilot_send_unhealthy_endpoints: bool = false;
        /// Persistent sessions as asked for by a label of the service.
        PILOT_ENABLE_PERSISTENT_SESSION_FILTER pilot_enable_persistent_session_filter: bool = false;
        /// The label that names the session cookie.
        PILOT_PERSISTENT_SESSION_LABEL pilot_persistent_session_label: SmolStr = text("istio.io/persistent-session");
        /// The label that names the session header.
        PILOT_PERSISTENT_SESSION_HEADER_LABEL pilot_persistent_session_header_label: SmolStr =
            text("istio.io/persistent-session-header");
        /// The label of endpoints that are draining.
        PILOT_DRAINING_LABEL pilot_draining_label: SmolStr = text("istio.io/draining");
        /// QUIC listeners beside HTTPS ones on gateways.
        PILOT_ENABLE_QUIC_LISTENERS pilot_enable_quic_listeners: bool = false;
        /// Gateways get only clusters that their routes name.
        PILOT_FILTER_GATEWAY_CLUSTER_CONFIG pilot_filter_gateway_cluster_config: bool = false;
        /// A Gateway selects only workloads of its own namespace.
        PILOT_SCOPE_GATEWAY_TO_NAMESPACE pilot_scope_gateway_to_namespace: bool = false;
        /// Equal virtual hosts on gateways are merged.
        PILOT_ENABLE_ROUTE_COLLAPSE_OPTIMIZATION pilot_enable_route_collapse_optimization: bool = true;
        /// `name.` (with a dot at the end) among the domains of virtual hosts.
        PILOT_ENABLE_ABSOLUTE_FQDN_VHOST_DOMAIN pilot_enable_absolute_fqdn_vhost_domain: bool = true;
        /// Time for the TLS handshake on gateways; 0: no limit.
        PILOT_GATEWAY_TRANSPORT_SOCKET_CONNECT_TIMEOUT pilot_gateway_transport_socket_connect_timeout: Duration = seconds(15);
        /// Connections accepted in one turn of Envoy's event loop; 0: no limit.
        MAX_CONNECTIONS_PER_SOCKET_EVENT_LOOP max_connections_per_socket_event_loop: u32 = 1;
        /// Queries of one UDP channel of the DNS resolver; 0: no limit.
        PILOT_DNS_CARES_UDP_MAX_QUERIES pilot_dns_cares_udp_max_queries: u32 = 100;
        /// Jitter of DNS refreshes.
        PILOT_DNS_JITTER_DURATION pilot_dns_jitter_duration: Duration = millis(100);
        /// `100-continue` is proxied.
        ENABLE_100_CONTINUE_HEADERS enable_100_continue_headers: bool = true;
        /// Internal address ranges come from meshNetworks.
        ENABLE_HCM_INTERNAL_NETWORKS enable_hcm_internal_networks: bool = false;
        /// The locality weighted load balancing config on clusters.
        ENABLE_LOCALITY_WEIGHTED_LB_CONFIG enable_locality_weighted_lb_config: bool = false;
        /// TLS settings of Sidecar ingress listeners count.
        ENABLE_TLS_ON_SIDECAR_INGRESS enable_tls_on_sidecar_ingress: bool = false;
        /// Inbound ports of services stay beside those of a Sidecar.
        PILOT_ALLOW_SIDECAR_SERVICE_INBOUND_LISTENER_MERGE pilot_allow_sidecar_service_inbound_listener_merge: bool = false;
        /// Sidecars use the remote address as the client's.
        PILOT_SIDECAR_USE_REMOTE_ADDRESS pilot_sidecar_use_remote_address: bool = false;
        /// No `-shadow` at the host of mirrored requests.
        DISABLE_SHADOW_HOST_SUFFIX disable_shadow_host_suffix: bool = true;
        /// No `trackRemaining` in circuit breakers.
        DISABLE_TRACK_REMAINING_CB_METRICS disable_track_remaining_cb_metrics: bool = true;
        /// TLS settings of a DestinationRule win over those made for external services.
        PREFER_DESTINATIONRULE_TLS_FOR_EXTERNAL_SERVICES prefer_destinationrule_tls_for_external_services: bool = true;
        /// Wildcard ServiceEntry hosts with dynamic DNS for TLS.
        ENABLE_WILDCARD_HOST_SERVICE_ENTRIES_FOR_TLS enable_wildcard_host_service_entries_for_tls: bool = false;
        /// Both IP families.
        ISTIO_DUAL_STACK istio_dual_stack: bool = false;
        /// IPv4 outbound listeners in IPv6 clusters.
        ISTIO_ENABLE_IPV4_OUTBOUND_LISTENER_FOR_IPV6_CLUSTERS istio_enable_ipv4_outbound_listener_for_ipv6_clusters: bool = false;
        /// Percentage of requests that are traced, 0 to 100.
        PILOT_TRACE_SAMPLING pilot_trace_sampling: f64 = 1.0;
        /// Gateways make a span for the upstream request.
        PILOT_SPAWN_UPSTREAM_SPAN_FOR_GATEWAY pilot_spawn_upstream_span_for_gateway: bool = true;
        /// Metrics about the effect of EnvoyFilters.
        PILOT_ENVOY_FILTER_STATS pilot_envoy_filter_stats: bool = false;

        // Scoping.
        /// Kept for configz: scopes are made when they are needed.
        ENABLE_LAZY_SIDECAR_EVALUATION enable_lazy_sidecar_evaluation: bool = true;
        /// Kept for configz, as above.
        PILOT_CONVERT_SIDECAR_SCOPE_CONCURRENCY pilot_convert_sidecar_scope_concurrency: u32 = 1;
        /// The default scope is made like that of a Sidecar with `*/*`.
        PILOT_UNIFIED_SIDECAR_SCOPE pilot_unified_sidecar_scope: bool = true;
        /// Among namespaces that define a host a Sidecar picks the best.
        PILOT_SIDECAR_PICK_BEST_SERVICE_NAMESPACE pilot_sidecar_pick_best_service_namespace: bool = true;
        /// DestinationRules of one host merge only with equal `exportTo` and selector.
        ENABLE_ENHANCED_DESTINATIONRULE_MERGE enable_enhanced_destinationrule_merge: bool = true;

        // Registry.
        /// Services may select WorkloadEntries.
        PILOT_ENABLE_K8S_SELECT_WORKLOAD_ENTRIES pilot_enable_k8s_select_workload_entries: bool = true;
        /// ServiceEntries may select pods.
        PILOT_ENABLE_SERVICEENTRY_SELECT_PODS pilot_enable_serviceentry_select_pods: bool = true;
        /// WorkloadEntries count over clusters.
        PILOT_ENABLE_CROSS_CLUSTER_WORKLOAD_ENTRY pilot_enable_cross_cluster_workload_entry: bool = true;
        /// WorkloadEntries are made for machines that connect.
        PILOT_ENABLE_WORKLOAD_ENTRY_AUTOREGISTRATION pilot_enable_workload_entry_autoregistration: bool = true;
        /// Their health counts.
        PILOT_ENABLE_WORKLOAD_ENTRY_HEALTHCHECKS pilot_enable_workload_entry_healthchecks: bool = true;
        /// How long a machine may be away before its WorkloadEntry goes.
        PILOT_WORKLOAD_ENTRY_GRACE_PERIOD pilot_workload_entry_grace_period: Duration = seconds(10);
        /// A machine's identity must fit its WorkloadEntry.
        ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY istio_workload_entry_validate_identity: bool = true;
        /// Of several instances one writes; else every one does.
        ENABLE_LEADER_ELECTION enable_leader_election: bool = true;
        /// Findings are told in statuses.
        PILOT_ENABLE_ANALYSIS pilot_enable_analysis: bool = false;
        /// How often at most.
        PILOT_ANALYSIS_INTERVAL pilot_analysis_interval: Duration = seconds(10);
        /// ServiceEntries without an address get one by their status.
        PILOT_ENABLE_IP_AUTOALLOCATE pilot_enable_ip_autoallocate: bool = true;
        /// The range of such IPv4 addresses.
        PILOT_IP_AUTOALLOCATE_IPV4_PREFIX pilot_ip_autoallocate_ipv4_prefix: SmolStr = text("240.240.0.0/16");
        /// The range of such IPv6 addresses.
        PILOT_IP_AUTOALLOCATE_IPV6_PREFIX pilot_ip_autoallocate_ipv6_prefix: SmolStr = text("2001:2::/48");
        /// A proxy whose name is unknown is found by its address.
        ENABLE_PROXY_FIND_POD_BY_IP enable_proxy_find_pod_by_ip: bool = false;
        /// Resources (`plural.group`) that are not read.
        PILOT_IGNORE_RESOURCES pilot_ignore_resources: Vec<SmolStr> = list();
        /// Resources that are read although they are ignored.
        PILOT_INCLUDE_RESOURCES pilot_include_resources: Vec<SmolStr> = list();
        /// Services of mesh-external ServiceEntries get canonical names.
        LABEL_CANONICAL_SERVICES_FOR_MESH_EXTERNAL_SERVICE_ENTRIES
            label_canonical_services_for_mesh_external_service_entries: bool = false;

        // Multicluster.
        /// How long a remote cluster may take until others stop waiting for it.
        PILOT_REMOTE_CLUSTER_TIMEOUT pilot_remote_cluster_timeout: Duration = seconds(30);
        /// Kubeconfig options that are allowed although they are unsafe.
        PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS pilot_insecure_multicluster_kubeconfig_options: Vec<SmolStr> = list();
        /// A folder of kubeconfigs in place of Secrets.
        PILOT_MULTICLUSTER_KUBECONFIG_PATH pilot_multicluster_kubeconfig_path: SmolStr = text("");
        /// Remote Secrets are read from the local cluster.
        LOCAL_CLUSTER_SECRET_WATCHER local_cluster_secret_watcher: bool = false;
        /// Host names of network gateways are resolved.
        RESOLVE_HOSTNAME_GATEWAYS resolve_hostname_gateways: bool = true;
        /// Network gateways are found among Gateway API gateways.
        PILOT_MULTI_NETWORK_DISCOVER_GATEWAY_API pilot_multi_network_discover_gateway_api: bool = true;
        /// Headless services have pods of all clusters in the name table.
        ENABLE_MULTICLUSTER_HEADLESS enable_multicluster_headless: bool = true;
        /// Endpoints of other clusters only for exported services.
        ENABLE_MCS_SERVICE_DISCOVERY enable_mcs_service_discovery: bool = false;
        /// `clusterset.local` hosts.
        ENABLE_MCS_HOST enable_mcs_host: bool = false;
        /// `cluster.local` hosts keep to their cluster.
        ENABLE_MCS_CLUSTER_LOCAL enable_mcs_cluster_local: bool = false;
        /// Every service is exported.
        ENABLE_MCS_AUTO_EXPORT enable_mcs_auto_export: bool = false;
        /// The group of the MCS API.
        MCS_API_GROUP mcs_api_group: SmolStr = text("multicluster.x-k8s.io");
        /// Its version.
        MCS_API_VERSION mcs_api_version: SmolStr = text("v1alpha1");

        // Gateway API.
        /// Gateway API is read.
        PILOT_ENABLE_GATEWAY_API pilot_enable_gateway_api: bool = true;
        /// Its status is written.
        PILOT_ENABLE_GATEWAY_API_STATUS pilot_enable_gateway_api_status: bool = true;
        /// Gateways are deployed.
        PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER pilot_enable_gateway_api_deployment_controller: bool = true;
        /// The GatewayClasses are made.
        PILOT_ENABLE_GATEWAY_API_GATEWAYCLASS_CONTROLLER pilot_enable_gateway_api_gatewayclass_controller: bool = true;
        /// Deployed gateways get the labels and annotations of their Gateway.
        PILOT_ENABLE_GATEWAY_API_COPY_LABELS_ANNOTATIONS pilot_enable_gateway_api_copy_labels_annotations: bool = true;
        /// Alpha kinds of the Gateway API.
        PILOT_ENABLE_ALPHA_GATEWAY_API pilot_enable_alpha_gateway_api: bool = false;
        /// Gateways may stand for a deployment made by hand.
        ENABLE_GATEWAY_API_MANUAL_DEPLOYMENT enable_gateway_api_manual_deployment: bool = true;
        /// The controller name that is ours.
        PILOT_GATEWAY_API_CONTROLLER_NAME pilot_gateway_api_controller_name: SmolStr = text("istio.io/gateway-controller");
        /// The class that is ours.
        PILOT_GATEWAY_API_DEFAULT_GATEWAYCLASS_NAME pilot_gateway_api_default_gatewayclass_name: SmolStr = text("istio");
        /// Inference pools.
        ENABLE_GATEWAY_API_INFERENCE_EXTENSION enable_gateway_api_inference_extension: bool = false;
        /// Policies with a selector count for Gateway API gateways.
        ENABLE_SELECTOR_BASED_K8S_GATEWAY_POLICY enable_selector_based_k8s_gateway_policy: bool = true;
        /// Not Istio's: a VirtualService of gateway `mesh` decides for clients of other namespaces only if its namespace owns all
        /// its hosts, or is the root namespace.
        PILOT_STRICT_HOST_OWNERSHIP pilot_strict_host_ownership: bool = false;
        /// Agentgateway proxies.
        PILOT_ENABLE_AGENTGATEWAY pilot_enable_agentgateway: bool = false;

        // Ambient, whatever PILOT_ENABLE_AMBIENT says.
        /// Ambient mode.
        PILOT_ENABLE_AMBIENT pilot_enable_ambient: bool = false;
        /// Policies of services and of their waypoint both count.
        ENABLE_LAYERED_WAYPOINT_AUTHORIZATION_POLICIES enable_layered_waypoint_authorization_policies: bool = false;
        /// A ztunnel is pushed only addresses of its own scope.
        AMBIENT_SCOPED_ADDRESS_PUSHES ambient_scoped_address_pushes: bool = true;

        // Security.
        /// `fips-140-2`, `pqc` or empty.
        COMPLIANCE_POLICY compliance_policy: SmolStr = text("");
        /// Audiences that tokens of callers must have one of.
        TOKEN_AUDIENCES token_audiences: Vec<SmolStr> = vec![text("istio-ca")];
        /// Trust bundles of several roots are sent to proxies.
        ISTIO_MULTIROOT_MESH istio_multiroot_mesh: bool = false;
        /// The trust domain of peers is not checked.
        PILOT_SKIP_VALIDATE_TRUST_DOMAIN pilot_skip_validate_trust_domain: bool = false;
        /// Revocation lists of the CA are served.
        PILOT_ENABLE_CA_CRL pilot_enable_ca_crl: bool = true;
        /// The ConfigMap that carries the root certificate.
        PILOT_CA_CERT_CONFIGMAP pilot_ca_cert_configmap: SmolStr = text("istio-ca-root-cert");
        /// The ConfigMap that carries the revocation list.
        PILOT_CRL_CONFIGMAP pilot_crl_configmap: SmolStr = text("istio-ca-crl");
        /// ClusterTrustBundles in place of ConfigMaps.
        ENABLE_CLUSTER_TRUST_BUNDLE_API enable_cluster_trust_bundle_api: bool = false;
        /// Accounts (`namespace/name`) of node proxies that may ask for others.
        CA_TRUSTED_NODE_ACCOUNTS ca_trusted_node_accounts: Vec<SmolStr> = list();
        /// Who fetches keys.
        PILOT_JWT_ENABLE_REMOTE_JWKS pilot_jwt_enable_remote_jwks: RemoteJwks = RemoteJwks::Istiod;
        /// How often keys are fetched anew.
        PILOT_JWT_PUB_KEY_REFRESH_INTERVAL pilot_jwt_pub_key_refresh_interval: Duration = seconds(1200);
        /// Certificates of key servers are not checked.
        JWKS_RESOLVER_INSECURE_SKIP_VERIFY jwks_resolver_insecure_skip_verify: bool = false;
        /// Addresses that keys are never fetched from.
        BLOCKED_CIDRS_IN_JWKS_URIS blocked_cidrs_in_jwks_uris: Vec<SmolStr> = list();
        /// Several CUSTOM providers for one workload.
        PILOT_ENABLE_MULTIPLE_CUSTOM_AUTHZ_PROVIDERS pilot_enable_multiple_custom_authz_providers: bool = false;

        // Certificates.
        /// The CA is served.
        ENABLE_CA_SERVER enable_ca_server: bool = true;
        /// How long a workload certificate is valid when the request does not say.
        DEFAULT_WORKLOAD_CERT_TTL default_workload_cert_ttl: Duration = hours(24);
        /// How long at most.
        MAX_WORKLOAD_CERT_TTL max_workload_cert_ttl: Duration = hours(2160);

        // Debugging.
        /// Debug pages on the plain HTTP port.
        ENABLE_DEBUG_ON_HTTP enable_debug_on_http: bool = true;
        /// Their callers are authenticated.
        ENABLE_DEBUG_ENDPOINT_AUTH enable_debug_endpoint_auth: bool = true;
        /// Namespaces whose accounts may read all of them.
        DEBUG_ENDPOINT_AUTH_ALLOWED_NAMESPACES debug_endpoint_auth_allowed_namespaces: Vec<SmolStr> = list();
        /// Dangerous debug pages.
        UNSAFE_ENABLE_ADMIN_ENDPOINTS unsafe_enable_admin_endpoints: bool = false;
        /// Comparisons at run time that cost much.
        UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS unsafe_pilot_enable_runtime_assertions: bool = false;
    }
    ambient {
        /// Waypoints.
        PILOT_ENABLE_AMBIENT_WAYPOINTS pilot_enable_ambient_waypoints: bool = true, else false;
        /// Sidecars and gateways send HBONE.
        PILOT_ENABLE_SENDING_HBONE pilot_enable_sending_hbone: bool = true, else false;
        /// Sidecars listen for HBONE.
        PILOT_ENABLE_SIDECAR_LISTENING_HBONE pilot_enable_sidecar_listening_hbone: bool = true, else false;
        /// Conditions of ambient objects are written.
        AMBIENT_ENABLE_STATUS ambient_enable_status: bool = true, else false;
        /// Gateways may route through a waypoint.
        ENABLE_INGRESS_WAYPOINT_ROUTING enable_ingress_waypoint_routing: bool = true, else false;
        /// HBONE is preferred over mTLS where both are possible.
        PILOT_PREFER_SENDING_HBONE pilot_prefer_sending_hbone: bool = false, else false;
        /// Workloads with a waypoint accept only it.
        PILOT_AUTO_ALLOW_WAYPOINT_POLICY pilot_auto_allow_waypoint_policy: bool = false, else false;
        /// Several networks in ambient mode.
        AMBIENT_ENABLE_MULTI_NETWORK ambient_enable_multi_network: bool = false, else false;
        /// The same for waypoints.
        AMBIENT_ENABLE_MULTI_NETWORK_WAYPOINT ambient_enable_multi_network_waypoint: bool = true, else false;
        /// The same for ingress gateways.
        AMBIENT_ENABLE_MULTI_NETWORK_INGRESS ambient_enable_multi_network_ingress: bool = false, else false;
        /// Peer metadata in baggage.
        AMBIENT_ENABLE_BAGGAGE ambient_enable_baggage: bool = false, else false;
        /// Dry-run policies for ztunnel.
        AMBIENT_ENABLE_DRY_RUN_AUTHORIZATION_POLICY ambient_enable_dry_run_authorization_policy: bool = false, else false;
        /// Window of a new HBONE stream in bytes; 0: Envoy's own.
        PILOT_HBONE_INITIAL_STREAM_WINDOW_SIZE pilot_hbone_initial_stream_window_size: u32 = 0, else 0;
        /// Window of a new HBONE connection in bytes; 0: Envoy's own.
        PILOT_HBONE_INITIAL_CONNECTION_WINDOW_SIZE pilot_hbone_initial_connection_window_size: u32 = 0, else 0;
    }
}

impl Features {
    /// Rules that a type cannot say.
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

    fn parse(variables: &[(&str, &str)]) -> (Features, Vec<FeatureError>) {
        Features::parse(
            &variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn nothing_set_is_the_default() {
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
    fn values_are_read_as_go_reads_them() {
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
    fn a_bad_value_names_its_variable_and_leaves_the_default() {
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
