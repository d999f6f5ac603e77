//! Image pull secrets of plugins. The proxy's agent removes them before Envoy receives the configuration.
//!
//! Note: the Secret is always that of the plugin's own namespace, whatever namespace is written.

use crate::{
    base::{ClusterId, Namespace, Sensitive},
    generate::{BuildContext, proxy_class::ProxyClass},
    model::credential::{SECRET, Secrets},
};

/// Returns the cluster to look up Secrets for, if the proxy has a verified identity.
pub(super) fn reader(class: &ProxyClass) -> Option<ClusterId> {
    let is_known = class.identity.is_some();
    is_known.then(|| class.node.cluster.clone())
}

/// Returns the resource name of a Secret; `None` if it is malformed.
pub(super) fn resource_name(written: &str, namespace: &Namespace) -> Option<String> {
    let typed = |scheme: &str| written.strip_prefix(scheme);
    if written.is_empty() || typed("builtin://").is_some() {
        return None;
    }
    if typed("invalid://").is_some() {
        return Some(format!("invalid://{namespace}/"));
    }
    for scheme in ["configmap://", "kubernetes-gateway://"] {
        if let Some(rest) = typed(scheme) {
            let mut parts = rest.split('/');
            let (declared_namespace, name) = (parts.next()?, parts.next()?);
            return (!declared_namespace.is_empty() && !name.is_empty()).then(|| format!("{scheme}{namespace}/{name}"));
        }
    }
    let rest = typed(SECRET).unwrap_or(written);
    let mut parts = rest.split('/');
    let first = parts.next().unwrap_or_default();
    let name = parts.next().unwrap_or(first);
    Some(format!("{SECRET}{namespace}/{name}"))
}

/// Returns the credentials for a name of [`resource_name`]: from the proxy's cluster, or else from the config cluster.
pub(super) fn docker_config(ctx: &BuildContext, resource_name: &str, cluster: &ClusterId) -> Option<Sensitive> {
    let (namespace, name) = resource_name.strip_prefix(SECRET)?.split_once('/')?;
    let secrets = Secrets::of(ctx.cx, ctx.mesh, cluster);
    secrets.docker_config(&Namespace::new(namespace), name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_is_always_that_of_the_plugin() {
        let pairs = [
            ("a", Some("kubernetes://own/a")),
            ("other/a", Some("kubernetes://own/a")),
            ("kubernetes://a", Some("kubernetes://own/a")),
            ("kubernetes://other/a/b", Some("kubernetes://own/a")),
            ("kubernetes-gateway://other/a", Some("kubernetes-gateway://own/a")),
            ("kubernetes-gateway://a", None),
            ("configmap://other/", None),
            ("invalid://x", Some("invalid://own/")),
            ("builtin://x", None),
            ("", None),
        ];
        for (written, name) in pairs {
            let found = resource_name(written, &Namespace::new("own"));
            assert_eq!(found.as_deref(), name, "{written}");
        }
    }
}
