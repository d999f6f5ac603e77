//! Statuses of GatewayClasses, Gateways and ListenerSets.

use std::{collections::BTreeSet, net::IpAddr};

use smol_str::SmolStr;

use super::{
    ACCEPTED, Address, Condition, Content, GatewayStatus, ListenerStatus, RESOLVED_REFS, Status, Verdict,
    address::Resolved,
    is_own,
    statuses::{Attached, StatusInputs},
};
use crate::{
    api::{Config, Kind, gateway_api},
    base::ObjectKey,
    model::{
        MeshSnapshot,
        gateway_api::{
            Mistake,
            class::Controller,
            is_converted,
            listener::{self, Declaration, ListenerOwner, Services, tls},
        },
    },
    table::Cx,
};

/// Message of Gateways without a service.
pub(super) const NO_ADDRESS: &str = "Failed to assign to any requested addresses";
/// Annotation with the type of reported addresses.
const ADDRESS_TYPE_ANNOTATION: &str = "networking.istio.io/address-type";
const PROGRAMMED: &str = "Programmed";
pub(super) const INSECURE_VALIDATION: &str = "InsecureFrontendValidationMode";
/// Message of listeners without a mistake.
const NO_ERRORS: &str = "No errors found";

/// Returns the status of a GatewayClass; `None` if it is another controller's or another revision's.
pub(super) fn class(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx, mesh, revisions, ..
    } = inputs;
    let class = mesh.gateway_classes.get(cx, key).filter(|_| is_converted(mesh, key))?;
    Controller::named(mesh, &class.spec.controller_name)?;
    if !is_own(cx, mesh, revisions, &class.meta) {
        return None;
    }
    let accepted = Condition::met(ACCEPTED, ACCEPTED, "Handled by Istio controller");
    Some(Status {
        generation: class.meta.generation,
        content: Content::Class(vec![accepted]),
    })
}

/// Returns the status of a Gateway; `None` if it is another controller's or another revision's.
pub(super) fn gateway(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx,
        mesh,
        revisions,
        attached,
    } = inputs;
    let gateway = mesh.kube_gateways.get(cx, key).filter(|_| is_converted(mesh, key))?;
    let controller = Controller::of_class(cx, mesh, &gateway.spec.gateway_class_name)?;
    if !is_own(cx, mesh, revisions, &gateway.meta) {
        return None;
    }
    let owner = ListenerOwner {
        kind: Kind::KubeGateway,
        object: key.clone(),
    };
    let status = match (controller, Declaration::of(cx, mesh, &owner)) {
        (Controller::Remote, _) => remote(&gateway.spec),
        (_, None) => refused(Services::of(mesh, gateway, controller).mistake),
        (_, Some(declaration)) => {
            let sets: Vec<_> = attached.listener_sets(cx, key).filter(|set| set.is_admitted).collect();
            let mut ports = ports(&declaration);
            ports.extend(sets.iter().flat_map(|set| &set.ports));
            let mistake = Services::of(mesh, gateway, controller).mistake;
            let resolved = Resolved::of(cx, mesh, &declaration, &ports);
            let written = gateway.meta.annotations.get(ADDRESS_TYPE_ANNOTATION);
            let address_type = match written.map(SmolStr::as_str) {
                Some("") => None,
                Some(written) => Some(written),
                None => controller.address_type(),
            };
            let addresses = resolved.addresses(address_type).into_iter();
            let addresses: Vec<Address> = addresses.map(address).collect();
            let mut conditions = conditions(mistake, resolved.programmed(&declaration.services));
            conditions.extend(tls_conditions(cx, mesh, gateway));
            GatewayStatus {
                conditions,
                listeners: listeners(cx, mesh, attached, &declaration),
                // Reported addresses stay while none are known.
                addresses: (!addresses.is_empty()).then_some(addresses),
                attached_sets: sets.len(),
            }
        }
    };
    Some(Status {
        generation: gateway.meta.generation,
        content: Content::Gateway(status),
    })
}

/// Returns the status of a ListenerSet; `None` if its Gateway does not exist, or is another controller's or revision's.
pub(super) fn listener_set(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx,
        mesh,
        revisions,
        attached,
    } = inputs;
    let set = mesh.listener_sets.get(cx, key).filter(|_| is_converted(mesh, key))?;
    let gateway = mesh.kube_gateways.get(cx, &listener::parent_of(key, &set.spec)?)?;
    let class = &gateway.spec.gateway_class_name;
    let controller = Controller::of_class(cx, mesh, class)?;
    if !is_own(cx, mesh, revisions, &set.meta) {
        return None;
    }
    let owner = ListenerOwner {
        kind: Kind::ListenerSet,
        object: key.clone(),
    };
    let status = if !controller.supports_listener_sets() {
        let class = class.as_str();
        not_allowed(&format!("The {class:?} GatewayClass does not support ListenerSet"))
    } else if !listener::admits(cx, mesh, gateway, &key.namespace) {
        not_allowed("The parent Gateway does not allow this reference; check the 'spec.allowedRoutes'")
    } else {
        let mistake = Services::of(mesh, gateway, controller).mistake.map(|mistake| Mistake {
            message: format!("Parent not accepted: {}", mistake.message),
            ..mistake
        });
        match Declaration::of(cx, mesh, &owner) {
            None => refused(mistake),
            Some(declaration) => {
                let ports = ports(&declaration);
                let resolved = Resolved::of(cx, mesh, &declaration, &ports);
                let invalid = || Mistake::new("ListenersNotValid", "No listener is valid");
                let invalid = declaration.is_invalid(cx, mesh).then(invalid);
                GatewayStatus {
                    conditions: match invalid {
                        Some(invalid) => conditions(Some(invalid.clone()), Err(invalid)),
                        None => conditions(mistake, resolved.programmed(&declaration.services)),
                    },
                    listeners: listeners(cx, mesh, attached, &declaration),
                    ..GatewayStatus::default()
                }
            }
        }
    };
    Some(Status {
        generation: set.meta.generation,
        content: Content::Gateway(status),
    })
}

/// A ListenerSet, as far as the status of its Gateway depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AttachedSet {
    /// The Gateway.
    pub(super) gateway: ObjectKey,
    /// True if the Gateway admits it and a listener is valid.
    pub(super) is_admitted: bool,
    /// Ports of its listeners.
    pub(super) ports: BTreeSet<u16>,
}

/// Derives the Gateway of a ListenerSet.
pub(super) fn attached_set(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<AttachedSet> {
    let set = mesh.listener_sets.get(cx, key).filter(|_| is_converted(mesh, key))?;
    let owner = ListenerOwner {
        kind: Kind::ListenerSet,
        object: key.clone(),
    };
    let declaration = Declaration::of(cx, mesh, &owner);
    let is_admitted = |it: &Declaration| !it.listeners.is_empty() && !it.is_invalid(cx, mesh);
    Some(AttachedSet {
        gateway: listener::parent_of(key, &set.spec)?,
        is_admitted: declaration.as_ref().is_some_and(is_admitted),
        ports: declaration.as_ref().map(ports).unwrap_or_default(),
    })
}

fn ports(declaration: &Declaration) -> BTreeSet<u16> {
    let ports = declaration.listeners.iter().map(listener::port);
    ports.filter_map(Result::ok).collect()
}

fn conditions(mistake: Option<Mistake>, programmed: Result<String, Mistake>) -> Vec<Condition> {
    vec![
        Condition::met(ACCEPTED, ACCEPTED, "Resource accepted").unless(mistake),
        match programmed {
            Ok(message) => Condition::met(PROGRAMMED, PROGRAMMED, message),
            Err(mistake) => Condition::unmet(PROGRAMMED, mistake),
        },
    ]
}

/// Returns the conditions of the TLS settings for a whole Gateway, which Istio does not have. A Gateway without such
/// settings has none of them.
fn tls_conditions(cx: &Cx, mesh: &MeshSnapshot, gateway: &Config<gateway_api::Gateway>) -> Vec<Condition> {
    let mut conditions = Vec::new();
    if let Some(certificate) = tls::backend_certificate(cx, mesh, gateway) {
        let met = Condition::met(RESOLVED_REFS, RESOLVED_REFS, "All references resolved");
        conditions.push(met.unless(certificate.err()));
    }
    let frontend = gateway.spec.tls.as_ref().and_then(|tls| tls.frontend.as_ref());
    let of_ports = frontend
        .into_iter()
        .flat_map(|frontend| &frontend.per_port)
        .map(|port| &port.tls);
    let mut settings = of_ports.chain(frontend.map(|frontend| &frontend.default));
    if settings.any(|settings| tls::accepts_untrusted(settings.validation.as_ref())) {
        let message = "Clients without a valid certificate are accepted (AllowInsecureFallback)";
        conditions.push(Condition::met(INSECURE_VALIDATION, "ConfigurationChanged", message));
    }
    conditions
}

/// Returns the status of a Gateway without any service.
fn refused(mistake: Option<Mistake>) -> GatewayStatus {
    let programmed = Err(Mistake::new("UnsupportedAddress", NO_ADDRESS));
    GatewayStatus {
        conditions: conditions(mistake, programmed),
        ..GatewayStatus::default()
    }
}

fn not_allowed(message: &str) -> GatewayStatus {
    let mistake = Mistake::new("NotAllowed", message);
    GatewayStatus {
        conditions: conditions(Some(mistake.clone()), Err(mistake)),
        ..GatewayStatus::default()
    }
}

/// Returns the status of a Gateway of another network.
fn remote(gateway: &gateway_api::Gateway) -> GatewayStatus {
    let addresses = gateway.addresses.iter().map(|written| Address {
        address_type: written.address_type.clone().unwrap_or(SmolStr::new_static("IPAddress")),
        value: written.value.clone(),
    });
    GatewayStatus {
        conditions: conditions(None, Ok("This Gateway is remote; Istio will not program it".to_owned())),
        addresses: Some(addresses.collect()),
        ..GatewayStatus::default()
    }
}

fn address(value: SmolStr) -> Address {
    let address_type = if value.parse::<IpAddr>().is_ok() {
        "IPAddress"
    } else {
        "Hostname"
    };
    Address {
        address_type: SmolStr::new_static(address_type),
        value,
    }
}

fn listeners(cx: &Cx, mesh: &MeshSnapshot, attached: &Attached, declaration: &Declaration) -> Vec<ListenerStatus> {
    let counts = attached.counts(cx, declaration.owner);
    let listeners = declaration.with_mistakes(cx, mesh).map(|(listener, mistakes)| {
        let kinds = listener::kinds(listener);
        let mut references = mistakes.references.clone();
        if !has_valid_kinds(listener, &kinds) {
            references = Some(Mistake::new("InvalidRouteKinds", "Invalid route kinds"));
        }
        let unprogrammed = mistakes.references.is_some();
        let unprogrammed = unprogrammed.then(|| Mistake::new("Invalid", "Bad TLS configuration"));
        let conflict = mistakes.conflict;
        let conflicted = Condition {
            kind: "Conflicted",
            verdict: if conflict.is_some() {
                Verdict::True
            } else {
                Verdict::False
            },
            reason: conflict.as_ref().map_or("NoConflicts", |it| it.reason),
            message: conflict.as_ref().map_or(NO_ERRORS, |it| &it.message).to_owned(),
        };
        ListenerStatus {
            name: listener.name.clone(),
            attached_routes: counts.get(&listener.name).copied().unwrap_or_default(),
            conditions: vec![
                Condition::met(ACCEPTED, ACCEPTED, NO_ERRORS).unless(conflict.clone().or(mistakes.accepted)),
                conflicted,
                Condition::met(PROGRAMMED, PROGRAMMED, NO_ERRORS).unless(conflict.or(unprogrammed)),
                Condition::met(RESOLVED_REFS, RESOLVED_REFS, NO_ERRORS).unless(references),
            ],
            kinds,
        }
    });
    listeners.collect()
}

/// Returns true if every kind that a listener allows is one that its protocol supports.
fn has_valid_kinds(listener: &gateway_api::gateway::Listener, supported: &[Kind]) -> bool {
    let written = listener.allowed_routes.as_ref().map(|allowed| allowed.kinds.len());
    written.is_none_or(|written| written == 0 || written == supported.len())
}

/// Emits the Gateway of a ListenerSet.
pub(super) fn gateway_of(_: &ObjectKey, row: &AttachedSet, emit: &mut dyn FnMut(ObjectKey)) {
    emit(row.gateway.clone());
}

/// Returns true if a Gateway belongs to a controller of this control plane.
pub(super) fn is_of_own_class(cx: &Cx, mesh: &MeshSnapshot, gateway: &Config<gateway_api::Gateway>) -> bool {
    Controller::of_class(cx, mesh, &gateway.spec.gateway_class_name).is_some()
}
