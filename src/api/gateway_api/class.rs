//! GatewayClass.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::ObjectReference;

/// A class of Gateways and its controller.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClass {
    /// The name of the controller.
    pub controller_name: SmolStr,
    /// Parameters for the controller.
    pub parameters_ref: Option<ObjectReference>,
}
