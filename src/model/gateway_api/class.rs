//! GatewayClasses and their controllers.

use smol_str::SmolStr;

use crate::{base::ObjectKey, model::MeshSnapshot, table::Cx};

/// Name of the controller for waypoints.
pub const WAYPOINT: &str = "istio.io/mesh-controller";
const REMOTE: &str = "istio.io/unmanaged-gateway";
const EAST_WEST: &str = "istio.io/eastwest-controller";

/// A controller of Gateways in this control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Gateways for ingress and egress.
    Gateway,
    /// Gateways of other networks, which have no configuration here.
    Remote,
    /// Waypoints.
    Waypoint,
    /// Ambient gateways between networks.
    EastWest,
}

impl Controller {
    /// Returns the controller that configures the Gateways of a class. A built-in class needs no object, and an object
    /// with a foreign controller does not replace it.
    ///
    /// Parity (pilot/pkg/config/kube/gatewaycommon/gatewayclass_collection.go, FetchGatewayClass).
    pub fn of_class(cx: &Cx, mesh: &MeshSnapshot, class: &SmolStr) -> Option<Self> {
        let declared = declared_name(cx, mesh, class).and_then(|name| Self::named(mesh, name));
        declared.or_else(|| Self::built_in(mesh, class))
    }

    /// Returns the controller that deploys the Gateways of a class: that of its object, if there is one.
    ///
    /// Parity (pilot/pkg/config/kube/gatewaycommon/deploymentcontroller.go, Reconcile).
    pub fn of_deployments(cx: &Cx, mesh: &MeshSnapshot, class: &SmolStr) -> Option<Self> {
        match declared_name(cx, mesh, class) {
            Some(name) => Self::named(mesh, name),
            None => Self::built_in(mesh, class),
        }
    }

    /// Returns the controller with a name.
    pub fn named(mesh: &MeshSnapshot, name: &str) -> Option<Self> {
        let features = &mesh.installation.features;
        let found = match name {
            name if features.pilot_gateway_api_controller_name == name => Self::Gateway,
            REMOTE => Self::Remote,
            WAYPOINT => Self::Waypoint,
            EAST_WEST => Self::EastWest,
            _ => return None,
        };
        found.is_enabled(mesh).then_some(found)
    }

    fn built_in(mesh: &MeshSnapshot, class: &str) -> Option<Self> {
        let features = &mesh.installation.features;
        let found = match class {
            name if features.pilot_gateway_api_default_gatewayclass_name == name => Self::Gateway,
            "istio-remote" => Self::Remote,
            "istio-waypoint" => Self::Waypoint,
            "istio-east-west" => Self::EastWest,
            _ => return None,
        };
        found.is_enabled(mesh).then_some(found)
    }

    /// Returns the built-in classes that are enabled, with their controllers.
    pub fn built_in_classes(mesh: &MeshSnapshot) -> Vec<(SmolStr, Self)> {
        let default = &mesh.installation.features.pilot_gateway_api_default_gatewayclass_name;
        let names = [default.as_str(), "istio-remote", "istio-waypoint", "istio-east-west"];
        names
            .into_iter()
            .filter_map(|name| Some((SmolStr::new(name), Self::built_in(mesh, name)?)))
            .collect()
    }

    /// Returns the name of the controller.
    pub fn name(self, mesh: &MeshSnapshot) -> SmolStr {
        match self {
            Self::Gateway => mesh.installation.features.pilot_gateway_api_controller_name.clone(),
            Self::Remote => SmolStr::new_static(REMOTE),
            Self::Waypoint => SmolStr::new_static(WAYPOINT),
            Self::EastWest => SmolStr::new_static(EAST_WEST),
        }
    }

    fn is_enabled(self, mesh: &MeshSnapshot) -> bool {
        let features = &mesh.installation.features;
        match self {
            Self::Gateway => true,
            Self::Remote => features.pilot_multi_network_discover_gateway_api,
            Self::Waypoint => features.pilot_enable_ambient_waypoints,
            Self::EastWest => features.ambient_enable_multi_network,
        }
    }

    /// Returns true if ListenerSets may add listeners.
    pub fn supports_listener_sets(self) -> bool {
        self == Self::Gateway
    }

    /// Returns the type of the addresses that a Gateway without external ones reports; `None` for all types.
    pub fn address_type(self) -> Option<&'static str> {
        (!self.has_plain_names()).then_some("Hostname")
    }

    /// Returns true if deployed resources have the Gateway's name, without that of the class.
    pub fn has_plain_names(self) -> bool {
        matches!(self, Self::Waypoint | Self::EastWest)
    }
}

/// Returns the name of the controller in the object of a class; `None` without an object.
fn declared_name<'a>(cx: &Cx, mesh: &'a MeshSnapshot, class: &SmolStr) -> Option<&'a SmolStr> {
    let key = ObjectKey::new(&mesh.installation.cluster, "", class.clone());
    let class = mesh.gateway_classes.get(cx, &key)?;
    Some(&class.spec.controller_name)
}
