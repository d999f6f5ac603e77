//! Addresses and CIDR ranges, parsed as Go's `netip` does (no leading zeros, no zone).

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use smol_str::SmolStr;

/// Parses an IP address.
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse().ok()
}

/// Returns the canonical spelling of an IP address, and any other text as it is. Only IPv6 addresses have several.
pub fn canonical(text: &str) -> SmolStr {
    let ip = text.contains(':').then(|| text.parse::<Ipv6Addr>().ok()).flatten();
    ip.map_or_else(|| SmolStr::new(text), |ip| SmolStr::from(ip.to_string()))
}

/// Returns true for an IP address, and for an IPv6 address with a zone, such as `fe80::1%eth0`. Go accepts both, and
/// Envoy refuses zones that its machine does not have.
pub fn is_ip_or_zoned(text: &str) -> bool {
    match text.split_once('%') {
        Some((address, zone)) => !zone.is_empty() && address.parse::<Ipv6Addr>().is_ok(),
        None => parse_ip(text).is_some(),
    }
}

/// Parses `address/length`, or a bare address as a range of one; the host bits are kept as written.
///
/// The parser of `ipnet` does not suffice: it accepts leading zeros, so `010.0.0.0/8` would be a range that other
/// programs read as octal.
pub fn parse(text: &str) -> Option<IpNet> {
    let Some((address, length)) = text.rsplit_once('/') else {
        return parse_ip(text).map(IpNet::from);
    };
    let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
    let has_zeros = length.len() > 1 && length.starts_with('0');
    let length = length.parse::<u8>().ok().filter(|_| is_number && !has_zeros)?;
    IpNet::new(parse_ip(address)?, length).ok()
}

/// Returns true for a range of more than one address.
pub fn is_range(text: &str) -> bool {
    text.contains('/') && parse(text).is_some_and(|net| net.prefix_len() != net.max_prefix_len())
}

/// Families of a set of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum IpMode {
    /// Only IPv4 (also if no address is known).
    #[default]
    V4,
    /// Only IPv6.
    V6,
    /// Both.
    Dual,
}

impl IpMode {
    /// Returns the mode of addresses; invalid ones are ignored.
    pub fn of<'a>(addresses: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut v4, mut v6) = (false, false);
        for ip in addresses.into_iter().filter_map(parse_ip) {
            match ip {
                IpAddr::V4(_) => v4 = true,
                IpAddr::V6(_) => v6 = true,
            }
        }
        match (v4, v6) {
            (true, true) => Self::Dual,
            (false, true) => Self::V6,
            _ => Self::V4,
        }
    }

    /// Returns true if this mode includes the family of the address.
    pub fn serves(self, ip: &IpAddr) -> bool {
        match self {
            Self::V4 => ip.is_ipv4(),
            Self::V6 => ip.is_ipv6(),
            Self::Dual => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_belong_to_ipv6_addresses() {
        for (text, is_address) in [
            ("10.0.0.1", true),
            ("fe80::1", true),
            ("fe80::1%eth0", true),
            ("fe80::1%", false),
            ("10.0.0.1%eth0", false),
            ("%eth0", false),
            ("", false),
        ] {
            assert_eq!(is_ip_or_zoned(text), is_address, "{text}");
        }
        assert_eq!(parse_ip("fe80::1%eth0"), None);
    }

    #[test]
    fn ipv6_addresses_have_one_canonical_spelling() {
        for (text, expected) in [
            ("::0", "::"),
            ("::", "::"),
            ("2001:DB8:0::1", "2001:db8::1"),
            ("2001:db8::1", "2001:db8::1"),
            ("10.0.0.1", "10.0.0.1"),
            ("2001:db8:0::/64", "2001:db8:0::/64"),
            ("unix:///var/run/a", "unix:///var/run/a"),
            ("", ""),
        ] {
            assert_eq!(canonical(text), expected);
        }
    }

    #[test]
    fn ranges_have_no_leading_zeros() {
        let pairs = [
            ("10.1.2.3/8", "10.1.2.3/8"),
            ("10.1.2.3", "10.1.2.3/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::1/64", "2001:db8::1/64"),
            ("::1", "::1/128"),
        ];
        for (text, range) in pairs {
            assert_eq!(parse(text).map(|net| net.to_string()).as_deref(), Some(range));
        }
        let invalid = [
            "",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/08",
            "10.0.0.0/+8",
            "010.0.0.0/8",
            "10.0.0.0/8/8",
            "10.0.0/8",
            "fe80::1%eth0/64",
            "10.0.0.0/ 8",
        ];
        for text in invalid {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
