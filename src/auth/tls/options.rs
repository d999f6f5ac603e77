//! TLS versions and cipher suites: `--tls-min-version`, `--tls-cipher-suites`, `COMPLIANCE_POLICY`.

use std::sync::Arc;

use rustls::{
    CipherSuite, SupportedProtocolVersion,
    crypto::{
        CryptoProvider,
        aws_lc_rs::{default_provider, kx_group},
    },
    version::{TLS12, TLS13},
};

use crate::settings::{DiscoveryFlags, TlsVersion};

/// Cipher suites that Istio accepts but that are too weak to be offered.
const WEAK_SUITES: [&str; 14] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_RC4_128_SHA",
];
/// Cipher suites with static RSA key exchange, which has no forward secrecy.
const STATIC_RSA_SUITES: [&str; 2] = ["TLS_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_AES_256_GCM_SHA384"];
/// The cipher suites of `fips-140-2`.
const FIPS: [CipherSuite; 4] = [
    CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
];
/// The cipher suites of `pqc`.
const PQC: [CipherSuite; 2] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
];

/// The TLS parameters of servers.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// Cipher suites, key exchange groups and signature algorithms.
    pub provider: Arc<CryptoProvider>,
    /// The protocol versions.
    pub versions: Vec<&'static SupportedProtocolVersion>,
}

/// Invalid options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsOptionsError {
    /// An unknown cipher suite.
    #[error("--tls-cipher-suites: cipher suite {0} not supported or doesn't exist")]
    UnknownSuite(String),
    /// No usable cipher suite is left, and TLS 1.3 is not allowed.
    #[error(
        "--tls-cipher-suites leaves no usable cipher suite; hint: use suites with ECDHE and GCM, or unset the flag"
    )]
    NoUsableVersion,
}

impl Default for TlsOptions {
    fn default() -> Self {
        Self {
            provider: default_provider().into(),
            versions: vec![&TLS13, &TLS12],
        }
    }
}

impl TlsOptions {
    /// Reads the flags and `COMPLIANCE_POLICY`. The latter takes precedence.
    pub fn new(flags: &DiscoveryFlags, compliance: &str) -> Result<Self, TlsOptionsError> {
        let mut provider = default_provider();
        let mut versions = vec![&TLS13];
        if flags.tls_min_version == TlsVersion::Tls12 {
            versions.push(&TLS12);
        }
        let names: Vec<&str> = flags.tls_cipher_suites.iter().map(|name| name.trim()).collect();
        let names: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
        if !names.is_empty() {
            let requested = known_suites(&provider, &names)?;
            // As in Go's crypto/tls, the TLS 1.3 suites are not configurable.
            let is_new = |suite: CipherSuite| go_name(suite).starts_with("TLS_AES") || is_chacha_of_13(suite);
            provider
                .cipher_suites
                .retain(|suite| is_new(suite.suite()) || requested.contains(&suite.suite()));
        }
        match compliance {
            "fips-140-2" => {
                versions = vec![&TLS12];
                provider.cipher_suites.retain(|suite| FIPS.contains(&suite.suite()));
                provider.kx_groups = vec![kx_group::SECP256R1];
            }
            "pqc" => {
                versions = vec![&TLS13];
                provider.cipher_suites.retain(|suite| PQC.contains(&suite.suite()));
                provider.kx_groups = vec![kx_group::X25519MLKEM768];
            }
            "" => {}
            unknown => tracing::warn!(
                value = unknown,
                "COMPLIANCE_POLICY ignored; hint: want fips-140-2 or pqc"
            ),
        }
        let speaks = |version: &&'static SupportedProtocolVersion| {
            let mut suites = provider.cipher_suites.iter();
            suites.any(|suite| suite.version().version == version.version)
        };
        versions.retain(speaks);
        if versions.is_empty() {
            return Err(TlsOptionsError::NoUsableVersion);
        }
        Ok(Self {
            provider: provider.into(),
            versions,
        })
    }
}

/// Returns the named suites; weak ones are logged and skipped.
fn known_suites(provider: &CryptoProvider, names: &[&str]) -> Result<Vec<CipherSuite>, TlsOptionsError> {
    let mut suites = Vec::new();
    for &name in names {
        let found = provider.cipher_suites.iter().find(|suite| {
            let known = go_name(suite.suite());
            // Older names of the ChaCha20 suites have no hash suffix.
            known == name || known.strip_suffix("_SHA256").filter(|_| known.contains("CHACHA20")) == Some(name)
        });
        if let Some(suite) = found {
            suites.push(suite.suite());
        } else if WEAK_SUITES.contains(&name) || STATIC_RSA_SUITES.contains(&name) {
            tracing::warn!(suite = name, "weak suite of --tls-cipher-suites ignored");
        } else {
            return Err(TlsOptionsError::UnknownSuite(name.to_owned()));
        }
    }
    Ok(suites)
}

/// The name of a cipher suite in Go and Istio.
fn go_name(suite: CipherSuite) -> String {
    suite.as_str().unwrap_or_default().replacen("TLS13_", "TLS_", 1)
}

fn is_chacha_of_13(suite: CipherSuite) -> bool {
    suite == CipherSuite::TLS13_CHACHA20_POLY1305_SHA256
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fixture;

    fn options(words: &[&str], compliance: &str) -> Result<TlsOptions, TlsOptionsError> {
        TlsOptions::new(&fixture::flags(words).expect("valid flags"), compliance)
    }

    fn suites(options: &TlsOptions) -> Vec<CipherSuite> {
        options
            .provider
            .cipher_suites
            .iter()
            .map(rustls::SupportedCipherSuite::suite)
            .collect()
    }

    #[test]
    fn tls_1_2_and_1_3_are_the_default() {
        assert_eq!(options(&[], "").expect("valid options").versions, [&TLS13, &TLS12]);
        assert_eq!(
            options(&["--tls-min-version=1.3"], "").expect("valid options").versions,
            [&TLS13]
        );
    }

    #[test]
    fn cipher_suites_have_go_names_and_apply_to_tls_1_2() {
        let named = options(
            &["--tls-cipher-suites=TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305,TLS_AES_128_GCM_SHA256"],
            "",
        );
        let named = suites(&named.expect("known suites"));
        assert!(named.contains(&CipherSuite::TLS13_AES_256_GCM_SHA384));
        assert!(named.contains(&CipherSuite::TLS13_CHACHA20_POLY1305_SHA256));
        let old: Vec<_> = named
            .into_iter()
            .filter(|suite| go_name(*suite).contains("_WITH_"))
            .collect();
        assert_eq!(old, [CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256]);
        let unknown = options(&["--tls-cipher-suites=TLS_NOTHING"], "").map(drop);
        assert_eq!(unknown, Err(TlsOptionsError::UnknownSuite("TLS_NOTHING".into())));
        let weak = options(&["--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA"], "").expect("TLS 1.3 is left");
        assert_eq!(weak.versions, [&TLS13]);
    }

    #[test]
    fn compliance_policy_takes_precedence() {
        let fips = options(&["--tls-min-version=1.3"], "fips-140-2").expect("valid options");
        assert_eq!(fips.versions, [&TLS12]);
        assert_eq!(suites(&fips).len(), FIPS.len());
        let pqc = options(&[], "pqc").expect("valid options");
        assert_eq!(pqc.versions, [&TLS13]);
        assert_eq!(suites(&pqc).len(), PQC.len());
        let weak = ["--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA"];
        assert_eq!(
            options(&weak, "fips-140-2").map(drop),
            Err(TlsOptionsError::NoUsableVersion)
        );
    }
}
