//! The statuses of all objects of the Gateway API, brought up to date with snapshots.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;
use smol_str::SmolStr;

use super::{
    Revisions, Status, StatusKey,
    gateway::{self, AttachedSet},
    policy, pool,
    route::{self, Attachment},
    surplus::{self, Surplus, Surpluses},
};
use crate::{
    api::{Kind, invalid_route::InvalidRoute},
    base::{ObjectKey, Shared},
    model::{
        MeshSnapshot,
        gateway_api::{listener::ListenerOwner, policy::TargetKey, route::AttachedRouteKey},
        output_limit::DemandKey,
    },
    table::{Cx, Derived, Index, IndexWriter, Key, RelationId, Table, TableWriter, Transaction},
};

/// Kinds with statuses.
pub const KINDS: [Kind; 10] = [
    Kind::GatewayClass,
    Kind::KubeGateway,
    Kind::ListenerSet,
    Kind::HttpRoute,
    Kind::GrpcRoute,
    Kind::TlsRoute,
    Kind::TcpRoute,
    Kind::BackendTlsPolicy,
    Kind::BackendTrafficPolicy,
    Kind::InferencePool,
];

/// Identities of the tables, which no table of the mesh has.
mod relation {
    use super::RelationId;

    pub(super) const ATTACHMENTS: RelationId = RelationId(5000);
    pub(super) const BY_OWNER: RelationId = RelationId(5001);
    pub(super) const BY_TARGET: RelationId = RelationId(5002);
    pub(super) const SETS: RelationId = RelationId(5003);
    pub(super) const SETS_BY_GATEWAY: RelationId = RelationId(5004);
    pub(super) const WRITTEN: RelationId = RelationId(5005);
    pub(super) const STATUSES: RelationId = RelationId(5006);
    pub(super) const SURPLUSES: RelationId = RelationId(5007);
    pub(super) const SURPLUSES_BY_ROUTE: RelationId = RelationId(5008);
}

/// The present status of an object, if other statuses depend on it; `None` if the object is gone.
pub type Written = (StatusKey, Option<Value>);

/// The statuses of all objects.
pub struct Statuses {
    mesh: Option<Arc<MeshSnapshot>>,
    revisions: Revisions,
    surpluses: Derived<ObjectKey, Surplus>,
    surpluses_by_route: IndexWriter<AttachedRouteKey, ObjectKey, Surplus>,
    attachments: Derived<AttachedRouteKey, Attachment>,
    by_owner: IndexWriter<ListenerOwner, AttachedRouteKey, Attachment>,
    by_target: IndexWriter<TargetKey, AttachedRouteKey, Attachment>,
    sets: Derived<ObjectKey, AttachedSet>,
    sets_by_gateway: IndexWriter<ObjectKey, ObjectKey, AttachedSet>,
    written: TableWriter<StatusKey, Value>,
    statuses: Derived<StatusKey, Status>,
    panics: Vec<String>,
}

impl Statuses {
    /// Returns the statuses of an empty mesh.
    pub fn new(revisions: Revisions) -> Self {
        Self {
            mesh: None,
            revisions,
            surpluses: Derived::new(relation::SURPLUSES),
            surpluses_by_route: IndexWriter::new(relation::SURPLUSES_BY_ROUTE, surplus::routes),
            attachments: Derived::new(relation::ATTACHMENTS),
            by_owner: IndexWriter::new(relation::BY_OWNER, route::owners),
            by_target: IndexWriter::new(relation::BY_TARGET, route::targets),
            sets: Derived::new(relation::SETS),
            sets_by_gateway: IndexWriter::new(relation::SETS_BY_GATEWAY, gateway::gateway_of),
            written: TableWriter::new(relation::WRITTEN),
            statuses: Derived::new(relation::STATUSES),
            panics: Vec::new(),
        }
    }

    /// Returns descriptions of derivations that panicked and kept their previous row; always a bug.
    pub fn take_panics(&mut self) -> Vec<String> {
        std::mem::take(&mut self.panics)
    }

    /// Returns true if the statuses of other objects depend on an object's present status.
    pub fn depend_on(kind: Kind) -> bool {
        matches!(kind, Kind::HttpRoute | Kind::InferencePool)
    }

    /// Returns the status of an object; `None` if this control plane is not responsible for it.
    pub fn get(&self, key: &StatusKey) -> Option<&Shared<Status>> {
        self.statuses.table().get(&Cx::untracked(), key)
    }

    /// Returns all statuses.
    pub fn iter(&self) -> impl Iterator<Item = (&StatusKey, &Shared<Status>)> {
        self.statuses.table().rows(&Cx::untracked()).iter()
    }

    /// Evaluates what depends on a difference between the snapshot and the previous one, or on statuses of objects as
    /// they are now. Returns the keys of changed statuses.
    pub fn update(&mut self, mesh: &Arc<MeshSnapshot>, written: Vec<Written>) -> Vec<StatusKey> {
        let before = self.mesh.replace(mesh.clone());
        let before = before.as_deref();
        let mut tx = Transaction::default();
        if let Some(before) = before {
            mesh.mark_differences(before, &mut tx);
        }
        self.written.begin();
        for (key, status) in written {
            match status {
                Some(status) => self.written.put(&mut tx, key, Shared::new(status)),
                None => self.written.remove(&mut tx, &key),
            };
        }
        let mut objects: Vec<StatusKey> = Vec::new();
        let routes = differences(&mesh.attached_routes, before.map(|before| &before.attached_routes));
        let sets = differences(&mesh.listener_sets, before.map(|before| &before.listener_sets));
        let mut add = |kind, keys: Vec<ObjectKey>| {
            objects.extend(keys.into_iter().map(|object| StatusKey { kind, object }));
        };
        macro_rules! add {
            ($($kind:ident: $table:ident),*) => {
                $(add(Kind::$kind, differences(&mesh.$table, before.map(|before| &before.$table)));)*
            };
        }
        add!(
            GatewayClass: gateway_classes, KubeGateway: kube_gateways, BackendTlsPolicy: backend_tls_policies,
            BackendTrafficPolicy: backend_traffic_policies, InferencePool: inference_pools
        );
        add(Kind::ListenerSet, sets.clone());
        objects.extend(routes.iter().map(|key| StatusKey {
            kind: key.kind,
            object: key.object.clone(),
        }));
        let invalid = differences(&mesh.invalid_routes, before.map(|before| &before.invalid_routes));
        objects.extend(invalid.iter().filter_map(|key| {
            let cx = Cx::untracked();
            let now = mesh.invalid_routes.get(&cx, key);
            let route = now.or_else(|| before?.invalid_routes.get(&cx, key))?;
            Some(StatusKey {
                kind: route.meta.kind,
                object: route.meta.key.clone(),
            })
        }));
        let demands = differences(&mesh.demands, before.map(|before| &before.demands)).into_iter();
        let demands = demands.filter(|key| key.kind == Kind::VirtualService);
        let limited: Vec<ObjectKey> = demands.map(|key| key.object).collect();
        self.surpluses
            .update(&mut tx, &limited, |cx, key| surplus::surplus(cx, mesh, key));
        self.surpluses_by_route.update(&mut tx, self.surpluses.writer());
        let surpluses = self.surpluses_by_route.index();
        self.attachments
            .update(&mut tx, &routes, |cx, key| route::attachment(cx, mesh, surpluses, key));
        self.by_owner.update(&mut tx, self.attachments.writer());
        self.by_target.update(&mut tx, self.attachments.writer());
        self.sets
            .update(&mut tx, &sets, |cx, key| gateway::attached_set(cx, mesh, key));
        self.sets_by_gateway.update(&mut tx, self.sets.writer());
        let attached = Attached {
            surpluses,
            by_owner: self.by_owner.index(),
            by_target: self.by_target.index(),
            sets_by_gateway: self.sets_by_gateway.index(),
            written: self.written.table(),
        };
        let revisions = &self.revisions;
        self.statuses.update(&mut tx, &objects, |cx, key| {
            let inputs = StatusInputs {
                cx,
                mesh,
                revisions,
                attached: &attached,
            };
            status(inputs, key)
        });
        self.panics.extend(tx.take_panics());
        let changes = self.statuses.writer().changes().iter();
        let changed: Vec<StatusKey> = changes.map(|(key, ..)| key.clone()).collect();
        for key in objects.iter().filter(|key| !exists(mesh, key)) {
            self.statuses.forget(&mut tx, key);
        }
        let cx = Cx::untracked();
        for key in routes.iter().filter(|key| mesh.attached_routes.get(&cx, key).is_none()) {
            self.attachments.forget(&mut tx, key);
        }
        for key in sets.iter().filter(|key| mesh.listener_sets.get(&cx, key).is_none()) {
            self.sets.forget(&mut tx, key);
        }
        for key in limited.iter().filter(|key| !has_demand(mesh, key)) {
            self.surpluses.forget(&mut tx, key);
        }
        changed
    }
}

/// Returns the keys of rows that differ from those of an earlier table.
fn differences<K: Key, V: PartialEq>(now: &Table<K, V>, before: Option<&Table<K, V>>) -> Vec<K> {
    match before {
        Some(before) => now.differences(before).cloned().collect(),
        None => now.keys(&Cx::untracked()).cloned().collect(),
    }
}

/// Returns true if a VirtualService is large enough to count.
fn has_demand(mesh: &MeshSnapshot, object: &ObjectKey) -> bool {
    let key = DemandKey {
        kind: Kind::VirtualService,
        object: object.clone(),
    };
    mesh.demands.get(&Cx::untracked(), &key).is_some()
}

/// Returns true if an object exists.
fn exists(mesh: &MeshSnapshot, key: &StatusKey) -> bool {
    let (cx, object) = (Cx::untracked(), &key.object);
    match key.kind {
        Kind::GatewayClass => mesh.gateway_classes.get(&cx, object).is_some(),
        Kind::KubeGateway => mesh.kube_gateways.get(&cx, object).is_some(),
        Kind::ListenerSet => mesh.listener_sets.get(&cx, object).is_some(),
        Kind::BackendTlsPolicy => mesh.backend_tls_policies.get(&cx, object).is_some(),
        Kind::BackendTrafficPolicy => mesh.backend_traffic_policies.get(&cx, object).is_some(),
        Kind::InferencePool => mesh.inference_pools.get(&cx, object).is_some(),
        kind => {
            let invalid = InvalidRoute::key(kind, object);
            let object = object.clone();
            let attached = mesh.attached_routes.get(&cx, &AttachedRouteKey { kind, object });
            attached.is_some() || mesh.invalid_routes.get(&cx, &invalid).is_some()
        }
    }
}

fn status(inputs: StatusInputs, key: &StatusKey) -> Option<Status> {
    let object = &key.object;
    match key.kind {
        Kind::GatewayClass => gateway::class(inputs, object),
        Kind::KubeGateway => gateway::gateway(inputs, object),
        Kind::ListenerSet => gateway::listener_set(inputs, object),
        Kind::BackendTlsPolicy => policy::tls(inputs, object),
        Kind::BackendTrafficPolicy => policy::traffic(inputs, object),
        Kind::InferencePool => pool::status(inputs, object),
        kind => {
            let object = object.clone();
            route::status(inputs, &AttachedRouteKey { kind, object })
        }
    }
}

/// The inputs of a status.
#[derive(Clone, Copy)]
pub(super) struct StatusInputs<'a> {
    pub(super) cx: &'a Cx,
    pub(super) mesh: &'a MeshSnapshot,
    pub(super) revisions: &'a Revisions,
    pub(super) attached: &'a Attached<'a>,
}

/// Facts of other objects that statuses depend on.
pub(super) struct Attached<'a> {
    /// Rules of routes that do not apply because of limits.
    pub(super) surpluses: &'a Surpluses,
    by_owner: &'a Index<ListenerOwner, AttachedRouteKey, Attachment>,
    by_target: &'a Index<TargetKey, AttachedRouteKey, Attachment>,
    sets_by_gateway: &'a Index<ObjectKey, ObjectKey, AttachedSet>,
    written: &'a Table<StatusKey, Value>,
}

impl Attached<'_> {
    /// Returns the number of routes attached to each listener of an object.
    pub(super) fn counts(&self, cx: &Cx, owner: &ListenerOwner) -> BTreeMap<SmolStr, usize> {
        let mut counts = BTreeMap::new();
        for (_, attachment) in self.by_owner.get(cx, owner) {
            for section in attachment.sections(owner) {
                *counts.entry(section.clone()).or_default() += 1;
            }
        }
        counts
    }

    /// Returns the ListenerSets of a Gateway.
    pub(super) fn listener_sets(&self, cx: &Cx, gateway: &ObjectKey) -> impl Iterator<Item = &Shared<AttachedSet>> {
        self.sets_by_gateway.get(cx, gateway).map(|(_, set)| set)
    }

    /// Returns the routes that refer to an object.
    pub(super) fn routes_of(&self, cx: &Cx, target: &TargetKey) -> impl Iterator<Item = &AttachedRouteKey> {
        self.by_target.get(cx, target).map(|(route, _)| route)
    }

    /// Returns the Gateways of the routes that refer to an object.
    pub(super) fn gateways_of(&self, cx: &Cx, target: &TargetKey) -> BTreeSet<ObjectKey> {
        let routes = self.by_target.get(cx, target);
        routes
            .flat_map(|(_, attachment)| attachment.gateways.iter().cloned())
            .collect()
    }

    /// Returns the present status of an object.
    pub(super) fn written(&self, cx: &Cx, key: &StatusKey) -> Option<&Shared<Value>> {
        self.written.get(cx, key)
    }
}
