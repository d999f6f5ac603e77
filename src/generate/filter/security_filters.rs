//! The security filters of one kind of filter chain, by stage. [`super::security`] builds them.

/// The places of security filters in a stack, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SecurityStage {
    /// `CUSTOM` policies: an external service decides.
    Custom,
    /// JWTs are checked. There is no such filter in TCP chains.
    Authentication,
    /// `AUDIT`, `DENY` and `ALLOW` policies.
    Authorization,
}

/// The security filters of the chains of one kind.
#[derive(Clone, Debug, Default)]
pub struct SecurityFilters<F> {
    pub(super) custom: Vec<F>,
    pub(super) authentication: Vec<F>,
    pub(super) authorization: Vec<F>,
    /// The client lacks a filter that its policies need. The chain must let nothing through: [`denied_routes`] or a TCP
    /// proxy to nowhere stand at its end. No filter is built then.
    pub denied: bool,
}

impl<F> SecurityFilters<F> {
    /// The filters of a stage.
    pub fn of(&self, stage: SecurityStage) -> &[F] {
        match stage {
            SecurityStage::Custom => &self.custom,
            SecurityStage::Authentication => &self.authentication,
            SecurityStage::Authorization => &self.authorization,
        }
    }
}
