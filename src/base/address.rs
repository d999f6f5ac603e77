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
    /// The port.
    pub port: Port,
}

/// A port as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// A number; 0 means that the kernel chooses one.
    Number(u16),
    /// The name of a service, such as `https`.
    Service(String),
}

/// TCP services that Go knows without a file.
const SERVICES: [(&str, u16); 15] = [
    ("domain", 53),
    ("ftp", 21),
    ("ftps", 990),
    ("gopher", 70),
    ("http", 80),
    ("https", 443),
    ("imap2", 143),
    ("imap3", 220),
    ("imaps", 993),
    ("pop3", 110),
    ("pop3s", 995),
    ("smtp", 25),
    ("submissions", 465),
    ("ssh", 22),
    ("telnet", 23),
];

impl Port {
    /// Parses a port as Go does: digits with a sign are a number, and anything else is a name.
    fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(Self::Service(text.to_owned()));
        }
        if digits.is_empty() {
            return Some(Self::Number(0));
        }
        let number = digits.parse().ok();
        number
            .filter(|number| *number == 0 || !text.starts_with('-'))
            .map(Self::Number)
    }

    /// Returns the number. `services` is the content of `/etc/services`, whose lines are added to the services that
    /// are known without it.
    pub fn number(&self, services: &str) -> Option<u16> {
        let name = match self {
            Self::Number(number) => return Some(*number),
            Self::Service(name) => name.to_ascii_lowercase(),
        };
        let known = SERVICES.iter().find(|(known, _)| *known == name);
        let listed = services.lines().rev().find_map(|line| tcp_service(line, &name));
        listed.or(known.map(|(_, number)| *number))
    }
}

/// Returns the number in a line such as `http 80/tcp www # World Wide Web` if it is about the TCP service.
fn tcp_service(line: &str, name: &str) -> Option<u16> {
    let mut words = line.split('#').next()?.split_ascii_whitespace();
    let (official, port) = (words.next()?, words.next()?);
    let number = port.strip_suffix("/tcp")?.parse().ok().filter(|number| *number > 0)?;
    (official == name || words.any(|alias| alias == name)).then_some(number)
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
    /// The port is a number of more than 16 bits, or negative.
    #[error("address {0}: invalid port {1:?}; hint: want a number up to 65535 or the name of a service")]
    InvalidPort(String, String),
}

impl HostPort {
    /// Parses `host:port`, `[host]:port`, `:port` and, without a port, `host:`.
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
        let port = Port::parse(port).ok_or_else(|| AddressError::InvalidPort(all(), port.to_owned()))?;
        Ok(Self {
            host: host.to_owned(),
            port,
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

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Service(name) => name.fmt(f),
        }
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

/// Returns `host:port`, with IPv6 addresses in brackets.
pub fn host_port(host: &str, port: u32) -> String {
    let mut digits = itoa::Buffer::new();
    let port = digits.format(port);
    if host.contains(':') {
        ["[", host, "]:", port].concat()
    } else {
        [host, ":", port].concat()
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
    fn only_ipv6_addresses_get_brackets() {
        assert_eq!(host_port("::1", 80), "[::1]:80");
        assert_eq!(host_port("example.com", 80), "example.com:80");
    }

    #[test]
    fn addresses_parse_as_in_go() {
        for (text, host, port) in [
            (":8080", "", 8080),
            (":", "", 0),
            ("localhost:8080", "localhost", 8080),
            ("istiod.local:", "istiod.local", 0),
            (":+8080", "", 8080),
            (":0080", "", 80),
            ("127.0.0.1:1", "127.0.0.1", 1),
            ("[::1]:8080", "::1", 8080),
            ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        ] {
            let want = HostPort {
                host: host.to_owned(),
                port: Port::Number(port),
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
    fn services_have_the_numbers_that_go_finds() {
        let file = "\
            http            8000/tcp        www # a comment\n\
            local           9000/udp\n\
            local           9001/tcp        alias\n\
            # https         1/tcp\n\
            broken          x/tcp\n";
        for (text, without_file, with_file) in [
            (":http", Some(80), Some(8000)),
            (":HTTP", Some(80), Some(8000)),
            (":https", Some(443), Some(443)),
            (":www", None, Some(8000)),
            (":alias", None, Some(9001)),
            (":local", None, Some(9001)),
            (":broken", None, None),
            (":80x", None, None),
            (":80", Some(80), Some(80)),
        ] {
            let address = HostPort::parse(text).expect("an address");
            assert_eq!(address.port.number(""), without_file, "{text}");
            assert_eq!(address.port.number(file), with_file, "{text}");
            assert_eq!(address.to_string(), text);
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
