//! Feature variables (`PILOT_*` and others): read from text once, then plain data.

/// Every feature variable that shows in behaviour, with Istio's default.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Features {}
