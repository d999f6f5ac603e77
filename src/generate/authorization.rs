//! Policies of ztunnels (WADS): AuthorizationPolicies and PeerAuthentications as rules of layer 4.
//!
//! Note: policies that select workloads have no effect until a workload refers to them. So all ztunnels receive all
//! policies, and a PeerAuthentication without port levels needs only the one static policy that requires mutual TLS.

mod authorization_policy;
mod peer_authentication;
#[cfg(test)]
mod tests;

use smol_str::{SmolStr, format_smolstr};

use super::{BuildContext, EncodedResource, ScopeTables, build_context::PushMemo, resource::Built};
use crate::{
    base::ObjectKey,
    model::{MeshSnapshot, ambient::waypoint::implicit_policy, identity::spiffe_id},
    proto::istio::security::{Action, Authorization, Group, Match, Rules, Scope, StringMatch, string_match::MatchType},
    table::{Cx, RelationId, Table},
};

/// All policies of the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AuthorizationPart(());

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AuthorizationKey {
    /// The policy of an AuthorizationPolicy.
    AuthorizationPolicy(ObjectKey),
    /// The policy of a PeerAuthentication with port levels.
    PeerAuthentication(ObjectKey),
    /// The policy that requires mutual TLS.
    Strict,
    /// The policy that admits the instances of a waypoint.
    Waypoint(ObjectKey),
}

/// Returns the policies of a ztunnel.
pub fn select(ctx: &BuildContext) -> Option<AuthorizationPart> {
    let features = &ctx.mesh.installation.features;
    features.pilot_enable_ambient.then_some(AuthorizationPart(()))
}

impl AuthorizationPart {
    /// Lists the policies.
    ///
    /// Parity (pilot/pkg/serviceregistry/ambient/policies.go): the static policy exists with the first
    /// PeerAuthentication. Only waypoints of the config cluster have policies.
    pub fn list(&self, ctx: &BuildContext) -> Vec<AuthorizationKey> {
        let policies = ctx.mesh.authorization_policies.keys(ctx.cx).cloned();
        let policies = policies.map(AuthorizationKey::AuthorizationPolicy);
        let peers = ctx.mesh.peer_authentications.keys(ctx.cx).cloned();
        let mut keys: Vec<_> = policies
            .chain(peers.map(AuthorizationKey::PeerAuthentication))
            .collect();
        if !ctx.mesh.peer_authentications.is_empty() {
            keys.push(AuthorizationKey::Strict);
        }
        if ctx.mesh.installation.features.pilot_auto_allow_waypoint_policy {
            let waypoints = ctx.mesh.waypoint_instances.keys(ctx.cx);
            let own = waypoints.filter(|key| key.cluster == ctx.mesh.installation.cluster);
            keys.extend(own.cloned().map(AuthorizationKey::Waypoint));
        }
        keys
    }
}

impl AuthorizationKey {
    /// Builds the policy. An object that does not concern ztunnels has none.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let policy = self.policy(ctx);
        policy.map_or_else(Built::none, |policy| Built::new(encoded(&policy)))
    }

    fn policy(&self, ctx: &BuildContext) -> Option<Authorization> {
        match self {
            Self::AuthorizationPolicy(key) => authorization_policy::of_object(ctx, key),
            Self::PeerAuthentication(key) => peer_authentication::of_object(ctx, key),
            Self::Strict => Some(peer_authentication::strict(ctx)),
            Self::Waypoint(key) => waypoint(ctx, key),
        }
    }
}

/// Returns all policies, for debug pages.
pub fn all(mesh: &MeshSnapshot) -> Vec<Authorization> {
    let ctx = BuildContext {
        cx: &Cx::untracked(),
        mesh,
        scopes: &ScopeTables {
            all: Table::new(RelationId(0)),
            tcp: Table::new(RelationId(0)),
        },
        memo: &PushMemo::default(),
    };
    let keys = select(&ctx).map(|part| part.list(&ctx)).unwrap_or_default();
    let mut policies: Vec<Authorization> = keys.iter().filter_map(|key| key.policy(&ctx)).collect();
    policies.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    policies
}

/// Returns the policy that admits the service accounts of a waypoint's pods.
fn waypoint(ctx: &BuildContext, key: &ObjectKey) -> Option<Authorization> {
    let name = implicit_policy(ctx.cx, ctx.mesh, key)?;
    let instances = ctx.mesh.waypoint_instances.get(ctx.cx, key)?;
    let trust_domain = &ctx.mesh_config().trust_domain;
    let principal = |account: &SmolStr| {
        let identity = spiffe_id(trust_domain, &key.namespace, account);
        let principal = identity.strip_prefix("spiffe://").unwrap_or(&identity);
        string_match(MatchType::Exact(principal.to_owned()))
    };
    let admitted = Match {
        principals: instances.service_accounts.iter().map(principal).collect(),
        ..Match::default()
    };
    let rules = vec![Rules {
        matches: vec![admitted],
    }];
    Some(Authorization {
        name,
        namespace: key.namespace.to_string(),
        scope: Scope::WorkloadSelector.into(),
        action: Action::Allow.into(),
        groups: vec![Group { rules }],
        ..Authorization::default()
    })
}

fn encoded(policy: &Authorization) -> EncodedResource {
    let name = format_smolstr!("{}/{}", policy.namespace, policy.name);
    EncodedResource::new(name, policy)
}

fn string_match(match_type: MatchType) -> StringMatch {
    StringMatch {
        match_type: Some(match_type),
    }
}

/// Matches every value that is present.
fn presence() -> StringMatch {
    string_match(MatchType::Presence(()))
}
