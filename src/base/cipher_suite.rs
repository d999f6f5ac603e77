//! Cipher suites of TLS that users name.

use std::collections::BTreeSet;

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

/// Returns the cipher suites that Envoy supports, without duplicates. Expressions are omitted unless Envoy certainly
/// accepts them.
pub fn without_invalid_expressions(written: &[String]) -> Vec<String> {
    let mut suites = known(written);
    if !is_accepted(&suites) {
        suites.retain(|suite| KNOWN_SUITES.contains(&suite.as_str()));
    }
    suites
}

/// Returns true for a list that Envoy certainly accepts: each expression consists of suites that it supports, and some
/// suite remains in the end.
///
/// Expressions of BoringSSL (include/openssl/ssl.h): `-A` removes a suite, `!A` for ever, `+A` moves it to the end, and
/// `[A|B]` is a group of equal preference, which no such sign may follow.
fn is_accepted(suites: &[String]) -> bool {
    let mut enabled = BTreeSet::<&str>::new();
    let mut excluded = BTreeSet::<&str>::new();
    let mut has_group = false;
    for written in suites {
        let sign = written.chars().next().filter(|first| "-!+[".contains(*first));
        let named = sign.map_or(written.as_str(), |_| &written[1..]);
        let group = named.strip_suffix(']').filter(|_| sign == Some('['));
        let named: Vec<&str> = match group {
            Some(group) => group.split('|').collect(),
            None if named == "ALL" => KNOWN_SUITES.to_vec(),
            None => vec![named],
        };
        let are_known = named.iter().all(|suite| KNOWN_SUITES.contains(suite));
        let is_open = sign == Some('[') && group.is_none();
        if !are_known || is_open || has_group && group.is_none() && sign.is_some() {
            return false;
        }
        has_group |= group.is_some();
        match sign {
            Some('-') => enabled.retain(|suite| !named.contains(suite)),
            Some('!') => {
                enabled.retain(|suite| !named.contains(suite));
                excluded.extend(named);
            }
            Some('+') => {}
            _ => enabled.extend(named.into_iter().filter(|suite| !excluded.contains(suite))),
        }
    }
    !enabled.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cipher_suites_unknown_to_envoy_are_omitted() {
        let written = ["AES128-SHA", "RC4", "-ALL", "AES128-SHA", "ALL"].map(str::to_owned);
        assert_eq!(known(&written), ["AES128-SHA", "-ALL", "ALL"]);
    }

    #[test]
    fn expressions_that_envoy_may_refuse_are_omitted() {
        let of = |written: &[&str]| {
            let written: Vec<String> = written.iter().map(|suite| (*suite).to_owned()).collect();
            without_invalid_expressions(&written)
        };
        for accepted in [
            &["AES128-SHA"][..],
            &["ALL", "-AES128-SHA", "+AES256-SHA"],
            &["-ALL", "[AES128-SHA|AES256-SHA]", "AES128-GCM-SHA256"],
            &["!AES128-SHA", "ALL"],
        ] {
            assert_eq!(of(accepted), accepted);
        }
        let cases: [(&[&str], &[&str]); 9] = [
            (&["AES128-SHA", "!FOO"], &["AES128-SHA"]),
            (&["AES128-SHA", "@FOO"], &["AES128-SHA"]),
            (&["AES128-SHA", ""], &["AES128-SHA"]),
            (&["AES128-SHA", "[AES256-SHA"], &["AES128-SHA"]),
            (&["[AES256-SHA|FOO]", "AES128-SHA"], &["AES128-SHA"]),
            (&["[AES256-SHA]", "-AES256-SHA", "AES128-SHA"], &["AES128-SHA"]),
            (&["AES128-SHA", "-AES128-SHA"], &["AES128-SHA"]),
            (&["ALL", "!ALL"], &[]),
            (&["!AES128-SHA", "ALL:FOO", "-ALL"], &[]),
        ];
        for (refused, rest) in cases {
            assert_eq!(of(refused), rest, "{refused:?}");
        }
    }
}
