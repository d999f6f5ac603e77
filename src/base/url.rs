//! URLs parsed and written as in Go, for values whose exact text is sent.
//!
//! Note: without a scheme everything is a path, so `registry/image` is valid and `1.2.3.4:5000/image` is not, while
//! `localhost:5000/image` has the scheme `localhost`.

use std::fmt::{self, Write};

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// Scheme in lower case; may be empty.
    pub scheme: String,
    /// Text after a scheme without a slash.
    opaque: String,
    /// User and host as written, after two slashes.
    authority: String,
    /// True if a rooted path follows the scheme directly.
    without_authority: bool,
    /// The path as written.
    path: String,
    /// The query as written, with its question mark.
    query: String,
    /// The fragment as written, with its hash.
    fragment: String,
}

impl Url {
    /// Parses a URL; `None` if it is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        if text.bytes().any(|byte| byte < b' ' || byte == 0x7f) {
            return None;
        }
        let (text, fragment) = split_before(text, '#');
        let (scheme, rest) = scheme(text)?;
        let (rest, query) = split_before(rest, '?');
        let mut url = Self {
            scheme: scheme.to_ascii_lowercase(),
            opaque: String::new(),
            authority: String::new(),
            without_authority: false,
            path: String::new(),
            query: query.to_owned(),
            fragment: fragment.to_owned(),
        };
        if !is_escaped_well(fragment) {
            return None;
        }
        if !rest.starts_with('/') {
            if !scheme.is_empty() {
                rest.clone_into(&mut url.opaque);
                return Some(url);
            }
            if rest.split('/').next().is_some_and(|segment| segment.contains(':')) {
                return None;
            }
        }
        let after = rest.strip_prefix("//");
        let after = after.filter(|_| !scheme.is_empty() || !rest.starts_with("///"));
        let (authority, path) = after.map_or(("", rest), |after| split_before(after, '/'));
        url.without_authority = after.is_none() && !scheme.is_empty();
        authority.clone_into(&mut url.authority);
        path.clone_into(&mut url.path);
        (is_authority(authority) && is_escaped_well(path)).then_some(url)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, query, .. } = self;
        if !scheme.is_empty() {
            write!(f, "{scheme}:")?;
        }
        if self.opaque.is_empty() {
            let is_hosted = !scheme.is_empty() && !self.path.is_empty() && !self.without_authority;
            if is_hosted || !self.authority.is_empty() {
                write!(f, "//{}", self.authority)?;
            }
            write!(f, "{}", escaped(&self.path))?;
        } else {
            write!(f, "{}", self.opaque)?;
        }
        write!(f, "{query}{}", self.fragment)
    }
}

/// Splits the text before a character.
fn split_before(text: &str, at: char) -> (&str, &str) {
    text.split_at(text.find(at).unwrap_or(text.len()))
}

/// Splits the scheme (empty for none) from the rest.
fn scheme(text: &str) -> Option<(&str, &str)> {
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => {}
            b'0'..=b'9' | b'+' | b'-' | b'.' if index > 0 => {}
            b':' if index == 0 => return None,
            b':' => return Some((&text[..index], &text[index + 1..])),
            _ => break,
        }
    }
    Some(("", text))
}

/// Returns true if every percent sign begins an escaped byte.
pub fn is_escaped_well(text: &str) -> bool {
    let mut pieces = text.split('%');
    pieces.next();
    pieces.all(|piece| piece.len() >= 2 && piece.bytes().take(2).all(|byte| byte.is_ascii_hexdigit()))
}

fn is_authority(authority: &str) -> bool {
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let port = if host.starts_with('[') {
        let Some((_, port)) = host.rsplit_once(']') else {
            return false;
        };
        port
    } else {
        host.rfind(':').map_or("", |colon| &host[colon..])
    };
    let is_port = port.is_empty()
        || port
            .strip_prefix(':')
            .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let is_host =
        |byte: u8| !byte.is_ascii() || byte.is_ascii_alphanumeric() || br#"-_.~!$&'()*+,;=:[]<>""#.contains(&byte);
    is_port && host.bytes().all(is_host)
}

/// Returns a path as written, or escaped if a character needs it.
fn escaped(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte);
    if path.bytes().all(|byte| is_plain(byte) || b"!'()*[]%".contains(&byte)) {
        return path.to_owned();
    }
    let mut text = String::new();
    let mut rest = path.as_bytes();
    while let Some((first, further)) = rest.split_first() {
        rest = further;
        let mut byte = *first;
        if byte == b'%' && further.len() >= 2 {
            let hex = std::str::from_utf8(&further[..2]).unwrap_or_default();
            byte = u8::from_str_radix(hex, 16).unwrap_or(byte);
            rest = &further[2..];
        }
        if is_plain(byte) {
            text.push(char::from(byte));
        } else {
            write!(text, "%{byte:02X}").expect("because text can be written to");
        }
    }
    text
}

/// Returns host and port of an HTTP URL; `None` if it is invalid.
pub fn authority(uri: &str) -> Option<(&str, u32)> {
    let (scheme, rest) = uri.split_once("://")?;
    let is = |known: &str| scheme.eq_ignore_ascii_case(known);
    let default_port = if is("http") {
        80
    } else if is("https") {
        443
    } else {
        return None;
    };
    let authority = rest.split(['/', '?', '#']).next()?;
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => Some((host, port.parse().ok()?)),
        _ => Some((authority, default_port)),
    }
}

/// Returns a URL without user and password. It may be invalid, so everything between its scheme and the last `@` counts
/// as credentials.
pub fn without_credentials(url: &str) -> String {
    let Some((before, rest)) = url.rsplit_once('@') else {
        return url.to_owned();
    };
    let scheme = before.find("://").map_or("", |end| &before[..end + "://".len()]);
    format!("{scheme}[redacted]@{rest}")
}

/// Returns a command line argument without the credentials of a URL in its value.
pub fn argument_without_credentials(argument: &str) -> String {
    match argument.split_once('=') {
        Some((flag, value)) if flag.starts_with('-') => format!("{flag}={}", without_credentials(value)),
        _ => without_credentials(argument),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(String, String)> {
        let mut url = Url::parse(text)?;
        let scheme = url.scheme.clone();
        if url.scheme.is_empty() {
            "oci".clone_into(&mut url.scheme);
        }
        Some((scheme, url.to_string()))
    }

    fn pair(scheme: &str, text: &str) -> Option<(String, String)> {
        Some((scheme.to_owned(), text.to_owned()))
    }

    #[test]
    fn a_missing_scheme_is_filled_in() {
        assert_eq!(read("ghcr.io/a/b:v1"), pair("", "oci://ghcr.io/a/b:v1"));
        assert_eq!(read("image"), pair("", "oci://image"));
        assert_eq!(read("//host/a"), pair("", "oci://host/a"));
        assert_eq!(read("/a"), pair("", "oci:///a"));
    }

    #[test]
    fn authorities_have_the_port_of_the_scheme_in_any_case() {
        assert_eq!(authority("https://a.com/keys"), Some(("a.com", 443)));
        assert_eq!(authority("HTTP://a.com:8080/keys"), Some(("a.com", 8080)));
        assert_eq!(authority("Https://[::1]"), Some(("[::1]", 443)));
        assert_eq!(authority("ftp://a.com"), None);
    }

    #[test]
    fn ports_parse_as_schemes_or_path_segments() {
        assert_eq!(read("localhost:5000/a"), pair("localhost", "localhost:5000/a"));
        assert_eq!(read("127.0.0.1:5000/a"), None);
    }

    #[test]
    fn only_reserved_characters_are_escaped() {
        assert_eq!(
            read("HTTPS://Ex.com/A?b=c&d#e"),
            pair("https", "https://Ex.com/A?b=c&d#e")
        );
        assert_eq!(read("http://h/a(b)%20c"), pair("http", "http://h/a(b)%20c"));
        assert_eq!(read("http://h/a b%41(c)"), pair("http", "http://h/a%20bA%28c%29"));
        assert_eq!(read("file:///opt/f.wasm"), pair("file", "file:///opt/f.wasm"));
        assert_eq!(read("file:/opt/f.wasm"), pair("file", "file:/opt/f.wasm"));
        assert_eq!(read("oci://[::1]:5000/a"), pair("oci", "oci://[::1]:5000/a"));
    }

    #[test]
    fn invalid_urls_are_refused() {
        for text in [
            "oci://h:port/a",
            "oci://h/%zz",
            "oci://h\n",
            ":a",
            "oci://[::1/a",
            "oci://a b/c",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn credentials_of_a_url_are_not_shown() {
        for (url, shown) in [
            ("http://user:secret@host:1/a", "http://[redacted]@host:1/a"),
            ("https://user:se/cr@et@host", "https://[redacted]@host"),
            ("user:secret@host", "[redacted]@host"),
            ("http://host:1/a", "http://host:1/a"),
        ] {
            assert_eq!(without_credentials(url), shown);
        }
    }

    #[test]
    fn credentials_in_arguments_are_not_shown() {
        for (argument, shown) in [
            (
                "--eurekaserverURL=http://user:se=cret@eureka",
                "--eurekaserverURL=http://[redacted]@eureka",
            ),
            ("http://user:se=cret@eureka", "http://[redacted]@eureka"),
            ("--httpAddr=:8080", "--httpAddr=:8080"),
        ] {
            assert_eq!(argument_without_credentials(argument), shown);
        }
    }
}
