//! CA options from environment variables. Parity (pilot/pkg/bootstrap/istio_ca.go): Istio's names and defaults.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use smol_str::{SmolStr, format_smolstr};

use crate::{
    base::{boolean, duration},
    ca::{authority::TtlLimits, authority_selector::SelectionRules, key::KeyKind, self_signed::RootOptions},
    model::features::{FeatureError, Features},
};

const HOUR: Duration = Duration::from_hours(1);

/// The options of the CA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalOptions {
    /// `ROOT_CA_DIR`: where plugged-in certificates are mounted.
    pub folder: PathBuf,
    /// The control plane's namespace.
    pub namespace: SmolStr,
    /// `DEFAULT_WORKLOAD_CERT_TTL`, `MAX_WORKLOAD_CERT_TTL`.
    pub limits: TtlLimits,
    /// `CITADEL_SELF_SIGNED_CA_CERT_TTL`, `CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE`.
    pub root: RootOptions,
    /// `CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL`; none: roots are not renewed.
    pub check_interval: Option<Duration>,
    /// `CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR`.
    pub jitter: bool,
    /// `CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE`.
    pub grace_percent: u32,
    /// `USE_CACERTS_FOR_SELF_SIGNED_CA`.
    pub self_signed_in_cacerts: bool,
    /// `PILOT_ENABLE_CA_CRL`.
    pub revocation: bool,
    /// `ISTIO_MULTIROOT_MESH`.
    pub multi_root: bool,
}

impl LocalOptions {
    /// Reads the variables that are not features. An invalid value yields its default and an error.
    pub fn new(
        variables: &BTreeMap<String, String>,
        features: &Features,
        namespace: &str,
    ) -> (Self, Vec<FeatureError>) {
        let mut reader = Reader {
            variables,
            errors: Vec::new(),
        };
        let hours = |hours: u32| HOUR * hours;
        let interval = reader.read(
            "CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL",
            "a duration such as 1h",
            3_600_000_000_000,
            |text| duration::parse_nanos(text).ok(),
        );
        let options = Self {
            folder: reader.text("ROOT_CA_DIR").unwrap_or("./etc/cacerts").into(),
            namespace: namespace.into(),
            limits: TtlLimits {
                default: reader.duration("DEFAULT_WORKLOAD_CERT_TTL", hours(24)),
                max: reader.duration("MAX_WORKLOAD_CERT_TTL", hours(2160)),
            },
            root: RootOptions {
                lifetime: reader.duration("CITADEL_SELF_SIGNED_CA_CERT_TTL", hours(87_600)),
                key: reader.read(
                    "CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE",
                    "2048, 3072 or 4096",
                    KeyKind::Rsa(2048),
                    rsa,
                ),
            },
            check_interval: u64::try_from(interval)
                .ok()
                .filter(|nanos| *nanos > 0)
                .map(Duration::from_nanos),
            jitter: reader.flag("CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR", true),
            grace_percent: reader.read(
                "CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE",
                "a percentage from 0 to 100",
                20,
                |text| text.parse().ok().filter(|percent| *percent <= 100),
            ),
            self_signed_in_cacerts: reader.flag("USE_CACERTS_FOR_SELF_SIGNED_CA", false),
            revocation: features.pilot_enable_ca_crl,
            multi_root: features.istio_multiroot_mesh,
        };
        (options, reader.errors)
    }

    pub(super) fn rules(&self, has_secret_store: bool) -> SelectionRules {
        SelectionRules {
            namespace: self.namespace.clone(),
            folder: format_smolstr!("folder {}", self.folder.display()),
            self_signed_in_cacerts: self.self_signed_in_cacerts,
            revocation: self.revocation,
            multi_root: self.multi_root,
            has_secret_store,
            limits: self.limits,
            root: self.root.clone(),
            grace_percent: self.grace_percent,
        }
    }
}

/// Parses a supported RSA key size.
fn rsa(text: &str) -> Option<KeyKind> {
    let bits = text.parse().ok()?;
    [2048, 3072, 4096].contains(&bits).then_some(KeyKind::Rsa(bits))
}

struct Reader<'a> {
    variables: &'a BTreeMap<String, String>,
    errors: Vec<FeatureError>,
}

impl<'a> Reader<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        let text = self.variables.get(name).map(String::as_str);
        text.filter(|text| !text.is_empty())
    }

    fn read<T>(
        &mut self,
        variable: &'static str,
        expected: &'static str,
        default: T,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> T {
        let Some(text) = self.text(variable) else {
            return default;
        };
        read(text).unwrap_or_else(|| {
            self.errors.push(FeatureError {
                variable,
                value: text.to_owned(),
                expected,
            });
            default
        })
    }

    fn duration(&mut self, variable: &'static str, default: Duration) -> Duration {
        self.read(variable, "a duration above zero, such as 24h", default, |text| {
            duration::parse(text).ok().filter(|value| !value.is_zero())
        })
    }

    fn flag(&mut self, variable: &'static str, default: bool) -> bool {
        self.read(variable, "true or false", default, boolean::parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> (LocalOptions, Vec<FeatureError>) {
        let variables = variables.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        LocalOptions::new(&variables.collect(), &Features::default(), "istio-system")
    }

    #[test]
    fn defaults_are_istios() {
        let (options, errors) = options(&[]);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(options.folder, PathBuf::from("./etc/cacerts"));
        assert_eq!((options.limits.default, options.limits.max), (HOUR * 24, HOUR * 2160));
        assert_eq!(
            (options.root.lifetime, options.root.key),
            (HOUR * 87_600, KeyKind::Rsa(2048))
        );
        assert_eq!((options.check_interval, options.grace_percent), (Some(HOUR), 20));
        assert!(options.jitter && options.revocation && !options.self_signed_in_cacerts && !options.multi_root);
    }

    #[test]
    fn an_interval_that_is_not_positive_turns_renewal_off() {
        for text in ["0", "0s", "-1h"] {
            let (options, errors) = options(&[("CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL", text)]);
            assert_eq!((options.check_interval, errors.len()), (None, 0), "{text}");
        }
    }

    #[test]
    fn bad_values_are_reported_and_keep_their_defaults() {
        let (options, errors) = options(&[
            ("DEFAULT_WORKLOAD_CERT_TTL", "soon"),
            ("CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE", "1024"),
            ("USE_CACERTS_FOR_SELF_SIGNED_CA", "maybe"),
        ]);
        assert_eq!(
            (options.limits.default, options.root.key),
            (HOUR * 24, KeyKind::Rsa(2048))
        );
        assert!(!options.self_signed_in_cacerts && errors.len() == 3, "{errors:?}");
        assert!(errors.iter().any(|error| error.variable == "DEFAULT_WORKLOAD_CERT_TTL"));
    }
}
