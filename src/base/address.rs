//! Listen addresses as Go writes them (`net.Listen`), and addresses of peers.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

/// A host and a port. An empty host means all addresses of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// A host name, an IP address without brackets, or empty.
    pub host: String,
    /// The port; 0 means that the kernel chooses one.
    pub port: u16,
}

/// Reason why a text is not an address. The messages are those of Go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// There is no colon before a port.
    #[error("address {0}: missing port in address")]
    MissingPort(String),
    /// An IPv6 address without brackets.
    #[error("address {0}: too many colons in address; hint: write an IPv6 address in brackets, such as [::1]:8080")]
    TooManyColons(String),
    /// Brackets that do not enclose the host.
    #[error("address {0}: brackets do not enclose the host")]
    Brackets(String),
    /// The port is not a number of 16 bits.
    #[error("address {0}: invalid port {1:?}; hint: want a number up to 65535")]
    InvalidPort(String, String),
}

impl HostPort {
    /// Parses `host:port`, `[host]:port`, `:port` and, without a port number, `host:`.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let all = || text.to_owned();
        let (host, port) = text.rsplit_once(':').ok_or_else(|| AddressError::MissingPort(all()))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| {
                if text.ends_with(']') {
                    AddressError::MissingPort(all())
                } else {
                    AddressError::Brackets(all())
                }
            })?,
            None if host.contains(':') => return Err(AddressError::TooManyColons(all())),
            None => host,
        };
        if host.contains(['[', ']']) {
            return Err(AddressError::Brackets(all()));
        }
        let number = match port {
            "" => 0,
            port => port
                .parse()
                .map_err(|_| AddressError::InvalidPort(all(), port.to_owned()))?,
        };
        Ok(Self {
            host: host.to_owned(),
            port: number,
        })
    }

    /// Returns true if the address means all addresses of the machine, of both families. As in Go, `0.0.0.0` and `::`
    /// mean the same as no host.
    pub fn is_wildcard(&self) -> bool {
        self.host.is_empty()
            || self
                .host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_unspecified())
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Returns a peer's address without its IPv6 form. A listener of both families reports IPv4 peers as `::ffff:a.b.c.d`,
/// which is neither a loopback address nor part of an IPv4 range.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_as_in_go() {
        for (text, host, port) in [
            (":8080", "", 8080),
            (":", "", 0),
            ("localhost:8080", "localhost", 8080),
            ("istiod.local:", "istiod.local", 0),
            ("127.0.0.1:1", "127.0.0.1", 1),
            ("[::1]:8080", "::1", 8080),
            ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        ] {
            let want = HostPort {
                host: host.to_owned(),
                port,
            };
            assert_eq!(HostPort::parse(text), Ok(want), "{text}");
        }
        for (text, message) in [
            ("nonsense", "missing port"),
            ("[::1]", "missing port"),
            ("::1:8080", "too many colons"),
            ("[::1:8080", "brackets"),
            ("[a]b:80", "brackets"),
            ("a:65536", "invalid port"),
            ("a:-1", "invalid port"),
        ] {
            let error = HostPort::parse(text).map_err(|error| error.to_string());
            assert!(
                error.as_ref().is_err_and(|error| error.contains(message)),
                "{text}: {error:?}"
            );
        }
    }

    #[test]
    fn an_unspecified_address_means_both_families() {
        for (text, is_wildcard) in [
            (":80", true),
            ("0.0.0.0:80", true),
            ("[::]:80", true),
            ("127.0.0.1:80", false),
        ] {
            assert_eq!(
                HostPort::parse(text).map(|address| address.is_wildcard()),
                Ok(is_wildcard),
                "{text}"
            );
        }
    }

    #[test]
    fn ipv4_peers_of_a_dual_stack_listener_are_ipv4() {
        let mapped: SocketAddr = "[::ffff:127.0.0.1]:9".parse().unwrap();
        assert_eq!(canonical(mapped), "127.0.0.1:9".parse().unwrap());
        let v6: SocketAddr = "[2001:db8::1]:9".parse().unwrap();
        assert_eq!(canonical(v6), v6);
    }
}
