//! All indexes and derived tables, in the order of their updates.
//!
//! A derive function may read what is above it; what is below still belongs to the previous revision.

mod source;

use std::fmt::Debug;

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::model::{
    ambient::{
        self, AmbientMesh,
        gateway::Gateways,
        policy::{NamespaceModes, PolicySelector, SelectorModes},
        remote::{RemoteKey, RemoteWorkloads},
        service::{
            AmbientService, ClusterSelectorKey, ClusterService, ClusterServiceKey, DeclaredKey, DeclaredService,
            HostServices,
        },
        waypoint::WaypointInstances,
        workload::{AmbientWorkload, EntryEndpoints, SliceTargets, SliceWorkloads, WorkloadUid},
    },
    ambient_status::{self, ObjectConditions, StatusTarget},
    cluster_local::{self, ClusterLocalHosts},
    credential::{pem::KeyPairError, references},
    destination_rule::{self, HostRules, PolicySize, RuleKey},
    endpoint::{self, EndpointTraits, SelectedWorkloads, ServiceEndpoints},
    envoy_filter::{self, CompiledFilter},
    extension::{self, ExtensionFilter, ExtensionId},
    external_dependencies::{self, ExternalDependencies, KeyTimeouts},
    gateway::{self, DeclaredGateway, hosts::GatewayHosts},
    gateway_api::{
        self,
        grant::Permitted,
        listener::{
            ListenerOwner, Listeners,
            authority::{self, ClientAuthorities, ClientAuthority},
            conflict::Conflicts,
            key_pair,
        },
        policy::{Backend, BackendPolicies, OldestTlsPolicies, PolicyKey, TlsTarget},
        route::{AttachedRoute, AttachedRouteKey, ConvertedName},
        used_pool::UsedPool,
    },
    ingress::{self, NamedPorts, ServedIngress},
    inputs::{InputTables, InputWriters, RelationKeys},
    locality_dependencies::{self, LocalityDependencies, LocationAttribute},
    network::{self, Networks},
    output_limit::{self, Demand, DemandKey, RefusedObjects},
    per_replica::{self, PerReplicaInputs},
    policy::{self, PolicyTarget},
    service::{
        self, Service, ServiceKey, Visibility,
        alias::{self, HostAliases},
        auto_allocation::{self, AutoAddresses, AutoAllocation},
        entry_lists::{self, EntryLists},
        node_selector::{self, NodeSelector},
    },
    virtual_service::{self, ExportNamespace, VirtualService, VirtualServiceSummary, WildcardOwners},
    waypoint::{
        self, ServedService, ServiceWaypoint, Waypoint,
        addresses::ServicesAtGateways,
        workloads::{WaypointWorkloads, WorkloadsKey},
    },
    workload::{self, Workload, WorkloadKey},
};
use crate::{
    api::{self, Config, Kind},
    base::{ClusterId, Hostname, Labels, Namespace, NetworkId, ObjectKey, Shared, select::LabelSelector},
    proto::istio::{
        extensions::v1alpha1 as extensions, networking::v1alpha3 as networking,
        networking::v1beta1 as networking_v1beta1, security::v1beta1 as security, telemetry::v1alpha1 as telemetry,
    },
    table::{Cx, Derived, Distinct, Index, IndexWriter, RelationId, Table, Transaction, Union},
};
use source::{
    candidates, changed_converted, changed_keys, entries_with_lists, if_ambient, large_entries, large_objects,
    selecting_entries,
};

/// Generates the tables from a list of entries, which are updated in the order of the list:
/// - `index name (IndexKey, Key, Row) from (source) = extract;` indexes the rows of a table;
/// - `distinct name (IndexKey, Key, Row) from (source) = extract;` has the keys of such an index without the rows;
/// - `table name (Key, Row) from (source) = derive;` derives the rows of the keys that the source returns, and those
///   whose recorded reads have changed;
/// - `union name (Key, Row) from (inputs.table, tables…) = key;` has the rows of all, under the keys that the function
///   returns.
///
/// A source is `(inputs.table)` (an input table), `(table)` (a derived table), `(once)` (the whole mesh, first
/// evaluated by the first commit), or `(with |graph, inputs, mesh| keys)`.
macro_rules! graph {
    ($($(#[$doc:meta])* $sort:ident $name:ident $types:tt from $source:tt = $function:expr;)*) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Relation { $($name,)* }

        impl Relation {
            fn id(self) -> RelationId {
                RelationId(1000 + self as u32)
            }
        }

        /// Write side of all derived data.
        pub struct Graph {
            $($name: writer!($sort $types),)*
        }

        impl Default for Graph {
            fn default() -> Self {
                Self { $($name: new_writer!($sort Relation::$name.id(), $function),)* }
            }
        }

        /// Read side of all derived data; input tables are reached by dereference (see [`MeshSnapshot`]).
        #[derive(Clone)]
        pub struct DerivedTables {
            inputs: InputTables,
            $($(#[$doc])* pub $name: reader!($sort $types),)*
        }

        impl DerivedTables {
            /// Returns the keys of every table and index, in the order of updates.
            pub fn relations(&self) -> Vec<RelationKeys<'_>> {
                let mut relations = self.inputs.relations();
                $(relations.push(RelationKeys {
                    name: stringify!($name),
                    id: Relation::$name.id(),
                    source: source_name!($source),
                    keys: Box::new(move || texts(&mut self.$name.keys(&Cx::untracked()).map(|key| key as &dyn Debug))),
                });)*
                relations
            }

            /// Marks what differs from an earlier revision as changed.
            pub fn mark_differences(&self, earlier: &Self, tx: &mut Transaction) {
                self.inputs.mark_differences(&earlier.inputs, tx);
                $(self.$name.mark_differences(&earlier.$name, tx);)*
            }
        }

        impl Graph {
            /// Returns the present tables.
            pub fn tables(&self, inputs: InputTables) -> DerivedTables {
                DerivedTables { inputs, $($name: current!($sort self.$name),)* }
            }

            /// Returns the number of recorded dependencies.
            pub fn recorded_reads(&self) -> usize {
                0 $(+ recorded_reads!($sort self.$name))*
            }

            /// Forgets the row changes of the last transaction.
            pub fn begin(&mut self) {
                $(self.$name.begin();)*
            }

            /// Updates everything from the inputs, in order. Each table is published for the following ones.
            pub fn update(&mut self, tx: &mut Transaction, inputs: &InputWriters, mesh: &mut MeshSnapshot) {
                mesh.derived.inputs = inputs.tables();
                mesh.config = mesh.derived.mesh_config.prefetch(&mesh.installation.mesh_config_key());
                $(
                    update!($sort self, tx, inputs, mesh, $name $source $function);
                    mesh.derived.$name = current!($sort self.$name);
                )*
            }
        }
    };
}

macro_rules! writer {
    (index ($entry:ty, $key:ty, $row:ty)) => { IndexWriter<$entry, $key, $row> };
    (distinct ($entry:ty, $key:ty, $row:ty)) => { Distinct<$entry, $key, $row> };
    (table ($key:ty, $row:ty)) => { Derived<$key, $row> };
    (union ($key:ty, $row:ty)) => { Union<$key, $row> };
}

macro_rules! new_writer {
    (index $id:expr, $extract:expr) => {
        IndexWriter::new($id, $extract)
    };
    (distinct $id:expr, $extract:expr) => {
        Distinct::new($id, $extract)
    };
    (table $id:expr, $derive:expr) => {
        Derived::new($id)
    };
    (union $id:expr, $key:expr) => {
        Union::new($id)
    };
}

macro_rules! reader {
    (index ($entry:ty, $key:ty, $row:ty)) => { Index<$entry, $key, $row> };
    (distinct ($entry:ty, $key:ty, $row:ty)) => { Table<$entry, ()> };
    (table ($key:ty, $row:ty)) => { Table<$key, $row> };
    (union ($key:ty, $row:ty)) => { Table<$key, $row> };
}

macro_rules! current {
    (index $writer:expr) => {
        $writer.index().clone()
    };
    (distinct $writer:expr) => {
        $writer.table().clone()
    };
    (table $writer:expr) => {
        $writer.table().clone()
    };
    (union $writer:expr) => {
        $writer.table().clone()
    };
}

macro_rules! source_name {
    ((inputs.$table:ident)) => {
        Some(stringify!($table))
    };
    ((once)) => {
        None
    };
    (($table:ident)) => {
        Some(stringify!($table))
    };
    ($other:tt) => {
        None
    };
}

macro_rules! recorded_reads {
    (index $writer:expr) => {
        0
    };
    (distinct $writer:expr) => {
        0
    };
    (table $writer:expr) => {
        $writer.recorded_reads()
    };
    (union $writer:expr) => {
        0
    };
}

macro_rules! update {
    (index $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $name:ident (inputs.$table:ident) $extract:expr) => {
        $graph.$name.update($tx, &$inputs.$table)
    };
    (index $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $name:ident ($table:ident) $extract:expr) => {
        $graph.$name.update($tx, $graph.$table.writer())
    };
    (distinct $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $name:ident (inputs.$table:ident) $extract:expr) => {
        $graph.$name.update($tx, &$inputs.$table)
    };
    (distinct $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $name:ident ($table:ident) $extract:expr) => {
        $graph.$name.update($tx, $graph.$table.writer())
    };
    (union $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $to:ident (inputs.$a:ident, $($b:ident),+) $key:expr)
    => {{
        $graph.$to.begin();
        $graph.$to.remove($tx, &$inputs.$a, $key);
        $($graph.$to.remove($tx, $graph.$b.writer(), $key);)+
        $graph.$to.put($tx, &$inputs.$a, $key);
        $($graph.$to.put($tx, $graph.$b.writer(), $key);)+
        $graph.$to.check($inputs.$a.table().len() $(+ $graph.$b.table().len())+);
    }};
    (table $graph:ident, $tx:ident, $inputs:ident, $mesh:ident, $name:ident $source:tt $derive:expr) => {{
        let candidates = candidates!($graph, $inputs, $mesh, $source);
        $graph.$name.update($tx, &candidates, |cx, key| $derive(cx, $mesh, key));
    }};
}

/// Returns the keys of a source.
macro_rules! candidates {
    ($graph:ident, $inputs:ident, $mesh:ident, (once)) => {
        if $mesh.revision.0 == 0 { vec![()] } else { Vec::new() }
    };
    ($graph:ident, $inputs:ident, $mesh:ident, (inputs.$table:ident)) => {
        changed_keys(&$inputs.$table)
    };
    ($graph:ident, $inputs:ident, $mesh:ident, (with $candidates:expr)) => {
        candidates($graph, $inputs, $mesh, $candidates)
    };
    ($graph:ident, $inputs:ident, $mesh:ident, ($table:ident)) => {
        changed_keys($graph.$table.writer())
    };
}

/// Returns keys as text. Not generic, since the tables have a hundred types.
fn texts(keys: &mut dyn Iterator<Item = &dyn Debug>) -> Vec<String> {
    keys.map(|key| format!("{key:?}")).collect()
}

/// Derives the output of an object.
fn demand(cx: &Cx, mesh: &MeshSnapshot, key: &DemandKey) -> Option<Demand> {
    match key.kind {
        Kind::DestinationRule => destination_rule::demand(cx, mesh, &key.object),
        Kind::ServiceEntry => endpoint::demand(cx, mesh, &key.object),
        _ => virtual_service::demand(cx, mesh, &key.object),
    }
}

impl std::ops::Deref for DerivedTables {
    type Target = InputTables;
    fn deref(&self) -> &InputTables {
        &self.inputs
    }
}

/// Returns the key of an object.
fn own_key<T>(row: &Config<T>) -> ObjectKey {
    row.meta.key.clone()
}

/// An index of namespaced objects by namespace.
macro_rules! by_namespace {
    () => {
        |key: &ObjectKey, _, emit: &mut dyn FnMut(Namespace)| emit(key.namespace.clone())
    };
}

graph! {
    /// Kubernetes Services by (namespace, name) over clusters.
    index kube_services_by_name ((Namespace, SmolStr), ObjectKey, api::kube::Service)
        from (inputs.kube_services) = |key, _, emit| emit((key.namespace.clone(), key.name.clone()));
    /// Kubernetes Services by namespace.
    index kube_services_by_namespace (Namespace, ObjectKey, api::kube::Service)
        from (inputs.kube_services) = by_namespace!();
    /// ServiceImports by (namespace, name) over clusters.
    index service_imports_by_name ((Namespace, SmolStr), ObjectKey, Config<api::mcs::ServiceImport>)
        from (inputs.service_imports) = |key, _, emit| emit((key.namespace.clone(), key.name.clone()));
    /// ExternalName Services by their target.
    index aliases_by_target (Hostname, ObjectKey, api::kube::Service)
        from (inputs.kube_services) =
            |_, service, emit| if service.is_external_name() { emit(service.external_name.as_str().into()) };
    /// Node selectors of NodePort Services.
    distinct node_selectors (NodeSelector, ObjectKey, api::kube::Service)
        from (inputs.kube_services) = node_selector::of_service;
    /// Addresses of the nodes of each selector.
    table selected_nodes (NodeSelector, Shared<[SmolStr]>) from (node_selectors) = node_selector::addresses;
    /// Services with the label of a network gateway.
    index network_services ((), ObjectKey, api::kube::Service)
        from (inputs.kube_services) = |_, service, emit| if network::network_label(service).is_some() { emit(()) };
    /// Gateway API Gateways with the label of a network gateway.
    index network_gateways ((), ObjectKey, Config<api::gateway_api::Gateway>)
        from (inputs.kube_gateways) = network::labelled_gateway;
    /// EndpointSlices by (namespace, service name) over clusters; rows come by cluster. Mirrored slices are omitted,
    /// because the cluster of their endpoints has these, too.
    ///
    /// Parity (pilot/pkg/serviceregistry/kube/controller/endpointslice.go): this holds for Envoys; ztunnels know the
    /// endpoints of mirrored slices.
    index slices_by_service ((Namespace, SmolStr), ObjectKey, api::kube::EndpointSlice)
        from (inputs.endpoint_slices) = |key, slice, emit| {
        if !slice.service_name.is_empty() && !slice.mirrored {
                emit((key.namespace.clone(), slice.service_name.clone()));
            }
        };
    /// ServiceEntries by host and namespace.
    index service_entries_by_host (ServiceKey, ObjectKey, Config<networking::ServiceEntry>)
        from (inputs.service_entries) = service::entry_keys;
    /// ServiceEntries by the address of an inline endpoint.
    index service_entries_by_endpoint_address (SmolStr, ObjectKey, Config<networking::ServiceEntry>)
        from (inputs.service_entries) = service::endpoint_address_keys;
    /// ServiceEntries that select workloads, by namespace.
    index selecting_entries_by_namespace (Namespace, ObjectKey, Config<networking::ServiceEntry>)
        from (inputs.service_entries) = service::selecting_entry_key;
    /// ReferenceGrants by the references that they permit.
    index grants_by_reference (Permitted, ObjectKey, Config<api::gateway_api::ReferenceGrant>)
        from (inputs.reference_grants) = gateway_api::grant::permitted;
    /// Pods by (cluster, address).
    index pods_by_address ((ClusterId, SmolStr), ObjectKey, api::kube::Pod)
        from (inputs.pods) = |key, pod, emit| pod.ips.iter().for_each(|ip| emit((key.cluster.clone(), ip.clone())));
    /// Running pods with the label of an ingress gateway, by cluster, namespace and the label's value.
    index ingress_gateway_pods ((ClusterId, Namespace, SmolStr), ObjectKey, api::kube::Pod)
        from (inputs.pods) = ingress::status::gateway_pod;
    /// Pods that have not failed, by their nodes and service accounts.
    index pods_by_node_account (api::kube::pod::NodeAccount, ObjectKey, api::kube::Pod)
        from (inputs.pods) = |key, pod, emit| pod.node_account(key).into_iter().for_each(emit);
    /// Sidecars by namespace.
    index sidecars_by_namespace (Namespace, ObjectKey, Config<networking::Sidecar>)
        from (inputs.sidecars) = by_namespace!();
    /// Sidecars with listeners.
    index listening_sidecars ((), ObjectKey, Config<networking::Sidecar>)
        from (inputs.sidecars) = per_replica::sidecar_entry;
    /// Sidecars by the per-replica labels that they select.
    index sidecars_by_label (SmolStr, ObjectKey, Config<networking::Sidecar>)
        from (inputs.sidecars) = per_replica::label_entries;
    /// EnvoyFilters by the per-replica labels that they select.
    index envoy_filters_by_label (SmolStr, ObjectKey, Config<networking::EnvoyFilter>)
        from (inputs.envoy_filters) = per_replica::label_entries;
    /// AuthorizationPolicies by the per-replica labels that they select.
    index authorization_policies_by_label (SmolStr, ObjectKey, Config<security::AuthorizationPolicy>)
        from (inputs.authorization_policies) = per_replica::label_entries;
    /// PeerAuthentications by the per-replica labels that they select.
    index peer_authentications_by_label (SmolStr, ObjectKey, Config<security::PeerAuthentication>)
        from (inputs.peer_authentications) = per_replica::label_entries;
    /// RequestAuthentications by the per-replica labels that they select.
    index request_authentications_by_label (SmolStr, ObjectKey, Config<security::RequestAuthentication>)
        from (inputs.request_authentications) = per_replica::label_entries;
    /// Telemetries by the per-replica labels that they select.
    index telemetries_by_label (SmolStr, ObjectKey, Config<telemetry::Telemetry>)
        from (inputs.telemetries) = per_replica::label_entries;
    /// WasmPlugins by the per-replica labels that they select.
    index wasm_plugins_by_label (SmolStr, ObjectKey, Config<extensions::WasmPlugin>)
        from (inputs.wasm_plugins) = per_replica::label_entries;
    /// TrafficExtensions by the per-replica labels that they select.
    index traffic_extensions_by_label (SmolStr, ObjectKey, Config<extensions::TrafficExtension>)
        from (inputs.traffic_extensions) = per_replica::label_entries;
    /// EnvoyFilters by namespace.
    index envoy_filters_by_namespace (Namespace, ObjectKey, Config<networking::EnvoyFilter>)
        from (inputs.envoy_filters) = by_namespace!();
    /// ProxyConfigs by namespace.
    index proxy_configs_by_namespace (Namespace, ObjectKey, Config<networking_v1beta1::ProxyConfig>)
        from (inputs.proxy_configs) = by_namespace!();
    /// AuthorizationPolicies by namespace.
    index authorization_policies_by_namespace (Namespace, ObjectKey, Config<security::AuthorizationPolicy>)
        from (inputs.authorization_policies) = by_namespace!();
    /// PeerAuthentications by namespace.
    index peer_authentications_by_namespace (Namespace, ObjectKey, Config<security::PeerAuthentication>)
        from (inputs.peer_authentications) = by_namespace!();
    /// RequestAuthentications by namespace.
    index request_authentications_by_namespace (Namespace, ObjectKey, Config<security::RequestAuthentication>)
        from (inputs.request_authentications) = by_namespace!();
    /// Telemetries by namespace.
    index telemetries_by_namespace (Namespace, ObjectKey, Config<telemetry::Telemetry>)
        from (inputs.telemetries) = by_namespace!();
    /// WasmPlugins by namespace.
    index wasm_plugins_by_namespace (Namespace, ObjectKey, Config<extensions::WasmPlugin>)
        from (inputs.wasm_plugins) = by_namespace!();
    /// TrafficExtensions by namespace.
    index traffic_extensions_by_namespace (Namespace, ObjectKey, Config<extensions::TrafficExtension>)
        from (inputs.traffic_extensions) = by_namespace!();
    /// AuthorizationPolicies by the objects that they refer to.
    index authorization_policies_by_target (PolicyTarget, ObjectKey, Config<security::AuthorizationPolicy>)
        from (inputs.authorization_policies) = policy::targets;
    /// RequestAuthentications by the objects that they refer to.
    index request_authentications_by_target (PolicyTarget, ObjectKey, Config<security::RequestAuthentication>)
        from (inputs.request_authentications) = policy::targets;
    /// Telemetries by the objects that they refer to.
    index telemetries_by_target (PolicyTarget, ObjectKey, Config<telemetry::Telemetry>)
        from (inputs.telemetries) = policy::targets;
    /// WasmPlugins by the objects that they refer to.
    index wasm_plugins_by_target (PolicyTarget, ObjectKey, Config<extensions::WasmPlugin>)
        from (inputs.wasm_plugins) = policy::targets;
    /// TrafficExtensions by the objects that they refer to.
    index traffic_extensions_by_target (PolicyTarget, ObjectKey, Config<extensions::TrafficExtension>)
        from (inputs.traffic_extensions) = policy::targets;
    /// EnvoyFilters by the objects that they refer to.
    index envoy_filters_by_target (PolicyTarget, ObjectKey, Config<networking::EnvoyFilter>)
        from (inputs.envoy_filters) = policy::targets;
    /// Networks of clusters by the labels of their system namespaces.
    table system_networks (ClusterId, NetworkId)
        from (with |_, inputs, mesh| network::system_candidates(mesh, inputs)) = network::of_system_namespace;
    /// Pods and WorkloadEntries in one form.
    table workloads (WorkloadKey, Workload)
        from (with |_, inputs, _| workload::candidates(inputs)) = workload::workload;
    /// Workloads by namespace.
    index workloads_by_namespace (Namespace, WorkloadKey, Workload)
        from (workloads) = |key, _, emit| emit(key.object.namespace.clone());
    /// Workloads of WorkloadEntries by namespace.
    index entry_workloads_by_namespace (Namespace, WorkloadKey, Workload) from (workloads) = |key, _, emit| {
            if key.source == workload::WorkloadSource::WorkloadEntry {
                emit(key.object.namespace.clone());
            }
        };
    /// Namespaces with workloads that have sidecars.
    distinct sidecar_namespaces (Namespace, WorkloadKey, Workload) from (workloads) = workload::sidecar_namespace;
    /// Workloads by address.
    index workloads_by_address (SmolStr, WorkloadKey, Workload)
        from (workloads) = |_, workload, emit| workload.addresses.iter().for_each(|address| emit(address.clone()));
    /// Workloads that ServiceEntries select.
    table selected_workloads (ObjectKey, SelectedWorkloads) from (with |_, inputs, _| selecting_entries(inputs)) =
            endpoint::selected_workloads;
    /// ServiceEntries that produce more than small ones.
    table entry_demands (DemandKey, Demand) from (with |_, inputs, _| large_entries(inputs)) = demand;
    /// ServiceEntries that produce more than small ones, by namespace.
    index entry_demands_by_namespace ((Kind, Namespace), DemandKey, Demand)
        from (entry_demands) = output_limit::namespace_key;
    /// ServiceEntries that do not apply because those of their namespace produce too much.
    table refused_entries ((Kind, Namespace), RefusedObjects)
        from (with |graph, _, _| graph.entry_demands_by_namespace.changed().iter().cloned().collect()) =
            output_limit::refused;
    /// Addresses computed for ServiceEntries without one, as a whole.
    table auto_allocation ((), AutoAllocation) from (once) = auto_allocation::allocation;
    /// Addresses computed for each service.
    table auto_addresses (ServiceKey, AutoAddresses)
        from (with |graph, _, _| graph.service_entries_by_host.changed().iter().cloned().collect()) =
            auto_allocation::addresses;
    /// Lists of ServiceEntries with several hosts.
    table entry_lists (ObjectKey, EntryLists) from (with |_, inputs, mesh| entries_with_lists(inputs, mesh)) =
            entry_lists::entry_lists;
    /// Aliases of hosts.
    table host_aliases (Hostname, HostAliases)
        from (with |graph, _, _| graph.aliases_by_target.changed().iter().cloned().collect()) = alias::host_aliases;
    /// Services merged over clusters and registries.
    table services (ServiceKey, Service) from (with |graph, _, mesh| service::candidates(
            &mesh.installation,
            graph.kube_services_by_name.changed(),
            graph.service_imports_by_name.changed(),
            graph.service_entries_by_host.changed(),
        )) = service::service;
    /// Attributes that decide whether a service is visible; they change far less often than the service.
    table visibility (ServiceKey, Visibility) from (services) = service::visibility;
    /// Merged services by namespace.
    index services_by_namespace (Namespace, ServiceKey, Service)
        from (services) = |key, _, emit| emit(key.namespace.clone());
    /// Services by host over namespaces.
    index services_by_host (Hostname, ServiceKey, Visibility)
        from (visibility) = |key, _, emit| emit(key.hostname.clone());
    /// Services by the namespace that sees them and the namespace that declares them (`None`: all).
    index services_by_export ((ExportNamespace, Option<Namespace>), ServiceKey, Visibility)
        from (visibility) = service::export_keys;
    /// Labels of the config cluster's namespaces.
    table namespace_labels (ObjectKey, Labels) from (inputs.namespaces) = gateway::namespace_labels;
    /// ListenerSets by their Gateways.
    index listener_sets_by_gateway (ObjectKey, ObjectKey, Config<api::gateway_api::ListenerSet>)
        from (inputs.listener_sets) = gateway_api::listener::gateway_of_set;
    /// Conflicts of ListenerSets by their Gateways.
    table listener_conflicts (ObjectKey, Conflicts)
        from (with |graph, _, _| graph.listener_sets_by_gateway.changed().iter().cloned().collect()) =
            gateway_api::listener::conflict::conflicts;
    /// Gateways of the Gateway API by the Secrets with the certificates that they refer to.
    index gateways_by_certificate (ObjectKey, ObjectKey, Config<api::gateway_api::Gateway>)
        from (inputs.kube_gateways) = key_pair::of_gateway;
    /// ListenerSets by these Secrets.
    index listener_sets_by_certificate (ObjectKey, ObjectKey, Config<api::gateway_api::ListenerSet>)
        from (inputs.listener_sets) = key_pair::of_set;
    /// These Secrets. Other changes of a Gateway than of its references leave the rows as they are.
    table certificates_in_use (ObjectKey, ())
        from (with |graph, _, _| {
            let sets = graph.listener_sets_by_certificate.changed();
            graph.gateways_by_certificate.changed().union(sets).cloned().collect()
        }) = key_pair::is_used;
    /// Errors in the key pairs of these Secrets.
    table key_pair_errors (ObjectKey, KeyPairError) from (certificates_in_use) = key_pair::error;
    /// Objects with CA certificates for clients, by the Gateways of the Gateway API that refer to them.
    table client_authorities (ObjectKey, ClientAuthorities) from (inputs.kube_gateways) = authority::of_gateway;
    /// These objects.
    distinct client_authorities_in_use (ClientAuthority, ObjectKey, ClientAuthorities)
        from (client_authorities) = authority::authorities;
    /// Those of which no certificate can be parsed.
    table malformed_client_authorities (ClientAuthority, ())
        from (client_authorities_in_use) = authority::malformed;
    /// Gateways and ListenerSets of the Gateway API with their listeners.
    table listeners (ListenerOwner, Listeners)
        from (with |_, inputs, _| gateway_api::listener::candidates(inputs)) = gateway_api::listener::listeners;
    /// Gateways and ListenerSets by the Gateways that they are converted to.
    index listeners_by_gateway (ObjectKey, ListenerOwner, Listeners)
        from (listeners) = gateway_api::listener::converted_keys;
    /// Gateways made from listeners of the Gateway API.
    table converted_gateways (ObjectKey, Config<networking::Gateway>)
        from (with |graph, _, _| graph.listeners_by_gateway.changed().iter().cloned().collect()) =
            gateway_api::listener::converted;
    /// Selectors of the namespaces whose routes may attach to these listeners.
    table listener_selectors (ObjectKey, LabelSelector)
        from (with |graph, _, _| graph.listeners_by_gateway.changed().iter().cloned().collect()) =
            gateway_api::listener::selector;
    /// Routes of the Gateway API that contribute more to VirtualServices than small ones.
    table route_demands (DemandKey, Demand)
        from (with |_, inputs, _| gateway_api::route::demand_candidates(inputs)) = gateway_api::route::demand;
    /// The same by kind and namespace.
    index route_demands_by_namespace ((Kind, Namespace), DemandKey, Demand)
        from (route_demands) = output_limit::namespace_key;
    /// Routes that do not apply because those of their namespace contribute too much.
    table refused_routes ((Kind, Namespace), RefusedObjects)
        from (with |graph, _, _| graph.route_demands_by_namespace.changed().iter().cloned().collect()) =
            output_limit::refused;
    /// Routes of the Gateway API with their parents.
    table attached_routes (AttachedRouteKey, AttachedRoute)
        from (with |_, inputs, _| gateway_api::route::candidates(inputs)) = gateway_api::route::attached;
    /// Routes by the VirtualServices that they are merged into.
    index routes_by_virtual_service (ConvertedName, AttachedRouteKey, AttachedRoute)
        from (attached_routes) = gateway_api::route::converted_names;
    /// Routes by the InferencePools that they refer to.
    index routes_by_pool (ObjectKey, AttachedRouteKey, AttachedRoute)
        from (attached_routes) = gateway_api::route::pools;
    /// InferencePools that routes use.
    table used_pools (ObjectKey, UsedPool) from (inputs.inference_pools) = gateway_api::used_pool::used;
    /// The same by the Gateways of the routes.
    index pools_by_gateway (ObjectKey, ObjectKey, UsedPool) from (used_pools) = gateway_api::used_pool::gateways;
    /// VirtualServices made from routes of the Gateway API.
    table converted_virtual_services (ConvertedName, virtual_service::Converted)
        from (with |graph, _, _| graph.routes_by_virtual_service.changed().iter().cloned().collect()) =
            gateway_api::merge::virtual_service;
    /// BackendTLSPolicies by their targets.
    index tls_policies_by_target (TlsTarget, ObjectKey, Config<api::gateway_api::BackendTlsPolicy>)
        from (inputs.backend_tls_policies) = gateway_api::policy::targets;
    /// The oldest BackendTLSPolicies of each target.
    table oldest_tls_policies (TlsTarget, OldestTlsPolicies)
        from (with |graph, _, _| graph.tls_policies_by_target.changed().iter().cloned().collect()) =
            gateway_api::policy::oldest;
    /// Policies of the Gateway API with their targets.
    table backend_policies (PolicyKey, BackendPolicies)
        from (with |_, inputs, _| gateway_api::policy::candidates(inputs)) = gateway_api::policy::policies;
    /// Policies by target.
    index policies_by_backend (Backend, PolicyKey, BackendPolicies)
        from (backend_policies) = gateway_api::policy::backends;
    /// DestinationRules made from policies of the Gateway API.
    table converted_destination_rules (Backend, Config<networking::DestinationRule>)
        from (with |graph, _, _| graph.policies_by_backend.changed().iter().cloned().collect()) =
            gateway_api::policy::destination_rule;
    /// Ingresses that are served.
    table served_ingresses (ObjectKey, ServedIngress) from (inputs.ingresses) = ingress::served;
    /// Served Ingresses by the hosts of their rules.
    index ingresses_by_host (SmolStr, ObjectKey, ServedIngress) from (served_ingresses) = ingress::hosts;
    /// Ports of Services with many, by name.
    table named_service_ports (ObjectKey, NamedPorts)
        from (with |_, inputs, mesh| ingress::services_with_many_ports(mesh, inputs)) = ingress::named_ports;
    /// Gateways made from Ingresses.
    table ingress_gateways (ObjectKey, Config<networking::Gateway>) from (served_ingresses) = ingress::gateway;
    /// Names that Istio gives to the VirtualServices made from Ingresses, by host.
    table ingress_names (SmolStr, ObjectKey)
        from (with |graph, _, _| graph.ingresses_by_host.changed().iter().cloned().collect()) = ingress::usual_name;
    /// Hosts of Ingresses by these names.
    index ingress_hosts_by_name (ObjectKey, SmolStr, ObjectKey)
        from (ingress_names) = |_, name, emit| emit(name.clone());
    /// VirtualServices made from Ingresses, by host.
    table ingress_virtual_services (SmolStr, Config<networking::VirtualService>)
        from (with |graph, _, _| graph.ingresses_by_host.changed().iter().cloned().collect()) =
            ingress::virtual_service;
    /// All Gateways.
    union gateways (ObjectKey, Config<networking::Gateway>)
        from (inputs.written_gateways, converted_gateways, ingress_gateways) = own_key;
    /// All VirtualServices but those made from routes of the Gateway API, not yet resolved.
    union raw_virtual_services (ObjectKey, Config<networking::VirtualService>)
        from (inputs.written_virtual_services, ingress_virtual_services) = own_key;
    /// All DestinationRules, not yet merged.
    union raw_destination_rules (ObjectKey, Config<networking::DestinationRule>)
        from (inputs.written_destination_rules, converted_destination_rules) = own_key;
    /// Gateways by namespace.
    index gateways_by_namespace (Namespace, ObjectKey, Config<networking::Gateway>)
        from (gateways) = by_namespace!();
    /// DestinationRules with credentials, by the proxies that they apply to.
    index credential_rules (references::CredentialUsers, ObjectKey, Config<networking::DestinationRule>)
        from (raw_destination_rules) = references::clients;
    /// DestinationRules by namespace and host as written.
    index raw_rules_by_host ((Namespace, SmolStr), ObjectKey, Config<networking::DestinationRule>)
        from (raw_destination_rules) = destination_rule::raw_key;
    /// Gateways by the per-replica labels that they select.
    index gateways_by_label (SmolStr, ObjectKey, Config<networking::Gateway>)
        from (gateways) = per_replica::label_entries;
    /// DestinationRules by the per-replica labels that they select.
    index raw_rules_by_label (SmolStr, ObjectKey, Config<networking::DestinationRule>)
        from (raw_destination_rules) = per_replica::label_entries;
    /// Networks of clusters for ztunnels.
    table cluster_networks (ClusterId, NetworkId) from (system_networks) = ambient::network_of_cluster;
    /// Gateways of the Gateway API with an address, by namespace.
    index gateways_with_address (Namespace, ObjectKey, Config<api::gateway_api::Gateway>)
        from (inputs.kube_gateways) = waypoint::addresses::with_address;
    /// Services at these addresses.
    table services_at_gateways (Namespace, ServicesAtGateways) from (with |graph, _, mesh| {
            if_ambient(mesh, || graph.gateways_with_address.changed().iter().cloned().collect())
        }) = waypoint::addresses::services;
    /// Gateways that are waypoints.
    table waypoints (ObjectKey, Waypoint) from (inputs.kube_gateways) = waypoint::waypoint;
    /// Waypoint of each service that has one.
    table service_waypoints (ServiceKey, ServiceWaypoint) from (services) = waypoint::of_service;
    /// Waypoints by address: a host or an IP address.
    index waypoints_by_address (SmolStr, ObjectKey, Waypoint)
        from (waypoints) = |_, waypoint, emit| emit(waypoint.address.clone());
    /// Services by their waypoint.
    index services_by_waypoint (ObjectKey, ServiceKey, ServiceWaypoint)
        from (service_waypoints) = |_, row, emit| emit(row.gateway.clone());
    /// Settings that all workloads for ztunnels depend on.
    table ambient_mesh ((), AmbientMesh) from (once) = ambient::settings;
    /// Pods of the Gateways that they are instances of.
    index pods_by_gateway ((ClusterId, Namespace, SmolStr), ObjectKey, api::kube::Pod)
        from (inputs.pods) = ambient::waypoint::gateway_of_pod;
    /// Instances of waypoints.
    table waypoint_instances (ObjectKey, WaypointInstances) from (waypoints) = ambient::waypoint::instances;
    /// Gateways to networks for ztunnels, as a whole.
    table ambient_gateways ((), Gateways) from (once) = ambient::gateway::gateways;
    /// Services for ztunnels by the objects that declare them.
    table declared_services (DeclaredKey, DeclaredService)
        from (with |_, inputs, mesh| ambient::service::candidates(mesh, inputs)) = ambient::service::declared;
    /// Declared services by cluster and host.
    index declared_services_by_host ((ClusterId, Hostname), DeclaredKey, DeclaredService)
        from (declared_services) = ambient::service::host_key;
    /// The same for hosts that several objects declare.
    table host_services ((ClusterId, Hostname), HostServices) from (with |graph, _, _| {
            graph.declared_services_by_host.changed().iter().cloned().collect()
        }) = ambient::service::of_host;
    /// Services for ztunnels in one cluster.
    table cluster_services (ClusterServiceKey, ClusterService) from (with |graph, _, _| {
            let changes = graph.declared_services.writer().changes().iter();
            let key = |key: &DeclaredKey| ClusterServiceKey {
                cluster: key.object.cluster.clone(),
                service: ServiceKey {
                    hostname: key.hostname.clone(),
                    namespace: key.object.namespace.clone(),
                },
            };
            changes.map(|(declared, ..)| key(declared)).collect()
        }) = ambient::service::in_cluster;
    /// Services of all clusters by name.
    index cluster_services_by_name (ServiceKey, ClusterServiceKey, ClusterService)
        from (cluster_services) = |key, _, emit| emit(key.service.clone());
    /// Services that select workloads, by the first label of the selector and by namespace.
    index services_by_selector (ClusterSelectorKey, ClusterServiceKey, ClusterService)
        from (cluster_services) = ambient::service::selector_entry;
    /// Selectors of AuthorizationPolicies that ztunnels enforce.
    table policy_selectors (ObjectKey, PolicySelector) from (with |_, inputs, mesh| {
            if_ambient(mesh, || changed_keys(&inputs.authorization_policies))
        }) = ambient::policy::selector;
    /// The same by the first label of the selector and by namespace.
    index policies_by_selector (ambient::SelectorKey, ObjectKey, PolicySelector)
        from (policy_selectors) = ambient::policy::selector_entry;
    /// Modes of PeerAuthentications with a selector.
    table peer_policies (ObjectKey, SelectorModes) from (with |_, inputs, mesh| {
            if_ambient(mesh, || changed_keys(&inputs.peer_authentications))
        }) = ambient::policy::peer_policy;
    /// The same by the first label of the selector and by namespace.
    index peer_policies_by_selector (ambient::SelectorKey, ObjectKey, SelectorModes)
        from (peer_policies) = ambient::policy::peer_entry;
    /// Modes of mutual TLS of whole namespaces.
    table mutual_tls_modes (Namespace, NamespaceModes) from (with |graph, _, mesh| {
            if_ambient(mesh, || graph.peer_authentications_by_namespace.changed().iter().cloned().collect())
        }) = ambient::policy::namespace_modes;
    /// Pods that EndpointSlices refer to and their Services do not select.
    table slice_targets (ObjectKey, SliceTargets)
        from (with |_, inputs, mesh| ambient::workload::slice_candidates(mesh, inputs)) =
            ambient::workload::slice_targets;
    /// The same by pod.
    index slices_by_pod (ObjectKey, ObjectKey, SliceTargets) from (slice_targets) = ambient::workload::target_pods;
    /// Workloads of EndpointSlices: endpoints without a pod.
    table slice_workloads (ObjectKey, SliceWorkloads)
        from (with |_, inputs, mesh| ambient::workload::slices_with_workloads(mesh, inputs)) =
            ambient::workload::slice_workloads;
    /// Endpoints of ServiceEntries for ztunnels.
    table entry_endpoints (ObjectKey, EntryEndpoints)
        from (with |_, inputs, mesh| ambient::workload::entry_candidates(mesh, inputs)) =
            ambient::workload::entry_endpoints;
    /// Workloads that use waypoints, by their objects.
    table waypoint_workloads (WorkloadsKey, WaypointWorkloads)
        from (with |_, inputs, mesh| waypoint::workloads::candidates(mesh, inputs)) = waypoint::workloads::of_object;
    /// Objects with workloads by the waypoint of these.
    index workloads_by_waypoint (ObjectKey, WorkloadsKey, WaypointWorkloads)
        from (waypoint_workloads) = |_, row, emit| row.gateways(emit);
    /// Workloads for ztunnels.
    table ambient_workloads (WorkloadUid, AmbientWorkload)
        from (with |_, inputs, mesh| ambient::workload::candidates(mesh, inputs)) = ambient::workload::workload;
    /// The same by shard.
    index ambient_workloads_by_shard (u8, WorkloadUid, AmbientWorkload) from (ambient_workloads) =
        |uid, workload, emit| if !workload.is_hidden { emit(ambient::shard(uid.text())) };
    /// The same by the name of an address.
    index ambient_workloads_by_address (SmolStr, WorkloadUid, AmbientWorkload) from (ambient_workloads) =
        |_, workload, emit| if !workload.is_hidden { workload.aliases().for_each(emit) };
    /// Addresses of workloads that accept HBONE, by name.
    table tunnelled_addresses (SmolStr, ())
        from (with |graph, _, _| graph.ambient_workloads_by_address.changed().iter().cloned().collect()) =
            ambient::workload::tunnelled_address;
    /// The same by service.
    index ambient_workloads_by_service (ServiceKey, WorkloadUid, AmbientWorkload) from (ambient_workloads) =
        |_, workload, emit| if !workload.is_hidden { workload.services.iter().cloned().for_each(emit) };
    /// The same by node.
    index ambient_workloads_by_node (SmolStr, WorkloadUid, AmbientWorkload) from (ambient_workloads) =
        |_, workload, emit| if !workload.is_hidden && !workload.node.is_empty() { emit(workload.node.clone()) };
    /// Workloads of other networks by service.
    index hidden_workloads_by_service (ServiceKey, WorkloadUid, AmbientWorkload)
        from (ambient_workloads) = ambient::remote::hidden_services;
    /// Workloads that represent other networks.
    table remote_workloads (RemoteKey, RemoteWorkloads) from (with |graph, _, mesh| {
            ambient::remote::candidates(mesh, graph.ambient_workloads.writer().changes())
        }) = ambient::remote::workloads;
    /// The same by shard.
    index remote_workloads_by_shard (u8, RemoteKey, RemoteWorkloads) from (remote_workloads) =
        |_, workloads, emit| workloads.iter().for_each(|(uid, _)| emit(ambient::shard(uid.text())));
    /// The same by name, and by the name of an address.
    index remote_workloads_by_name (SmolStr, RemoteKey, RemoteWorkloads)
        from (remote_workloads) = ambient::remote::names;
    /// The same by service.
    index remote_workloads_by_service (ServiceKey, RemoteKey, RemoteWorkloads)
        from (remote_workloads) = ambient::remote::services;
    /// Services for ztunnels over clusters.
    table ambient_services (ServiceKey, AmbientService)
        from (with |graph, _, _| graph.cluster_services_by_name.changed().iter().cloned().collect()) =
            ambient::service::service;
    /// The same by shard.
    index ambient_services_by_shard (u8, ServiceKey, AmbientService) from (ambient_services) =
        |key, _, emit| emit(ambient::shard(&ambient::service::resource_name(key)));
    /// The same by the name of an address.
    index ambient_services_by_address (SmolStr, ServiceKey, AmbientService)
        from (ambient_services) = ambient::service::address_keys;
    /// Services that span clusters, by the service of their waypoint.
    index global_services_by_waypoint (ServiceKey, ServiceKey, AmbientService)
        from (ambient_services) = ambient::service::waypoint_of_global;
    /// Services that gateways between networks serve.
    table exposed_services (ServiceKey, ServedService) from (ambient_services) = ambient::service::exposed;
    /// Conditions of ambient objects.
    table ambient_statuses (StatusTarget, ObjectConditions)
        from (with |_, inputs, mesh| ambient_status::candidates(mesh, inputs)) = ambient_status::of_object;
    /// The network gateways.
    table networks ((), Networks) from (once) = network::networks;
    /// Key sets that RequestAuthentications need.
    table key_timeouts (ObjectKey, KeyTimeouts)
        from (inputs.request_authentications) = external_dependencies::key_timeouts;
    /// External data that the mesh needs.
    table external_dependencies ((), ExternalDependencies) from (once) = external_dependencies::external_dependencies;
    /// Cluster-local hosts.
    table cluster_local ((), ClusterLocalHosts) from (once) = cluster_local::hosts;
    /// Endpoints of services.
    table endpoints (ServiceKey, ServiceEndpoints) from (services) = endpoint::endpoints;
    /// Services by the address of an endpoint.
    index services_by_endpoint_address (SmolStr, ServiceKey, ServiceEndpoints) from (endpoints) = endpoint::addresses;
    /// Services with endpoints whose pods are not known yet.
    index services_awaiting_pods ((), ServiceKey, ServiceEndpoints) from (endpoints) = endpoint::pending;
    /// Traits of endpoints that clusters and listeners depend on.
    table endpoint_traits (ServiceKey, EndpointTraits) from (endpoints) = endpoint::traits;
    /// Gateways prepared for merging.
    table declared_gateways (ObjectKey, DeclaredGateway) from (gateways) = gateway::declared;
    /// Hosts of Gateways with many.
    table gateway_hosts (ObjectKey, GatewayHosts)
        from (with |graph, _, _| gateway::hosts::gateways_with_many(graph.declared_gateways.writer())) =
            gateway::hosts::hosts;
    /// Sizes of the large traffic policies of DestinationRules for a host.
    table large_policies (RuleKey, PolicySize) from (with |graph, _, mesh| {
            destination_rule::large_policy_candidates(&mesh.installation, graph.raw_destination_rules.writer())
        }) = destination_rule::large_policy;
    /// DestinationRules and VirtualServices that produce more than small ones.
    table demands (DemandKey, Demand) from (with |graph, _, mesh| large_objects(graph, mesh)) = demand;
    /// DestinationRules and VirtualServices that produce more than small ones, by kind and namespace.
    index demands_by_namespace ((Kind, Namespace), DemandKey, Demand) from (demands) = output_limit::namespace_key;
    /// DestinationRules and VirtualServices that do not apply because those of their namespace produce too much.
    table refused_objects ((Kind, Namespace), RefusedObjects)
        from (with |graph, _, _| graph.demands_by_namespace.changed().iter().cloned().collect()) =
            output_limit::refused;
    /// Resolved VirtualServices, and rows that refuse the surplus of very large ones.
    table virtual_services (ObjectKey, VirtualService) from (with |graph, _, _| {
            let mut keys = changed_keys(graph.raw_virtual_services.writer());
            keys.extend(changed_converted(graph));
            let large = graph.demands.writer().changes().iter().map(|(key, ..)| key);
            let large = large.filter(|key| key.kind == Kind::VirtualService);
            keys.extend(large.map(|key| output_limit::surplus_key(&key.object)));
            keys
        }) = virtual_service::virtual_service;
    /// Namespaces that own wildcard hosts.
    table wildcard_owners ((), WildcardOwners) from (once) = virtual_service::wildcard_owners;
    /// Visibility and destinations of VirtualServices.
    table virtual_service_summaries (ObjectKey, VirtualServiceSummary)
        from (virtual_services) = virtual_service::summary;
    /// The number of TLS matches of VirtualServices that have any.
    table tls_match_counts (ObjectKey, usize) from (virtual_services) = virtual_service::tls_match_count;
    /// VirtualServices by gateway, and those of gateway `mesh` by the namespace that sees them.
    index virtual_services_by_gateway ((ExportNamespace, SmolStr), ObjectKey, VirtualServiceSummary)
        from (virtual_service_summaries) = virtual_service::export_keys;
    /// VirtualServices of gateway `mesh` by host; `None` for those with wildcards.
    index virtual_services_by_mesh_host (Option<Hostname>, ObjectKey, VirtualServiceSummary)
        from (virtual_service_summaries) = virtual_service::mesh_hosts;
    /// VirtualServices by the client labels in their matches.
    index virtual_services_by_source_label (SmolStr, ObjectKey, VirtualService)
        from (virtual_services) = virtual_service::source_labels;
    /// VirtualServices with TCP or TLS routes.
    index tcp_virtual_services ((), ObjectKey, VirtualService) from (virtual_services) = virtual_service::tcp_entry;
    /// VirtualServices with TCP or TLS routes by host, and by marks of partial wildcards.
    index tcp_virtual_services_by_host (Hostname, ObjectKey, VirtualService)
        from (virtual_services) = virtual_service::tcp_hosts;
    /// DestinationRules merged by host.
    table destination_rules (RuleKey, HostRules)
        from (with |graph, _, mesh| {
            destination_rule::candidates(&mesh.installation, graph.raw_destination_rules.writer())
        }) = destination_rule::host_rules;
    /// Merged rules for wildcard hosts by namespace.
    index wildcard_rules_by_namespace (Namespace, RuleKey, HostRules)
        from (destination_rules) = destination_rule::wildcard_key;
    /// Merged rules by the namespaces whose clients may see another rule than all others.
    index rules_by_client (Namespace, RuleKey, HostRules)
        from (destination_rules) = destination_rule::client_namespaces;
    /// Merged rules with a consistent hash by host; `None` has those for wildcard hosts.
    index consistent_hash_rules (Option<Hostname>, RuleKey, HostRules)
        from (destination_rules) = destination_rule::consistent_hash_key;
    /// Merged rules by namespace and the client labels in their selectors.
    index rules_by_selector_label ((Namespace, SmolStr), RuleKey, HostRules)
        from (destination_rules) = destination_rule::selector_labels;
    /// Location attributes of clients that rules may use.
    distinct rule_locations (LocationAttribute, RuleKey, HostRules)
        from (destination_rules) = locality_dependencies::of_rules;
    /// Location attributes of clients that services use.
    distinct service_locations (LocationAttribute, ServiceKey, Service)
        from (services) = locality_dependencies::of_service;
    /// Location attributes that endpoints depend on.
    table locality_dependencies ((), LocalityDependencies) from (once) = locality_dependencies::dependencies;
    /// Credentials in EnvoyFilters; no row without any.
    table filter_credentials (ObjectKey, Vec<SmolStr>) from (inputs.envoy_filters) = references::of_filter;
    /// Compiled EnvoyFilters.
    table envoy_filter_patches (ObjectKey, CompiledFilter) from (inputs.envoy_filters) = envoy_filter::compiled;
    /// EnvoyFilters that match node metadata.
    index filters_by_metadata ((), ObjectKey, CompiledFilter) from (envoy_filter_patches) = per_replica::filter_entry;
    /// Per-replica attributes that the mesh uses.
    table per_replica_inputs ((), PerReplicaInputs) from (once) = per_replica::inputs;
    /// Positions of the filters of WasmPlugins and TrafficExtensions.
    table extension_filters (ExtensionId, ExtensionFilter)
        from (with |_, inputs, _| extension::candidates(inputs)) = extension::filter;
}
