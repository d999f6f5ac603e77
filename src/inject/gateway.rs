//! The objects of a Gateway's deployment: from a Gateway, its class and the injector's configuration to the objects
//! that are applied for it. No IO.
//!
//! The template of the class renders a ServiceAccount, a Deployment, a Service, a HorizontalPodAutoscaler and a
//! PodDisruptionBudget. ConfigMaps of users patch them ([`overlay`]); the last two exist only with a patch. Tenants
//! write Gateways and ConfigMaps, so the result is checked ([`check`]): only objects of known kinds, names and
//! namespaces are applied.
//!
//! Parity (pilot/pkg/config/kube/gatewaycommon/deploymentcontroller.go).

mod check;
mod data;
mod live;
mod overlay;

use std::collections::BTreeMap;

use serde_json::Value as Json;

use self::data::Metadata;
use super::{Environment, Injector, pod};
use crate::{api::yaml, template::Host};

pub use self::live::{keep_selector, without_status};

/// Label of all objects of deployments: the controller, with `-` for `/`. Objects without it are never changed.
pub const MANAGED: &str = "gateway.istio.io/managed";
/// Label with the name of the Gateway.
pub const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";
/// Label of ConfigMaps in the control plane's namespace with parameters for all Gateways of a class.
pub const CLASS_DEFAULTS: &str = "gateway.istio.io/defaults-for-class";
const NAME_OVERRIDE: &str = "gateway.istio.io/name-override";
const SERVICE_ACCOUNT: &str = "gateway.istio.io/service-account";
const SERVICE_TYPE: &str = "networking.istio.io/service-type";
/// Port where proxies answer probes of load balancers.
const STATUS_PORT: u16 = 15021;

/// A class of Gateways, as far as deployments depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayClass {
    /// Name of the controller, such as `istio.io/gateway-controller`.
    pub controller: String,
    /// Controller as the label of deployed objects; it is not derived from a controller name of the user.
    pub label: &'static str,
    /// Name of the template.
    pub template: &'static str,
    /// Type of Services.
    pub service_type: &'static str,
    /// True if objects have the Gateway's name, without that of the class.
    pub has_plain_names: bool,
    /// True for ambient gateways between networks.
    pub is_east_west: bool,
}

/// A port of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name of the listener.
    pub name: String,
    /// Number.
    pub number: u16,
    /// Protocol, as written.
    pub protocol: String,
}

/// A ConfigMap with parameters: strategic merge patches by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// `data`.
    pub data: BTreeMap<String, String>,
}

/// A Gateway and what its deployment depends on, besides the injector and its environment.
pub struct GatewayRequest<'a> {
    /// The Gateway.
    pub gateway: &'a Json,
    /// Its class.
    pub class: &'a GatewayClass,
    /// Listeners of ListenerSets that the Gateway admits.
    pub more_ports: &'a [Port],
    /// Parameters of the class: the oldest ConfigMap with label [`CLASS_DEFAULTS`].
    pub class_parameters: Option<&'a Parameters>,
    /// The ConfigMap that [`parameters_name`] returns, if it exists.
    pub parameters: Option<&'a Parameters>,
    /// `--clusterID`.
    pub cluster: &'a str,
    /// Major and minor version of Kubernetes, written together: 128 for 1.28.
    pub kubernetes_version: i64,
    /// `PILOT_ENABLE_AMBIENT_WAYPOINTS`.
    pub ambient: bool,
    /// `PILOT_ENABLE_GATEWAY_API_COPY_LABELS_ANNOTATIONS`.
    pub copies_metadata: bool,
}

/// The reason why a Gateway has no valid deployment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {}{message}", prefix(.field))]
pub struct GatewayError {
    /// The object with the mistake: kind, namespace and name, or the injector's template.
    pub object: String,
    /// Path of the field; empty for the whole object.
    pub field: String,
    /// The reason.
    pub message: String,
}

fn prefix(field: &str) -> String {
    if field.is_empty() {
        String::new()
    } else {
        format!("{field}: ")
    }
}

/// An object to apply.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayObject {
    /// Kind.
    pub kind: ObjectKind,
    /// Name. The namespace is that of the Gateway.
    pub name: String,
    /// The object.
    pub value: Json,
}

/// A kind of objects of deployments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// ServiceAccount.
    ServiceAccount,
    /// Deployment.
    Deployment,
    /// DaemonSet, which a patch may make of the Deployment.
    DaemonSet,
    /// Service.
    Service,
    /// HorizontalPodAutoscaler.
    HorizontalPodAutoscaler,
    /// PodDisruptionBudget.
    PodDisruptionBudget,
}

impl ObjectKind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::ServiceAccount,
        Self::Deployment,
        Self::DaemonSet,
        Self::Service,
        Self::HorizontalPodAutoscaler,
        Self::PodDisruptionBudget,
    ];

    /// Returns group (empty for core), version and plural.
    pub fn resource(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::ServiceAccount => ("", "v1", "serviceaccounts"),
            Self::Deployment => ("apps", "v1", "deployments"),
            Self::DaemonSet => ("apps", "v1", "daemonsets"),
            Self::Service => ("", "v1", "services"),
            Self::HorizontalPodAutoscaler => ("autoscaling", "v2", "horizontalpodautoscalers"),
            Self::PodDisruptionBudget => ("policy", "v1", "poddisruptionbudgets"),
        }
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::ServiceAccount => "ServiceAccount",
            Self::Deployment => "Deployment",
            Self::DaemonSet => "DaemonSet",
            Self::Service => "Service",
            Self::HorizontalPodAutoscaler => "HorizontalPodAutoscaler",
            Self::PodDisruptionBudget => "PodDisruptionBudget",
        }
    }

    /// Returns the kind of an object; `None` for other kinds, groups and versions.
    fn of(object: &Json) -> Option<Self> {
        let text = |key: &str| object.get(key).and_then(Json::as_str).unwrap_or_default();
        Self::ALL.into_iter().find(|kind| {
            let (group, version, _) = kind.resource();
            let api_version = text("apiVersion");
            let is_version = match api_version.split_once('/') {
                Some(parts) => parts == (group, version),
                None => group.is_empty() && api_version == version,
            };
            is_version && text("kind") == kind.name()
        })
    }

    /// Returns the key of its patches in parameters; `None` for a kind that templates do not render.
    fn overlay_key(self) -> Option<&'static str> {
        match self {
            Self::ServiceAccount => Some("serviceAccount"),
            Self::Deployment => Some("deployment"),
            Self::DaemonSet => None,
            Self::Service => Some("service"),
            Self::HorizontalPodAutoscaler => Some("horizontalPodAutoscaler"),
            Self::PodDisruptionBudget => Some("podDisruptionBudget"),
        }
    }

    /// Returns true if the object exists only with a patch.
    fn needs_overlay(self) -> bool {
        matches!(self, Self::HorizontalPodAutoscaler | Self::PodDisruptionBudget)
    }
}

/// The keys of parameters.
pub const OVERLAY_KEYS: [&str; 5] = [
    "deployment",
    "horizontalPodAutoscaler",
    "podDisruptionBudget",
    "service",
    "serviceAccount",
];

/// Returns the name of the ConfigMap with the Gateway's parameters, in its namespace; `None` if it has none.
///
/// # Errors
/// If the Gateway refers to another kind.
pub fn parameters_name(gateway: &Json) -> Result<Option<&str>, GatewayError> {
    const FIELD: &str = "spec.infrastructure.parametersRef";
    let Some(reference) = gateway
        .pointer("/spec/infrastructure/parametersRef")
        .filter(|reference| reference.is_object())
    else {
        return Ok(None);
    };
    let text = |key: &str| reference.get(key).and_then(Json::as_str).unwrap_or_default();
    if (text("group"), text("kind")) == ("", "ConfigMap") {
        return Ok(Some(text("name")));
    }
    let (group, kind) = (text("group"), text("kind"));
    let message = format!("unknown infrastructure parameters type {group}/{kind}; hint: only a ConfigMap is supported");
    Err(invalid(gateway, FIELD, message))
}

/// Returns true if the deployment of a Gateway is managed: it has no address, or one IP address. Otherwise its
/// addresses are those of Services that others deploy. `manual` is `ENABLE_GATEWAY_API_MANUAL_DEPLOYMENT`.
pub fn is_managed(gateway: &Json, manual: bool) -> bool {
    let addresses = gateway.pointer("/spec/addresses").and_then(Json::as_array);
    let kind = |address: &Json| {
        address
            .get("type")
            .and_then(Json::as_str)
            .is_none_or(|kind| kind == "IPAddress")
    };
    !manual
        || match addresses.map(Vec::as_slice) {
            None | Some([]) => true,
            Some([address]) => kind(address),
            Some(_) => false,
        }
}

/// Returns an error of a Gateway.
fn invalid(gateway: &Json, field: &str, message: impl Into<String>) -> GatewayError {
    GatewayError {
        object: described("Gateway", gateway),
        field: field.to_owned(),
        message: message.into(),
    }
}

fn described(kind: &str, object: &Json) -> String {
    let (namespace, name) = (pod::metadata(object, "namespace"), pod::metadata(object, "name"));
    format!("{kind} {namespace}/{name}")
}

/// The names and settings of a deployment that follow from the Gateway alone.
struct Deployed<'a> {
    request: &'a GatewayRequest<'a>,
    namespace: &'a str,
    gateway_name: &'a str,
    /// Value of `spec.gatewayClassName`.
    class_name: &'a str,
    /// Name of the Deployment and most other objects.
    name: String,
    service_account: String,
    service_type: String,
    labels: Metadata,
    annotations: Metadata,
}

impl<'a> Deployed<'a> {
    fn new(request: &'a GatewayRequest<'a>, network: &str) -> Result<Self, GatewayError> {
        let gateway = request.gateway;
        check::gateway(gateway)?;
        let gateway_name = pod::metadata(gateway, "name");
        let class_name = gateway
            .pointer("/spec/gatewayClassName")
            .and_then(Json::as_str)
            .unwrap_or_default();
        let default = if request.class.has_plain_names {
            gateway_name.to_owned()
        } else {
            format!("{gateway_name}-{class_name}")
        };
        let named = |annotation: &str| {
            let given = pod::annotation(gateway, annotation).filter(|name| !name.is_empty());
            let name = given.unwrap_or(&default);
            if check::is_name(name) {
                return Ok(name.to_owned());
            }
            let field = format!("metadata.annotations[{annotation:?}]");
            Err(invalid(
                gateway,
                &field,
                format!("{name:?} is not the name of an object"),
            ))
        };
        let (name, service_account) = (named(NAME_OVERRIDE)?, named(SERVICE_ACCOUNT)?);
        let service_type = pod::annotation(gateway, SERVICE_TYPE).unwrap_or(request.class.service_type);
        let (mut labels, annotations) = data::metadata(request);
        data::add_labels(request, class_name, network, &mut labels);
        Ok(Self {
            request,
            namespace: pod::metadata(gateway, "namespace"),
            gateway_name,
            class_name,
            name,
            service_account,
            service_type: service_type.to_owned(),
            labels,
            annotations,
        })
    }
}

impl Injector {
    /// Returns the objects of a Gateway's deployment, in the order of the template.
    ///
    /// # Errors
    /// If the Gateway or its parameters have invalid values, if the template does not exist or fails, or if it renders
    /// objects that it may not.
    pub fn gateway_objects(
        &self,
        request: &GatewayRequest<'_>,
        environment: &Environment,
    ) -> Result<Vec<GatewayObject>, GatewayError> {
        let of_template = |message: String| GatewayError {
            object: "injector configuration".to_owned(),
            field: format!("templates.{}", request.class.template),
            message,
        };
        let deployed = Deployed::new(request, self.config.values.network())?;
        let overlays = overlay::overlays(request)?;
        let name = request.class.template;
        let Some(templates) = self.config.templates.get(name) else {
            return Err(of_template("the template does not exist".to_owned()));
        };
        let data = data::of_template(&deployed, &self.config.values, environment)?;
        let host = environment.host.as_ref() as &dyn Host;
        let text = templates
            .render(name, &data, host)
            .map_err(|error| of_template(error.to_string()))?;
        let mut objects = Vec::new();
        for document in yaml::documents(&text) {
            let rendered: Json = document
                .parse()
                .map_err(|error| of_template(format!("the output is not YAML: {error}")))?;
            if rendered.is_null() {
                continue;
            }
            let kind = ObjectKind::of(&rendered);
            let Some((kind, key)) = kind.and_then(|kind| Some((kind, kind.overlay_key()?))) else {
                return Err(of_template(check::unexpected_kind(&rendered)));
            };
            let Some(mut patched) = overlay::patched(kind, key, rendered, &overlays)? else {
                continue;
            };
            let kind = check::object(&deployed, &patched).map_err(of_template)?;
            set_managed(&mut patched, &request.class.controller);
            objects.push(GatewayObject {
                kind,
                name: pod::metadata(&patched, "name").to_owned(),
                value: patched,
            });
        }
        Ok(objects)
    }
}

fn set_managed(object: &mut Json, controller: &str) {
    pod::labels_mut(object).insert(MANAGED.to_owned(), controller.replace('/', "-").into());
}

#[cfg(test)]
mod tests;
