//! Secrets that images of plugins are pulled with. The proxy's agent takes them out before Envoy sees the configuration.
//!
//! What one would get wrong: whatever namespace is written, the Secret is that of the plugin's own namespace.

use crate::{
    base::{ClusterId, Namespace, Sensitive},
    generate::{BuildContext, proxy_class::ProxyClass},
    model::credential::{SECRET, Secrets},
};

/// The cluster that Secrets are looked up for, if the client has shown who it is.
pub(super) fn reader(profile: &ProxyClass) -> Option<ClusterId> {
    let is_known = profile.identity.is_some();
    is_known.then(|| profile.kind.cluster.clone())
}

/// The name under which a Secret is asked for; `None` if there is no making sense of it.
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
            let (of, name) = (parts.next()?, parts.next()?);
            return (!of.is_empty() && !name.is_empty()).then(|| format!("{scheme}{namespace}/{name}"));
        }
    }
    let rest = typed(SECRET).unwrap_or(written);
    let mut parts = rest.split('/');
    let first = parts.next().unwrap_or_default();
    let name = parts.next().unwrap_or(first);
    Some(format!("{SECRET}{namespace}/{name}"))
}

/// The credentials behind a name of [`resource_name`]: of the client's cluster, else of ours.
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
