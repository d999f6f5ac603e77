//! Variables of Istio that are not feature variables: those that other parts read, and those without effect.

/// A variable with its meaning, or with the reason why it has no effect.
pub type Described = (&'static str, &'static str);

/// Variables that other parts read.
pub const OTHER_VARIABLES: &[Described] = &[
    (
        "AUDIENCE",
        "Outside a cluster: audience of the tokens of `TOKEN_ISSUER`; by default the first of istiod's own token.",
    ),
    (
        "CERT_SIGNER_DOMAIN",
        "Domain of the Kubernetes signers that workloads may name.",
    ),
    (
        "CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR",
        "Spreads the checks of the self-signed root; `true` by default.",
    ),
    (
        "CITADEL_SELF_SIGNED_CA_CERT_TTL",
        "Validity of the self-signed root; `87600h` by default.",
    ),
    (
        "CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE",
        "Size of the self-signed root's RSA key: `2048`, the default, `3072` or `4096`.",
    ),
    (
        "CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL",
        "Interval of the checks of the self-signed root; `1h` by default, `0` for none.",
    ),
    (
        "CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE",
        "Part of the root's validity, in percent, before whose end it is replaced; `20` by default.",
    ),
    ("CLUSTER_ID", "Default of `--clusterID`."),
    (
        "DEFAULT_WORKLOAD_CERT_TTL",
        "Validity of workload certificates for requests without one; `24h` by default.",
    ),
    (
        "ENABLE_NATIVE_SIDECARS",
        "Native sidecars: `true`, `false` or `auto`, the default, which is by the versions of the nodes.",
    ),
    (
        "EXTERNAL_CA",
        "`ISTIOD_RA_KUBERNETES_API`: Kubernetes signs workload certificates.",
    ),
    (
        "EXTERNAL_ISTIOD",
        "Writes root certificates and CA bundles of injectors into remote clusters that name this control plane.",
    ),
    (
        "GRPC_KEEPALIVE_INTERVAL",
        "Default of `--keepaliveInterval`; without it, `30s`.",
    ),
    (
        "GRPC_KEEPALIVE_TIMEOUT",
        "Default of `--keepaliveTimeout`; without it, `10s`.",
    ),
    (
        "HOME",
        "Folder whose `.kube/config` is read if `KUBECONFIG` is not set.",
    ),
    (
        "INJECTION_WEBHOOK_CONFIG_NAME",
        "If set and empty, CA bundles of the injector's webhooks are not written.",
    ),
    ("INJECT_ENABLED", "If false, `/inject` is not served."),
    (
        "ISTIOD_CUSTOM_HOST",
        "Further DNS names of the serving certificate, separated by commas.",
    ),
    (
        "ISTIO_WATCH_NAMESPACE",
        "The only namespaces that are read and written into, separated by commas.",
    ),
    ("JWT_RULE", "OpenID Connect provider of callers."),
    (
        "K8S_SIGNER",
        "Kubernetes signer of workload certificates, with `EXTERNAL_CA`.",
    ),
    (
        "KUBECONFIG",
        "Kubeconfig files of the config cluster, separated by colons.",
    ),
    (
        "KUBERNETES_SERVICE_HOST",
        "Address of the API server for the service account.",
    ),
    (
        "KUBERNETES_SERVICE_PORT",
        "Port of the API server for the service account.",
    ),
    ("K_REVISION", "Set by Knative: the first stream is refused."),
    (
        "MAX_WORKLOAD_CERT_TTL",
        "Longest validity of workload certificates; `2160h` by default.",
    ),
    (
        "METRICS_LOCALHOST_ACCESS_ONLY",
        "Serves `/metrics` to this machine only.",
    ),
    (
        "PILOT_CERT_PROVIDER",
        "Source of the serving certificate: `istiod`, the default; `k8s.io/` and a signer; or only files: `custom`, or \
         `none`, which distributes no root certificates either.",
    ),
    (
        "PLATFORM",
        "`openshift` takes the user ids of injected containers from namespaces.",
    ),
    (
        "POD_NAME",
        "Name of this replica in locks, WorkloadEntries and debug pages.",
    ),
    ("POD_NAMESPACE", "Default of `--namespace`."),
    ("REVISION", "Revision of this control plane; empty for all revisions."),
    (
        "ROOT_CA_DIR",
        "Folder of the plugged-in CA; `./etc/cacerts` by default.",
    ),
    (
        "SERVICE_ACCOUNT",
        "Service account of this control plane, by which replicas know each other; `istiod` by default.",
    ),
    (
        "SHARED_MESH_CONFIG",
        "ConfigMap whose mesh config is the base of the own one, and whose networks replace the own ones.",
    ),
    (
        "TOKEN_ISSUER",
        "Outside a cluster: issuer of further tokens that certificates may be requested with; by default that of \
         istiod's own token.",
    ),
    (
        "USE_CACERTS_FOR_SELF_SIGNED_CA",
        "Stores the self-signed root in Secret `cacerts`.",
    ),
    (
        "VALIDATION_WEBHOOK_CONFIG_NAME",
        "If set and empty, webhook configurations of the validator are not written.",
    ),
];

const SHARED: &str = "encoded resources are always shared, and there is no cache to configure";
const GO: &str = "it configures the Go runtime or Go libraries";
const AGENT: &str = "agents read it, not the control plane";
const ON_DEMAND: &str = "scopes are built on demand, once for all proxies";

/// Variables without effect, with the reason. The daemon warns about those that are set.
pub const WITHOUT_EFFECT: &[Described] = &[
    (
        "AMBIENT_SCOPED_ADDRESS_PUSHES",
        "a change is always pushed only to proxies whose configuration it changes",
    ),
    ("ENABLE_LAZY_SIDECAR_EVALUATION", ON_DEMAND),
    ("ENABLE_VTPROTOBUF", GO),
    ("ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL", AGENT),
    ("ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION", AGENT),
    ("ISTIO_DELTA_XDS", AGENT),
    (
        "ISTIO_ENABLE_CONTROLLER_QUEUE_METRICS",
        "there are no controller queues",
    ),
    (
        "ISTIO_KUBE_CLIENT_CONTENT_TYPE",
        "the API server is always asked for JSON",
    ),
    ("ISTIO_WASM_MAX_BINARY_SIZE_BYTES", AGENT),
    ("MUTEX_PROFILE_FRACTION", GO),
    ("PILOT_AGENT_MERGE_ENVOY_STATS", AGENT),
    ("PILOT_CONVERT_SIDECAR_SCOPE_CONCURRENCY", ON_DEMAND),
    ("PILOT_ENABLE_AGENTGATEWAY", "agentgateway is not served"),
    ("PILOT_ENABLE_CDS_CACHE", SHARED),
    ("PILOT_ENABLE_RDS_CACHE", SHARED),
    ("PILOT_ENABLE_XDS_CACHE", SHARED),
    (
        "PILOT_PUSH_THROTTLE",
        "configuration is generated once for all proxies that share it; responses are bounded by their bytes",
    ),
    ("PILOT_STATUS_MAX_WORKERS", "status writers do not queue"),
    ("PILOT_XDS_CACHE_INDEX_CLEAR_INTERVAL", SHARED),
    ("PILOT_XDS_CACHE_SIZE", SHARED),
    ("PILOT_XDS_CACHE_STATS", SHARED),
    ("UNSAFE_PILOT_ENABLE_DELTA_TEST", "it serves tests of Istio itself"),
    (
        "UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS",
        "it serves tests of Istio itself",
    ),
    ("USE_REMOTE_CERTS", "the plugged-in CA is read from ROOT_CA_DIR"),
];
