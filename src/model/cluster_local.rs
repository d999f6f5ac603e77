//! Cluster-local hosts, whose endpoints are used only by clients of the same cluster.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::{base::host, table::Cx};

/// Default cluster-local hosts, without the domain.
const DEFAULTS: &[&str] = &["*.kube-system.svc", "kubernetes.default.svc"];

/// Cluster-local hosts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ClusterLocalHosts {
    /// Hosts and wildcards, with whether matching hosts are local; the most specific one decides.
    hosts: BTreeMap<SmolStr, bool>,
}

impl ClusterLocalHosts {
    /// Returns true if a host (or wildcard) is cluster-local.
    pub fn is_local(&self, hostname: &str) -> bool {
        if let Some(local) = self.hosts.get(hostname) {
            return *local;
        }
        let wildcards = self.hosts.iter().filter(|(pattern, _)| host::is_wildcard(pattern));
        let matching = wildcards.filter(|(pattern, _)| host::subset_of(hostname, pattern));
        matching
            .min_by(|(a, _), (b, _)| host::more_specific(a, b))
            .is_some_and(|(_, local)| *local)
    }
}

impl MeshSnapshot {
    /// Returns true if a host is cluster-local: the most specific of the mesh's settings and defaults decides.
    pub fn is_cluster_local(&self, cx: &Cx, hostname: &str) -> bool {
        let hosts = self.cluster_local.get(cx, &());
        hosts.is_some_and(|hosts| hosts.is_local(hostname))
    }
}

/// Derives the hosts: `serviceSettings` of the mesh, and the defaults that these do not override.
pub fn hosts(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<ClusterLocalHosts> {
    let config = mesh.mesh_config(cx);
    let mut hosts = BTreeMap::new();
    for entry in &config.service_settings {
        let local = entry.settings.is_some_and(|settings| settings.cluster_local);
        hosts.extend(entry.hosts.iter().map(|pattern| (SmolStr::new(pattern), local)));
    }
    let domain = &mesh.installation.domain;
    let mut defaults: Vec<String> = DEFAULTS.iter().map(|host| format!("{host}.{domain}")).collect();
    let discovery = config.default_config.as_ref().map(|config| &config.discovery_address);
    if let Some((address, _)) = discovery.and_then(|address| address.rsplit_once(':')) {
        let whole = address.ends_with(domain.as_str());
        defaults.push(if whole {
            address.to_owned()
        } else {
            format!("{address}.{domain}")
        });
    }
    let taken_back = |default: &String| {
        let mut not_local = hosts.iter().filter(|(_, local)| !**local);
        not_local.any(|(pattern, _)| match default.strip_prefix('*') {
            Some(suffix) => pattern.ends_with(suffix),
            None => pattern == default,
        })
    };
    defaults.retain(|default| !taken_back(default));
    hosts.extend(defaults.into_iter().map(|default| (SmolStr::new(default), true)));
    Some(ClusterLocalHosts { hosts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{fixture, installation::Installation};

    /// Returns the hosts of `all` that are local with these `serviceSettings`.
    fn local(settings: &str) -> Vec<&'static str> {
        let all = [
            "a.default.svc.cluster.local",
            "b.default.svc.cluster.local",
            "dns.kube-system.svc.cluster.local",
            "other.kube-system.svc.cluster.local",
            "kubernetes.default.svc.cluster.local",
            "istiod.istio-system.svc.cluster.local",
            "x.com",
        ];
        let text = format!("serviceSettings: {settings}");
        let world = fixture::folder_world(Installation::default(), &[("mesh.yaml", text.as_str())]);
        let mesh = world.snapshot();
        let hosts = mesh.cluster_local.get(&Cx::untracked(), &()).unwrap();
        let all = all.into_iter().filter(|host| hosts.is_local(host));
        all.map(|host| host.split(".svc").next().unwrap()).collect()
    }

    #[test]
    fn settings_extend_the_defaults() {
        let defaults = [
            "dns.kube-system",
            "other.kube-system",
            "kubernetes.default",
            "istiod.istio-system",
        ];
        assert_eq!(local("[]"), defaults);
        let services = "[{settings: {clusterLocal: true}, hosts: [a.default.svc.cluster.local, x.com]}]";
        assert_eq!(local(services), [&["a.default"][..], &defaults, &["x.com"]].concat());
    }

    #[test]
    fn default_hosts_can_be_disabled() {
        let exact = "[{settings: {clusterLocal: false}, hosts: [kubernetes.default.svc.cluster.local, istiod.istio-system.svc.cluster.local]}]";
        assert_eq!(local(exact), ["dns.kube-system", "other.kube-system"]);
        // A host below the wildcard overrides the whole wildcard.
        let below = "[{settings: {}, hosts: [dns.kube-system.svc.cluster.local]}]";
        assert_eq!(local(below), ["kubernetes.default", "istiod.istio-system"]);
        // A wider wildcard does not: the default is more specific.
        let wide = "[{settings: {clusterLocal: false}, hosts: ['*']}]";
        assert_eq!(local(wide).len(), 4);
    }

    #[test]
    fn the_most_specific_host_decides() {
        let settings = "[{settings: {clusterLocal: true}, hosts: ['*.default.svc.cluster.local']},
            {settings: {clusterLocal: false}, hosts: [b.default.svc.cluster.local, '*.svc.cluster.local']}]";
        let want = [
            "a.default",
            "dns.kube-system",
            "other.kube-system",
            "kubernetes.default",
            "istiod.istio-system",
        ];
        assert_eq!(local(settings), want);
    }
}
