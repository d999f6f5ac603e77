//! What the mesh asks of ingestion: which namespaces count, and which host names are to be resolved.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{MeshSnapshot, network};
use crate::{
    base::select::{LabelSelector, Requirement},
    proto::istio::mesh::v1alpha1 as mesh_api,
    table::Cx,
};

/// What the mesh asks of ingestion.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Wants {
    /// A namespace counts if one of them matches its labels; all count when there is none.
    pub discovery_selectors: Vec<LabelSelector>,
    /// Host names of network gateways whose addresses are needed.
    pub hosts: BTreeSet<SmolStr>,
}

impl Wants {
    /// What a snapshot asks for; nothing before the first commit.
    pub fn of(mesh: &MeshSnapshot) -> Self {
        let wants = mesh.wants.get(&Cx::untracked(), &());
        wants.map(|wants| (**wants).clone()).unwrap_or_default()
    }
}

/// Derives what the mesh asks for.
pub fn wants(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<Wants> {
    let selectors = &mesh.mesh_config(cx).discovery_selectors;
    let networks = mesh.networks.get(cx, &());
    let hosts = networks.filter(|_| mesh.installation.features.resolve_hostname_gateways);
    Some(Wants {
        discovery_selectors: selectors.iter().map(selector).collect(),
        hosts: hosts.map(|networks| network::hosts(networks)).unwrap_or_default(),
    })
}

fn selector(written: &mesh_api::LabelSelector) -> LabelSelector {
    let labels: &BTreeMap<String, String> = &written.match_labels;
    let requirement = |written: &mesh_api::LabelSelectorRequirement| Requirement {
        key: SmolStr::new(&written.key),
        operator: SmolStr::new(&written.operator),
        values: written.values.iter().map(SmolStr::new).collect(),
    };
    LabelSelector {
        match_labels: labels
            .iter()
            .map(|(key, value)| (SmolStr::new(key), SmolStr::new(value)))
            .collect(),
        match_expressions: written.match_expressions.iter().map(requirement).collect(),
    }
}
