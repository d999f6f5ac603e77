//! Converts PeerAuthentications with port levels. Parity (pilot/pkg/serviceregistry/ambient/authorization.go): denied
//! is what lacks an identity, on the ports that require mutual TLS.

use super::presence;
use crate::{
    api::Config,
    base::{Namespace, ObjectKey, Shared},
    generate::BuildContext,
    model::{
        ambient::policy::{CONVERTED, STRICT},
        policy,
    },
    proto::istio::security::{
        Action, Authorization, Group, Match, Rules, Scope,
        v1beta1::{
            PeerAuthentication,
            peer_authentication::{MutualTls, mutual_tls::Mode},
        },
    },
};

type Row = Shared<Config<PeerAuthentication>>;

/// Returns the policy that requires mutual TLS.
pub(super) fn strict(ctx: &BuildContext) -> Authorization {
    let root = policy::root_namespace(ctx.cx, ctx.mesh);
    denial(STRICT.to_owned(), &root, vec![group(vec![without_identity()])])
}

/// Returns the policy of an object; `None` if its port levels change nothing.
pub(super) fn of_object(ctx: &BuildContext, key: &ObjectKey) -> Option<Authorization> {
    let object = ctx.mesh.peer_authentications.get(ctx.cx, key)?;
    let root = policy::root_namespace(ctx.cx, ctx.mesh);
    let spec = &object.spec;
    if key.namespace == root || spec.selector.is_none() || spec.port_level_mtls.is_empty() {
        return None;
    }
    let parent = Parent {
        namespace: general(ctx, &key.namespace).map(mode),
        root: general(ctx, &root).map(mode),
    };
    let groups = groups(&object.spec, parent);
    (!groups.is_empty()).then(|| denial(format!("{CONVERTED}{}", key.name), &key.namespace, groups))
}

/// Modes of the policies of the namespace and of the mesh; `None` without a policy.
#[derive(Clone, Copy)]
struct Parent {
    namespace: Option<Mode>,
    root: Option<Mode>,
}

impl Parent {
    /// Returns true if a workload policy without a mode is strict.
    fn is_strict(self) -> bool {
        match self.namespace {
            None | Some(Mode::Unset) => self.root == Some(Mode::Strict),
            Some(mode) => mode == Mode::Strict,
        }
    }

    /// Returns true if exceptions of a workload policy without a mode count. Note: a policy of the namespace without a
    /// mode hides the one of the mesh here.
    fn allows_exceptions(self) -> bool {
        self.namespace.or(self.root) == Some(Mode::Strict)
    }
}

/// Returns the groups of a policy: one for each port that its parents do not protect, and one for all ports if mutual
/// TLS is required on those without an exception.
fn groups(spec: &PeerAuthentication, parent: Parent) -> Vec<Group> {
    let own = spec.mtls.as_ref().map_or(Mode::Unset, MutualTls::mode);
    let implied = match own {
        Mode::Strict => true,
        Mode::Unset => parent.is_strict(),
        // The file of Istio named above: by the precedence of Go's operators, the mode of the mesh counts here too.
        Mode::Permissive | Mode::Disable => {
            matches!(parent.namespace, None | Some(Mode::Unset)) && parent.root == Some(Mode::Strict)
        }
    };
    let excepts = match own {
        Mode::Strict => true,
        Mode::Unset => parent.allows_exceptions(),
        Mode::Permissive | Mode::Disable => false,
    };
    let ports = || spec.port_level_mtls.iter().map(|(port, mtls)| (*port, mtls.mode()));
    let mut required: Vec<u32> = Vec::new();
    let mut exceptions: Vec<u32> = Vec::new();
    for (port, mode) in ports() {
        match mode {
            Mode::Strict if !implied => required.push(port),
            Mode::Permissive | Mode::Disable if excepts => exceptions.push(port),
            _ => {}
        }
    }
    required.sort_unstable();
    exceptions.sort_unstable();
    if own == Mode::Strict && exceptions.is_empty() {
        return Vec::new();
    }
    let mut groups: Vec<Group> = required
        .into_iter()
        .map(|port| group(vec![unprotected(port)]))
        .collect();
    let has_exceptions = !exceptions.is_empty();
    let mut rules: Vec<Match> = Vec::new();
    if own == Mode::Strict {
        rules.push(without_identity());
    }
    rules.extend(exceptions.into_iter().map(except));
    if has_exceptions && parent.is_strict() {
        rules.push(without_identity());
    }
    if !rules.is_empty() {
        groups.push(group(rules));
    }
    groups
}

fn denial(name: String, namespace: &Namespace, groups: Vec<Group>) -> Authorization {
    Authorization {
        name,
        namespace: namespace.to_string(),
        scope: Scope::WorkloadSelector.into(),
        action: Action::Deny.into(),
        groups,
        ..Authorization::default()
    }
}

/// Returns a group in which all of these must match.
fn group(all: Vec<Match>) -> Group {
    let rules = all.into_iter().map(|matched| Rules { matches: vec![matched] });
    Group { rules: rules.collect() }
}

fn without_identity() -> Match {
    Match {
        not_principals: vec![presence()],
        ..Match::default()
    }
}

fn unprotected(port: u32) -> Match {
    Match {
        destination_ports: vec![port],
        ..without_identity()
    }
}

fn except(port: u32) -> Match {
    Match {
        not_destination_ports: vec![port],
        ..Match::default()
    }
}

/// Returns the oldest policy of a namespace without a selector.
fn general<'a>(ctx: &BuildContext<'a>, namespace: &Namespace) -> Option<&'a Row> {
    let rows = ctx.mesh.peer_authentications_by_namespace.get(ctx.cx, namespace);
    let general = rows.map(|(_, row)| row).filter(|row| row.spec.selector.is_none());
    general.min_by(|one, other| one.meta.age_order().cmp(&other.meta.age_order()))
}

fn mode(row: &Row) -> Mode {
    row.spec.mtls.as_ref().map_or(Mode::Unset, MutualTls::mode)
}
