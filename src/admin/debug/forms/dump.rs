//! Resources of a proxy, and Envoy's `admin.v3.ConfigDump` of them.

use std::{borrow::Cow, sync::Arc};

use serde_json::{Value, json};

use crate::{
    admin::debug::redact::redacted,
    generate::{EncodedResource, ResourceSnapshot, ResourceType, requested::ADDRESSES},
    proto::json,
    xds::registry::TypeStatus,
};

/// The resources of a proxy, with its subscriptions.
pub(in crate::admin::debug) struct Dump {
    pub(in crate::admin::debug) resources: Arc<ResourceSnapshot>,
    pub(in crate::admin::debug) types: Vec<TypeStatus>,
    pub(in crate::admin::debug) is_ztunnel: bool,
}

impl Dump {
    /// Returns the resources of a type that the proxy subscribes to.
    fn watched(&self, resource_type: ResourceType) -> Vec<Cow<'_, EncodedResource>> {
        let status = self.types.iter().find(|status| status.resource_type == resource_type);
        let all = self.resources.resources(resource_type);
        match status {
            None => Vec::new(),
            // Workloads and services may be requested by aliases; all that were generated are sent.
            Some(status) if status.wildcard || ADDRESSES.contains(&resource_type) => {
                all.iter().map(|resource| Cow::Borrowed(&**resource)).collect()
            }
            Some(status) => {
                let named = |name: &str| {
                    let present = all.get(name).map(|resource| Cow::Borrowed(&**resource));
                    present.or_else(|| self.resources.absent(resource_type, name).map(Cow::Owned))
                };
                status.names.iter().filter_map(|name| named(name)).collect()
            }
        }
    }

    /// Returns the resources of a type as JSON with their types, without private keys.
    fn bodies(&self, resource_type: ResourceType) -> impl Iterator<Item = (String, Value)> {
        let resources = self.watched(resource_type).into_iter();
        resources.map(|resource| {
            let body = redacted(json::any_to_json(&resource.any()));
            (resource.name.to_string(), body)
        })
    }

    fn version(&self, resource_type: ResourceType) -> String {
        self.resources.resources(resource_type).version().to_string()
    }

    /// Returns the resources of these types, named as in metrics (`cds`) or by URL.
    pub(in crate::admin::debug) fn of_types(&self, types: &[&str]) -> Value {
        let is_selected = |resource_type: &ResourceType| {
            let (short, url) = (resource_type.short_name(), resource_type.url());
            types
                .iter()
                .any(|name| name.eq_ignore_ascii_case(short) || *name == url)
        };
        let selected = ResourceType::ALL
            .iter()
            .filter(|resource_type| is_selected(resource_type));
        let bodies = selected.flat_map(|resource_type| self.bodies(*resource_type));
        page(bodies.map(|(_, body)| body).collect())
    }

    /// Returns the whole dump. That of a ztunnel is its workloads and services.
    pub(in crate::admin::debug) fn whole(&self, include_endpoints: bool) -> Value {
        if self.is_ztunnel {
            return self.of_types(&[ResourceType::Address.url()]);
        }
        page(self.sections(include_endpoints))
    }

    /// Returns the sections of the dump, as the proxy would show it.
    ///
    /// Parity (pilot/pkg/xds/debug.go). Versions are those of the responses to the proxy.
    pub(in crate::admin::debug) fn sections(&self, include_endpoints: bool) -> Vec<Value> {
        let section = |name: &str| json!({ "@type": format!("type.googleapis.com/envoy.admin.v3.{name}") });
        let versioned = |resource_type, name: &str| {
            let mut section = section(name);
            section["versionInfo"] = json!(self.version(resource_type));
            section
        };
        let fill = |mut section: Value, field: &str, entries: Vec<Value>| {
            if !entries.is_empty() {
                section[field] = Value::Array(entries);
            }
            section
        };
        let entries = |resource_type, field: &str| -> Vec<Value> {
            let version = self.version(resource_type);
            self.bodies(resource_type)
                .map(|(_, body)| json!({ "versionInfo": version, field: body }))
                .collect()
        };
        let clusters = self.bodies(ResourceType::Cluster);
        let clusters = clusters.map(|(_, body)| json!({ "cluster": body })).collect();
        let version = self.version(ResourceType::Listener);
        let listeners = self
            .bodies(ResourceType::Listener)
            .map(|(name, body)| json!({ "name": name, "activeState": { "versionInfo": version, "listener": body } }));
        let mut sections = vec![
            section("BootstrapConfigDump"),
            fill(
                versioned(ResourceType::Cluster, "ClustersConfigDump"),
                "dynamicActiveClusters",
                clusters,
            ),
        ];
        if include_endpoints {
            let endpoints = entries(ResourceType::Endpoint, "endpointConfig");
            sections.push(fill(
                section("EndpointsConfigDump"),
                "dynamicEndpointConfigs",
                endpoints,
            ));
        }
        sections.extend([
            fill(
                versioned(ResourceType::Listener, "ListenersConfigDump"),
                "dynamicListeners",
                listeners.collect(),
            ),
            section("ScopedRoutesConfigDump"),
            fill(
                section("RoutesConfigDump"),
                "dynamicRouteConfigs",
                entries(ResourceType::Route, "routeConfig"),
            ),
            fill(
                section("SecretsConfigDump"),
                "dynamicActiveSecrets",
                entries(ResourceType::Secret, "secret"),
            ),
            fill(
                section("EcdsConfigDump"),
                "ecdsFilters",
                entries(ResourceType::Extension, "ecdsFilter"),
            ),
        ]);
        sections
    }
}

fn page(configs: Vec<Value>) -> Value {
    if configs.is_empty() {
        json!({})
    } else {
        json!({ "configs": configs })
    }
}
