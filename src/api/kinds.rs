//! The table of kinds: the only list of the kinds of input objects.
//!
//! [`with_kinds!`] passes the table to another macro. `Kind`, `Row`, the parsers and the input tables are generated
//! from it. To add a kind, add an entry here; the compiler then names the code that has to treat it.
//!
//! An entry `Kind: RowType { … }` has these columns:
//! - `table`: the field of the input tables that holds the rows.
//! - `class`: the [`KindClass`](super::kind::KindClass).
//! - `parser`: the function that makes a row of a manifest. `kube()` is the `parse` function of the row type.
//!   `typed(check)` reads `spec` by serde; the check is optional. `istio(check, policy)` reads `spec` as a protobuf
//!   message, checks it and treats errors by the [`ErrorPolicy`](super::istio::ErrorPolicy). `internal()` kinds are not
//!   written as manifests.
//! - `resource`: the API group (empty for core), the versions that are read (the preferred one first), the plural name
//!   in paths of the Kubernetes API, and the scope.
//! - `names`: `kind:` of a manifest, and the kebab-case name in config metadata paths.

/// Calls `$callback!` with the table of kinds. Note: paths in the table resolve where the callback uses them.
macro_rules! with_kinds {
    ($callback:ident) => {
        $callback! {
            /// The mesh configuration as a whole (a file, or the key `mesh` of a ConfigMap). That of a remote cluster
            /// has only the trust domain.
            MeshConfig: Config<mesh::MeshConfig> {
                table: mesh_config, class: Internal, parser: kube(),
                resource: "mesh.istio.io" ["v1alpha1"] "meshconfigs" Namespaced,
                names: "MeshConfig" "mesh-config"
            }
            /// The mesh networks as a whole (a file, or the key `meshNetworks` of a ConfigMap).
            MeshNetworks: Config<mesh::MeshNetworks> {
                table: mesh_networks, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "meshnetworks" Namespaced,
                names: "MeshNetworks" "mesh-networks"
            }
            /// core/v1 Namespace.
            Namespace: kube::Namespace {
                table: namespaces, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "namespaces" Cluster,
                names: "Namespace" "namespace"
            }
            /// core/v1 Node.
            Node: kube::Node {
                table: nodes, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "nodes" Cluster,
                names: "Node" "node"
            }
            /// core/v1 Pod.
            Pod: kube::Pod {
                table: pods, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "pods" Namespaced,
                names: "Pod" "pod"
            }
            /// core/v1 Service.
            Service: kube::Service {
                table: kube_services, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "services" Namespaced,
                names: "Service" "service"
            }
            /// discovery.k8s.io EndpointSlice.
            EndpointSlice: kube::EndpointSlice {
                table: endpoint_slices, class: Kubernetes, parser: kube(),
                resource: "discovery.k8s.io" ["v1"] "endpointslices" Namespaced,
                names: "EndpointSlice" "endpoint-slice"
            }
            /// core/v1 Secret.
            Secret: kube::Secret {
                table: secrets, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "secrets" Namespaced,
                names: "Secret" "secret"
            }
            /// core/v1 ConfigMap.
            ConfigMap: kube::ConfigMap {
                table: config_maps, class: Kubernetes, parser: kube(),
                resource: "" ["v1"] "configmaps" Namespaced,
                names: "ConfigMap" "config-map"
            }
            /// networking.istio.io DestinationRule.
            DestinationRule: Config<networking::DestinationRule> {
                table: written_destination_rules, class: Istio, parser: istio(destination_rule::check, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "destinationrules" Namespaced,
                names: "DestinationRule" "destination-rule"
            }
            /// networking.istio.io EnvoyFilter.
            EnvoyFilter: Config<networking::EnvoyFilter> {
                table: envoy_filters, class: Istio, parser: istio(envoy_filter::check, Reject),
                resource: "networking.istio.io" ["v1alpha3"] "envoyfilters" Namespaced,
                names: "EnvoyFilter" "envoy-filter"
            }
            /// networking.istio.io Gateway.
            Gateway: Config<networking::Gateway> {
                table: written_gateways, class: Istio, parser: istio(gateway::check, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "gateways" Namespaced,
                names: "Gateway" "gateway"
            }
            /// networking.istio.io ProxyConfig.
            ProxyConfig: Config<networking_v1beta1::ProxyConfig> {
                table: proxy_configs, class: Istio, parser: istio(proxy_config::check, Reject),
                resource: "networking.istio.io" ["v1beta1"] "proxyconfigs" Namespaced,
                names: "ProxyConfig" "proxy-config"
            }
            /// networking.istio.io ServiceEntry.
            ServiceEntry: Config<networking::ServiceEntry> {
                table: service_entries, class: Istio, parser: istio(service_entry::check, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "serviceentries" Namespaced,
                names: "ServiceEntry" "service-entry"
            }
            /// networking.istio.io Sidecar.
            Sidecar: Config<networking::Sidecar> {
                table: sidecars, class: Istio, parser: istio(sidecar::check, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "sidecars" Namespaced,
                names: "Sidecar" "sidecar"
            }
            /// networking.istio.io VirtualService.
            VirtualService: Config<networking::VirtualService> {
                table: written_virtual_services, class: Istio, parser: istio(virtual_service::check, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "virtualservices" Namespaced,
                names: "VirtualService" "virtual-service"
            }
            /// networking.istio.io WorkloadEntry.
            WorkloadEntry: Config<networking::WorkloadEntry> {
                table: workload_entries, class: Istio, parser: istio(workload::entry, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "workloadentries" Namespaced,
                names: "WorkloadEntry" "workload-entry"
            }
            /// networking.istio.io WorkloadGroup.
            WorkloadGroup: Config<networking::WorkloadGroup> {
                table: workload_groups, class: Istio, parser: istio(workload::group, Reject),
                resource: "networking.istio.io" ["v1", "v1beta1", "v1alpha3"] "workloadgroups" Namespaced,
                names: "WorkloadGroup" "workload-group"
            }
            /// security.istio.io AuthorizationPolicy.
            AuthorizationPolicy: Config<security::AuthorizationPolicy> {
                table: authorization_policies, class: Istio, parser: istio(security::authorization_policy, Tolerate),
                resource: "security.istio.io" ["v1", "v1beta1"] "authorizationpolicies" Namespaced,
                names: "AuthorizationPolicy" "authorization-policy"
            }
            /// security.istio.io PeerAuthentication.
            PeerAuthentication: Config<security::PeerAuthentication> {
                table: peer_authentications, class: Istio, parser: istio(security::peer_authentication, Tolerate),
                resource: "security.istio.io" ["v1", "v1beta1"] "peerauthentications" Namespaced,
                names: "PeerAuthentication" "peer-authentication"
            }
            /// security.istio.io RequestAuthentication.
            RequestAuthentication: Config<security::RequestAuthentication> {
                table: request_authentications, class: Istio, parser: istio(security::request_authentication, Tolerate),
                resource: "security.istio.io" ["v1", "v1beta1"] "requestauthentications" Namespaced,
                names: "RequestAuthentication" "request-authentication"
            }
            /// telemetry.istio.io Telemetry.
            Telemetry: Config<telemetry::Telemetry> {
                table: telemetries, class: Istio, parser: istio(telemetry::check, Reject),
                resource: "telemetry.istio.io" ["v1", "v1alpha1"] "telemetries" Namespaced,
                names: "Telemetry" "telemetry"
            }
            /// extensions.istio.io WasmPlugin.
            WasmPlugin: Config<extensions::WasmPlugin> {
                table: wasm_plugins, class: Istio, parser: istio(extension::wasm_plugin, Reject),
                resource: "extensions.istio.io" ["v1alpha1"] "wasmplugins" Namespaced,
                names: "WasmPlugin" "wasm-plugin"
            }
            /// extensions.istio.io TrafficExtension.
            TrafficExtension: Config<extensions::TrafficExtension> {
                table: traffic_extensions, class: Istio, parser: istio(extension::traffic_extension, Reject),
                resource: "extensions.istio.io" ["v1alpha1"] "trafficextensions" Namespaced,
                names: "TrafficExtension" "traffic-extension"
            }
            /// gateway.networking.k8s.io GatewayClass.
            GatewayClass: Config<gateway_api::GatewayClass> {
                table: gateway_classes, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1", "v1beta1"] "gatewayclasses" Cluster,
                names: "GatewayClass" "gateway-class"
            }
            /// gateway.networking.k8s.io Gateway.
            KubeGateway: Config<gateway_api::Gateway> {
                table: kube_gateways, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1", "v1beta1"] "gateways" Namespaced,
                names: "Gateway" "kubernetes-gateway"
            }
            /// gateway.networking.k8s.io HTTPRoute.
            HttpRoute: Config<gateway_api::HttpRoute> {
                table: http_routes, class: GatewayApi, parser: typed(gateway_api::expression::http_route),
                resource: "gateway.networking.k8s.io" ["v1", "v1beta1"] "httproutes" Namespaced,
                names: "HTTPRoute" "http-route"
            }
            /// gateway.networking.k8s.io GRPCRoute.
            GrpcRoute: Config<gateway_api::GrpcRoute> {
                table: grpc_routes, class: GatewayApi, parser: typed(gateway_api::expression::grpc_route),
                resource: "gateway.networking.k8s.io" ["v1"] "grpcroutes" Namespaced,
                names: "GRPCRoute" "grpc-route"
            }
            /// gateway.networking.k8s.io TLSRoute.
            TlsRoute: Config<gateway_api::TlsRoute> {
                table: tls_routes, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1", "v1alpha3", "v1alpha2"] "tlsroutes" Namespaced,
                names: "TLSRoute" "tls-route"
            }
            /// gateway.networking.k8s.io TCPRoute.
            TcpRoute: Config<gateway_api::TcpRoute> {
                table: tcp_routes, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1alpha2"] "tcproutes" Namespaced,
                names: "TCPRoute" "tcp-route"
            }
            /// gateway.networking.k8s.io UDPRoute.
            UdpRoute: Config<gateway_api::UdpRoute> {
                table: udp_routes, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1alpha2"] "udproutes" Namespaced,
                names: "UDPRoute" "udp-route"
            }
            /// gateway.networking.k8s.io BackendTLSPolicy.
            BackendTlsPolicy: Config<gateway_api::BackendTlsPolicy> {
                table: backend_tls_policies, class: GatewayApi, parser: kube(),
                resource: "gateway.networking.k8s.io" ["v1", "v1alpha3"] "backendtlspolicies" Namespaced,
                names: "BackendTLSPolicy" "backend-tls-policy"
            }
            /// gateway.networking.k8s.io ListenerSet.
            ListenerSet: Config<gateway_api::ListenerSet> {
                table: listener_sets, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1"] "listenersets" Namespaced,
                names: "ListenerSet" "listener-set"
            }
            /// gateway.networking.k8s.io ReferenceGrant.
            ReferenceGrant: Config<gateway_api::ReferenceGrant> {
                table: reference_grants, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.k8s.io" ["v1beta1", "v1"] "referencegrants" Namespaced,
                names: "ReferenceGrant" "reference-grant"
            }
            /// gateway.networking.x-k8s.io XBackendTrafficPolicy.
            BackendTrafficPolicy: Config<gateway_api::BackendTrafficPolicy> {
                table: backend_traffic_policies, class: GatewayApi, parser: typed(),
                resource: "gateway.networking.x-k8s.io" ["v1alpha1"] "xbackendtrafficpolicies" Namespaced,
                names: "XBackendTrafficPolicy" "backend-traffic-policy"
            }
            /// inference.networking.k8s.io InferencePool.
            InferencePool: Config<gateway_api::InferencePool> {
                table: inference_pools, class: GatewayApi, parser: typed(),
                resource: "inference.networking.k8s.io" ["v1"] "inferencepools" Namespaced,
                names: "InferencePool" "inference-pool"
            }
            /// networking.k8s.io Ingress.
            Ingress: Config<kube::Ingress> {
                table: ingresses, class: Ingress, parser: typed(),
                resource: "networking.k8s.io" ["v1"] "ingresses" Namespaced,
                names: "Ingress" "ingress"
            }
            /// networking.k8s.io IngressClass.
            IngressClass: Config<kube::IngressClass> {
                table: ingress_classes, class: Ingress, parser: typed(),
                resource: "networking.k8s.io" ["v1"] "ingressclasses" Cluster,
                names: "IngressClass" "ingress-class"
            }
            /// multicluster.x-k8s.io ServiceExport.
            ServiceExport: Config<mcs::ServiceExport> {
                table: service_exports, class: MultiCluster, parser: typed(),
                resource: "multicluster.x-k8s.io" ["v1alpha1", "v1beta1"] "serviceexports" Namespaced,
                names: "ServiceExport" "service-export"
            }
            /// multicluster.x-k8s.io ServiceImport.
            ServiceImport: Config<mcs::ServiceImport> {
                table: service_imports, class: MultiCluster, parser: typed(),
                resource: "multicluster.x-k8s.io" ["v1alpha1", "v1beta1"] "serviceimports" Namespaced,
                names: "ServiceImport" "service-import"
            }
            /// A Gateway that counts only as a gateway to another network, because its namespace is not selected.
            HiddenGateway: hidden_gateway::HiddenGateway {
                table: hidden_gateways, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "hiddengateways" Namespaced,
                names: "HiddenGateway" "hidden-gateway"
            }
            /// The DNS answer for the host name of a network gateway, which istiod asks for itself.
            ResolvedHost: resolved_host::ResolvedHost {
                table: resolved_hosts, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "resolvedhosts" Cluster,
                names: "ResolvedHost" "resolved-host"
            }
            /// An API server's answer about permission to read Secrets, which istiod asks for itself.
            AccessReview: access_review::AccessReview {
                table: access_reviews, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "accessreviews" Namespaced,
                names: "AccessReview" "access-review"
            }
            /// The key set of a token issuer, which istiod fetches itself.
            FetchedKeys: fetched_keys::FetchedKeys {
                table: fetched_keys, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "fetchedkeys" Cluster,
                names: "FetchedKeys" "fetched-keys"
            }
            /// The roots for workloads of a mesh with several roots, which istiod merges itself.
            TrustAnchors: trust_anchors::TrustAnchors {
                table: trust_anchors, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "trustanchors" Cluster,
                names: "TrustAnchors" "trust-anchors"
            }
            /// A route of the Gateway API with errors, for its status.
            InvalidRoute: invalid_route::InvalidRoute {
                table: invalid_routes, class: Internal, parser: internal(),
                resource: "mesh.istio.io" ["v1alpha1"] "invalidroutes" Namespaced,
                names: "InvalidRoute" "invalid-route"
            }
        }
    };
}

pub(crate) use with_kinds;
