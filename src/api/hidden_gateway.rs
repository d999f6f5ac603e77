//! A Gateway that counts only as a gateway to another network: an input that is not a manifest.

use super::{Config, Kind, gateway_api, label::NETWORK, meta::Keyed};
use crate::base::{ObjectKey, Shared};

/// A Gateway in a namespace that `discoverySelectors` do not select.
#[derive(Clone, Debug, PartialEq)]
pub struct HiddenGateway {
    /// The Gateway.
    pub gateway: Shared<Config<gateway_api::Gateway>>,
}

impl HiddenGateway {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::HiddenGateway;

    /// Returns the row of a Gateway; `None` without a network.
    pub fn of(gateway: &Shared<Config<gateway_api::Gateway>>) -> Option<Self> {
        let network = gateway.meta.labels.get(NETWORK);
        network.filter(|network| !network.is_empty())?;
        Some(Self {
            gateway: gateway.clone(),
        })
    }
}

impl Keyed for HiddenGateway {
    fn key(&self) -> &ObjectKey {
        &self.gateway.meta.key
    }
}
