//! Domains of virtual hosts: all names under which a client may request a service.

use std::ops::Range;

use crate::{
    base::{Hostname, SmolStr, address::host_port, cidr},
    generate::VipView,
    model::{
        Service,
        service::{Registry, Resolution, UNSPECIFIED_IP},
    },
};

/// Domain of all hosts.
const ANY_HOST: &str = "*";

/// True if domains are repeated with the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortForms {
    /// The route configuration ignores ports.
    Ignored,
    /// Each domain is followed by `domain:port`.
    With(u32),
}

/// Domains of one virtual host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Domains {
    /// All domains in order, possibly repeated.
    pub(crate) all: Vec<String>,
    /// Positions of short and absolute forms. The full name of another host takes precedence over these.
    pub(crate) alternative: Vec<Range<usize>>,
}

/// Name resolution of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameSpace<'a> {
    /// DNS domain of the client, `<namespace>.svc.<suffix>` in Kubernetes.
    pub(crate) dns_domain: &'a str,
    /// True if names with a trailing dot are served too.
    pub(crate) absolute: bool,
}

/// Returns the domains of a service.
pub(crate) fn of_service(service: &Service, names: NameSpace, vip: &VipView, ports: PortForms) -> Domains {
    let mut domains = Domains::default();
    let aliases = service.aliases.iter().map(|alias| alias.hostname.as_str());
    for host in std::iter::once(service.key.hostname.as_str()).chain(aliases) {
        push(&mut domains.all, host, ports);
        let begin = domains.all.len();
        push_alternatives(&mut domains.all, host, names, ports);
        domains.alternative.push(begin..domains.all.len());
    }
    if service.resolution == Resolution::Passthrough && service.registry == Registry::Kubernetes {
        let pods: Vec<String> = domains.all.iter().map(|domain| format!("*.{domain}")).collect();
        domains.all.extend(pods);
    }
    let addresses = match ports {
        PortForms::Ignored => vip.addresses_on_port(service),
        PortForms::With(_) => vip.addresses(service),
    };
    for address in addresses {
        if !address.is_empty() && address != UNSPECIFIED_IP {
            push(&mut domains.all, &address, ports);
        }
    }
    domains
}

/// Returns a host as a domain, with IPv6 addresses in brackets.
pub(crate) fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

fn push(domains: &mut Vec<String>, domain: &str, ports: PortForms) {
    domains.push(bracketed(domain));
    if let PortForms::With(port) = ports {
        domains.push(host_port(domain, port));
    }
}

/// Returns short and absolute forms of a host.
pub(crate) fn alternatives(host: &str, names: NameSpace, ports: PortForms) -> Vec<String> {
    let mut forms = Vec::new();
    push_alternatives(&mut forms, host, names, ports);
    forms
}

fn push_alternatives(result: &mut Vec<String>, host: &str, names: NameSpace, ports: PortForms) {
    if names.absolute {
        let absolute = [host, "."].concat();
        let with_port = match ports {
            PortForms::With(port) => Some(host_port(&absolute, port)),
            PortForms::Ignored => None,
        };
        let is_name = !cidr::is_ip_or_zoned(host);
        result.extend(is_name.then_some(absolute).into_iter().chain(with_port));
    }
    let is_inside = |suffix: &str| host.strip_suffix(suffix).is_some_and(|rest| rest.ends_with(".svc."));
    let forms = match split_dns_domain(names.dns_domain) {
        Some((namespace, suffix)) if is_inside(suffix) => kubernetes_forms(host, namespace),
        // Hosts outside the cluster's domain are not shortened: the short form could hide a service of that name.
        Some(_) => Vec::new(),
        None => shared_suffix_forms(host, names.dns_domain),
    };
    // The short form of a wildcard for the client's own namespace is every host. The last virtual host has that domain,
    // and Envoy refuses all routes of the port if another one has it too.
    for form in forms.iter().filter(|form| *form != ANY_HOST) {
        push(result, form, ports);
    }
}

/// Returns the namespace and the cluster's domain of a client in Kubernetes.
pub(super) fn split_dns_domain(dns_domain: &str) -> Option<(&str, &str)> {
    dns_domain.split_once(".svc.")
}

/// Returns the namespace in the host of a Kubernetes service.
pub(super) fn namespace_of(host: &str) -> Option<&str> {
    let (qualified, _) = host.split_once(".svc.")?;
    Some(qualified.split_once('.')?.1)
}

/// Returns `svc`, `svc.ns.svc` and `svc.ns`, as far as they are unique in the client's namespace.
fn kubernetes_forms(host: &str, client_namespace: &str) -> Vec<String> {
    let Some((qualified, _)) = host.split_once(".svc.") else {
        return Vec::new();
    };
    let (Some((name, _)), Some(namespace)) = (qualified.split_once('.'), namespace_of(host)) else {
        return Vec::new();
    };
    let with_svc = format!("{qualified}.svc");
    if namespace == client_namespace {
        vec![name.to_owned(), with_svc, qualified.to_owned()]
    } else {
        vec![qualified.to_owned(), with_svc]
    }
}

/// Returns the host without the suffix that it shares with the client's domain, for domains outside Kubernetes.
fn shared_suffix_forms(host: &str, dns_domain: &str) -> Vec<String> {
    let labels: Vec<&str> = host.split('.').collect();
    let shared = labels
        .iter()
        .rev()
        .zip(dns_domain.rsplit('.'))
        .take_while(|(a, b)| *a == b)
        .count();
    if shared == 0 {
        return Vec::new();
    }
    let (unique, common) = labels.split_at(labels.len() - shared);
    let short = unique.join(".");
    let longer = (unique.len() == 2).then(|| format!("{short}.{}", common[0]));
    std::iter::once(short).chain(longer).collect()
}

/// Returns the host in lower case, in its allocation if it already is.
pub(super) fn lower_case(host: &Hostname) -> SmolStr {
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        SmolStr::from(host.to_ascii_lowercase())
    } else {
        host.text().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forms(host: &str, dns_domain: &str) -> Vec<String> {
        let names = NameSpace {
            dns_domain,
            absolute: true,
        };
        alternatives(host, names, PortForms::Ignored)
    }

    #[test]
    fn services_of_the_own_namespace_have_their_bare_name() {
        assert_eq!(
            forms("a.ns.svc.cluster.local", "ns.svc.cluster.local"),
            ["a.ns.svc.cluster.local.", "a", "a.ns.svc", "a.ns"]
        );
        assert_eq!(
            forms("a.other.svc.cluster.local", "ns.svc.cluster.local"),
            ["a.other.svc.cluster.local.", "a.other", "a.other.svc"]
        );
    }

    #[test]
    fn addresses_have_one_form() {
        for address in ["10.0.0.1", "fe80::1", "fe80::1%eth0"] {
            assert!(forms(address, "ns.svc.cluster.local").is_empty(), "{address}");
        }
    }

    #[test]
    fn foreign_hosts_are_not_shortened_in_kubernetes() {
        assert_eq!(forms("a.example.com", "ns.svc.cluster.local"), ["a.example.com."]);
        assert_eq!(forms("cluster.local", "ns.svc.cluster.local"), ["cluster.local."]);
    }

    #[test]
    fn shared_domain_suffixes_have_short_forms() {
        assert_eq!(
            forms("foo.local.campus.net", "remote.campus.net"),
            ["foo.local.campus.net.", "foo.local", "foo.local.campus"]
        );
        assert_eq!(
            forms("foo.local.campus.net", "local.campus.net"),
            ["foo.local.campus.net.", "foo"]
        );
        assert_eq!(forms("foo.com", "campus.net"), ["foo.com."]);
    }

    #[test]
    fn wildcards_have_no_short_form_that_is_every_host() {
        assert_eq!(
            forms("*.ns.svc.cluster.local", "ns.svc.cluster.local"),
            ["*.ns.svc.cluster.local.", "*.ns.svc", "*.ns"]
        );
        assert_eq!(forms("*.campus.net", "campus.net"), ["*.campus.net."]);
        let names = NameSpace {
            dns_domain: "ns.svc.cluster.local",
            absolute: false,
        };
        assert_eq!(
            alternatives("*.ns.svc.cluster.local", names, PortForms::With(80)),
            ["*.ns.svc", "*.ns.svc:80", "*.ns", "*.ns:80"]
        );
    }

    #[test]
    fn ports_follow_each_form() {
        let names = NameSpace {
            dns_domain: "ns.svc.cluster.local",
            absolute: false,
        };
        assert_eq!(
            alternatives("a.ns.svc.cluster.local", names, PortForms::With(80)),
            ["a", "a:80", "a.ns.svc", "a.ns.svc:80", "a.ns", "a.ns:80"]
        );
    }
}
