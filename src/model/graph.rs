//! All indexes and derived tables, in the order of their updates.
//!
//! A derive function may read what is above it; what is below still belongs to the previous revision.

use smol_str::SmolStr;

use super::{
    cluster_local::{self, ClusterLocalHosts},
    credential::references,
    destination_rule::{self, HostRules, RuleKey},
    endpoint::{self, EndpointTraits, ServiceEndpoints},
    envoy_filter::{self, CompiledFilter},
    extension::{self, ExtensionFilter, ExtensionId},
    gateway::{self, DeclaredGateway},
    inputs::{InputTables, Inputs},
    locality_dependencies::{self, LocalityDependencies},
    network::{self, Networks},
    per_replica::{self, PerReplicaInputs},
    service::{
        self, Service, ServiceKey, Visibility,
        auto_allocation::{self, AutoAddresses, AutoAllocation},
    },
    snapshot::MeshSnapshot,
    virtual_service::{self, ExportNamespace, VirtualService, VirtualServiceSummary},
    wants::{self, Wants},
    waypoint::{self, ServiceWaypoint, Waypoint},
    workload::{self, Workload, WorkloadKey},
};
use crate::{
    api::{self, Config},
    base::{ClusterId, Namespace, ObjectKey},
    proto::istio::{
        extensions::v1alpha1 as extensions, networking::v1alpha3 as networking,
        networking::v1beta1 as networking_v1beta1, security::v1beta1 as security, telemetry::v1alpha1 as telemetry,
    },
    table::{Derived, Index, IndexWriter, RelationId, Table, Transaction},
};

macro_rules! graph {
    (
        indexes { $($(#[$idoc:meta])* $index:ident: ($entry:ty, $ikey:ty, $irow:ty) = $extract:expr;)* }
        derived { $($(#[$ddoc:meta])* $table:ident: ($key:ty, $row:ty);)* }
    ) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Relation { $($index,)* $($table,)* }

        impl Relation {
            fn id(self) -> RelationId {
                RelationId(1000 + self as u32)
            }
        }

        /// Write side of all derived data.
        pub struct Graph {
            $($index: IndexWriter<$entry, $ikey, $irow>,)*
            $($table: Derived<$key, $row>,)*
        }

        impl Default for Graph {
            fn default() -> Self {
                Self {
                    $($index: IndexWriter::new(Relation::$index.id(), $extract),)*
                    $($table: Derived::new(Relation::$table.id()),)*
                }
            }
        }

        /// Read side of all derived data; input tables are reached by dereference.
        #[derive(Clone)]
        pub struct DerivedTables {
            inputs: InputTables,
            $($(#[$idoc])* pub $index: Index<$entry, $ikey, $irow>,)*
            $($(#[$ddoc])* pub $table: Table<$key, $row>,)*
        }

        impl Graph {
            /// Returns the present tables.
            pub fn tables(&self, inputs: InputTables) -> DerivedTables {
                DerivedTables {
                    inputs,
                    $($index: self.$index.index().clone(),)*
                    $($table: self.$table.table().clone(),)*
                }
            }

            /// Returns the number of recorded dependencies, by table.
            pub fn recorded_reads(&self) -> Vec<(&'static str, usize)> {
                vec![$((stringify!($table), self.$table.recorded_reads()),)*]
            }
        }
    };
}

impl std::ops::Deref for DerivedTables {
    type Target = InputTables;
    fn deref(&self) -> &InputTables {
        &self.inputs
    }
}

/// An index of namespaced objects by namespace.
macro_rules! by_namespace {
    () => {
        |key: &ObjectKey, _, emit: &mut dyn FnMut(Namespace)| emit(key.namespace.clone())
    };
}

graph! {
    indexes {
        /// Kubernetes Services by (namespace, name) over clusters.
        kube_services_by_name: ((Namespace, SmolStr), ObjectKey, api::kube::Service) =
            |key, _, emit| emit((key.namespace.clone(), key.name.clone()));
        /// Kubernetes Services by namespace.
        kube_services_by_namespace: (Namespace, ObjectKey, api::kube::Service) = by_namespace!();
        /// ServiceImports by (namespace, name) over clusters.
        service_imports_by_name: ((Namespace, SmolStr), ObjectKey, Config<api::mcs::ServiceImport>) =
            |key, _, emit| emit((key.namespace.clone(), key.name.clone()));
        /// Services with the label of a network gateway.
        network_services: ((), ObjectKey, api::kube::Service) =
            |_, service, emit| if network::network_label(service).is_some() { emit(()) };
        /// Gateway API Gateways with the label of a network gateway.
        network_gateways: ((), ObjectKey, Config<api::gateway_api::Gateway>) = network::labelled_gateway;
        /// ExternalName Services by their target.
        aliases_by_target: (crate::base::Hostname, ObjectKey, api::kube::Service) =
            |_, service, emit| if service.is_external_name() { emit(service.external_name.as_str().into()) };
        /// EndpointSlices by (namespace, service name) over clusters; rows come by cluster.
        slices_by_service: ((Namespace, SmolStr), ObjectKey, api::kube::EndpointSlice) = |key, slice, emit| {
            if !slice.service_name.is_empty() {
                emit((key.namespace.clone(), slice.service_name.clone()));
            }
        };
        /// ServiceEntries by host and namespace.
        service_entries_by_host: (ServiceKey, ObjectKey, Config<networking::ServiceEntry>) = service::entry_keys;
        /// ServiceEntries by the address of an inline endpoint.
        service_entries_by_endpoint_address: (SmolStr, ObjectKey, Config<networking::ServiceEntry>) =
            service::endpoint_address_keys;
        /// ServiceEntries that select workloads, by namespace.
        selecting_entries_by_namespace: (Namespace, ObjectKey, Config<networking::ServiceEntry>) =
            service::selecting_entry_key;
        /// Gateways by namespace.
        gateways_by_namespace: (Namespace, ObjectKey, Config<networking::Gateway>) = by_namespace!();
        /// DestinationRules with credentials, by the proxies that they apply to.
        credential_rules: (references::CredentialUsers, ObjectKey, Config<networking::DestinationRule>) = references::clients;
        /// ReferenceGrants by namespace.
        reference_grants_by_namespace: (Namespace, ObjectKey, Config<api::gateway_api::ReferenceGrant>) = by_namespace!();
        /// Pods by (cluster, address).
        pods_by_address: ((ClusterId, SmolStr), ObjectKey, api::kube::Pod) =
            |key, pod, emit| pod.ips.iter().for_each(|ip| emit((key.cluster.clone(), ip.clone())));
        /// Pods that have not failed, by (cluster, node, namespace, service account).
        pods_by_place: ((ClusterId, SmolStr, Namespace, SmolStr), ObjectKey, api::kube::Pod) =
            |key, pod, emit| pod.place(key).into_iter().for_each(emit);
        /// Workloads by namespace.
        workloads_by_namespace: (Namespace, WorkloadKey, Workload) = |key, _, emit| emit(key.object.namespace.clone());
        /// Workloads of WorkloadEntries by namespace.
        entry_workloads_by_namespace: (Namespace, WorkloadKey, Workload) = |key, _, emit| {
            if key.source == workload::WorkloadSource::WorkloadEntry {
                emit(key.object.namespace.clone());
            }
        };
        /// Workloads by address.
        workloads_by_address: (SmolStr, WorkloadKey, Workload) =
            |_, workload, emit| workload.addresses.iter().for_each(|address| emit(address.clone()));
        /// Merged services by namespace.
        services_by_namespace: (Namespace, ServiceKey, Service) = |key, _, emit| emit(key.namespace.clone());
        /// Services by host over namespaces.
        services_by_host: (crate::base::Hostname, ServiceKey, Visibility) = |key, _, emit| emit(key.hostname.clone());
        /// Services by the namespace that sees them and the namespace that declares them (`None`: all).
        services_by_export: ((ExportNamespace, Option<Namespace>), ServiceKey, Visibility) = service::export_keys;
        /// Waypoints by address: a host or an IP address.
        waypoints_by_address: (SmolStr, ObjectKey, Waypoint) = |_, waypoint, emit| emit(waypoint.address.clone());
        /// Services by their waypoint.
        services_by_waypoint: (ObjectKey, ServiceKey, ServiceWaypoint) = |_, row, emit| emit(row.gateway.clone());
        /// Services with endpoints whose pods are not known yet.
        services_awaiting_pods: ((), ServiceKey, ServiceEndpoints) = endpoint::pending;
        /// Services by the address of an endpoint.
        services_by_endpoint_address: (SmolStr, ServiceKey, ServiceEndpoints) = endpoint::addresses;
        /// VirtualServices by the namespace that sees them, and gateway.
        virtual_services_by_gateway: ((ExportNamespace, SmolStr), ObjectKey, VirtualServiceSummary) = virtual_service::export_keys;
        /// VirtualServices with TCP or TLS routes by host.
        tcp_virtual_services_by_host: (crate::base::Hostname, ObjectKey, VirtualService) = virtual_service::tcp_hosts;
        /// DestinationRules by namespace and host as written.
        raw_rules_by_host: ((Namespace, SmolStr), ObjectKey, Config<networking::DestinationRule>) = destination_rule::raw_key;
        /// Merged rules for wildcard hosts by namespace.
        wildcard_rules_by_namespace: (Namespace, RuleKey, HostRules) = destination_rule::wildcard_key;
        /// VirtualServices by the client labels in their matches.
        virtual_services_by_source_label: (SmolStr, ObjectKey, VirtualService) = virtual_service::source_labels;
        /// Merged rules by namespace and the client labels in their selectors.
        rules_by_selector_label: ((Namespace, SmolStr), RuleKey, HostRules) = destination_rule::selector_labels;
        /// Services whose endpoints depend on the client's location.
        locality_services: ((), ServiceKey, Service) = locality_dependencies::service_entry;
        /// Rules by which endpoints may depend on the client's location.
        locality_rules: ((), RuleKey, HostRules) = locality_dependencies::rule_entry;
        /// Sidecars by namespace.
        sidecars_by_namespace: (Namespace, ObjectKey, Config<networking::Sidecar>) = by_namespace!();
        /// Sidecars by the per-replica labels that they select.
        sidecars_by_label: (SmolStr, ObjectKey, Config<networking::Sidecar>) = per_replica::label_entries;
        /// EnvoyFilters by the per-replica labels that they select.
        envoy_filters_by_label: (SmolStr, ObjectKey, Config<networking::EnvoyFilter>) = per_replica::label_entries;
        /// DestinationRules by the per-replica labels that they select.
        raw_rules_by_label: (SmolStr, ObjectKey, Config<networking::DestinationRule>) = per_replica::label_entries;
        /// Gateways by the per-replica labels that they select.
        gateways_by_label: (SmolStr, ObjectKey, Config<networking::Gateway>) = per_replica::label_entries;
        /// AuthorizationPolicies by the per-replica labels that they select.
        authorization_policies_by_label: (SmolStr, ObjectKey, Config<security::AuthorizationPolicy>) = per_replica::label_entries;
        /// PeerAuthentications by the per-replica labels that they select.
        peer_authentications_by_label: (SmolStr, ObjectKey, Config<security::PeerAuthentication>) = per_replica::label_entries;
        /// RequestAuthentications by the per-replica labels that they select.
        request_authentications_by_label: (SmolStr, ObjectKey, Config<security::RequestAuthentication>) = per_replica::label_entries;
        /// Telemetries by the per-replica labels that they select.
        telemetries_by_label: (SmolStr, ObjectKey, Config<telemetry::Telemetry>) = per_replica::label_entries;
        /// WasmPlugins by the per-replica labels that they select.
        wasm_plugins_by_label: (SmolStr, ObjectKey, Config<extensions::WasmPlugin>) = per_replica::label_entries;
        /// TrafficExtensions by the per-replica labels that they select.
        traffic_extensions_by_label: (SmolStr, ObjectKey, Config<extensions::TrafficExtension>) = per_replica::label_entries;
        /// Sidecars with listeners.
        listening_sidecars: ((), ObjectKey, Config<networking::Sidecar>) = per_replica::sidecar_entry;
        /// EnvoyFilters that match node metadata.
        filters_by_metadata: ((), ObjectKey, CompiledFilter) = per_replica::filter_entry;
        /// EnvoyFilters by namespace.
        envoy_filters_by_namespace: (Namespace, ObjectKey, Config<networking::EnvoyFilter>) = by_namespace!();
        /// ProxyConfigs by namespace.
        proxy_configs_by_namespace: (Namespace, ObjectKey, Config<networking_v1beta1::ProxyConfig>) = by_namespace!();
        /// AuthorizationPolicies by namespace.
        authorization_policies_by_namespace: (Namespace, ObjectKey, Config<security::AuthorizationPolicy>) = by_namespace!();
        /// PeerAuthentications by namespace.
        peer_authentications_by_namespace: (Namespace, ObjectKey, Config<security::PeerAuthentication>) = by_namespace!();
        /// RequestAuthentications by namespace.
        request_authentications_by_namespace: (Namespace, ObjectKey, Config<security::RequestAuthentication>) = by_namespace!();
        /// Telemetries by namespace.
        telemetries_by_namespace: (Namespace, ObjectKey, Config<telemetry::Telemetry>) = by_namespace!();
        /// WasmPlugins by namespace.
        wasm_plugins_by_namespace: (Namespace, ObjectKey, Config<extensions::WasmPlugin>) = by_namespace!();
        /// TrafficExtensions by namespace.
        traffic_extensions_by_namespace: (Namespace, ObjectKey, Config<extensions::TrafficExtension>) = by_namespace!();
    }
    derived {
        /// Pods and WorkloadEntries in one form.
        workloads: (WorkloadKey, Workload);
        /// Addresses computed for ServiceEntries without one, as a whole.
        auto_allocation: ((), AutoAllocation);
        /// Addresses computed for each service.
        auto_addresses: (ServiceKey, AutoAddresses);
        /// Services merged over clusters and registries.
        services: (ServiceKey, Service);
        /// Attributes that decide whether a service is visible; they change far less often than the service.
        visibility: (ServiceKey, Visibility);
        /// Gateways that are waypoints.
        waypoints: (ObjectKey, Waypoint);
        /// Waypoint of each service that has one.
        service_waypoints: (ServiceKey, ServiceWaypoint);
        /// Endpoints of services.
        endpoints: (ServiceKey, ServiceEndpoints);
        /// Traits of endpoints that clusters and listeners depend on.
        endpoint_traits: (ServiceKey, EndpointTraits);
        /// The network gateways.
        networks: ((), Networks);
        /// Cluster-local hosts.
        cluster_local: ((), ClusterLocalHosts);
        /// External data that the mesh needs.
        wants: ((), Wants);
        /// Resolved VirtualServices.
        virtual_services: (ObjectKey, VirtualService);
        /// Visibility and destinations of VirtualServices.
        virtual_service_summaries: (ObjectKey, VirtualServiceSummary);
        /// DestinationRules merged by host.
        destination_rules: (RuleKey, HostRules);
        /// Location attributes that endpoints depend on.
        locality_dependencies: ((), LocalityDependencies);
        /// Gateways prepared for merging.
        declared_gateways: (ObjectKey, DeclaredGateway);
        /// Credentials in EnvoyFilters; no row without any.
        filter_credentials: (ObjectKey, Vec<SmolStr>);
        /// Compiled EnvoyFilters.
        envoy_filter_patches: (ObjectKey, CompiledFilter);
        /// Per-replica attributes that the mesh uses.
        per_replica_inputs: ((), PerReplicaInputs);
        /// Positions of the filters of WasmPlugins and TrafficExtensions.
        extension_filters: (ExtensionId, ExtensionFilter);
    }
}

/// Copies a table or index to the read side, for the following ones.
macro_rules! publish {
    ($self:ident, $mesh:ident, index $($index:ident),*) => { $($mesh.derived.$index = $self.$index.index().clone();)* };
    ($self:ident, $mesh:ident, table $($table:ident),*) => { $($mesh.derived.$table = $self.$table.table().clone();)* };
}

/// Updates an index over an input table and publishes it.
macro_rules! index_inputs {
    ($self:ident, $tx:ident, $inputs:ident, $mesh:ident: $($index:ident <- $source:ident),* $(,)?) => {
        $($self.$index.update($tx, &$inputs.$source); publish!($self, $mesh, index $index);)*
    };
}

/// Updates an index over a derived table and publishes it.
macro_rules! index_derived {
    ($self:ident, $tx:ident, $mesh:ident: $($index:ident <- $source:ident),* $(,)?) => {
        $($self.$index.update($tx, $self.$source.writer()); publish!($self, $mesh, index $index);)*
    };
}

/// Updates a derived table from candidate keys and publishes it.
macro_rules! derive {
    ($self:ident, $tx:ident, $mesh:ident: $table:ident <- $candidates:expr, $function:expr) => {{
        let candidates: Vec<_> = $candidates;
        $self.$table.update($tx, &candidates, |cx, key| $function(cx, $mesh, key));
        publish!($self, $mesh, table $table);
    }};
}

impl Graph {
    /// Updates everything from the inputs, in order.
    pub fn update(&mut self, tx: &mut Transaction, inputs: &Inputs, mesh: &mut MeshSnapshot) {
        mesh.derived.inputs = inputs.tables();
        mesh.config = mesh.derived.mesh_config.held(&mesh.installation.mesh_config_key());
        index_inputs!(self, tx, inputs, mesh:
            kube_services_by_name <- kube_services,
            kube_services_by_namespace <- kube_services,
            service_imports_by_name <- service_imports,
            aliases_by_target <- kube_services,
            network_services <- kube_services,
            network_gateways <- kube_gateways,
            slices_by_service <- endpoint_slices,
            service_entries_by_host <- service_entries,
            service_entries_by_endpoint_address <- service_entries,
            selecting_entries_by_namespace <- service_entries,
            gateways_by_namespace <- gateways,
            credential_rules <- raw_destination_rules,
            reference_grants_by_namespace <- reference_grants,
            pods_by_address <- pods,
            pods_by_place <- pods,
            raw_rules_by_host <- raw_destination_rules,
            sidecars_by_namespace <- sidecars,
            listening_sidecars <- sidecars,
            sidecars_by_label <- sidecars,
            envoy_filters_by_label <- envoy_filters,
            raw_rules_by_label <- raw_destination_rules,
            gateways_by_label <- gateways,
            authorization_policies_by_label <- authorization_policies,
            peer_authentications_by_label <- peer_authentications,
            request_authentications_by_label <- request_authentications,
            telemetries_by_label <- telemetries,
            wasm_plugins_by_label <- wasm_plugins,
            traffic_extensions_by_label <- traffic_extensions,
            envoy_filters_by_namespace <- envoy_filters,
            proxy_configs_by_namespace <- proxy_configs,
            authorization_policies_by_namespace <- authorization_policies,
            peer_authentications_by_namespace <- peer_authentications,
            request_authentications_by_namespace <- request_authentications,
            telemetries_by_namespace <- telemetries,
            wasm_plugins_by_namespace <- wasm_plugins,
            traffic_extensions_by_namespace <- traffic_extensions,
        );
        let installation = mesh.installation.clone();
        derive!(self, tx, mesh: workloads <- workload::candidates(inputs), workload::workload);
        index_derived!(self, tx, mesh: workloads_by_namespace <- workloads,
            entry_workloads_by_namespace <- workloads, workloads_by_address <- workloads);
        // Rows of the whole mesh are evaluated once; later their recorded reads decide.
        let whole_mesh = if mesh.revision.0 == 0 { vec![()] } else { Vec::new() };
        derive!(self, tx, mesh: auto_allocation <- whole_mesh.clone(), auto_allocation::allocation);
        derive!(self, tx, mesh: auto_addresses <- self.service_entries_by_host.changed().iter().cloned().collect(),
            auto_allocation::addresses);
        derive!(self, tx, mesh: services <- service::candidates(
            &installation, self.kube_services_by_name.changed(), self.service_imports_by_name.changed(),
            self.service_entries_by_host.changed()), service::service);
        derive!(self, tx, mesh: visibility <- self.services.writer().changes().iter().map(|(key, ..)| key.clone()).collect(),
            service::visibility);
        index_derived!(self, tx, mesh: services_by_namespace <- services, services_by_host <- visibility,
            services_by_export <- visibility);
        derive!(self, tx, mesh: waypoints <- inputs.kube_gateways.changes().iter().map(|(key, ..)| key.clone()).collect(),
            waypoint::waypoint);
        derive!(self, tx, mesh: service_waypoints <- self.services.writer().changes().iter().map(|(key, ..)| key.clone()).collect(),
            waypoint::of_service);
        index_derived!(self, tx, mesh: waypoints_by_address <- waypoints, services_by_waypoint <- service_waypoints);
        derive!(self, tx, mesh: networks <- whole_mesh.clone(), network::networks);
        derive!(self, tx, mesh: wants <- whole_mesh.clone(), wants::wants);
        derive!(self, tx, mesh: cluster_local <- whole_mesh, cluster_local::hosts);
        derive!(self, tx, mesh: endpoints <- self.services.writer().changes().iter().map(|(key, ..)| key.clone()).collect(),
            endpoint::endpoints);
        index_derived!(self, tx, mesh: services_by_endpoint_address <- endpoints, services_awaiting_pods <- endpoints);
        derive!(self, tx, mesh: endpoint_traits <- self.endpoints.writer().changes().iter().map(|(key, ..)| key.clone()).collect(),
            endpoint::traits);
        derive!(self, tx, mesh: virtual_services <- inputs.raw_virtual_services.changes().iter().map(|(key, ..)| key.clone()).collect(),
            virtual_service::virtual_service);
        derive!(self, tx, mesh: virtual_service_summaries <- self.virtual_services.writer().changes().iter().map(|(key, ..)| key.clone()).collect(),
            virtual_service::summary);
        index_derived!(self, tx, mesh: virtual_services_by_gateway <- virtual_service_summaries,
            virtual_services_by_source_label <- virtual_services, tcp_virtual_services_by_host <- virtual_services);
        derive!(self, tx, mesh: destination_rules <- destination_rule::candidates(&installation, inputs),
            destination_rule::host_rules);
        index_derived!(self, tx, mesh: wildcard_rules_by_namespace <- destination_rules,
            rules_by_selector_label <- destination_rules,
            locality_rules <- destination_rules,
            locality_services <- services);
        // Later evaluations follow from its recorded reads.
        let first = if self.locality_dependencies.table().is_empty() {
            vec![()]
        } else {
            Vec::new()
        };
        derive!(self, tx, mesh: locality_dependencies <- first.clone(), locality_dependencies::dependencies);
        derive!(self, tx, mesh: declared_gateways <- inputs.gateways.changes().iter().map(|(key, ..)| key.clone()).collect(),
            gateway::declared);
        derive!(self, tx, mesh: filter_credentials <- inputs.envoy_filters.changes().iter().map(|(key, ..)| key.clone()).collect(),
            references::of_filter);
        derive!(self, tx, mesh: envoy_filter_patches <- inputs.envoy_filters.changes().iter().map(|(key, ..)| key.clone()).collect(),
            envoy_filter::compiled);
        index_derived!(self, tx, mesh: filters_by_metadata <- envoy_filter_patches);
        derive!(self, tx, mesh: per_replica_inputs <- first, per_replica::inputs);
        derive!(self, tx, mesh: extension_filters <- extension::candidates(inputs), extension::filter);
    }
}
