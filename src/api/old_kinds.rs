//! Kinds of old releases, which `istiod convert` turns into today's.

/// The groups with their kinds.
const OLD_KINDS: [(&str, &[&str]); 3] = [
    (
        "config.istio.io",
        &[
            "RouteRule",
            "EgressRule",
            "DestinationPolicy",
            "IngressRule",
            "HTTPAPISpec",
            "HTTPAPISpecBinding",
            "QuotaSpec",
            "QuotaSpecBinding",
            "ServiceRole",
            "ServiceRoleBinding",
        ],
    ),
    ("authentication.istio.io", &["Policy", "MeshPolicy"]),
    (
        "rbac.istio.io",
        &["ServiceRole", "ServiceRoleBinding", "RbacConfig", "ClusterRbacConfig"],
    ),
];

/// Returns true for a kind of an old release, by its `apiVersion` and `kind`.
pub fn is_old_kind(api_version: &str, kind: &str) -> bool {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    OLD_KINDS
        .iter()
        .any(|(old_group, kinds)| *old_group == group && kinds.contains(&kind))
}
