//! Literals of strings and characters in Go's notation.

use super::text::{ByteSet, chars, first_char, is_printable, printable_ascii_without, push_char, span};

/// Characters that quoted text shows as themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charset {
    /// All printable characters.
    Unicode,
    /// Printable ASCII.
    Ascii,
}

/// Bytes that quoting keeps.
const PLAIN: ByteSet = printable_ascii_without(b"\"\\");

/// Returns a string in double quotes.
pub(super) fn quote(bytes: &[u8], charset: Charset) -> String {
    let mut out = Vec::new();
    append_quoted(&mut out, bytes, charset);
    String::from_utf8(out).expect("because everything that is not UTF-8 is escaped")
}

/// Appends a string in double quotes.
pub(super) fn append_quoted(out: &mut Vec<u8>, bytes: &[u8], charset: Charset) {
    out.reserve(bytes.len() + 2);
    out.push(b'"');
    let mut position = span(bytes, &PLAIN);
    out.extend_from_slice(&bytes[..position]);
    if position < bytes.len() {
        let mut escaped = String::new();
        for (character, length) in chars(&bytes[position..]) {
            if character == char::REPLACEMENT_CHARACTER && length == 1 {
                push_code(&mut escaped, 'x', 2, u32::from(bytes[position]));
            } else {
                escape(&mut escaped, character, '"', charset);
            }
            position += length;
        }
        out.extend_from_slice(escaped.as_bytes());
    }
    out.push(b'"');
}

/// Returns a character in single quotes. A number that is not a character is U+FFFD.
pub(super) fn quote_char(code: i64, charset: Charset) -> String {
    let mut out = String::from("'");
    escape(&mut out, char_of(code), '\'', charset);
    out.push('\'');
    out
}

/// Returns the character of a code; U+FFFD if there is none.
pub(super) fn char_of(code: i64) -> char {
    u32::try_from(code)
        .ok()
        .and_then(char::from_u32)
        .unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn escape(out: &mut String, character: char, delimiter: char, charset: Charset) {
    let shown = match charset {
        Charset::Unicode => is_printable(character),
        Charset::Ascii => character.is_ascii() && is_printable(character),
    };
    match character {
        '\\' => out.push_str("\\\\"),
        _ if character == delimiter => {
            out.push('\\');
            out.push(delimiter);
        }
        _ if shown => out.push(character),
        '\u{7}' => out.push_str("\\a"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{b}' => out.push_str("\\v"),
        ..' ' | '\u{7f}' => push_code(out, 'x', 2, u32::from(character)),
        ..'\u{10000}' => push_code(out, 'u', 4, u32::from(character)),
        _ => push_code(out, 'U', 8, u32::from(character)),
    }
}

/// Appends an escape with a number of hexadecimal digits.
fn push_code(out: &mut String, letter: char, digits: usize, code: u32) {
    out.push('\\');
    out.push(letter);
    out.extend(format!("{code:0digits$x}").chars());
}

/// Returns true if a string can be written between back quotes on one line.
pub(super) fn can_backquote(bytes: &[u8]) -> bool {
    chars(bytes).all(|(character, length)| match character {
        char::REPLACEMENT_CHARACTER => length > 1,
        '\u{feff}' | '`' | '\u{7f}' => false,
        character => character >= ' ' || character == '\t',
    })
}

/// Returns the value of a literal in double quotes or back quotes, with its quotes.
pub(super) fn unquote(literal: &str) -> Option<Vec<u8>> {
    let inner = literal.get(1..literal.len().checked_sub(1)?)?;
    if literal.starts_with('`') {
        return Some(inner.bytes().filter(|byte| *byte != b'\r').collect());
    }
    let mut rest = inner.as_bytes();
    let mut out = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let (unit, length) = unit(rest, b'"')?;
        match unit {
            Unit::Byte(byte) => out.push(byte),
            Unit::Char(character) => push_char(&mut out, character),
        }
        rest = &rest[length..];
    }
    Some(out)
}

/// Returns the code of a character literal and the text after the character, which is `'` in a correct literal.
pub(super) fn unquote_char(literal: &str) -> Option<(u32, &str)> {
    let inner = literal.get(1..)?;
    let (unit, length) = unit(inner.as_bytes(), b'\'')?;
    let code = match unit {
        Unit::Byte(byte) => u32::from(byte),
        Unit::Char(character) => u32::from(character),
    };
    Some((code, &inner[length..]))
}

enum Unit {
    Byte(u8),
    Char(char),
}

/// Reads one character or escape, and returns its length.
fn unit(rest: &[u8], delimiter: u8) -> Option<(Unit, usize)> {
    let (first, length) = first_char(rest)?;
    if first == char::from(delimiter) {
        return None;
    }
    if first != '\\' {
        let unit = if first.is_ascii() {
            Unit::Byte(rest[0])
        } else {
            Unit::Char(first)
        };
        return Some((unit, length));
    }
    let simple = |byte: u8| Some((Unit::Byte(byte), 2));
    match *rest.get(1)? {
        b'a' => simple(7),
        b'b' => simple(8),
        b'f' => simple(12),
        b'n' => simple(b'\n'),
        b'r' => simple(b'\r'),
        b't' => simple(b'\t'),
        b'v' => simple(11),
        b'\\' => simple(b'\\'),
        byte @ (b'\'' | b'"') if byte == delimiter => simple(byte),
        b'x' => {
            let code = digits(rest.get(2..4)?, 16)?;
            Some((Unit::Byte(u8::try_from(code).ok()?), 4))
        }
        b'u' => Some((Unit::Char(char::from_u32(digits(rest.get(2..6)?, 16)?)?), 6)),
        b'U' => Some((Unit::Char(char::from_u32(digits(rest.get(2..10)?, 16)?)?), 10)),
        b'0'..=b'7' => {
            let code = digits(rest.get(1..4)?, 8)?;
            Some((Unit::Byte(u8::try_from(code).ok()?), 4))
        }
        _ => None,
    }
}

fn digits(text: &[u8], base: u32) -> Option<u32> {
    text.iter().try_fold(0_u32, |code, byte| {
        let digit = char::from(*byte).to_digit(base)?;
        code.checked_mul(base)?.checked_add(digit)
    })
}
