//! Paths with slashes, and variables of the environment.

use super::{
    super::{
        limits::Exceeded,
        types::Type,
        value::{Context, Function},
    },
    bytes, of_strings, text,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Bool, String};
    vec![
        of_strings("base", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            if whole.is_empty() {
                return Ok(".".into());
            }
            let kept = whole.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
            let name = whole[..kept].rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            if name.is_empty() {
                return Ok("/".into());
            }
            text(context, name)
        }),
        of_strings("dir", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            let end = whole
                .iter()
                .rposition(|byte| *byte == b'/')
                .map_or(0, |slash| slash + 1);
            Ok(clean(context, &whole[..end])?.into())
        }),
        of_strings("clean", 1, String, |context, arguments| {
            Ok(clean(context, bytes(arguments, 0))?.into())
        }),
        of_strings("ext", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            let name = whole.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            let dot = name.iter().rposition(|byte| *byte == b'.');
            text(context, dot.map_or(&b""[..], |dot| &name[dot..]))
        }),
        of_strings("isAbs", 1, Bool, |_, arguments| {
            Ok(bytes(arguments, 0).starts_with(b"/").into())
        }),
        of_strings("env", 1, String, |context, arguments| {
            let name = std::string::String::from_utf8_lossy(bytes(arguments, 0));
            text(context, context.host.variable(&name).unwrap_or_default().as_bytes())
        }),
        of_strings("expandenv", 1, String, |context, arguments| {
            Ok(expand(context, bytes(arguments, 0))?.into())
        }),
    ]
}

/// Returns the shortest equal path: without empty parts, `.`, and `..` behind a name.
fn clean(context: &mut Context<'_>, whole: &[u8]) -> Result<Vec<u8>, Exceeded> {
    context.allocate(whole.len() + 1)?;
    context.allocate_elements(whole.split(|byte| *byte == b'/').count())?;
    let is_absolute = whole.starts_with(b"/");
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in whole.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => match parts.last() {
                Some(last) if *last != b".." => {
                    parts.pop();
                }
                _ if is_absolute => {}
                _ => parts.push(part),
            },
            part => parts.push(part),
        }
    }
    let joined = parts.join(&b'/');
    Ok(match (is_absolute, joined.is_empty()) {
        (true, _) => [b"/".as_slice(), &joined].concat(),
        (false, true) => b".".to_vec(),
        (false, false) => joined,
    })
}

/// Replaces `$name` and `${name}` by variables.
fn expand(context: &mut Context<'_>, whole: &[u8]) -> Result<Vec<u8>, Exceeded> {
    let mut out = Vec::new();
    let mut rest = whole;
    while let Some(dollar) = rest.iter().position(|byte| *byte == b'$') {
        out.extend_from_slice(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if rest.is_empty() {
            out.push(b'$');
            break;
        }
        let (name, length) = variable_name(rest);
        context.step(1)?;
        match name {
            // A dollar that no name follows stays; wrong syntax vanishes.
            b"" if length == 0 => out.push(b'$'),
            b"" => {}
            name => {
                let name = String::from_utf8_lossy(name);
                let value = context.host.variable(&name).unwrap_or_default();
                context.allocate(value.len())?;
                out.extend_from_slice(value.as_bytes());
            }
        }
        rest = &rest[length..];
    }
    context.allocate(whole.len())?;
    if !rest.is_empty() {
        out.extend_from_slice(rest);
    }
    Ok(out)
}

/// Returns the name of a variable behind a dollar, and the length with its braces.
fn variable_name(rest: &[u8]) -> (&[u8], usize) {
    let is_special = |byte: u8| byte.is_ascii_digit() || b"*#$@!?-".contains(&byte);
    if rest[0] == b'{' {
        if rest.len() > 2 && is_special(rest[1]) && rest[2] == b'}' {
            return (&rest[1..2], 3);
        }
        return match rest[1..].iter().position(|byte| *byte == b'}') {
            Some(0) => (b"", 2),
            Some(length) => (&rest[1..=length], length + 2),
            None => (b"", 1),
        };
    }
    if is_special(rest[0]) {
        return (&rest[..1], 1);
    }
    let is_name = |byte: &&u8| byte.is_ascii_alphanumeric() || **byte == b'_';
    let length = rest.iter().take_while(is_name).count();
    (&rest[..length], length)
}
