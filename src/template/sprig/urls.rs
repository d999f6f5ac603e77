//! URLs in parts.

use super::{
    super::{
        limits::Failure,
        quote::{Charset, quote},
        text::find,
        types::Type,
        value::{Context, Function, Kind, Map, Value},
    },
    bytes, map, of_strings,
};

pub(super) fn functions() -> Vec<Function> {
    vec![
        of_strings("urlParse", 1, Type::Any.map(), |context, arguments| {
            let whole = bytes(arguments, 0);
            context.allocate(whole.len().saturating_mul(8))?;
            let parts =
                Parts::parse(whole).map_err(|message| Failure::Message(format!("unable to parse url: {message}")))?;
            let userinfo = parts.user.as_ref().map(User::text).unwrap_or_default();
            Ok(Value::map([
                ("scheme", parts.scheme.into()),
                ("hostname", hostname(&parts.host).into()),
                ("host", parts.host.into()),
                ("path", parts.path.into()),
                ("query", parts.query.into()),
                ("opaque", parts.opaque.into()),
                ("fragment", parts.fragment.into()),
                ("userinfo", userinfo.into()),
            ]))
        }),
        Function::new("urlJoin", &[Type::Any.map()], Type::String, |context, arguments| {
            let parts = map(arguments, 0);
            let mut url = Parts {
                scheme: part(context, &parts, "scheme")?,
                host: part(context, &parts, "host")?,
                path: part(context, &parts, "path")?,
                query: part(context, &parts, "query")?,
                opaque: part(context, &parts, "opaque")?,
                fragment: part(context, &parts, "fragment")?,
                user: None,
            };
            let userinfo = part(context, &parts, "userinfo")?;
            if !userinfo.is_empty() {
                let other = Parts::parse(&[b"proto://", userinfo.as_slice(), b"@host"].concat());
                let other = other
                    .map_err(|message| Failure::Message(format!("unable to parse userinfo in dict: {message}")))?;
                url.user = other.user;
            }
            let text = url.text();
            context.allocate(text.len())?;
            Ok(text.into())
        }),
    ]
}

/// Returns a part of a URL from a dictionary; empty if it is absent.
fn part(context: &Context<'_>, parts: &Map, name: &str) -> Result<Vec<u8>, Failure> {
    match context.entries(parts).get(name.as_bytes()) {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(text.bytes().to_vec()),
        Some(value) if value.kind() == Kind::Invalid => Err(super::nil_pointer()),
        Some(value) => {
            let kind = value.kind().name();
            Err(Failure::Message(format!(
                "unable to parse {name} key, must be of type string, but {kind} found"
            )))
        }
    }
}

#[derive(Default)]
struct Parts {
    scheme: Vec<u8>,
    opaque: Vec<u8>,
    user: Option<User>,
    host: Vec<u8>,
    path: Vec<u8>,
    query: Vec<u8>,
    fragment: Vec<u8>,
}

struct User {
    name: Vec<u8>,
    password: Option<Vec<u8>>,
}

impl User {
    fn text(&self) -> Vec<u8> {
        let mut out = escape(&self.name, Place::User);
        if let Some(password) = &self.password {
            out.push(b':');
            out.extend(escape(password, Place::User));
        }
        out
    }
}

/// The part of a URL that is escaped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Path,
    User,
    Host,
    Fragment,
}

fn cut(whole: &[u8], by: u8) -> (&[u8], Option<&[u8]>) {
    match whole.iter().position(|byte| *byte == by) {
        Some(position) => (&whole[..position], Some(&whole[position + 1..])),
        None => (whole, None),
    }
}

impl Parts {
    fn parse(whole: &[u8]) -> Result<Self, String> {
        let (url, fragment) = cut(whole, b'#');
        let wrapped = |url: &[u8], reason: String| format!("parse {}: {reason}", quote(url, Charset::Unicode));
        let mut parts = Self::parse_url(url).map_err(|reason| wrapped(url, reason))?;
        if let Some(fragment) = fragment {
            parts.fragment = unescape(fragment, Place::Fragment).map_err(|reason| wrapped(whole, reason))?;
        }
        Ok(parts)
    }

    fn parse_url(url: &[u8]) -> Result<Self, String> {
        let mut parts = Self::default();
        if url.iter().any(|byte| *byte < b' ' || *byte == 0x7f) {
            return Err("net/url: invalid control character in URL".to_owned());
        }
        if url == b"*" {
            parts.path = b"*".to_vec();
            return Ok(parts);
        }
        let mut rest = url;
        if let Some(length) = scheme_length(url)? {
            parts.scheme = url[..length].to_ascii_lowercase();
            rest = &url[length + 1..];
        }
        let (before, query) = cut(rest, b'?');
        rest = before;
        parts.query = query.unwrap_or_default().to_vec();
        if !rest.starts_with(b"/") {
            if !parts.scheme.is_empty() {
                parts.opaque = rest.to_vec();
                return Ok(parts);
            }
            if cut(rest, b'/').0.contains(&b':') {
                return Err("first path segment in URL cannot contain colon".to_owned());
            }
        }
        if rest.starts_with(b"//") && (!parts.scheme.is_empty() || !rest.starts_with(b"///")) {
            let slash = rest[2..].iter().position(|byte| *byte == b'/');
            let (authority, path) = rest[2..].split_at(slash.unwrap_or(rest.len() - 2));
            parts.authority(authority)?;
            rest = path;
        }
        parts.path = unescape(rest, Place::Path)?;
        Ok(parts)
    }

    fn authority(&mut self, authority: &[u8]) -> Result<(), String> {
        let at = authority.iter().rposition(|byte| *byte == b'@');
        let host = at.map_or(authority, |at| &authority[at + 1..]);
        check_port(host)?;
        self.host = unescape(host, Place::Host)?;
        let Some(at) = at else { return Ok(()) };
        let userinfo = &authority[..at];
        let is_valid = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._:~!$&'()*+,;=%@".contains(byte);
        if !userinfo.iter().all(is_valid) {
            return Err("net/url: invalid userinfo".to_owned());
        }
        let (name, password) = cut(userinfo, b':');
        self.user = Some(User {
            name: unescape(name, Place::User)?,
            password: password.map(|password| unescape(password, Place::User)).transpose()?,
        });
        Ok(())
    }

    fn text(&self) -> Vec<u8> {
        let mut out = self.scheme.clone();
        if !out.is_empty() {
            out.push(b':');
        }
        if !self.opaque.is_empty() {
            out.extend_from_slice(&self.opaque);
        } else {
            let has_authority = !self.host.is_empty() || self.user.is_some();
            if has_authority || !self.scheme.is_empty() && !self.path.is_empty() {
                out.extend_from_slice(b"//");
            }
            if let Some(user) = &self.user {
                out.extend(user.text());
                out.push(b'@');
            }
            out.extend(escape(&self.host, Place::Host));
            let path = if self.path == b"*" {
                self.path.clone()
            } else {
                escape(&self.path, Place::Path)
            };
            if !path.is_empty() && path[0] != b'/' && !self.host.is_empty() {
                out.push(b'/');
            }
            if out.is_empty() && cut(&path, b'/').0.contains(&b':') {
                out.extend_from_slice(b"./");
            }
            out.extend(path);
        }
        if !self.query.is_empty() {
            out.push(b'?');
            out.extend_from_slice(&self.query);
        }
        if !self.fragment.is_empty() {
            out.push(b'#');
            out.extend(escape(&self.fragment, Place::Fragment));
        }
        out
    }
}

/// Returns the length of the scheme, if there is one.
fn scheme_length(url: &[u8]) -> Result<Option<usize>, String> {
    for (position, byte) in url.iter().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => {}
            b'0'..=b'9' | b'+' | b'-' | b'.' if position > 0 => {}
            b':' if position == 0 => return Err("missing protocol scheme".to_owned()),
            b':' => return Ok(Some(position)),
            _ => return Ok(None),
        }
    }
    Ok(None)
}

fn check_port(host: &[u8]) -> Result<(), String> {
    let port = if host.starts_with(b"[") {
        let end = host.iter().rposition(|byte| *byte == b']');
        let end = end.ok_or("missing ']' in host")?;
        &host[end + 1..]
    } else {
        let colon = host.iter().rposition(|byte| *byte == b':');
        colon.map_or(&b""[..], |colon| &host[colon..])
    };
    let digits = port.strip_prefix(b":").unwrap_or(port);
    if (port.is_empty() || port.starts_with(b":")) && digits.iter().all(u8::is_ascii_digit) {
        return Ok(());
    }
    Err(format!("invalid port {} after host", quote(port, Charset::Unicode)))
}

/// Returns a host without its port and brackets.
fn hostname(host: &[u8]) -> Vec<u8> {
    if host.starts_with(b"[")
        && let Some(end) = find(host, b"]")
    {
        return host[1..end].to_vec();
    }
    let colon = host.iter().rposition(|byte| *byte == b':');
    colon.map_or(host, |colon| &host[..colon]).to_vec()
}

fn unescape(whole: &[u8], place: Place) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(whole.len());
    let mut position = 0;
    while let Some(&byte) = whole.get(position) {
        if byte == b'%' {
            let digits = whole.get(position + 1..position + 3);
            let text = digits.and_then(|digits| std::str::from_utf8(digits).ok());
            let code = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
            let Some(code) = code.and_then(|text| u8::from_str_radix(text, 16).ok()) else {
                let shown = &whole[position..whole.len().min(position + 3)];
                return Err(format!("invalid URL escape {}", quote(shown, Charset::Unicode)));
            };
            out.push(code);
            position += 3;
            continue;
        }
        if place == Place::Host && byte.is_ascii() && is_escaped(byte, place) {
            let shown = quote(&[byte], Charset::Unicode);
            return Err(format!("invalid character {shown} in host name"));
        }
        out.push(byte);
        position += 1;
    }
    Ok(out)
}

fn is_escaped(byte: u8, place: Place) -> bool {
    if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
        return false;
    }
    match place {
        Place::Host if b"!$&'()*+,;=:[]<>\"".contains(&byte) => false,
        Place::Path => !b"$&+,/:;=@".contains(&byte),
        Place::User => !b"$&+,;=".contains(&byte),
        Place::Fragment => !b"$&+,/:;=?@!()*".contains(&byte),
        Place::Host => true,
    }
}

fn escape(whole: &[u8], place: Place) -> Vec<u8> {
    let mut out = Vec::with_capacity(whole.len());
    for byte in whole {
        if is_escaped(*byte, place) {
            out.extend_from_slice(format!("%{byte:02X}").as_bytes());
        } else {
            out.push(*byte);
        }
    }
    out
}
