//! Private keys of CAs and leaf certificates: parsing, generation and signing.

use std::fmt;

use aws_lc_rs::signature as aws;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use rcgen::{KeyPair, PublicKeyData, RsaKeySize, SigningKey};
use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
use x509_parser::{
    asn1_rs::{BitString, Oid},
    oid_registry::{
        OID_EC_P256, OID_NIST_EC_P384, OID_NIST_EC_P521, OID_SIG_ECDSA_WITH_SHA256, OID_SIG_ECDSA_WITH_SHA384,
        OID_SIG_ECDSA_WITH_SHA512,
    },
    prelude::{AlgorithmIdentifier, SubjectPublicKeyInfo},
};

use super::der;
use crate::base::Sensitive;

/// sha256WithRSAEncryption, ecdsa-with-SHA256, -SHA384, -SHA512 and Ed25519, each as the DER of an
/// `AlgorithmIdentifier`.
const RSA_SHA256: &[u8] = &[0x30, 13, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 11, 5, 0];
const ECDSA_SHA256: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const ECDSA_SHA384: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3];
const ECDSA_SHA512: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 4];
const ED25519: &[u8] = &[0x30, 5, 6, 3, 0x2b, 0x65, 0x70];

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// RSA with this modulus size in bits.
    Rsa(u32),
    /// NIST P-256.
    P256,
    /// NIST P-384.
    P384,
    /// NIST P-521.
    P521,
    /// Ed25519.
    Ed25519,
}

/// A private key. Its debug output is redacted.
pub struct PrivateKey {
    pair: KeyPair,
    kind: KeyKind,
    pem: Sensitive,
}

/// A key error. Its text never contains key material.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text has no key in a supported format.
    #[error("no unencrypted private key in PEM (PKCS#8, PKCS#1 or SEC1)")]
    Unreadable,
    /// The key type is not supported.
    #[error("the key is neither RSA of 2048 to 8192 bits, nor P-256, P-384, P-521 or Ed25519")]
    Unsupported,
    /// Keys of this type cannot be generated.
    #[error("cannot generate a {0:?} key; hint: RSA keys have 2048, 3072 or 4096 bits")]
    Kind(KeyKind),
    /// Key generation failed.
    #[error("key generation failed")]
    Generation,
    /// Signing failed.
    #[error("signing failed")]
    Signing,
}

impl PrivateKey {
    /// Parses the first private key in PEM: PKCS#8, PKCS#1 (`RSA PRIVATE KEY`) or SEC1 (`EC PRIVATE KEY`).
    pub fn from_pem(pem: &Sensitive) -> Result<Self, KeyError> {
        let der = PrivateKeyDer::from_pem_slice(pem.reveal()).map_err(|_| KeyError::Unreadable)?;
        let pair = KeyPair::try_from(&der).map_err(|_| KeyError::Unsupported)?;
        Self::new(pair, pem.clone())
    }

    /// Generates a key. RSA takes a tenth of a second or more.
    pub fn generate(kind: KeyKind) -> Result<Self, KeyError> {
        let pair = match kind {
            KeyKind::Rsa(2048) => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_2048),
            KeyKind::Rsa(3072) => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_3072),
            KeyKind::Rsa(4096) => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_4096),
            KeyKind::P256 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256),
            KeyKind::P384 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384),
            KeyKind::P521 => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512),
            KeyKind::Ed25519 => KeyPair::generate_for(&rcgen::PKCS_ED25519),
            KeyKind::Rsa(_) => return Err(KeyError::Kind(kind)),
        };
        let pair = pair.map_err(|_| KeyError::Generation)?;
        let pem = pem("PRIVATE KEY", pair.serialized_der());
        Self::new(pair, Sensitive::new(Bytes::from(pem)))
    }

    fn new(pair: KeyPair, pem: Sensitive) -> Result<Self, KeyError> {
        let algorithm = pair.algorithm();
        let kind = if *algorithm == rcgen::PKCS_RSA_SHA256 {
            KeyKind::Rsa(rsa_bits(pair.der_bytes()).ok_or(KeyError::Unsupported)?)
        } else if *algorithm == rcgen::PKCS_ECDSA_P256_SHA256 {
            KeyKind::P256
        } else if *algorithm == rcgen::PKCS_ECDSA_P384_SHA384 {
            KeyKind::P384
        } else if *algorithm == rcgen::PKCS_ECDSA_P521_SHA512 {
            KeyKind::P521
        } else if *algorithm == rcgen::PKCS_ED25519 {
            KeyKind::Ed25519
        } else {
            return Err(KeyError::Unsupported);
        };
        Ok(Self { pair, kind, pem })
    }

    /// Kind.
    pub fn kind(&self) -> KeyKind {
        self.kind
    }

    /// The key as PEM, in its original format; PKCS#8 if generated.
    pub fn pem(&self) -> &Sensitive {
        &self.pem
    }

    /// The public key: a `SubjectPublicKeyInfo` in DER.
    pub fn public(&self) -> Vec<u8> {
        self.pair.subject_public_key_info()
    }

    /// The raw public key bits, the input of key identifiers.
    pub(super) fn public_bits(&self) -> &[u8] {
        self.pair.der_bytes()
    }

    /// The `AlgorithmIdentifier` of its signatures, in DER.
    pub(super) fn algorithm(&self) -> &'static [u8] {
        match self.kind {
            KeyKind::Rsa(_) => RSA_SHA256,
            KeyKind::P256 => ECDSA_SHA256,
            KeyKind::P384 => ECDSA_SHA384,
            KeyKind::P521 => ECDSA_SHA512,
            KeyKind::Ed25519 => ED25519,
        }
    }

    /// Signs a TBS structure and returns the signed structure, as in certificates, CSRs and CRLs.
    pub(super) fn sign_tbs(&self, content: &[u8]) -> Result<Vec<u8>, KeyError> {
        let signature = self.pair.sign(content).map_err(|_| KeyError::Signing)?;
        let parts = [content, self.algorithm(), &der::bits(&signature)];
        Ok(der::nested(der::SEQUENCE, &parts))
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} key, redacted", self.kind)
    }
}

/// The length of the modulus in a PKCS#1 public key.
fn rsa_bits(public: &[u8]) -> Option<u32> {
    use x509_parser::{der_parser::parse_der, public_key::RSAPublicKey};
    let (_, sequence) = parse_der(public).ok()?;
    let parts = sequence.as_sequence().ok()?;
    let key = RSAPublicKey {
        modulus: parts.first()?.as_slice().ok()?,
        exponent: parts.get(1)?.as_slice().ok()?,
    };
    u32::try_from(key.key_size()).ok()
}

/// A PEM block with a newline at its end.
pub(super) fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(64));
        out.push_str(line);
        out.push('\n');
        rest = more;
    }
    out.extend(["-----END ", label, "-----\n"]);
    out
}

/// Verifies a signature of `content` by a public key. Accepts the algorithms of TLS, except SHA-1.
pub(super) fn is_signed(
    by: &SubjectPublicKeyInfo<'_>,
    algorithm: &AlgorithmIdentifier<'_>,
    signature: &BitString<'_>,
    content: &[u8],
) -> bool {
    if let Some(verifier) = ecdsa(by, algorithm) {
        let key = aws::UnparsedPublicKey::new(verifier, &by.subject_public_key.data);
        return key.verify(content, &signature.data).is_ok();
    }
    if is_sha1(algorithm) {
        return false;
    }
    x509_parser::verify::verify_signature(by, algorithm, signature, content).is_ok()
}

/// Returns the verifier of an ECDSA signature that `x509_parser` does not know. Any digest may be used with any curve;
/// OpenSSL signs with SHA-256 by default, also with P-521.
fn ecdsa(
    by: &SubjectPublicKeyInfo<'_>,
    algorithm: &AlgorithmIdentifier<'_>,
) -> Option<&'static dyn aws::VerificationAlgorithm> {
    let curve = by.algorithm.parameters.as_ref()?.as_oid().ok()?;
    let has = |of_key: Oid<'_>, of_signature: Oid<'_>| curve == of_key && algorithm.algorithm == of_signature;
    if has(OID_NIST_EC_P521, OID_SIG_ECDSA_WITH_SHA256) {
        Some(&aws::ECDSA_P521_SHA256_ASN1)
    } else if has(OID_NIST_EC_P521, OID_SIG_ECDSA_WITH_SHA384) {
        Some(&aws::ECDSA_P521_SHA384_ASN1)
    } else if has(OID_NIST_EC_P521, OID_SIG_ECDSA_WITH_SHA512) {
        Some(&aws::ECDSA_P521_SHA512_ASN1)
    } else if has(OID_NIST_EC_P384, OID_SIG_ECDSA_WITH_SHA512) {
        Some(&aws::ECDSA_P384_SHA512_ASN1)
    } else if has(OID_EC_P256, OID_SIG_ECDSA_WITH_SHA512) {
        Some(&aws::ECDSA_P256_SHA512_ASN1)
    } else {
        None
    }
}

fn is_sha1(algorithm: &AlgorithmIdentifier<'_>) -> bool {
    use x509_parser::oid_registry::{OID_PKCS1_SHA1WITHRSA, OID_SHA1_WITH_RSA};
    [OID_PKCS1_SHA1WITHRSA, OID_SHA1_WITH_RSA].contains(&algorithm.algorithm)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [KeyKind; 5] = [
        KeyKind::Rsa(2048),
        KeyKind::P256,
        KeyKind::P384,
        KeyKind::P521,
        KeyKind::Ed25519,
    ];

    #[test]
    fn generated_keys_are_parsed_again() {
        for kind in KINDS {
            let generated = PrivateKey::generate(kind).unwrap();
            assert_eq!(generated.kind(), kind);
            let read = PrivateKey::from_pem(generated.pem()).unwrap();
            assert_eq!((read.kind(), read.public()), (kind, generated.public()));
        }
        assert_eq!(
            PrivateKey::generate(KeyKind::Rsa(1024)).unwrap_err(),
            KeyError::Kind(KeyKind::Rsa(1024))
        );
    }

    #[test]
    fn keys_never_print() {
        for kind in KINDS {
            let key = PrivateKey::generate(kind).unwrap();
            let secret = std::str::from_utf8(key.pem().reveal()).unwrap();
            let line = secret.lines().nth(1).unwrap();
            let printed = format!("{key:?} {:#?} {:?}", key, key.pem());
            assert!(!printed.contains(line) && !printed.contains("BEGIN"), "{printed}");
        }
    }

    #[test]
    fn errors_do_not_contain_key_material() {
        for text in [
            "",
            "secret",
            "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
        ] {
            let error = PrivateKey::from_pem(&Sensitive::new(Bytes::from_static(text.as_bytes()))).unwrap_err();
            let printed = format!("{error} {error:?}");
            assert!(
                !printed.contains("secret") && !printed.contains("c2VjcmV0"),
                "{printed}"
            );
        }
    }
}
