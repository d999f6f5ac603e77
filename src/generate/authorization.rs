//! Policies of ztunnels (WADS): AuthorizationPolicies and PeerAuthentications as rules of layer 4.
//!
//! Note: policies that select workloads have no effect until a workload refers to them. So all ztunnels receive all
//! policies, and a PeerAuthentication without port levels needs only the one static policy that requires mutual TLS.

mod authorization_policy;
mod peer_authentication;
#[cfg(test)]
mod tests;

use smol_str::format_smolstr;

use super::{BuildContext, EncodedResource, resource::Built};
use crate::{
    base::ObjectKey,
    proto::istio::security::{Authorization, StringMatch, string_match::MatchType},
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
    /// PeerAuthentication.
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
        keys
    }
}

impl AuthorizationKey {
    /// Builds the policy. An object that does not concern ztunnels has none.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let policy = match self {
            Self::AuthorizationPolicy(key) => authorization_policy::of_object(ctx, key),
            Self::PeerAuthentication(key) => peer_authentication::of_object(ctx, key),
            Self::Strict => Some(peer_authentication::strict(ctx)),
        };
        policy.map_or_else(Built::none, |policy| Built::new(encoded(&policy)))
    }
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
