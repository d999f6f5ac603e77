//! Fingerprints of certificates, in the forms that Envoy accepts.

use base64::{Engine, prelude::BASE64_STANDARD};

/// Length of a SHA-256, in bytes.
const LENGTH: usize = 32;

/// Returns true for the SHA-256 of a public key (SPKI) in Base64.
pub fn is_of_key(text: &str) -> bool {
    BASE64_STANDARD.decode(text).is_ok_and(|hash| hash.len() == LENGTH)
}

/// Returns true for the SHA-256 of a certificate in hexadecimal digits, also with colons between the bytes.
pub fn is_of_certificate(text: &str) -> bool {
    let with_colons = text.len() == 3 * LENGTH - 1;
    let digits = text.bytes().filter(|byte| !(with_colons && *byte == b':'));
    let digits: Vec<u8> = digits.collect();
    digits.len() == 2 * LENGTH && digits.iter().all(u8::is_ascii_hexdigit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_envoy_accepts_is_a_fingerprint() {
        let key = BASE64_STANDARD.encode([7; LENGTH]);
        assert!(is_of_key(&key));
        for text in [
            "",
            "x",
            key.trim_end_matches('='),
            &BASE64_STANDARD.encode([7; 31]),
            &"A".repeat(44),
        ] {
            assert!(!is_of_key(text), "{text}");
        }
        let colons = vec!["aB"; LENGTH].join(":");
        for text in ["0f".repeat(LENGTH), colons.clone()] {
            assert!(is_of_certificate(&text), "{text}");
        }
        let misplaced = colons.replace(':', "").replacen("aB", ":aB", 1);
        for text in [
            "",
            "x",
            &"0g".repeat(LENGTH),
            &"0f".repeat(LENGTH + 1),
            &misplaced,
            &":".repeat(95),
        ] {
            assert!(!is_of_certificate(text), "{text}");
        }
    }
}
