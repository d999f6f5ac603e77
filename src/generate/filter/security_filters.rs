//! The security filters of one kind of filter chain, by stage. [`super::security`] builds them.

/// The source of the identity of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PeerSource {
    /// The certificate of the connection.
    #[default]
    Tls,
    /// The HBONE tunnel that the connection comes out of.
    Tunnel,
}

/// Positions of security filters in a stack, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SecurityStage {
    /// `CUSTOM` policies, decided by an external service.
    Custom,
    /// JWT validation; TCP chains have none.
    Authentication,
    /// `AUDIT`, `DENY` and `ALLOW` policies.
    Authorization,
}

/// Security filters of the chains of one kind.
#[derive(Clone, Debug, Default)]
pub struct SecurityFilters<F> {
    pub(super) custom: Vec<F>,
    pub(super) authentication: Vec<F>,
    pub(super) authorization: Vec<F>,
    /// True if the proxy lacks a filter that its policies need, or the filters of all chains would be too large. The
    /// chain must then deny all traffic: it ends in [`denied_routes`] or a TCP proxy to no cluster, without filters.
    pub denied: bool,
}

impl<F> SecurityFilters<F> {
    /// Returns the filters of a stage.
    pub fn of(&self, stage: SecurityStage) -> &[F] {
        match stage {
            SecurityStage::Custom => &self.custom,
            SecurityStage::Authentication => &self.authentication,
            SecurityStage::Authorization => &self.authorization,
        }
    }
}
