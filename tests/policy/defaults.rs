//! R16: paths are normalized as the mesh config says before policies see them. R14: policies do not depend on the
//! proxy's version.

use istiod::{
    model::Installation,
    proto::envoy::extensions::filters::network::http_connection_manager::v3::{
        HttpConnectionManager, http_connection_manager::PathWithEscapedSlashesAction,
    },
};
use libtest_mimic::Failed;

use serde_json::json;

use super::{
    differential::mesh,
    fixture::{Fixture, sidecar, unpacked},
};

/// The test of R16.
pub(super) fn r16_paths_are_normalized_as_configured() -> Result<(), Failed> {
    let (keep, unescape) = (
        PathWithEscapedSlashesAction::KeepUnchanged,
        PathWithEscapedSlashesAction::UnescapeAndForward,
    );
    // (option, dots are resolved, slashes merged, escaped slashes)
    let cases = [
        ("", true, false, keep),
        ("DEFAULT", true, false, keep),
        ("NONE", false, false, keep),
        ("BASE", true, false, keep),
        ("MERGE_SLASHES", true, true, keep),
        ("DECODE_AND_MERGE_SLASHES", true, true, unescape),
    ];
    for (chosen, dots, slashes, escaped) in cases {
        let mesh = match chosen {
            "" => "{}".to_owned(),
            chosen => format!("pathNormalization: {{normalization: {chosen}}}"),
        };
        let fixture = Fixture::new(Installation::default(), &mesh, "")?;
        let managers: Vec<HttpConnectionManager> = fixture
            .names(istiod::generate::ResourceType::Listener)
            .iter()
            .filter_map(|name| fixture.listener(name).ok())
            .flat_map(|listener| listener.filter_chains.into_iter().chain(listener.default_filter_chain))
            .flat_map(|chain| chain.filters)
            .filter_map(|filter| unpacked(&filter))
            .collect();
        if managers.len() < 2 {
            return Err("no inbound or outbound connection manager".into());
        }
        for manager in managers {
            let found = (
                manager.normalize_path == Some(dots),
                manager.merge_slashes == slashes,
                manager.path_with_escaped_slashes_action() == escaped,
            );
            if found != (true, true, true) {
                let prefix = manager.stat_prefix;
                return Err(format!("{chosen:?}: {prefix}: (dots, slashes, escaped) as expected: {found:?}").into());
            }
        }
    }
    Ok(())
}

/// Policies of every action.
const POLICIES: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: deny, namespace: foo}
spec: {action: DENY, rules: [{from: [{source: {trustDomains: ['other*'], serviceAccounts: [bad]}}], to: [{operation: {paths: ['/a/{*}']}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: audit, namespace: foo}
spec: {action: AUDIT, rules: [{}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: ask, namespace: foo}
spec: {action: CUSTOM, provider: {name: default}, rules: [{to: [{operation: {hosts: [a]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: allow, namespace: foo}
spec: {rules: [{from: [{source: {requestPrincipals: ['*']}}]}]}
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: tokens, namespace: foo}
spec: {jwtRules: [{issuer: i, jwks: '{\"keys\": []}'}]}
---
";

/// The supported versions, and a proxy without a version.
const VERSIONS: [&str; 6] = ["1.28.0", "1.28.9", "1.29.0", "1.29.2", "1.30.3", ""];

/// The test of R14. Golden cases cover the other resources of older proxies.
pub(super) fn r14_policies_are_equal_for_all_proxy_versions() -> Result<(), Failed> {
    let filters = |version: &str| {
        let proxy = sidecar(&json!({"ISTIO_VERSION": version}));
        let fixture = Fixture::of(Installation::default(), &mesh(), POLICIES, proxy)?;
        let is_security = |name: &str| ["rbac", "ext_authz", "jwt_authn"].iter().any(|end| name.ends_with(end));
        let mut http = fixture.http_filters()?;
        http.retain(|filter| is_security(&filter.name));
        let mut network = fixture.network_filters()?;
        network.retain(|filter| is_security(&filter.name));
        Ok::<_, Failed>((http, network))
    };
    let newest = filters("1.30.3")?;
    if (newest.0.len(), newest.1.len()) != (6, 5) {
        return Err(format!("{} and {} filters", newest.0.len(), newest.1.len()).into());
    }
    let other = VERSIONS
        .iter()
        .map(|version| Ok((version, filters(version)? == newest)));
    match other
        .collect::<Result<Vec<_>, Failed>>()?
        .iter()
        .find(|(_, equal)| !equal)
    {
        Some((version, _)) => Err(format!("different filters for version {version:?}").into()),
        None => Ok(()),
    }
}
