//! Keys of RequestAuthentications that istiod fetches from users' addresses.

use super::{
    json::{items, text},
    mesh::Mesh,
    message::{Report, UNRESTRICTED_JWKS, listed},
    object::{Object, Type},
};
use crate::api::Kind;

/// The environment variable of istiod with the address ranges that it must not fetch keys from.
const VARIABLE: &str = "BLOCKED_CIDRS_IN_JWKS_URIS";

/// Reports control planes that fetch keys from any address.
///
/// Parity (pkg/config/analysis/analyzers/authn/blockedcidrs.go).
pub(super) fn blocked_ranges(mesh: &Mesh, report: &mut Report) {
    let all = mesh.of(Kind::RequestAuthentication);
    if all.is_empty() {
        return;
    }
    let names = listed(all.iter().map(Object::full_name));
    for istiod in mesh
        .of(Type::Deployment)
        .iter()
        .filter(|deployment| deployment.label("app") == "istiod")
    {
        let containers = items(&istiod.spec("template")["spec"]["containers"]);
        let mut variables = containers.iter().flat_map(|container| items(&container["env"]));
        if !variables.any(|variable| text(&variable["name"]) == VARIABLE && !text(&variable["value"]).is_empty()) {
            let text = format!(
                "{VARIABLE} is not set, so the key sets of {} RequestAuthentications ({names}) may come from any \
                 address, also inside the cluster",
                all.len()
            );
            report.add(UNRESTRICTED_JWKS, istiod, text);
        }
    }
}
