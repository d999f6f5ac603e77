//! Checks whether a text is a certificate. Dates are not checked: this layer has no clock.

use base64::{Engine, engine::general_purpose::STANDARD};

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";

/// DER tags in a certificate.
const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// Reason why a text is not a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// It has no PEM block.
    #[error("it is not PEM")]
    NotPem,
    /// The first PEM block has another type.
    #[error("its first PEM block is not a certificate")]
    NotACertificate,
}

/// Checks the first PEM block of a text, which Envoy uses as the server certificate.
pub fn check_certificate(text: &[u8]) -> Result<(), CertificateError> {
    let der = first_block(text).ok_or(CertificateError::NotPem)?;
    let mut rest = der.as_slice();
    while !rest.is_empty() {
        let (certificate, after) = element(rest, SEQUENCE).ok_or(CertificateError::NotACertificate)?;
        is_certificate(certificate).ok_or(CertificateError::NotACertificate)?;
        rest = after;
    }
    Ok(())
}

/// Returns the content of the first PEM block.
fn first_block(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut rest = text;
    loop {
        let start = rest.find(BEGIN)? + BEGIN.len();
        rest = &rest[start..];
        let block = rest.split_once(DASHES).and_then(|(kind, body)| {
            let (body, _) = body.split_once(&format!("{END}{kind}{DASHES}"))?;
            // Lines with a colon are headers.
            let lines = body.lines().filter(|line| !line.as_bytes().contains(&b':'));
            let mut compact = Vec::with_capacity(body.len());
            for line in lines {
                let line = line.as_bytes().trim_ascii();
                if line.iter().any(u8::is_ascii_whitespace) {
                    compact.extend(line.iter().filter(|byte| !byte.is_ascii_whitespace()));
                } else {
                    compact.extend_from_slice(line);
                }
            }
            STANDARD.decode(compact).ok()
        });
        if block.is_some() {
            return block;
        }
    }
}

/// Checks the three elements of a certificate: signed content, algorithm and signature.
fn is_certificate(content: &[u8]) -> Option<()> {
    let (_, rest) = element(content, SEQUENCE)?;
    let (_, rest) = element(rest, SEQUENCE)?;
    let (_, rest) = element(rest, BIT_STRING)?;
    rest.is_empty().then_some(())
}

/// Returns the content of the first DER element, if it has this tag, and the remaining bytes.
fn element(bytes: &[u8], expected_tag: u8) -> Option<(&[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
        if digits.is_empty() || digits.len() > 4 {
            return None;
        }
        let length = digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit));
        (length, rest)
    };
    (tag == expected_tag).then(|| rest.split_at_checked(length)).flatten()
}
