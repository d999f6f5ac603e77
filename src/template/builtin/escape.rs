//! `html`, `js` and `urlquery`.

use std::borrow::Cow;

use crate::template::{
    format,
    limits::Failure,
    text::{first_char, is_printable},
    types::Type,
    value::{Context, Function, Value},
};

pub(super) fn functions() -> [Function; 3] {
    let escaper = |name: &str, escape: fn(&[u8]) -> Vec<u8>| {
        Function::variadic(name, &[Type::Any], Type::String, move |context, arguments| {
            let text = joined(context, arguments)?;
            // Each byte has at most six in its place.
            context.allocate(text.len().saturating_mul(6))?;
            Ok(escape(&text).into())
        })
    };
    [escaper("html", html), escaper("js", js), escaper("urlquery", query)]
}

fn joined(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Vec<u8>, Failure> {
    let printable: Vec<Cow<'_, Value>> = arguments
        .iter()
        .map(|argument| match argument {
            // A nil argument has no type, so it prints like a missing one.
            Value::Nil => format::printable(&Value::Missing),
            argument => format::printable(argument),
        })
        .collect();
    let printable: Vec<&Value> = printable.iter().map(AsRef::as_ref).collect();
    format::print(context, &printable)
}

fn html(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for byte in text {
        match byte {
            0 => out.extend_from_slice("\u{fffd}".as_bytes()),
            b'"' => out.extend_from_slice(b"&#34;"),
            b'\'' => out.extend_from_slice(b"&#39;"),
            b'&' => out.extend_from_slice(b"&amp;"),
            b'<' => out.extend_from_slice(b"&lt;"),
            b'>' => out.extend_from_slice(b"&gt;"),
            byte => out.push(*byte),
        }
    }
    out
}

fn js(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((character, length)) = first_char(rest) {
        match character {
            '\\' => out.extend_from_slice(b"\\\\"),
            '\'' => out.extend_from_slice(b"\\'"),
            '"' => out.extend_from_slice(b"\\\""),
            '<' | '>' | '&' | '=' | ..' ' if character != ' ' => {
                out.extend_from_slice(format!("\\u{:04X}", u32::from(character)).as_bytes());
            }
            _ if character.is_ascii() || is_printable(character) => out.extend_from_slice(&rest[..length]),
            _ => out.extend_from_slice(format!("\\u{:04X}", u32::from(character)).as_bytes()),
        }
        rest = &rest[length..];
    }
    out
}

fn query(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for byte in text {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(*byte),
            b' ' => out.push(b'+'),
            byte => out.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    out
}
