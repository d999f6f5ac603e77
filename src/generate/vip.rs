//! Addresses of a service for one proxy: those of its cluster and of its address families.

use std::net::IpAddr;

use smol_str::SmolStr;

use super::proxy::{MetadataKey, NodeMetadata, ProxyType};
use crate::{
    base::{
        ClusterId,
        cidr::{self, IpMode},
    },
    model::{
        Service,
        features::Features,
        service::{Registry, UNSPECIFIED_IP},
    },
};

/// The proxy attributes that the choice of a service's addresses depends on. Part of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VipView {
    /// The proxy's cluster; empty if the node names none.
    pub cluster: ClusterId,
    /// The proxy's address families.
    pub ip_mode: IpMode,
    /// True if the proxy captures DNS and can use auto-allocated addresses, or serves clients that do.
    pub auto_allocated: bool,
    /// True if a dual-stack proxy gets addresses of both families (`ISTIO_DUAL_STACK`, ambient).
    pub both_families: bool,
}

impl VipView {
    /// Returns the view of a proxy.
    pub fn of(proxy: &NodeMetadata, features: &Features) -> Self {
        Self {
            cluster: proxy.cluster.clone(),
            ip_mode: proxy.ip_mode,
            auto_allocated: (proxy.has(MetadataKey::DnsCapture) || proxy.proxy_type == ProxyType::Waypoint)
                && (features.pilot_enable_ip_autoallocate || proxy.has(MetadataKey::DnsAutoAllocate)),
            both_families: features.istio_dual_stack || features.pilot_enable_ambient,
        }
    }

    /// Returns the main address of a service; [`UNSPECIFIED_IP`] if it has none.
    #[doc(alias = "GetAddressForProxy")]
    pub fn address(&self, service: &Service) -> SmolStr {
        if let Some(first) = self.of_family(self.cluster_vips(service)).into_iter().next() {
            return first;
        }
        if self.auto_allocated && service.default_address == UNSPECIFIED_IP {
            if self.serves_v4() && !service.auto_ipv4.is_empty() {
                return service.auto_ipv4.clone();
            }
            if self.serves_v6() && !service.auto_ipv6.is_empty() {
                return service.auto_ipv6.clone();
            }
        }
        service.default_address.clone()
    }

    /// Returns all addresses of a service, the main one first.
    #[doc(alias = "GetAllAddressesForProxy")]
    pub fn addresses(&self, service: &Service) -> Vec<SmolStr> {
        let own = self.cluster_vips(service);
        let of_all_families = self.both_families && self.ip_mode == IpMode::Dual;
        let chosen = |addresses: &[SmolStr]| {
            if of_all_families {
                addresses.to_vec()
            } else {
                self.of_family(addresses)
            }
        };
        let addresses = if own.is_empty() && self.auto_allocated {
            let auto = [&service.auto_ipv4, &service.auto_ipv6].into_iter();
            chosen(&auto.filter(|ip| !ip.is_empty()).cloned().collect::<Vec<_>>())
        } else {
            chosen(own)
        };
        if !addresses.is_empty() || service.default_address.is_empty() {
            return addresses;
        }
        let default = vec![service.default_address.clone()];
        // A Kubernetes service without an address in the proxy's cluster: the default address is that of another
        // cluster and may be of a family that the proxy lacks. Addresses of ServiceEntries are only used for matching.
        if service.registry == Registry::Kubernetes && !service.cluster_vips.is_empty() {
            return self.of_family(&default);
        }
        default
    }

    /// Returns the addresses by which a waypoint recognises connections to a service, sorted. May contain ranges.
    ///
    /// Parity (pilot/pkg/networking/core/listener_waypoint.go): a service without an address has [`UNSPECIFIED_IP`].
    /// One of several services of a host may have none.
    pub fn virtual_addresses(&self, service: &Service) -> Vec<SmolStr> {
        let mut addresses: Vec<SmolStr> = service.all().flat_map(|member| self.addresses(member)).collect();
        addresses.sort();
        addresses.dedup();
        if addresses.len() > 1 {
            addresses.retain(|address| address != UNSPECIFIED_IP);
        }
        addresses
    }

    /// Returns the bind addresses of a service's TCP listener, the main one first. May contain ranges.
    pub fn listen_addresses(&self, service: &Service) -> Vec<SmolStr> {
        let mut first = self.address(service);
        let mut further: Vec<SmolStr> = self.addresses(service).into_iter().skip(1).collect();
        // Endpoints of a ServiceEntry may be host names, so the address family is the proxy's.
        if service.registry == Registry::External && first == UNSPECIFIED_IP {
            match self.ip_mode {
                IpMode::V4 => {}
                IpMode::V6 => first = SmolStr::new_static("::"),
                IpMode::Dual => further.push(SmolStr::new_static("::")),
            }
        }
        if first.is_empty() {
            return Vec::new();
        }
        further.insert(0, first);
        further
    }

    /// Returns the addresses of a service in a route configuration of one port.
    ///
    /// Parity (pilot/pkg/model/service.go): only the main one of the auto-allocated addresses.
    pub fn addresses_on_port(&self, service: &Service) -> Vec<SmolStr> {
        if !self.auto_allocated || !self.cluster_vips(service).is_empty() {
            return self.addresses(service);
        }
        let main = vec![self.address(service)];
        if service.cluster_vips.is_empty() {
            main
        } else {
            self.of_family(&main)
        }
    }

    fn cluster_vips<'a>(&self, service: &'a Service) -> &'a [SmolStr] {
        service.cluster_vips.get(&self.cluster).map_or(&[], Vec::as_slice)
    }

    fn serves_v4(&self) -> bool {
        self.ip_mode != IpMode::V6
    }

    fn serves_v6(&self) -> bool {
        self.ip_mode != IpMode::V4
    }

    /// Keeps the addresses that the proxy can reach. A dual-stack proxy gets those of the first address's family.
    fn of_family(&self, addresses: &[SmolStr]) -> Vec<SmolStr> {
        let family = |text: &SmolStr| cidr::parse(text).map(|net| net.addr());
        let family_filter = match self.ip_mode {
            IpMode::V4 => Some(true),
            IpMode::V6 => Some(false),
            IpMode::Dual => addresses.first().and_then(family).map(|ip| ip.is_ipv4()),
        };
        let is_supported = |ip: IpAddr| family_filter.is_none_or(|v4| v4 == ip.is_ipv4());
        addresses
            .iter()
            .filter(|text| family(text).is_some_and(is_supported))
            .cloned()
            .collect()
    }
}
