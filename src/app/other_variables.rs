//! Values of variables that are not feature variables and that no other part reports.

use crate::{
    base::{boolean, duration},
    model::features::FeatureError,
    settings::Settings,
};

/// A check of a value.
type Check = fn(&str) -> bool;

/// Each variable with the form of its values, and their check.
const FORMS: [(&str, &str, Check); 5] = [
    ("EXTERNAL_ISTIOD", "true or false", is_boolean),
    ("GRPC_KEEPALIVE_INTERVAL", "a duration such as 30s", is_duration),
    ("GRPC_KEEPALIVE_TIMEOUT", "a duration such as 10s", is_duration),
    ("INJECT_ENABLED", "true or false", is_boolean),
    ("METRICS_LOCALHOST_ACCESS_ONLY", "true or false", is_boolean),
];

/// Returns an error for each variable with an invalid value. Their readers use the default.
pub(super) fn invalid(settings: &Settings) -> Vec<FeatureError> {
    let errors = FORMS.iter().filter_map(|&(variable, expected, is_valid)| {
        let value = settings.variable(variable)?;
        (!is_valid(value)).then(|| FeatureError {
            variable,
            value: value.to_owned(),
            expected,
        })
    });
    errors.collect()
}

fn is_boolean(text: &str) -> bool {
    boolean::parse(text).is_some()
}

fn is_duration(text: &str) -> bool {
    duration::parse(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fixture;

    #[test]
    fn invalid_values_are_errors() {
        let invalid = |variables: &[(&str, &str)]| {
            let errors = invalid(&fixture::settings(&[], variables)).into_iter();
            errors.map(|error| (error.variable, error.value)).collect::<Vec<_>>()
        };
        let valid = [
            ("EXTERNAL_ISTIOD", "true"),
            ("GRPC_KEEPALIVE_INTERVAL", "1m"),
            ("INJECT_ENABLED", ""),
            ("METRICS_LOCALHOST_ACCESS_ONLY", "F"),
        ];
        assert!(invalid(&valid).is_empty());
        let wrong = [
            ("GRPC_KEEPALIVE_TIMEOUT", "10"),
            ("METRICS_LOCALHOST_ACCESS_ONLY", "yes"),
        ];
        assert_eq!(invalid(&wrong), wrong.map(|(name, value)| (name, value.to_owned())));
    }
}
