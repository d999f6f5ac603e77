//! Names and domains of virtual hosts. Those of a service are made once for all proxies that see them alike.
//!
//! Without this, a changed VirtualService costs twice the time of generation (1,000 services, 50 namespaces): each
//! namespace has a route configuration, which repeats the names of all services.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    RouteConfigProxyView,
    domains::{self, Domains, NameSpace, PortForms},
    name_set,
};
use crate::{
    base::{Hashed, Hostname, Shared, SmolStr, address::host_port},
    generate::{
        VipView,
        block::Block,
        wire::{Encoded, field_len},
    },
    model::{Service, features::Features},
    proto::{envoy::config::route::v3::VirtualHost, field::virtual_host},
};

/// In place of the client's namespace in a [`NamesView`], for services of other namespaces. No namespace has this name.
const OTHER_NAMESPACE: &str = "*";

/// A domain with its hashes, which are those of [`name_set`].
pub(super) struct Domain {
    /// As in the virtual host.
    pub(super) text: String,
    pub(super) hash: u64,
    /// In lower case, with the hash of that, unless it is the same.
    pub(super) lower_case: Option<(String, u64)>,
    /// True for short and absolute forms. The full name of another host takes precedence over these.
    pub(super) is_alternative: bool,
}

impl Domain {
    fn new(text: String, is_alternative: bool) -> Self {
        let has_upper_case = text.bytes().any(|byte| byte.is_ascii_uppercase());
        let lower_case = has_upper_case.then(|| {
            let lower = text.to_ascii_lowercase();
            let hash = name_set::hash(&lower);
            (lower, hash)
        });
        Self {
            hash: name_set::hash(&text),
            text,
            lower_case,
            is_alternative,
        }
    }
}

impl Domain {
    /// Returns the domain in lower case, with its hash.
    pub(super) fn lower_case(&self) -> (&str, u64) {
        match &self.lower_case {
            None => (&self.text, self.hash),
            Some((lower, hash)) => (lower, *hash),
        }
    }
}

/// The name and all domains of a virtual host.
pub(super) struct HostNames {
    pub(super) name: String,
    pub(super) name_hash: u64,
    /// The [`block_hash`] of the name.
    pub(super) block_hash: u64,
    pub(super) domains: Box<[Domain]>,
    /// Both as fields of the virtual host.
    pub(super) encoded: Block,
}

impl HostNames {
    pub(super) fn new(name: String, domains: Domains) -> Self {
        let len = field_len(virtual_host::NAME, name.len());
        let all = domains.all.iter();
        let len = len
            + all
                .map(|domain| field_len(virtual_host::DOMAINS, domain.len()))
                .sum::<usize>();
        let encoded = Encoded::<VirtualHost>::write(len, |out| {
            out.text(virtual_host::NAME, &name);
            for domain in &domains.all {
                out.text(virtual_host::DOMAINS, domain);
            }
        });
        let Domains { all, alternative } = domains;
        let is_alternative = |position| alternative.iter().any(|range| range.contains(&position));
        let domains = all.into_iter().enumerate();
        Self {
            name_hash: name_set::hash(&name),
            block_hash: block_hash(&name),
            name,
            domains: domains
                .map(|(position, text)| Domain::new(text, is_alternative(position)))
                .collect(),
            encoded: Block::new(encoded.into_bytes().into()),
        }
    }
}

/// Returns the hash of a virtual host's name that decides whether a block ends after it.
///
/// Note: it has no key. The version of a route configuration depends on the ends of its blocks, and must be the same on
/// every replica: with another one, clients that reconnect are sent everything again.
pub(super) fn block_hash(name: &str) -> u64 {
    xxh3_64(name.as_bytes())
}

/// Inputs of the names of a service, besides the service and the port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NamesView {
    dns_domain: SmolStr,
    vip: VipView,
    absolute: bool,
    with_ports: bool,
}

/// The names of services for one view. The services are held, so that no other one has their address.
type NamesOfView = Arc<Mutex<FxHashMap<(usize, u32), (Shared<Service>, Arc<HostNames>)>>>;

/// The names of services, for the time of one update.
#[derive(Default)]
pub(crate) struct HostNamesMemo(Mutex<FxHashMap<Hashed<NamesView>, NamesOfView>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HostNamesMemo {
    fn of(&self, view: NamesView) -> NamesOfView {
        lock(&self.0).entry(Hashed::new(view)).or_default().clone()
    }
}

/// Returns the DNS domain of a client in another namespace than all services; `None` outside Kubernetes.
pub(super) fn dns_domain_of_others(dns_domain: &str) -> Option<SmolStr> {
    let (_, suffix) = domains::split_dns_domain(dns_domain)?;
    Some([OTHER_NAMESPACE, ".svc.", suffix].into_iter().collect())
}

/// Returns the host of a service and its aliases.
fn names_of(service: &Service) -> impl Iterator<Item = &Hostname> {
    let aliases = service.aliases.iter().map(|alias| &alias.hostname);
    std::iter::once(&service.key.hostname).chain(aliases)
}

/// Returns the namespaces in which a service has other names than elsewhere.
pub(super) fn namespaces(service: &Service) -> impl Iterator<Item = &str> {
    names_of(service).filter_map(|host| domains::namespace_of(host))
}

/// The names of services for one client.
pub(super) struct ClientNames<'a> {
    client: &'a RouteConfigProxyView,
    absolute: bool,
    with_ports: bool,
    /// The client's namespace, if it decides names only of its own services.
    namespace: Option<&'a str>,
    own: NamesOfView,
    others: NamesOfView,
}

impl<'a> ClientNames<'a> {
    /// Returns the names for a client, whose domains are repeated with their port if `with_ports` is true.
    pub(super) fn new(
        memo: &HostNamesMemo,
        features: &Features,
        client: &'a RouteConfigProxyView,
        with_ports: bool,
    ) -> Self {
        let absolute = features.pilot_enable_absolute_fqdn_vhost_domain;
        let view = |dns_domain: SmolStr| NamesView {
            dns_domain,
            vip: client.vip.clone(),
            absolute,
            with_ports,
        };
        let own = memo.of(view(client.dns_domain.clone()));
        let split = domains::split_dns_domain(&client.dns_domain);
        Self {
            client,
            absolute,
            with_ports,
            namespace: split.map(|(namespace, _)| namespace),
            others: match dns_domain_of_others(&client.dns_domain) {
                Some(domain) => memo.of(view(domain)),
                None => own.clone(),
            },
            own,
        }
    }

    /// Returns the names of a service port.
    pub(super) fn of(&self, service: &Shared<Service>, port: u32) -> Arc<HostNames> {
        let is_own = names_of(service).any(|host| domains::namespace_of(host) == self.namespace);
        let memo = if is_own { &self.own } else { &self.others };
        let key = (std::ptr::from_ref::<Service>(service).addr(), port);
        if let Some((_, names)) = lock(memo).get(&key) {
            return names.clone();
        }
        let names = Arc::new(self.make(service, port));
        lock(memo).insert(key, (service.clone(), names.clone()));
        names
    }

    fn make(&self, service: &Service, port: u32) -> HostNames {
        let names = NameSpace {
            dns_domain: &self.client.dns_domain,
            absolute: self.absolute,
        };
        let forms = if self.with_ports {
            PortForms::With(port)
        } else {
            PortForms::Ignored
        };
        let host = domains::lower_case(&service.key.hostname);
        let name = host_port(&host, port);
        HostNames::new(name, domains::of_service(service, names, &self.client.vip, forms))
    }
}
