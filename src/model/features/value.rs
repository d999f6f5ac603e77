//! Types of feature variables.

use std::time::Duration;

use smol_str::SmolStr;

use super::RemoteJwks;
use crate::base::{boolean, duration};

/// A type of variables.
pub(super) trait Value: Sized {
    /// Expected form, for messages.
    const EXPECTED: &'static str;
    /// Parses a value as Go does.
    fn read(text: &str) -> Option<Self>;
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";
    fn read(text: &str) -> Option<Self> {
        boolean::parse(text)
    }
}

impl Value for u32 {
    const EXPECTED: &'static str = "a whole number that is not negative";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Value for f64 {
    const EXPECTED: &'static str = "a number that is not negative";
    fn read(text: &str) -> Option<Self> {
        text.parse()
            .ok()
            .filter(|number: &f64| number.is_finite() && *number >= 0.0)
    }
}

impl Value for Duration {
    const EXPECTED: &'static str = "a duration such as 100ms, 10s or 1h30m";
    fn read(text: &str) -> Option<Self> {
        duration::parse(text).ok()
    }
}

impl Value for SmolStr {
    const EXPECTED: &'static str = "text";
    fn read(text: &str) -> Option<Self> {
        Some(Self::new(text))
    }
}

impl Value for Vec<SmolStr> {
    const EXPECTED: &'static str = "a list separated by commas";
    fn read(text: &str) -> Option<Self> {
        Some(
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(SmolStr::new)
                .collect(),
        )
    }
}

impl Value for RemoteJwks {
    const EXPECTED: &'static str = "istiod, hybrid or envoy";
    fn read(text: &str) -> Option<Self> {
        Some(match text {
            "true" | "hybrid" => Self::Hybrid,
            "envoy" => Self::Envoy,
            _ => Self::Istiod,
        })
    }
}
