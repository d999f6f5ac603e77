//! Syntax of format strings, which values of headers are: text with commands such as `%REQ(NAME)%`.
//!
//! `check` has the rules of Istio's admission, `is_valid` those of Envoy, which refuses all routes of a port
//! because of one invalid value.

use std::borrow::Cow;

/// The commands of Envoy, besides [`FAMILIES`], and if they need arguments (source/common/formatter and
/// source/extensions/formatter). `PER_REQUEST_STATE` exists in headers only.
const COMMANDS: [(&str, bool); 43] = [
    ("ACCESS_LOG_TYPE", false),
    ("BYTES_RECEIVED", false),
    ("BYTES_RETRANSMITTED", false),
    ("BYTES_SENT", false),
    ("CEL", true),
    ("CLUSTER_METADATA", true),
    ("COALESCE", true),
    ("COMMON_DURATION", true),
    ("CONNECTION_ID", false),
    ("CONNECTION_TERMINATION_DETAILS", false),
    ("CUSTOM_FLAGS", false),
    ("DURATION", false),
    ("DYNAMIC_METADATA", true),
    ("EMIT_TIME", false),
    ("EMIT_TIME_LOCAL", false),
    ("ENVIRONMENT", true),
    ("FILE_CONTENT", true),
    ("FILTER_CHAIN_NAME", false),
    ("FILTER_STATE", true),
    ("GRPC_STATUS", false),
    ("GRPC_STATUS_NUMBER", false),
    ("HOSTNAME", false),
    ("LOCAL_REPLY_BODY", false),
    ("METADATA", true),
    ("PACKETS_RETRANSMITTED", false),
    ("PATH", false),
    ("PER_REQUEST_STATE", true),
    ("PROTOCOL", false),
    ("QUERY_PARAM", true),
    ("QUERY_PARAMS", false),
    ("REQ", true),
    ("REQ_WITHOUT_QUERY", true),
    ("RESP", true),
    ("ROUNDTRIP_DURATION", false),
    ("ROUTE_NAME", false),
    ("SPAN_ID", false),
    ("START_TIME", false),
    ("START_TIME_LOCAL", false),
    ("STREAM_ID", false),
    ("STREAM_INFO_REQ", true),
    ("TRACE_ID", false),
    ("TRAILER", true),
    ("UNIQUE_ID", false),
];
/// The beginnings of Envoy's other commands. New releases add some of these.
const FAMILIES: [&str; 8] = [
    "DOWNSTREAM_",
    "REQUEST_",
    "REQUESTED_",
    "RESPONSE_",
    "TLS_",
    "UPSTREAM_",
    "VIRTUAL_",
    "XFCC_",
];

/// Returns a value as a format string of Envoy: itself if it is valid, or else with each percent sign as a literal one.
pub fn accepted(value: &str) -> Cow<'_, str> {
    if is_valid(value) {
        Cow::Borrowed(value)
    } else {
        Cow::Owned(value.replace('%', "%%"))
    }
}

/// Returns true if each percent sign of a text is escaped, or belongs to a command that Envoy knows.
pub fn is_valid(text: &str) -> bool {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('%') {
        let Some(behind) = after.strip_prefix('%').or_else(|| behind_command(after)) else {
            return false;
        };
        rest = behind;
    }
    true
}

/// Returns the text behind a command, of which the first percent sign was read: `NAME%`, `NAME(arguments)%` or
/// `NAME(arguments):length%` (Envoy, source/common/formatter/substitution_formatter.cc).
fn behind_command(text: &str) -> Option<&str> {
    let is_of_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let (name, rest) = text.split_at(text.find(|c: char| !is_of_name(c))?);
    let needs_arguments = match COMMANDS.iter().find(|(known, _)| *known == name) {
        Some((_, needs_arguments)) => *needs_arguments,
        None if FAMILIES.iter().any(|family| name.starts_with(family)) => false,
        None => return None,
    };
    match rest.strip_prefix('(') {
        Some(arguments) if needs_arguments && arguments.starts_with(')') => None,
        Some(arguments) => {
            let mut ends = arguments.match_indices(')');
            ends.find_map(|(end, _)| behind_length(&arguments[end + 1..]))
        }
        None if needs_arguments => None,
        None => behind_length(rest),
    }
}

/// Returns the text behind the length, if there is one, and the last percent sign of a command.
fn behind_length(text: &str) -> Option<&str> {
    let rest = match text.strip_prefix(':') {
        Some(length) => {
            let rest = length.trim_start_matches(|c: char| c.is_ascii_digit());
            // Envoy reads 64 bits.
            let digits = &length[..length.len() - rest.len()];
            digits.parse::<u64>().ok()?;
            rest
        }
        None => text,
    };
    rest.strip_prefix('%')
}

/// Checks a format string. A literal percent sign is `%%`.
///
/// Parity (pkg/config/validation/header_value_validator.go, after an old release of Envoy).
///
/// # Errors
/// The first syntax error, for the user.
pub(super) fn check(text: &str) -> Result<(), &'static str> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('%') {
        rest = match after.strip_prefix('%') {
            Some(rest) => rest,
            None => command(after)?,
        };
    }
    Ok(())
}

/// Reads a command behind its first percent sign. Returns the text behind the last one.
fn command(text: &str) -> Result<&str, &'static str> {
    const ENDLESS: &str = "has a % that no other % ends; write %% for a percent sign";
    let end = text.find(['%', '(']).ok_or(ENDLESS)?;
    let (name, rest) = text.split_at(end + 1);
    if name.ends_with('%') {
        return Ok(rest);
    }
    let rest = arguments(rest)?.trim_start_matches(' ');
    if rest.is_empty() {
        return Err(ENDLESS);
    }
    rest.strip_prefix('%').ok_or("has text between ) and %")
}

/// Reads an argument, or a list of them in brackets. Returns the text behind the closing parenthesis.
fn arguments(text: &str) -> Result<&str, &'static str> {
    let text = text.trim_start_matches(' ');
    let mut rest = match text.strip_prefix('[') {
        Some(list) => quoted(list)?,
        None => text
            .get(text.chars().next().map_or(0, char::len_utf8)..)
            .unwrap_or_default(),
    };
    loop {
        let (end, behind) = argument(rest)?;
        if end == ')' {
            return Ok(behind);
        }
        let behind = behind.trim_start_matches(' ');
        let Some(next) = behind.strip_prefix(',') else {
            let behind = behind.strip_prefix(']').ok_or("needs , or ] after an argument")?;
            let behind = behind.trim_start_matches(' ').strip_prefix(')');
            return behind.ok_or("needs ) after the arguments");
        };
        rest = quoted(next)?;
    }
}

/// Reads the quote before an item of a list.
fn quoted(text: &str) -> Result<&str, &'static str> {
    let item = text.trim_start_matches(' ').strip_prefix('"');
    item.ok_or("has a list of arguments without quotes")
}

/// Reads the rest of an argument. Returns the parenthesis or quote that ends it, and the text behind that.
fn argument(text: &str) -> Result<(char, &str), &'static str> {
    let mut characters = text.char_indices();
    while let Some((position, character)) = characters.next() {
        match character {
            '\\' => {
                characters.next().ok_or("ends with a backslash in an argument")?;
            }
            ')' | '"' => return Ok((character, &text[position + 1..])),
            _ => {}
        }
    }
    Err("has an argument without end; write %% for a percent sign")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_strings_are_distinguished_from_others() {
        for text in [
            "",
            "plain",
            "100%%",
            "%START_TIME%",
            "a %REQ(x-id)% b %PROTOCOL%",
            "%REQ( x )%",
            "%DYNAMIC_METADATA([\"a\", \"b\"])%",
            "%DYNAMIC_METADATA( [ \"a\" , \"b\\\"c\" ] ) %",
            "%START_TIME(%Y/%m)%",
            "ü%REQ(ü)%ü",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        for text in [
            "50%",
            "50% of",
            "%REQ(x)",
            "%REQ(x",
            "%REQ(",
            "%REQ(x) y%",
            "%A([x])%",
            "%A([\"x\"%",
            "%A([\"x\" \"y\"])%",
            "%A([\"x\"]x%",
            "%A(\\",
            "%REQ(\"x\")%",
        ] {
            assert!(check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn values_that_are_no_format_strings_are_literal() {
        for format in [
            "a",
            "100%%",
            "%REQ(x-id)%",
            "a %DOWNSTREAM_REMOTE_ADDRESS% b",
            "%REQ(A?B):10%",
            "%START_TIME(%Y-%m)%",
            "%CEL(f(a))%",
            "%UPSTREAM_METADATA([\"a\", \"b\"])%",
            "%PER_REQUEST_STATE(key)%",
            "%RESPONSE_FLAGS%%HOSTNAME%",
        ] {
            assert_eq!(accepted(format), format);
        }
        for (value, escaped) in [
            ("50%", "50%%"),
            ("10%-20%", "10%%-20%%"),
            ("/a%20b%20c", "/a%%20b%%20c"),
            ("%E2%82%AC", "%%E2%%82%%AC"),
            ("%REQ(a", "%%REQ(a"),
            ("%REQ(a):%", "%%REQ(a):%%"),
            ("%REQ(a):18446744073709551616%", "%%REQ(a):18446744073709551616%%"),
            ("%req(a)%", "%%req(a)%%"),
            ("%VERSION%", "%%VERSION%%"),
            ("%REQ%", "%%REQ%%"),
            ("%REQ()%", "%%REQ()%%"),
        ] {
            assert_eq!(accepted(value), escaped);
            assert!(is_valid(escaped), "{escaped}");
        }
    }

    /// The depth of the stack does not grow with the list.
    #[test]
    fn long_lists_are_read() {
        let text = format!("%A([{}\"x\"])%", "\"x\",".repeat(1_000_000));
        assert_eq!(check(&text), Ok(()));
    }
}
