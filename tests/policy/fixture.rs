//! A workload with an HTTP and a TCP port in a mesh of objects, and its generated filters.

use std::sync::Arc;

use istiod::{
    api::{Kind, document, folder},
    generate::{
        Proxy, ResourceType,
        proxy::Extensions,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, Installation, SourceId, World},
    proto::{
        Any,
        envoy::{
            config::listener::v3::{Filter, Listener, filter::ConfigType},
            extensions::filters::network::http_connection_manager::v3::{HttpConnectionManager, HttpFilter},
        },
    },
};
use libtest_mimic::Failed;
use serde_json::{Value, json};

/// The workload: app `httpbin` of version `v1` in namespace `foo`.
const WORKLOAD: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: foo}
---
apiVersion: v1
kind: Service
metadata: {name: httpbin, namespace: foo}
spec:
  clusterIP: 10.0.0.1
  selector: {app: httpbin}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 90, targetPort: 9090}]
---
apiVersion: v1
kind: Service
metadata: {name: my-custom-ext-authz, namespace: foo}
spec:
  clusterIP: 10.0.0.2
  ports: [{name: grpc, port: 9000}]
---
apiVersion: v1
kind: Pod
metadata: {name: httpbin-0, namespace: foo, labels: {app: httpbin, version: v1}}
spec: {serviceAccountName: httpbin}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
";

/// A mesh and the resources of one of its proxies.
pub(super) struct Fixture {
    world: World,
    store: ConfigStore,
}

/// The listener for inbound traffic, and the one for inbound traffic through an HBONE tunnel.
pub(super) const INBOUND: &str = "virtualInbound";
pub(super) const TUNNELED: &str = "main_internal";

/// The only client.
const CLIENT: ConnectionId = ConnectionId(0);

impl Fixture {
    /// Builds a mesh from mesh config and objects, both YAML.
    pub(super) fn new(installation: Installation, mesh: &str, objects: &str) -> Result<Self, Failed> {
        Self::of(installation, mesh, objects, sidecar(&json!({})))
    }

    /// Like [`Self::new`], with another client.
    pub(super) fn of(installation: Installation, mesh: &str, objects: &str, proxy: Proxy) -> Result<Self, Failed> {
        let files = [("mesh.yaml", mesh), ("kube.yaml", WORKLOAD), ("config.yaml", objects)];
        let files: Vec<(String, &[u8])> = files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), text.as_bytes()))
            .collect();
        let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
        let mut fixture = Self {
            world: World::new(installation),
            store: ConfigStore::default(),
        };
        let rows = folder.rows.into_values().flatten();
        let membership = ProxyEvents {
            connected: std::iter::once((CLIENT, Arc::new(proxy))).collect(),
            ..ProxyEvents::default()
        };
        fixture.commit(rows.map(Change::Upsert).collect(), membership)?;
        Ok(fixture)
    }

    /// Replaces all AuthorizationPolicies.
    pub(super) fn declare(&mut self, policies: Vec<Value>) -> Result<(), Failed> {
        let source = SourceId {
            cluster: Installation::default().cluster,
            kind: Kind::AuthorizationPolicy,
        };
        let rows = policies
            .iter()
            .flat_map(|policy| document::parse(&source.cluster, policy).rows);
        let rows: Vec<_> = rows.collect();
        if rows.len() != policies.len() {
            return Err("a policy was rejected".into());
        }
        self.commit(vec![Change::Replace(source, rows)], ProxyEvents::default())
    }

    fn commit(&mut self, changes: Vec<Change>, membership: ProxyEvents) -> Result<(), Failed> {
        let commit = self.world.commit(changes);
        let update = self
            .store
            .update(&commit.snapshot, &commit.changes, membership, &Serial);
        if update.panics.is_empty() {
            Ok(())
        } else {
            Err(format!("panics: {:?}", update.panics).into())
        }
    }

    /// Returns a resource of the client.
    pub(super) fn resource(&self, resource_type: ResourceType, name: &str) -> Option<Any> {
        let group = self.store.group_of(CLIENT).and_then(|key| self.store.snapshot(key))?;
        group.resources(resource_type).get(name).map(|resource| resource.any())
    }

    /// Returns the names of the client's resources of a type.
    pub(super) fn names(&self, resource_type: ResourceType) -> Vec<String> {
        let group = self.store.group_of(CLIENT).and_then(|key| self.store.snapshot(key));
        let resources = group.iter().flat_map(|group| group.resources(resource_type).iter());
        resources.map(|resource| resource.name.to_string()).collect()
    }

    /// Returns a listener.
    pub(super) fn listener(&self, name: &str) -> Result<Listener, Failed> {
        let any = self.resource(ResourceType::Listener, name);
        let any = any.ok_or_else(|| format!("no listener {name}"))?;
        Ok(any.unpack()?.ok_or("the resource is not a listener")?)
    }

    /// Returns the HTTP filters of the workload's HTTP port.
    pub(super) fn http_filters(&self) -> Result<Vec<HttpFilter>, Failed> {
        self.http_filters_of(INBOUND)
    }

    /// Like [`Self::http_filters`], of another listener.
    pub(super) fn http_filters_of(&self, listener: &str) -> Result<Vec<HttpFilter>, Failed> {
        let filters = self.network_filters_on(listener, 8080)?;
        let manager = filters.iter().find_map(unpacked::<HttpConnectionManager>);
        Ok(manager.ok_or("the port has no HTTP connection manager")?.http_filters)
    }

    /// Returns the network filters of the workload's TCP port.
    pub(super) fn network_filters(&self) -> Result<Vec<Filter>, Failed> {
        self.network_filters_of(INBOUND)
    }

    /// Like [`Self::network_filters`], of another listener.
    pub(super) fn network_filters_of(&self, listener: &str) -> Result<Vec<Filter>, Failed> {
        self.network_filters_on(listener, 9090)
    }

    fn network_filters_on(&self, listener: &str, port: u32) -> Result<Vec<Filter>, Failed> {
        let listener = self.listener(listener)?;
        let serves = |chain: &&istiod::proto::envoy::config::listener::v3::FilterChain| {
            let matcher = chain.filter_chain_match.as_ref();
            matcher.and_then(|matcher| matcher.destination_port) == Some(port)
        };
        let chain = listener.filter_chains.iter().find(serves);
        Ok(chain
            .ok_or_else(|| format!("no filter chain for port {port}"))?
            .filters
            .clone())
    }
}

/// Returns the configuration of a network filter, if it has this type.
pub(super) fn unpacked<M: prost::Message + prost::Name + Default>(filter: &Filter) -> Option<M> {
    match filter.config_type.as_ref()? {
        ConfigType::TypedConfig(any) => any.unpack().ok()?,
        ConfigType::ConfigDiscovery(_) => None,
    }
}

/// The sidecar of the workload; `more` overrides its metadata.
pub(super) fn sidecar(more: &Value) -> Proxy {
    let mut metadata = json!({
        "NAMESPACE": "foo", "CLUSTER_ID": "Kubernetes", "SERVICE_ACCOUNT": "httpbin", "ISTIO_VERSION": "1.30.3",
        "LABELS": {"app": "httpbin", "version": "v1"}, "INSTANCE_IPS": "10.1.0.1",
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        metadata[key] = value.clone();
    }
    let metadata = serde_json::from_value(metadata).expect("the metadata is an object");
    let node = "sidecar~10.1.0.1~httpbin-0.foo~foo.svc.cluster.local";
    Proxy::new(node, "", metadata, "".into(), Extensions::default()).expect("the node is valid")
}
