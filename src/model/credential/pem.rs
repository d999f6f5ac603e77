//! Checks of certificates and private keys in PEM. Dates are read and not checked: this layer has no clock.

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls::{crypto::aws_lc_rs::sign::any_supported_type, pki_types::PrivateKeyDer};
use x509_parser::{
    parse_x509_certificate,
    prelude::{FromDer, SubjectPublicKeyInfo, X509Certificate},
};

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";
/// Type of the blocks with certificates.
const CERTIFICATE: &str = "CERTIFICATE";
/// Type of the blocks with private keys; more specific ones end with it.
const PRIVATE_KEY: &str = "PRIVATE KEY";

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

/// Reason why a chain and a private key cannot be used together, in the words of Istio's statuses. No text contains any
/// of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyPairError {
    /// The chain has no PEM block.
    #[error("tls: failed to find any PEM data in certificate input")]
    NoChain,
    /// The chain has a private key only.
    #[error(
        "tls: failed to find certificate PEM data in certificate input, but did find a private key; PEM inputs may \
         have been switched"
    )]
    KeyAsChain,
    /// The chain has PEM blocks of other types only.
    #[error("tls: failed to find \"CERTIFICATE\" PEM block in certificate input")]
    NoCertificate,
    /// The first certificate cannot be parsed.
    #[error("x509: malformed certificate")]
    Certificate,
    /// The key has no PEM block.
    #[error("tls: failed to find any PEM data in key input")]
    NoKeyData,
    /// The key has a certificate only.
    #[error("tls: found a certificate rather than a key in the PEM for the private key")]
    ChainAsKey,
    /// The key has PEM blocks of other types only.
    #[error("tls: failed to find PEM block with type ending in \"PRIVATE KEY\" in key input")]
    NoKey,
    /// The key is encrypted, malformed, or of a type that Envoy refuses, such as RSA with less than 2048 bits.
    #[error("tls: failed to parse private key")]
    Key,
    /// The certificate is for a key of another type.
    #[error("tls: private key type does not match public key type")]
    KeyType,
    /// The certificate is for another key.
    #[error("tls: private key does not match public key")]
    Mismatch,
}

/// Checks the first PEM block of a text, and not its type.
///
/// Parity (pilot/pkg/xds/sds.go, ValidateCertificate): Istio only warns of such certificates, and so do we. Envoy skips
/// blocks of other types; [`check_key_pair`] and [`has_certificate`] decide whether a certificate can be used.
pub fn check_certificate(text: &[u8]) -> Result<(), CertificateError> {
    let text = String::from_utf8_lossy(text);
    let (_, der) = blocks(&text).next().ok_or(CertificateError::NotPem)?;
    let mut rest = der.as_slice();
    while !rest.is_empty() {
        let (certificate, after) = element(rest, SEQUENCE).ok_or(CertificateError::NotACertificate)?;
        is_certificate(certificate).ok_or(CertificateError::NotACertificate)?;
        rest = after;
    }
    Ok(())
}

/// The time in which certificates are valid, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The latest start.
    not_before: i64,
    /// The earliest end.
    not_after: i64,
}

impl Validity {
    /// Returns true if all certificates are valid at a time, in seconds since 1970.
    pub fn contains(&self, time: i64) -> bool {
        (self.not_before..=self.not_after).contains(&time)
    }
}

/// Returns the validity of the certificates in the first PEM block of a text; `None` if they cannot be parsed.
///
/// Parity (pilot/pkg/xds/sds.go, ValidateCertificate): other blocks do not count.
pub fn validity(text: &[u8]) -> Option<Validity> {
    let text = String::from_utf8_lossy(text);
    let (_, der) = blocks(&text).next()?;
    let mut validity = Validity {
        not_before: i64::MIN,
        not_after: i64::MAX,
    };
    let mut rest = der.as_slice();
    while !rest.is_empty() {
        let (after, certificate) = parse_x509_certificate(rest).ok()?;
        let own = &certificate.tbs_certificate.validity;
        validity.not_before = validity.not_before.max(own.not_before.timestamp());
        validity.not_after = validity.not_after.min(own.not_after.timestamp());
        rest = after;
    }
    Some(validity)
}

/// Checks that the first certificate of a chain is for a private key. Blocks of other types are skipped, as by Envoy.
///
/// Parity (pilot/pkg/config/kube/gateway/conversion.go, buildSecretReference).
pub fn check_key_pair(chain: &[u8], key: &[u8]) -> Result<(), KeyPairError> {
    let (chain, key) = (String::from_utf8_lossy(chain), String::from_utf8_lossy(key));
    let leaf = first_of_type(&chain, |kind| kind == CERTIFICATE);
    let leaf = leaf.map_err(|skipped| match skipped.as_slice() {
        [] => KeyPairError::NoChain,
        [only] if only.ends_with(PRIVATE_KEY) => KeyPairError::KeyAsChain,
        _ => KeyPairError::NoCertificate,
    })?;
    let key = first_of_type(&key, is_private_key);
    let key = key.map_err(|skipped| match skipped.as_slice() {
        [] => KeyPairError::NoKeyData,
        [CERTIFICATE] => KeyPairError::ChainAsKey,
        _ => KeyPairError::NoKey,
    })?;
    let leaf = parsed(&leaf).ok_or(KeyPairError::Certificate)?;
    let key = PrivateKeyDer::try_from(key.as_slice()).map_err(|_| KeyPairError::Key)?;
    let key = any_supported_type(&key).map_err(|_| KeyPairError::Key)?;
    let public = key.public_key().ok_or(KeyPairError::Key)?;
    let (_, public) = SubjectPublicKeyInfo::from_der(public.as_ref()).map_err(|_| KeyPairError::Key)?;
    let certified = leaf.public_key();
    if public.algorithm.algorithm != certified.algorithm.algorithm {
        return Err(KeyPairError::KeyType);
    }
    if public.subject_public_key.data != certified.subject_public_key.data {
        return Err(KeyPairError::Mismatch);
    }
    Ok(())
}

/// Returns true if a text has a certificate that can be parsed. Blocks of other types, such as revocation lists, and
/// damaged certificates are skipped.
///
/// Parity (pilot/pkg/config/kube/gateway/conversion.go, buildCaCertificateReference).
pub fn has_certificate(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    blocks(&text).any(|(kind, der)| kind == CERTIFICATE && parsed(&der).is_some())
}

/// Returns a certificate without trailing bytes.
fn parsed(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = parse_x509_certificate(der).ok()?;
    rest.is_empty().then_some(certificate)
}

fn is_private_key(kind: &str) -> bool {
    let specific = kind.strip_suffix(PRIVATE_KEY);
    specific.is_some_and(|algorithm| algorithm.is_empty() || algorithm.ends_with(' '))
}

/// Returns the content of the first PEM block of a type; without one, the types of all blocks.
fn first_of_type(text: &str, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<u8>, Vec<&str>> {
    let mut skipped = Vec::new();
    for (kind, der) in blocks(text) {
        if is_wanted(kind) {
            return Ok(der);
        }
        skipped.push(kind);
    }
    Err(skipped)
}

/// Returns the types and contents of the PEM blocks. Anything between blocks, and blocks that cannot be decoded, are
/// skipped.
fn blocks(text: &str) -> impl Iterator<Item = (&str, Vec<u8>)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            // The end is looked for first, so that no text is searched more than twice.
            let (before, after) = rest.split_once(END)?;
            rest = after;
            let begin = before.rfind(BEGIN).map(|start| start + BEGIN.len());
            let block = begin.and_then(|begin| {
                let (kind, body) = before[begin..].split_once(DASHES)?;
                let is_end = after.strip_prefix(kind)?.starts_with(DASHES);
                Some((kind, decoded(body).filter(|_| is_end)?))
            });
            if block.is_some() {
                return block;
            }
        }
    })
}

/// Returns the content of a PEM block.
fn decoded(body: &str) -> Option<Vec<u8>> {
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
