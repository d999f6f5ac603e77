//! Validation of traffic policies, and of those parts that Sidecars and the mesh config share.

use std::collections::BTreeSet;

use prost::Message;

use super::{common, field_path::FieldPath};
use crate::{
    api::names::{is_fqdn, is_header_or_pseudo_header},
    base::cidr,
    proto::istio::networking::v1alpha3::{
        ClientTlsSettings, ConnectionPoolSettings, LoadBalancerSettings, LocalityLoadBalancerSetting, OutlierDetection,
        TrafficPolicy,
        client_tls_settings::TlSmode as Mode,
        connection_pool_settings::http_settings::H2UpgradePolicy,
        load_balancer_settings::{
            ConsistentHashLb, LbPolicy,
            consistent_hash_lb::{HashAlgorithm, HashKey},
        },
        traffic_policy::{PortTrafficPolicy, TunnelSettings},
    },
};

/// The maximum size of Envoy's hash ring.
const MAX_RING: u64 = 8_388_608;
/// The maximum length of a server name in bytes.
pub const MAX_SERVER_NAME: usize = 255;
/// The maximum size of Envoy's Maglev table.
const MAX_MAGLEV: u64 = 5_000_011;
/// The limit of localities that are compared with each other. The weights of more cannot add up to 100.
const MAX_COMPARED: usize = 100;
/// The maximum numbers of labels in `failoverPriority`, and of entries in `failover` and in `distribute`. The lists are
/// read for each port, subset and location of clients.
const MAX_FAILOVER_LABELS: usize = 256;
const MAX_LOCALITY_RULES: usize = 1000;
/// The maximum size in bytes of a label or locality in these lists. Labels of Kubernetes are shorter.
const MAX_LOCALITY_TEXT: usize = 512;
/// The labels of regions, zones and subzones.
const LOCALITY_LABELS: [&str; 3] = [
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.istio.io/subzone",
];
/// The maximum size in bytes of the key of a consistent hash, which is part of every route to the host.
const MAX_HASH_KEY: usize = 1024;

/// Checks the policy of a rule in a namespace, or of one of its subsets.
pub fn check(at: &FieldPath<'_>, policy: Option<&TrafficPolicy>, namespace: &str) {
    let Some(policy) = policy else { return };
    let at = at.field("trafficPolicy");
    if *policy == TrafficPolicy::default() {
        at.refuse("has no field");
    }
    CommonSettings::from(policy).check(&at, namespace);
    at.each("portLevelSettings", &policy.port_level_settings, |at, policy| {
        port_policy(at, policy, namespace);
    });
    if let Some(settings) = &policy.tunnel {
        tunnel(&at.field("tunnel"), settings);
        at.require_on_admission(
            policy.proxy_protocol.is_none(),
            "tunnel and proxyProtocol cannot be combined",
        );
    }
    if let Some(percent) = policy.retry_budget.as_ref().and_then(|budget| budget.percent) {
        at.field("retryBudget")
            .field("percent")
            .require((0.0..=100.0).contains(&percent), "want 0 to 100");
    }
}

fn port_policy(at: &FieldPath<'_>, policy: &PortTrafficPolicy, namespace: &str) {
    match &policy.port {
        // Istio admits such an object, and serves its other settings.
        Some(port) if !(1..=65_535).contains(&port.number) => at
            .field("port")
            .field("number")
            .warning("is not a port, so the settings have no effect"),
        Some(_) => {}
        None => at.field("port").error("is required"),
    }
    let common = CommonSettings::from(policy);
    at.require_on_admission(common != CommonSettings::default(), "needs a setting besides the port");
    common.check(at, namespace);
}

/// The settings that policies for all ports and for one port share.
///
/// Note: messages are taken apart without `..` here, so that a new field cannot be forgotten: in [`check`], in the
/// policies of clusters, and in the size of a policy.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct CommonSettings<'a> {
    /// Load balancing.
    pub load_balancer: Option<&'a LoadBalancerSettings>,
    /// Connection pool.
    pub connection_pool: Option<&'a ConnectionPoolSettings>,
    /// Outlier detection.
    pub outlier_detection: Option<&'a OutlierDetection>,
    /// TLS towards the servers.
    pub tls: Option<&'a ClientTlsSettings>,
}

impl<'a> From<&'a TrafficPolicy> for CommonSettings<'a> {
    fn from(policy: &'a TrafficPolicy) -> Self {
        let TrafficPolicy {
            load_balancer,
            connection_pool,
            outlier_detection,
            tls,
            port_level_settings: _,
            tunnel: _,
            proxy_protocol: _,
            retry_budget: _,
        } = policy;
        Self {
            load_balancer: load_balancer.as_deref(),
            connection_pool: connection_pool.as_ref(),
            outlier_detection: outlier_detection.as_ref(),
            tls: tls.as_deref(),
        }
    }
}

impl<'a> From<&'a PortTrafficPolicy> for CommonSettings<'a> {
    fn from(policy: &'a PortTrafficPolicy) -> Self {
        let PortTrafficPolicy {
            port: _,
            load_balancer,
            connection_pool,
            outlier_detection,
            tls,
        } = policy;
        Self {
            load_balancer: load_balancer.as_deref(),
            connection_pool: connection_pool.as_ref(),
            outlier_detection: outlier_detection.as_ref(),
            tls: tls.as_deref(),
        }
    }
}

impl CommonSettings<'_> {
    fn check(&self, at: &FieldPath<'_>, namespace: &str) {
        if let Some(settings) = self.load_balancer {
            load_balancer(&at.field("loadBalancer"), settings, self.outlier_detection.is_some());
        }
        connection_pool(&at.field("connectionPool"), self.connection_pool);
        if let Some(settings) = self.outlier_detection {
            outlier_detection(&at.field("outlierDetection"), settings);
        }
        if let Some(settings) = self.tls {
            client_tls(&at.field("tls"), settings, namespace);
        }
    }
}

fn tunnel(at: &FieldPath<'_>, tunnel: &TunnelSettings) {
    let protocol = at.field("protocol");
    protocol.require(
        matches!(tunnel.protocol.as_str(), "" | "CONNECT" | "POST"),
        "want CONNECT or POST",
    );
    let target = tunnel.target_host.as_str();
    at.field("targetHost")
        .require(is_fqdn(target) || cidr::parse_ip(target).is_some(), "is not a host");
    common::port(&at.field("targetPort"), tunnel.target_port);
}

/// Checks the settings of connection pools.
pub fn connection_pool(at: &FieldPath<'_>, pool: Option<&ConnectionPoolSettings>) {
    let Some(pool) = pool else { return };
    at.require_on_admission(pool.tcp.is_some() || pool.http.is_some(), "needs tcp or http");
    if let Some(http) = &pool.http {
        let at = at.field("http");
        for (name, count) in [
            ("http1MaxPendingRequests", http.http1_max_pending_requests),
            ("http2MaxRequests", http.http2_max_requests),
            ("maxRequestsPerConnection", http.max_requests_per_connection),
            ("maxRetries", http.max_retries),
            ("maxConcurrentStreams", http.max_concurrent_streams),
        ] {
            at.field(name).require(count >= 0, "must not be negative");
        }
        at.require_on_admission(
            !http.use_client_protocol || http.h2_upgrade_policy != H2UpgradePolicy::Upgrade as i32,
            "useClientProtocol and h2UpgradePolicy UPGRADE cannot be combined",
        );
        not_negative(&at.field("idleTimeout"), http.idle_timeout.as_ref());
    }
    if let Some(tcp) = &pool.tcp {
        let at = at.field("tcp");
        at.field("maxConnections")
            .require(tcp.max_connections >= 0, "must not be negative");
        common::duration(&at.field("connectTimeout"), tcp.connect_timeout.as_ref());
        common::duration(&at.field("maxConnectionDuration"), tcp.max_connection_duration.as_ref());
        // Parity (pkg/config/validation/validation.go, `validateConnectionPool`): here, admission accepts 0.
        let idle = tcp.idle_timeout.filter(|idle| !is_short(idle));
        not_negative(&at.field("idleTimeout"), idle.as_ref());
        if let Some(keepalive) = &tcp.tcp_keepalive {
            let at = at.field("tcpKeepalive");
            common::duration_on_admission(&at.field("time"), keepalive.time.as_ref());
            common::duration_on_admission(&at.field("interval"), keepalive.interval.as_ref());
        }
    }
}

/// Checks a duration that may be 0, which disables the feature, although admission refuses it.
fn not_negative(at: &FieldPath<'_>, duration: Option<&prost_types::Duration>) {
    let Some(duration) = duration else { return };
    if duration.seconds < 0 || duration.nanos < 0 {
        at.error("must not be negative");
    } else {
        at.require_on_admission(!is_short(duration), "the duration must be at least 1ms");
        at.require_on_admission(duration.nanos % 1_000_000 == 0, "only whole milliseconds are supported");
    }
}

/// Returns true for less than a millisecond that is not negative.
fn is_short(duration: &prost_types::Duration) -> bool {
    duration.seconds == 0 && (0..1_000_000).contains(&duration.nanos)
}

fn outlier_detection(at: &FieldPath<'_>, outlier: &OutlierDetection) {
    common::duration(&at.field("baseEjectionTime"), outlier.base_ejection_time.as_ref());
    common::duration(&at.field("interval"), outlier.interval.as_ref());
    if outlier.consecutive_errors != 0 {
        at.field("consecutiveErrors")
            .warning("is deprecated, write consecutive5xxErrors or consecutiveGatewayErrors");
    }
    at.require_on_admission(
        outlier.split_external_local_origin_errors || outlier.consecutive_local_origin_failures.unwrap_or(0) == 0,
        "consecutiveLocalOriginFailures needs splitExternalLocalOriginErrors",
    );
    for (name, percent) in [
        ("maxEjectionPercent", outlier.max_ejection_percent),
        ("minHealthPercent", outlier.min_health_percent),
    ] {
        at.field(name)
            .require((0..=100).contains(&percent), "is not a percentage, want 0 to 100");
    }
}

fn load_balancer(at: &FieldPath<'_>, settings: &LoadBalancerSettings, has_outlier: bool) {
    if let Some(LbPolicy::ConsistentHash(hash)) = &settings.lb_policy {
        consistent_hash(&at.field("consistentHash"), hash);
    }
    // Parity (pkg/config/validation/validation.go, `validateLoadBalancer`): admission does not check the old field. 0
    // turns the feature off. Envoy refuses a cluster with a negative one.
    let old = settings.warmup_duration_secs.as_ref();
    at.field("warmupDurationSecs").require(
        old.is_none_or(|old| old.seconds >= 0 && old.nanos >= 0),
        "must not be negative",
    );
    if let Some(warmup) = &settings.warmup {
        let at = at.field("warmup");
        at.field("duration").require(warmup.duration.is_some(), "is required");
        common::duration(&at.field("duration"), warmup.duration.as_ref());
        let percent = warmup.minimum_percent.unwrap_or_default();
        at.field("minimumPercent")
            .require((0.0..=100.0).contains(&percent), "want 0 to 100");
        at.field("aggression")
            .require(warmup.aggression.unwrap_or(1.0) >= 1.0, "must be at least 1");
    }
    if let Some(locality) = &settings.locality_lb_setting {
        let at = at.field("localityLbSetting");
        self::locality(&at, locality);
        let failover = !locality.failover.is_empty() || !locality.failover_priority.is_empty();
        if failover && !has_outlier {
            at.warning("failover has an effect only with outlierDetection");
        }
    }
}

fn consistent_hash(at: &FieldPath<'_>, hash: &ConsistentHashLb) {
    let limit = |at: &FieldPath<'_>, size: usize| at.require(size <= MAX_HASH_KEY, "has more than 1024 bytes");
    match &hash.hash_key {
        Some(HashKey::HttpHeaderName(name)) => {
            let at = at.field("httpHeaderName");
            if name.is_empty() || !common::is_header_text(name) {
                at.error("is not a header name");
            } else if !is_header_or_pseudo_header(name) {
                // Istio admits such an object, and Envoy finds no such header.
                at.warning("is not a header name");
            }
            limit(&at, name.len());
        }
        Some(HashKey::HttpCookie(cookie)) => {
            let at = at.field("httpCookie");
            limit(&at, cookie.encoded_len());
            at.field("name").require(!cookie.name.is_empty(), "is required");
            let mut seen = BTreeSet::new();
            at.each("attributes", &cookie.attributes, |at, attribute| {
                at.field("name").require(!attribute.name.is_empty(), "is required");
                at.field("name").require(seen.insert(&attribute.name), "is a duplicate");
                common::header_text(&at.field("name"), &attribute.name);
                common::header_text(&at.field("value"), &attribute.value);
            });
        }
        Some(HashKey::HttpQueryParameterName(name)) => {
            let at = at.field("httpQueryParameterName");
            at.require(!name.is_empty(), "is required");
            limit(&at, name.len());
        }
        Some(HashKey::UseSourceIp(_)) => {}
        // Istio admits such an object, and serves the algorithm: proxies choose an endpoint at random.
        None => at.warning("has no key to hash"),
    }
    if hash.minimum_ring_size != 0 {
        let at = at.field("minimumRingSize");
        at.warning("is deprecated, write ringHash.minimumRingSize");
        at.require(
            hash.hash_algorithm.is_none(),
            "cannot be combined with ringHash or maglev",
        );
        ring_size(&at, hash.minimum_ring_size);
    }
    if let Some(HashAlgorithm::RingHash(ring)) = &hash.hash_algorithm {
        ring_size(&at.field("ringHash").field("minimumRingSize"), ring.minimum_ring_size);
    }
    if let Some(HashAlgorithm::Maglev(maglev)) = &hash.hash_algorithm {
        let maglev_at = at.field("maglev");
        let at = maglev_at.field("tableSize");
        if maglev.table_size == 0 {
            return at.refuse("is required");
        }
        at.require(maglev.table_size < MAX_MAGLEV, "must be below 5000011");
        at.require(is_prime(maglev.table_size.min(MAX_MAGLEV)), "must be a prime number");
    }
}

/// Checks the size of a hash ring. Because of a larger one, Envoy refuses all clusters that it is sent with.
fn ring_size(at: &FieldPath<'_>, size: u64) {
    at.require(size <= MAX_RING, "must be at most 8388608");
}

/// Returns true for a prime number, and for 1, as in Envoy.
fn is_prime(number: u64) -> bool {
    number >= 1
        && (2..=number)
            .take_while(|divisor| divisor * divisor <= number)
            .all(|divisor| !number.is_multiple_of(divisor))
}

/// Checks the locality settings of a rule or of the mesh.
pub fn locality(at: &FieldPath<'_>, setting: &LocalityLoadBalancerSetting) {
    if locality_limits(at, setting) {
        locality_rules(at, setting);
    }
}

/// Checks the lengths of locality settings. Returns true if no list is too long.
fn locality_limits(at: &FieldPath<'_>, setting: &LocalityLoadBalancerSetting) -> bool {
    let labels = at.field("failoverPriority");
    let rules = [
        (at.field("failover"), setting.failover.len()),
        (at.field("distribute"), setting.distribute.len()),
    ];
    let mut is_short = setting.failover_priority.len() <= MAX_FAILOVER_LABELS;
    labels.require(is_short, "has more than 256 labels");
    for (at, count) in rules {
        at.require(count <= MAX_LOCALITY_RULES, "has more than 1000 entries");
        is_short &= count <= MAX_LOCALITY_RULES;
    }
    is_short
}

/// Checks that a label or locality is not too long.
fn locality_text(at: &FieldPath<'_>, text: &str) {
    at.require(text.len() <= MAX_LOCALITY_TEXT, "has more than 512 bytes");
}

fn locality_rules(at: &FieldPath<'_>, setting: &LocalityLoadBalancerSetting) {
    at.each("failoverPriority", &setting.failover_priority, |at, label| {
        locality_text(at, label);
    });
    at.require_on_admission(
        setting.distribute.is_empty() || setting.failover.is_empty(),
        "distribute and failover cannot be combined",
    );
    let mut labels = setting.failover_priority.iter();
    at.require_on_admission(
        setting.failover.is_empty() || !labels.any(|label| LOCALITY_LABELS.contains(&label.as_str())),
        "failover and labels of localities in failoverPriority cannot be combined",
    );
    let (mut sources, mut compared) = (BTreeSet::<&str>::new(), Vec::<&str>::new());
    at.each("distribute", &setting.distribute, |at, distribute| {
        let from = at.field("from");
        locality_text(&from, &distribute.from);
        locality_parts(&from, &distribute.from);
        let star = distribute.from.find('*');
        from.require_on_admission(
            star.is_none_or(|star| star + 1 == distribute.from.len()),
            "`*` may only come last",
        );
        if !sources.insert(&distribute.from) {
            from.error("is a duplicate");
        } else if compared.iter().any(|earlier| hides(earlier, &distribute.from)) {
            from.refuse("overlaps with another one");
        }
        if compared.len() < MAX_COMPARED {
            compared.push(&distribute.from);
        }
        let at = at.field("to");
        let sum: u64 = distribute.to.values().map(|weight| u64::from(*weight)).sum();
        at.require(sum == 100, "the weights must add up to 100");
        for (locality, weight) in &distribute.to {
            locality_text(&at.field(locality), locality);
            locality_parts(&at.field(locality), locality);
            at.field(locality)
                .require((1..=100).contains(weight), "want a weight from 1 to 100");
            let star = locality.find('*');
            at.field(locality).require(
                star.is_none_or(|star| star + 1 == locality.len()),
                "`*` may only come last",
            );
            let mut others = distribute.to.keys().take_while(|other| *other < locality);
            if distribute.to.len() <= MAX_COMPARED && others.any(|other| hides(other, locality)) {
                at.field(locality).refuse("overlaps with another one");
            }
        }
    });
    at.each("failover", &setting.failover, |at, failover| {
        locality_text(&at.field("from"), &failover.from);
        locality_text(&at.field("to"), &failover.to);
        at.require(failover.from != failover.to, "needs two different regions");
        for region in [&failover.from, &failover.to] {
            at.require(!region.contains(['*', '/']), "names regions only, without `*` and `/`");
        }
    });
}

/// Returns region, zone and subzone.
fn parts(locality: &str) -> impl Iterator<Item = &str> {
    locality.splitn(3, '/')
}

/// Checks that no part of a locality is empty.
fn locality_parts(at: &FieldPath<'_>, locality: &str) {
    at.require_on_admission(parts(locality).all(|part| !part.is_empty()), "has an empty part");
}

/// Returns true if an earlier locality covers a later one: `region` and `region/*` cover `region/zone`.
///
/// Parity (pkg/config/validation/agent/validation.go, `validateLocalities`): the order counts. `region/*` may follow
/// `region/zone` and covers the remaining zones; `region` may not.
fn hides(earlier: &str, later: &str) -> bool {
    let mut pairs = parts(earlier).zip(parts(later));
    pairs.all(|(earlier, later)| earlier == later || earlier == "*")
}

/// Checks the TLS settings of a client, in a rule of a namespace or, with an empty one, in the mesh config.
pub fn client_tls(at: &FieldPath<'_>, tls: &ClientTlsSettings, namespace: &str) {
    if let Some(name) = tls.credential_name.strip_prefix("configmap://") {
        let parts: Vec<&str> = name.split('/').collect();
        at.field("credentialName").require_on_admission(
            matches!(parts[..], [of, name] if of == namespace && !of.is_empty() && !name.is_empty()),
            "names no ConfigMap of the own namespace",
        );
    }
    let mode = tls.mode();
    at.field("sni").require(
        mode == Mode::Disable || tls.sni.len() <= MAX_SERVER_NAME,
        "has more than 255 bytes",
    );
    // Other modes have no use for certificates of the rule.
    let has_certificates = matches!(mode, Mode::Simple | Mode::Mutual);
    if has_certificates && !tls.credential_name.is_empty() {
        let files = [&tls.client_certificate, &tls.private_key, &tls.ca_certificates];
        let any_file = files.iter().any(|file| !file.is_empty());
        at.require_on_admission(!any_file, "credentialName cannot be combined with certificate files");
        at.field("caCrl")
            .require_on_admission(tls.ca_crl.is_empty(), "cannot be combined with credentialName");
    }
    if tls.insecure_skip_verify == Some(true) && has_certificates {
        // With MUTUAL, the credential also has the certificate of the client.
        let by_credential = mode == Mode::Simple && !tls.credential_name.is_empty();
        let checks = by_credential || !tls.ca_certificates.is_empty() || !tls.subject_alt_names.is_empty();
        at.require_on_admission(
            !checks,
            "insecureSkipVerify cannot be combined with CA certificates and subjectAltNames",
        );
    }
    if mode == Mode::Mutual && tls.credential_name.is_empty() {
        at.field("clientCertificate")
            .require(!tls.client_certificate.is_empty(), "or credentialName is required");
        at.field("privateKey")
            .require(!tls.private_key.is_empty(), "or credentialName is required");
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::{
        api::{
            FieldError,
            istio::{ErrorPolicy, Validation},
        },
        proto::istio::networking::v1alpha3::locality_load_balancer_setting::Distribute,
    };

    /// Returns the fields with errors and with refusals.
    fn findings(distribute: Vec<Distribute>) -> (Vec<String>, Vec<String>) {
        let validation = RefCell::<Validation>::default();
        let setting = LocalityLoadBalancerSetting {
            distribute,
            ..Default::default()
        };
        locality(&FieldPath::root("", ErrorPolicy::Reject, &validation), &setting);
        let found = validation.into_inner();
        let fields = |found: Vec<FieldError>| found.into_iter().map(|found| found.field).collect();
        (fields(found.errors), fields(found.refusals))
    }

    fn from(locality: &str) -> Distribute {
        Distribute {
            from: locality.to_owned(),
            to: [("a".to_owned(), 100)].into(),
        }
    }

    #[test]
    fn a_limited_number_of_localities_is_compared() {
        let distinct = |count: usize| (0..count).map(|number| format!("r{number}"));
        let of = |localities: &[&str]| {
            let all = distinct(MAX_COMPARED).map(|locality| from(&locality));
            findings(all.chain(localities.iter().map(|locality| from(locality))).collect())
        };
        let at = |number: usize, field: &str| format!("distribute[{number}].{field}");
        let expected = vec![at(MAX_COMPARED, "from")];
        assert_eq!(of(&["r1/z", "s", "s/z"]), (Vec::new(), expected));
        let expected = vec![at(MAX_COMPARED + 1, "from")];
        assert_eq!(of(&["s", "s"]), (expected, Vec::new()), "every duplicate is found");

        let to = |count: usize| {
            let all = distinct(count - 2).chain(["s".to_owned(), "s/z".to_owned()]);
            findings(vec![Distribute {
                from: "a".to_owned(),
                to: all.map(|locality| (locality, 1)).collect(),
            }])
        };
        assert_eq!(to(MAX_COMPARED), (Vec::new(), vec![at(0, "to.s/z")]));
        assert_eq!(to(MAX_COMPARED + 1), (vec![at(0, "to")], Vec::new()));
    }
}
