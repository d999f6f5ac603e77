//! GatewayClass.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::ObjectReference;

/// A class of Gateways: which controller serves them.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClass {
    /// The controller.
    pub controller_name: SmolStr,
    /// Parameters for the controller.
    pub parameters_ref: Option<ObjectReference>,
}
