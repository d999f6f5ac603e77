//! Base64, base32 and checksums.

use aws_lc_rs::digest;
use base64::{Engine, engine::general_purpose::STANDARD};

use super::{
    super::{
        limits::Failure,
        types::Type,
        value::{Context, Function, Value},
    },
    bytes, of_strings,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::String;
    vec![
        of_strings("b64enc", 1, String, |context, arguments| {
            context.allocate(bytes(arguments, 0).len().saturating_mul(4) / 3 + 4)?;
            Ok(STANDARD.encode(bytes(arguments, 0)).into())
        }),
        of_strings("b64dec", 1, String, |context, arguments| {
            decoded(context, bytes(arguments, 0), "base64", decode_64)
        }),
        of_strings("b32enc", 1, String, |context, arguments| {
            context.allocate(bytes(arguments, 0).len().saturating_mul(8) / 5 + 8)?;
            Ok(encode_32(bytes(arguments, 0)).into())
        }),
        of_strings("b32dec", 1, String, |context, arguments| {
            decoded(context, bytes(arguments, 0), "base32", decode_32)
        }),
        of_strings("sha1sum", 1, String, |context, arguments| {
            sum(context, &digest::SHA1_FOR_LEGACY_USE_ONLY, bytes(arguments, 0))
        }),
        of_strings("sha256sum", 1, String, |context, arguments| {
            sum(context, &digest::SHA256, bytes(arguments, 0))
        }),
        of_strings("sha512sum", 1, String, |context, arguments| {
            sum(context, &digest::SHA512, bytes(arguments, 0))
        }),
        of_strings("adler32sum", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            context.step(whole.len() / 64)?;
            let (low, high) = whole.iter().fold((1_u32, 0_u32), |(low, high), byte| {
                let low = (low + u32::from(*byte)) % 65_521;
                (low, (high + low) % 65_521)
            });
            Ok((high << 16 | low).to_string().into())
        }),
    ]
}

fn sum(context: &mut Context<'_>, algorithm: &'static digest::Algorithm, whole: &[u8]) -> Result<Value, Failure> {
    context.step(whole.len() / 16)?;
    context.allocate(128)?;
    Ok(hexadecimal(digest::digest(algorithm, whole).as_ref()).into())
}

/// Returns the hexadecimal digits of bytes.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    let digit = |number: u8| char::from_digit(u32::from(number), 16).unwrap_or('0');
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

/// Decodes a text; the result of a wrong text is the message of the error.
fn decoded(
    context: &mut Context<'_>,
    whole: &[u8],
    name: &str,
    decode: fn(&[u8]) -> Result<Vec<u8>, usize>,
) -> Result<Value, Failure> {
    context.allocate(whole.len())?;
    Ok(match decode(whole) {
        Ok(out) => out.into(),
        Err(position) => format!("illegal {name} data at input byte {position}").into(),
    })
}

fn is_line_break(byte: u8) -> bool {
    byte == b'\n' || byte == b'\r'
}

fn digit_64(byte: u8) -> Option<u32> {
    let digit = match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(digit))
}

/// Decodes base64 with padding. The error is the position that Go reports.
fn decode_64(whole: &[u8]) -> Result<Vec<u8>, usize> {
    let mut out = Vec::with_capacity(whole.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0_usize);
    let mut position = 0;
    while let Some(&byte) = whole.get(position) {
        position += 1;
        if let Some(digit) = digit_64(byte) {
            bits = bits << 6 | digit;
            count += 1;
            if count == 4 {
                out.extend_from_slice(&bits.to_be_bytes()[1..]);
                (bits, count) = (0, 0);
            }
        } else if byte == b'=' && count >= 2 {
            let mut end = skip_line_breaks(whole, position);
            if count == 2 {
                match whole.get(end) {
                    None => return Err(whole.len()),
                    Some(b'=') => end = skip_line_breaks(whole, end + 1),
                    Some(_) => return Err(end - 1),
                }
            }
            if end < whole.len() {
                return Err(end);
            }
            bits <<= 6 * (4 - count);
            out.extend_from_slice(&bits.to_be_bytes()[1..count]);
            return Ok(out);
        } else if !is_line_break(byte) {
            return Err(position - 1);
        }
    }
    if count > 0 { Err(whole.len() - count) } else { Ok(out) }
}

fn skip_line_breaks(whole: &[u8], from: usize) -> usize {
    from + whole[from..].iter().take_while(|byte| is_line_break(**byte)).count()
}

const DIGITS_32: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

fn encode_32(whole: &[u8]) -> String {
    let mut out = String::new();
    for chunk in whole.chunks(5) {
        let mut padded = [0; 8];
        padded[3..3 + chunk.len()].copy_from_slice(chunk);
        let bits = u64::from_be_bytes(padded);
        let digits = (chunk.len() * 8).div_ceil(5);
        for position in 0..8 {
            let digit = (bits >> (35 - 5 * position) & 31) as usize;
            out.push(if position < digits {
                char::from(DIGITS_32[digit])
            } else {
                '='
            });
        }
    }
    out
}

/// Decodes base32 with padding. The error is the position that Go reports, without line breaks.
fn decode_32(whole: &[u8]) -> Result<Vec<u8>, usize> {
    let text: Vec<u8> = whole.iter().copied().filter(|byte| !is_line_break(*byte)).collect();
    let mut out = Vec::new();
    let mut position = 0;
    while position < text.len() {
        let mut bits = 0_u64;
        let mut count = 0;
        let mut has_ended = false;
        while count < 8 {
            let Some(&byte) = text.get(position) else {
                return Err(text.len() - count);
            };
            position += 1;
            let rest = &text[position..];
            if byte == b'=' && count >= 2 && rest.len() < 8 {
                if rest.len() + count < 7 {
                    return Err(text.len());
                }
                if let Some(wrong) = rest.iter().take(7 - count).position(|byte| *byte != b'=') {
                    return Err((position + wrong).saturating_sub(1));
                }
                if matches!(count, 1 | 3 | 6) {
                    return Err(position - 1);
                }
                has_ended = true;
                break;
            }
            let digit = DIGITS_32.iter().position(|digit| *digit == byte).ok_or(position - 1)?;
            bits = bits << 5 | digit as u64;
            count += 1;
        }
        bits <<= 5 * (8 - count);
        out.extend_from_slice(&bits.to_be_bytes()[3..3 + count * 5 / 8]);
        if has_ended {
            break;
        }
    }
    Ok(out)
}
