//! Cipher suites of TLS that users name.

/// Cipher suites that Envoy supports; it refuses a listener with others.
const KNOWN_SUITES: &[&str] = &[
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
    "ECDHE-ECDSA-AES128-SHA",
    "ECDHE-RSA-AES128-SHA",
    "ECDHE-ECDSA-AES256-SHA",
    "ECDHE-RSA-AES256-SHA",
    "AES128-GCM-SHA256",
    "AES256-GCM-SHA384",
    "AES128-SHA",
    "AES256-SHA",
    "DES-CBC3-SHA",
];

/// Returns true if Envoy supports a cipher suite. Expressions, which begin with a sign, are left to Envoy.
pub fn is_known(suite: &str) -> bool {
    suite == "ALL" || suite.chars().next().is_none_or(|first| !first.is_alphanumeric()) || KNOWN_SUITES.contains(&suite)
}

/// Returns the cipher suites that Envoy supports, without duplicates.
pub fn known(written: &[String]) -> Vec<String> {
    let mut suites: Vec<String> = Vec::new();
    for suite in written {
        if is_known(suite) && !suites.contains(suite) {
            suites.push(suite.clone());
        }
    }
    suites
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cipher_suites_unknown_to_envoy_are_omitted() {
        let written = ["AES128-SHA", "RC4", "-ALL", "AES128-SHA", "ALL"].map(str::to_owned);
        assert_eq!(known(&written), ["AES128-SHA", "-ALL", "ALL"]);
    }
}
