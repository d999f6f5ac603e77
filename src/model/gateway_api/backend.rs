//! Backends of routes.

use smol_str::SmolStr;

use super::{
    Mistake,
    grant::{self, Reference},
    inference_pool::{self, Picker},
    service_host,
};
use crate::{
    api::{Kind, Meta, gateway_api::route::BackendReference},
    base::{Hostname, Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        service::{ServiceKey, mcs},
    },
    proto::istio::networking::v1alpha3::{Destination, PortSelector, RouteDestination},
    table::Cx,
};

/// Reasons of mistakes in routes.
pub(super) mod reason {
    /// No ReferenceGrant allows the reference.
    pub(in crate::model::gateway_api) const NOT_PERMITTED: &str = "RefNotPermitted";
    /// The backend does not exist.
    pub(in crate::model::gateway_api) const NOT_FOUND: &str = "BackendNotFound";
    /// The backend is of an unknown kind.
    pub(in crate::model::gateway_api) const INVALID_KIND: &str = "InvalidKind";
    /// The reference is malformed.
    pub(in crate::model::gateway_api) const INVALID_DESTINATION: &str = "InvalidDestination";
    /// A filter is malformed or unknown.
    pub(in crate::model::gateway_api) const INVALID_FILTER: &str = "InvalidFilter";
    /// Anything else is malformed.
    pub(in crate::model::gateway_api) const INVALID_CONFIGURATION: &str = "InvalidConfiguration";
}

/// A destination that no service has: connections to it fail.
const NOWHERE: &str = "internal.cluster.local";
const NOWHERE_SUBSET: &str = "zero-weight";
const NOWHERE_PORT: u32 = 65535;

/// Kind of parents that a conversion is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Services of the mesh: its clients may use any backend.
    Mesh,
    /// Gateways: references to other namespaces need a ReferenceGrant.
    Gateway,
}

/// The route whose backends are resolved.
pub(super) struct Backends<'a> {
    /// Read context.
    pub cx: &'a Cx,
    /// The mesh.
    pub mesh: &'a MeshSnapshot,
    /// Kind of the route.
    pub kind: Kind,
    /// Metadata of the route.
    pub meta: &'a Meta,
    /// Kind of parents.
    pub side: Side,
}

/// Converted backends with their weights, and the mistake of the last one whose requests fail.
pub(super) struct Weighted<T> {
    /// The backends with positive weight.
    pub backends: Vec<T>,
    /// The mistake.
    pub mistake: Option<Mistake>,
}

impl Backends<'_> {
    /// Returns the destination of a backend. With a mistake that only fails its requests, both are returned: the
    /// destination and the mistake.
    pub(super) fn destination(&self, backend: &BackendReference) -> Result<(Destination, Option<Mistake>), Mistake> {
        let namespace = self.namespace_of(backend);
        let group = backend.group.as_deref().unwrap_or_default();
        let kind = backend.kind.as_deref().unwrap_or("Service");
        if !self.is_permitted(backend, group, kind, &namespace) {
            let own = self.meta.namespace().as_str();
            let message = format!(
                "backendRef {}/{namespace} not accessible to a {} in namespace {own:?} (missing a ReferenceGrant?)",
                backend.name,
                self.kind.name()
            );
            let mistake = Mistake::new(reason::NOT_PERMITTED, message);
            return Ok((Destination::default(), Some(mistake)));
        }
        if inference_pool::is_reference(group, kind) {
            return self.inference_pool(&namespace, &backend.name);
        }
        let features = &self.mesh.installation.features;
        let is_import = group == features.mcs_api_group.as_str() && kind == Kind::ServiceImport.name();
        let (host, exists) = match (group, kind) {
            ("", "Service") => self.service(&namespace, &backend.name)?,
            ("networking.istio.io", "Hostname") => self.hostname(backend, &namespace)?,
            _ if is_import => self.import(&namespace, &backend.name),
            _ => {
                let group = backend.group.as_deref().unwrap_or_default();
                let kind = backend.kind.as_deref().unwrap_or_default();
                let message = format!("referencing unsupported backendRef: group {group:?} kind {kind:?}");
                let mistake = Mistake::new(reason::INVALID_KIND, message);
                return Ok((Destination::default(), Some(mistake)));
            }
        };
        let Some(port) = backend.port else {
            return Err(Mistake::new(
                reason::INVALID_DESTINATION,
                "port is required in backendRef",
            ));
        };
        let mistake = (!exists).then(|| Mistake::new(reason::NOT_FOUND, format!("backend({host}) not found")));
        let port = Some(PortSelector { number: port.into() });
        Ok((
            Destination {
                host,
                port,
                ..Default::default()
            },
            mistake,
        ))
    }

    /// Returns the destination of an InferencePool: the first port of its shadow Service, whose cluster has the
    /// endpoints of all ports.
    fn inference_pool(&self, namespace: &Namespace, name: &SmolStr) -> Result<(Destination, Option<Mistake>), Mistake> {
        let failed = |reason, message: String| {
            let mistake = Mistake::new(reason, message);
            Ok((Destination::default(), Some(mistake)))
        };
        if !self.mesh.installation.features.enable_gateway_api_inference_extension {
            let hint = "To enable, set ENABLE_GATEWAY_API_INFERENCE_EXTENSION to true in istiod";
            return failed(reason::INVALID_KIND, format!("InferencePool is not enabled. {hint}"));
        }
        if name.contains('.') {
            let message = "InferencePool.Name invalid; the name of the InferencePool must be used, not the hostname.";
            return Err(Mistake::new(reason::INVALID_DESTINATION, message));
        }
        let object = |name: SmolStr| ObjectKey::new(self.meta.cluster(), namespace.clone(), name);
        if self.mesh.inference_pools.get(self.cx, &object(name.clone())).is_none() {
            return failed(reason::NOT_FOUND, format!("backend({name}) not found"));
        }
        let service = inference_pool::service_name(name);
        let host = service_host(self.mesh, namespace, &service);
        let Some(service) = self.mesh.kube_services.get(self.cx, &object(service)) else {
            return failed(reason::NOT_FOUND, format!("backend({host}) not found"));
        };
        if Picker::of(self.mesh, namespace, &service.meta.labels).is_none() {
            let message = "InferencePool service invalid, extensionRef labels not found";
            return Err(Mistake::new(reason::INVALID_DESTINATION, message));
        }
        let port = service.ports.first();
        let destination = Destination {
            host,
            port: port.map(|port| PortSelector { number: port.number }),
            ..Default::default()
        };
        Ok((destination, None))
    }

    fn namespace_of(&self, backend: &BackendReference) -> Namespace {
        let written = backend.namespace.as_ref();
        written.map_or_else(|| self.meta.namespace().clone(), Namespace::new)
    }

    fn is_permitted(&self, backend: &BackendReference, group: &str, kind: &str, namespace: &Namespace) -> bool {
        let own = self.meta.namespace();
        self.side == Side::Mesh
            || namespace == own
            || grant::is_granted(
                self.cx,
                self.mesh,
                Reference {
                    from_kind: self.kind.name(),
                    from: own,
                    group,
                    kind,
                    namespace,
                    name: &backend.name,
                },
            )
    }

    fn service_exists(&self, namespace: &Namespace, name: &SmolStr) -> bool {
        let key = ObjectKey::new(self.meta.cluster(), namespace.clone(), name.clone());
        self.mesh.kube_services.get(self.cx, &key).is_some()
    }

    fn service(&self, namespace: &Namespace, name: &SmolStr) -> Result<(String, bool), Mistake> {
        if name.contains('.') {
            let message = "service name invalid; the name of the Service must be used, not the hostname.";
            return Err(Mistake::new(reason::INVALID_DESTINATION, message));
        }
        Ok((
            service_host(self.mesh, namespace, name),
            self.service_exists(namespace, name),
        ))
    }

    fn hostname(&self, backend: &BackendReference, namespace: &Namespace) -> Result<(String, bool), Mistake> {
        if backend.namespace.is_some() {
            let message = "namespace may not be set with Hostname type";
            return Err(Mistake::new(reason::INVALID_DESTINATION, message));
        }
        // Parity (pilot/pkg/config/kube/gatewaycommon/context.go, GetService): services that other namespaces export do
        // not count.
        let service = ServiceKey {
            hostname: Hostname::new(&backend.name),
            namespace: namespace.clone(),
        };
        let exists = self.mesh.visibility.get(self.cx, &service).is_some();
        Ok((backend.name.to_string(), exists))
    }

    fn import(&self, namespace: &Namespace, name: &SmolStr) -> (String, bool) {
        let host = if mcs::has_hosts(&self.mesh.installation.features) {
            [name, ".", namespace, ".svc.clusterset.local"].concat()
        } else {
            service_host(self.mesh, namespace, name)
        };
        (host, self.service_exists(namespace, name))
    }

    /// Returns the backends with positive weight, converted by a function. A single one has no weight.
    pub(super) fn weighted<T>(
        &self,
        backends: &[BackendReference],
        convert: impl Fn(&BackendReference, Destination, i32) -> Result<T, Mistake>,
    ) -> Result<Weighted<T>, Mistake> {
        let used: Vec<_> = backends.iter().filter(|backend| weight(backend) > 0).collect();
        let mut converted = Vec::with_capacity(used.len());
        let mut last = None;
        for backend in &used {
            let (destination, mistake) = self.destination(backend)?;
            let weight = if used.len() == 1 { 0 } else { weight(backend) };
            converted.push(convert(backend, destination, weight)?);
            last = mistake.or(last);
        }
        Ok(Weighted {
            backends: converted,
            mistake: last,
        })
    }

    /// Returns the destinations of connections. Without any, connections are refused.
    pub(super) fn connections(&self, backends: &[BackendReference]) -> Result<Weighted<RouteDestination>, Mistake> {
        if !has_weight(backends) {
            let nowhere = Destination {
                host: NOWHERE.to_owned(),
                subset: NOWHERE_SUBSET.to_owned(),
                port: Some(PortSelector { number: NOWHERE_PORT }),
            };
            let backends = vec![RouteDestination {
                destination: Some(nowhere),
                ..Default::default()
            }];
            return Ok(Weighted {
                backends,
                mistake: None,
            });
        }
        self.weighted(backends, |_, destination, weight| {
            Ok(RouteDestination {
                destination: Some(destination),
                weight,
            })
        })
    }
}

fn weight(backend: &BackendReference) -> i32 {
    backend
        .weight
        .map_or(1, |weight| i32::try_from(weight).unwrap_or(i32::MAX))
}

/// Returns true if any backend has a positive weight.
pub(super) fn has_weight(backends: &[BackendReference]) -> bool {
    backends.iter().any(|backend| weight(backend) > 0)
}
