//! Syntax of format strings, which values of headers are: text with commands such as `%REQ(NAME)%`.
//!
//! `check` has the rules of Istio's admission, `is_valid` those of Envoy, which refuses all routes of a port
//! because of one invalid value.

use std::borrow::Cow;

use serde_json::Value;

use crate::api::cel;

/// The arguments and the length that Envoy's parser of a command accepts. Where releases differ, all are accepted.
#[derive(Clone, Copy)]
enum Arguments {
    /// Neither arguments nor a length.
    Nothing,
    /// Any arguments, or none.
    Any,
    /// Any arguments, but at least some.
    Required,
    /// The name of a header, and of another one if there is no such header: `NAME?NAME`.
    Headers,
    /// A format of times without line breaks; no length.
    Time,
    /// The number of bits of an address that are kept.
    Mask,
    /// Options with these values, separated by colons.
    Options(&'static [&'static [&'static str]]),
    /// The spelling of a status; no length.
    GrpcStatus,
    /// `FROM:TO`, or `FROM:TO:UNIT`; no length.
    Duration,
    /// `KEY`, `KEY:FORMAT` or `KEY:FIELD:NAME`.
    FilterState,
    /// `TYPE:NAMESPACE:KEY`.
    Metadata,
    /// An expression.
    Cel,
    /// Commands as JSON.
    Coalesce,
}

/// The commands of Envoy that need no formatter of their own in the configuration (source/common/formatter and
/// source/extensions/formatter). `PER_REQUEST_STATE` exists in headers only.
const COMMANDS: &[(Arguments, &[&str])] = &[
    (
        Arguments::Nothing,
        &[
            "ACCESS_LOG_TYPE",
            "BYTES_RECEIVED",
            "BYTES_RETRANSMITTED",
            "BYTES_SENT",
            "CONNECTION_ID",
            "CONNECTION_TERMINATION_DETAILS",
            "CUSTOM_FLAGS",
            "DOWNSTREAM_DIRECT_LOCAL_ADDRESS",
            "DOWNSTREAM_DIRECT_LOCAL_PORT",
            "DOWNSTREAM_DIRECT_REMOTE_ADDRESS",
            "DOWNSTREAM_DIRECT_REMOTE_PORT",
            "DOWNSTREAM_HANDSHAKE_DURATION",
            "DOWNSTREAM_HEADER_BYTES_RECEIVED",
            "DOWNSTREAM_HEADER_BYTES_SENT",
            "DOWNSTREAM_LOCAL_ADDRESS",
            "DOWNSTREAM_LOCAL_DNS_SAN",
            "DOWNSTREAM_LOCAL_EMAIL_SAN",
            "DOWNSTREAM_LOCAL_IP_SAN",
            "DOWNSTREAM_LOCAL_OTHERNAME_SAN",
            "DOWNSTREAM_LOCAL_PORT",
            "DOWNSTREAM_LOCAL_SUBJECT",
            "DOWNSTREAM_LOCAL_URI_SAN",
            "DOWNSTREAM_PEER_CERT",
            "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_1",
            "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_256",
            "DOWNSTREAM_PEER_CHAIN_SERIALS",
            "DOWNSTREAM_PEER_DNS_SAN",
            "DOWNSTREAM_PEER_EMAIL_SAN",
            "DOWNSTREAM_PEER_FINGERPRINT_1",
            "DOWNSTREAM_PEER_FINGERPRINT_256",
            "DOWNSTREAM_PEER_IP_SAN",
            "DOWNSTREAM_PEER_ISSUER",
            "DOWNSTREAM_PEER_OTHERNAME_SAN",
            "DOWNSTREAM_PEER_SERIAL",
            "DOWNSTREAM_PEER_SUBJECT",
            "DOWNSTREAM_PEER_URI_SAN",
            "DOWNSTREAM_REMOTE_ADDRESS",
            "DOWNSTREAM_REMOTE_PORT",
            "DOWNSTREAM_TLS_CIPHER",
            "DOWNSTREAM_TLS_SESSION_ID",
            "DOWNSTREAM_TLS_VERSION",
            "DOWNSTREAM_TRANSPORT_FAILURE_REASON",
            "DOWNSTREAM_WIRE_BYTES_RECEIVED",
            "DOWNSTREAM_WIRE_BYTES_SENT",
            "DURATION",
            "FILTER_CHAIN_NAME",
            "GRPC_STATUS_NUMBER",
            "HOSTNAME",
            "LOCAL_REPLY_BODY",
            "PACKETS_RETRANSMITTED",
            "PROTOCOL",
            "REQUEST_DURATION",
            "REQUEST_HEADERS_BYTES",
            "REQUEST_TX_DURATION",
            "RESPONSE_CODE",
            "RESPONSE_DURATION",
            "RESPONSE_FLAGS",
            "RESPONSE_FLAGS_LONG",
            "RESPONSE_HEADERS_BYTES",
            "RESPONSE_TRAILERS_BYTES",
            "RESPONSE_TX_DURATION",
            "ROUNDTRIP_DURATION",
            "ROUTE_NAME",
            "SPAN_ID",
            "STREAM_ID",
            "TLS_JA3_FINGERPRINT",
            "TRACE_ID",
            "UNIQUE_ID",
            "UPSTREAM_CLUSTER",
            "UPSTREAM_CLUSTER_RAW",
            "UPSTREAM_CONNECTION_ID",
            "UPSTREAM_CONNECTION_POOL_READY_DURATION",
            "UPSTREAM_HEADER_BYTES_RECEIVED",
            "UPSTREAM_HEADER_BYTES_SENT",
            "UPSTREAM_HOST",
            "UPSTREAM_HOST_NAME",
            "UPSTREAM_HOST_NAME_WITHOUT_PORT",
            "UPSTREAM_LOCAL_ADDRESS",
            "UPSTREAM_LOCAL_DNS_SAN",
            "UPSTREAM_LOCAL_IP_SAN",
            "UPSTREAM_LOCAL_PORT",
            "UPSTREAM_LOCAL_URI_SAN",
            "UPSTREAM_PEER_CERT",
            "UPSTREAM_PEER_DNS_SAN",
            "UPSTREAM_PEER_IP_SAN",
            "UPSTREAM_PEER_ISSUER",
            "UPSTREAM_PEER_SUBJECT",
            "UPSTREAM_PEER_URI_SAN",
            "UPSTREAM_PROTOCOL",
            "UPSTREAM_REMOTE_ADDRESS",
            "UPSTREAM_REMOTE_PORT",
            "UPSTREAM_REQUEST_ATTEMPT_COUNT",
            "UPSTREAM_TLS_CIPHER",
            "UPSTREAM_TLS_SESSION_ID",
            "UPSTREAM_TLS_VERSION",
            "UPSTREAM_TRANSPORT_FAILURE_REASON",
            "UPSTREAM_WIRE_BYTES_RECEIVED",
            "UPSTREAM_WIRE_BYTES_SENT",
            "VIRTUAL_CLUSTER_NAME",
        ],
    ),
    (
        Arguments::Any,
        &[
            "DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED",
            "DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_SENT",
            "DOWNSTREAM_DETECTED_CLOSE_TYPE",
            "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_ENDPOINT_ID",
            "DOWNSTREAM_LOCAL_ADDRESS_ENDPOINT_ID",
            "DOWNSTREAM_LOCAL_CLOSE_REASON",
            "DOWNSTREAM_PEER_ISSUER_FINGERPRINT_256",
            "DOWNSTREAM_PEER_ISSUER_SERIAL",
            "DOWNSTREAM_TLS_GROUP",
            "RESPONSE_CODE_DETAILS",
            "TLS_JA4_FINGERPRINT",
            "UPSTREAM_CONNECTION_IDS_ATTEMPTED",
            "UPSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED",
            "UPSTREAM_DECOMPRESSED_HEADER_BYTES_SENT",
            "UPSTREAM_DETECTED_CLOSE_TYPE",
            "UPSTREAM_HOSTS_ATTEMPTED",
            "UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT",
            "UPSTREAM_HOST_NAMES_ATTEMPTED",
            "UPSTREAM_HOST_NAMES_ATTEMPTED_WITHOUT_PORT",
            "UPSTREAM_LOCAL_CLOSE_REASON",
            "UPSTREAM_REMOTE_ADDRESS_ENDPOINT_ID",
            "UPSTREAM_SERVER_NAME",
            "UPSTREAM_TLS_GROUP",
        ],
    ),
    (
        Arguments::Required,
        &[
            "CLUSTER_METADATA",
            "DYNAMIC_METADATA",
            "ENVIRONMENT",
            "PER_REQUEST_STATE",
            "QUERY_PARAM",
            "UPSTREAM_METADATA",
            "XFCC_VALUE",
        ],
    ),
    (
        Arguments::Headers,
        &[
            "REQ",
            "REQUEST_HEADER",
            "REQ_WITHOUT_QUERY",
            "RESP",
            "RESPONSE_HEADER",
            "RESPONSE_TRAILER",
            "STREAM_INFO_REQ",
            "TRAILER",
        ],
    ),
    (
        Arguments::Time,
        &[
            "DOWNSTREAM_PEER_CERT_V_END",
            "DOWNSTREAM_PEER_CERT_V_START",
            "EMIT_TIME",
            "EMIT_TIME_LOCAL",
            "START_TIME",
            "START_TIME_LOCAL",
            "UPSTREAM_PEER_CERT_V_END",
            "UPSTREAM_PEER_CERT_V_START",
        ],
    ),
    (
        Arguments::Mask,
        &[
            "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_WITHOUT_PORT",
            "DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT",
            "DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT",
            "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT",
            "UPSTREAM_LOCAL_ADDRESS_WITHOUT_PORT",
            "UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT",
        ],
    ),
    (
        Arguments::Options(&[&["WQ", "NQ"], &["ORIG", "PATH", "ORIG_OR_PATH"]]),
        &["PATH"],
    ),
    (Arguments::Options(&[&["ORIG", "DECODED"]]), &["QUERY_PARAMS"]),
    (
        Arguments::Options(&[
            &["SNI_ONLY", "SNI_FIRST", "HOST_FIRST"],
            &["ORIG", "HOST", "ORIG_OR_HOST"],
        ]),
        &["REQUESTED_SERVER_NAME"],
    ),
    (Arguments::GrpcStatus, &["GRPC_STATUS"]),
    (Arguments::Duration, &["COMMON_DURATION"]),
    (Arguments::FilterState, &["FILTER_STATE", "UPSTREAM_FILTER_STATE"]),
    (Arguments::Metadata, &["METADATA"]),
    (Arguments::Cel, &["CEL", "TYPED_CEL"]),
    (Arguments::Coalesce, &["COALESCE"]),
];

/// The types of `METADATA`.
const METADATA_TYPES: [&str; 7] = [
    "CLUSTER",
    "DYNAMIC",
    "LISTENER",
    "LISTENER_FILTER_CHAIN",
    "ROUTE",
    "UPSTREAM_HOST",
    "VIRTUAL_HOST",
];

/// The maximum length of an expression, in bytes. Telemetry has the same limit.
const MAX_EXPRESSION: usize = 8 << 10;

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
    let (arguments, (has_length, behind)) = match rest.strip_prefix('(') {
        Some(inner) => {
            let mut ends = inner.match_indices(')');
            ends.find_map(|(end, _)| Some((&inner[..end], behind_length(&inner[end + 1..])?)))?
        }
        None => ("", behind_length(rest)?),
    };
    is_command(name, arguments, has_length).then_some(behind)
}

/// Returns the text behind the last percent sign of a command, and true before it if the command has a length.
fn behind_length(text: &str) -> Option<(bool, &str)> {
    let Some(length) = text.strip_prefix(':') else {
        return Some((false, text.strip_prefix('%')?));
    };
    let rest = length.trim_start_matches(|c: char| c.is_ascii_digit());
    // Envoy reads 64 bits.
    length[..length.len() - rest.len()].parse::<u64>().ok()?;
    Some((true, rest.strip_prefix('%')?))
}

/// Returns true if Envoy's parser accepts a command.
fn is_command(name: &str, arguments: &str, has_length: bool) -> bool {
    let Some((syntax, _)) = COMMANDS.iter().find(|(_, names)| names.contains(&name)) else {
        return false;
    };
    match syntax {
        Arguments::Nothing => arguments.is_empty() && !has_length,
        Arguments::Any => true,
        Arguments::Required => !arguments.is_empty(),
        Arguments::Headers => is_headers(arguments),
        Arguments::Time => !has_length && !has_line_break(arguments),
        Arguments::Mask => arguments.is_empty() || arguments.trim().parse::<u8>().is_ok_and(|bits| bits <= 128),
        Arguments::Options(options) => {
            let mut given = arguments.split(':').zip(*options);
            given.all(|(value, known)| value.is_empty() || known.contains(&value))
        }
        Arguments::GrpcStatus => !has_length && ["", "CAMEL_STRING", "SNAKE_STRING", "NUMBER"].contains(&arguments),
        Arguments::Duration => {
            let parts: Vec<&str> = arguments.split(':').collect();
            !has_length && matches!(parts.as_slice(), [_, _] | [_, _, "ms" | "us" | "ns"])
        }
        Arguments::FilterState => is_filter_state(arguments),
        Arguments::Metadata => {
            let (kind, _) = arguments.split_once(':').unwrap_or((arguments, ""));
            METADATA_TYPES.contains(&kind)
        }
        Arguments::Cel => arguments.len() <= MAX_EXPRESSION && cel::check(arguments).is_ok(),
        Arguments::Coalesce => is_coalesce(arguments),
    }
}

/// Returns true for the name of a header, or two of them. Either may be empty (Envoy,
/// source/common/formatter/substitution_format_utility.cc).
fn is_headers(arguments: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let is_name = |name: &str| name != ":" && name.strip_prefix(':').unwrap_or(name).bytes().all(is_token);
    !arguments.is_empty() && arguments.split('?').count() <= 2 && arguments.split('?').all(is_name)
}

/// Returns true if a format of times has a line break, such as `%n`, also with flags, a width and a modifier.
fn has_line_break(format: &str) -> bool {
    format.split('%').skip(1).any(|specifier| {
        let specifier = specifier.trim_start_matches(['-', '_', '0', '^', '#']);
        let specifier = specifier.trim_start_matches(|c: char| ('1'..='9').contains(&c));
        specifier.strip_prefix(['E', 'O']).unwrap_or(specifier).starts_with('n')
    })
}

fn is_filter_state(arguments: &str) -> bool {
    let mut parts = arguments.split(':');
    let mut next = || parts.next().unwrap_or_default();
    let (key, format, field) = (next(), next(), next());
    let is_known = ["", "PLAIN", "TYPED", "FIELD"].contains(&format);
    !key.is_empty() && is_known && (format == "FIELD") != field.is_empty()
}

/// Returns true for the configuration of `COALESCE`: `{"operators": [NAME, {"command": NAME, "param": ARGUMENTS}]}`.
fn is_coalesce(arguments: &str) -> bool {
    let config: Value = serde_json::from_str(arguments).unwrap_or_default();
    let operators = config.get("operators").and_then(Value::as_array);
    operators.is_some_and(|all| !all.is_empty() && all.iter().all(is_operator))
}

fn is_operator(operator: &Value) -> bool {
    let text = |field: &str| operator.get(field).and_then(Value::as_str);
    match operator {
        Value::String(name) => is_command(name, "", false),
        _ => text("command").is_some_and(|name| {
            let has_length = operator.get("max_length").is_some();
            is_command(name, text("param").unwrap_or_default(), has_length)
        }),
    }
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
            "%START_TIME(%Y/%m/%dT%H:%M:%S%z %s.%3f)%",
            "%CEL(size(request.path) > 3 ? 'a' : request.headers['b']):10%",
            "%UPSTREAM_METADATA([\"a\", \"b\"])%",
            "%PER_REQUEST_STATE(key)%",
            "%RESPONSE_FLAGS%%HOSTNAME%",
            "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
            "%FILTER_STATE(key)% %FILTER_STATE(key:PLAIN):5% %FILTER_STATE(key:FIELD:name)%",
            "%DYNAMIC_METADATA(com.test:a:b):3% %METADATA(ROUTE:a:b)%",
            "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% %DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT(16)%",
            "%PATH(NQ:ORIG)% %QUERY_PARAMS(DECODED)% %GRPC_STATUS% %GRPC_STATUS(NUMBER)%",
            "%COMMON_DURATION(DS_RX_BEG:US_TX_END)% %COMMON_DURATION(a:b:us)%",
            "%COALESCE({\"operators\": [\"PROTOCOL\", {\"command\": \"REQ\", \"param\": \":authority\"}]}):9%",
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

    /// Envoy refuses a route configuration or listener with one of these, and so the routes of others.
    #[test]
    fn commands_that_no_proxy_parses_are_literal() {
        for value in [
            "%REQ(a?b?c)%",
            "%REQ(a b)%",
            "%RESP(:)%",
            "%PROTOCOL(x)%",
            "%PROTOCOL:5%",
            "%UPSTREAM_FOO%",
            "%VIRTUAL_FOO%",
            "%CEL(a b)%",
            "%CEL(string(a))%",
            "%FILTER_STATE%",
            "%FILTER_STATE(:PLAIN)%",
            "%FILTER_STATE(x:BAD)%",
            "%FILTER_STATE(x:FIELD)%",
            "%FILTER_STATE(x:PLAIN:y)%",
            "%START_TIME(%Y%n)%",
            "%START_TIME(%-3En)%",
            "%START_TIME(%Y):4%",
            "%GRPC_STATUS(number)%",
            "%COMMON_DURATION(a)%",
            "%COMMON_DURATION(a:b:s)%",
            "%METADATA(OTHER:a)%",
            "%PATH(NQ:OTHER)%",
            "%DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT(129)%",
            "%UPSTREAM_METADATA%",
            "%COALESCE(x)%",
            "%COALESCE({\"operators\": []})%",
            "%COALESCE({\"operators\": [\"OTHER\"]})%",
            "%FILE_CONTENT(/a)%",
        ] {
            assert_eq!(accepted(value), value.replace('%', "%%"));
        }
    }

    /// The depth of the stack does not grow with the list.
    #[test]
    fn long_lists_are_read() {
        let text = format!("%A([{}\"x\"])%", "\"x\",".repeat(1_000_000));
        assert_eq!(check(&text), Ok(()));
    }
}
