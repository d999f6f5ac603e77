//! VirtualServices of sidecars that share hosts.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    analyze::{
        hosts::{ALL, applies_to_sidecars, qualified, scopes},
        json::texts,
        mesh::Mesh,
        message::{CONFLICTING_MESH_HOSTS, Report},
        object::Object,
    },
    api::Kind,
    base::host,
};

/// The maximum number of names in a message.
const MAX_NAMES: usize = 10;

/// VirtualServices by scope (a namespace or [`ALL`]) and host.
type ByHost<'a> = BTreeMap<(String, String), Vec<&'a Object>>;

/// Reports VirtualServices that sidecars of one namespace see with the same host.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/conflictingmeshgatewayhosts.go).
pub(in crate::analyze) fn conflicts(mesh: &Mesh, report: &mut Report) {
    let services = by_host(mesh);
    let mut reported: BTreeSet<(&str, &str)> = BTreeSet::new();
    for ((scope, name), own) in &services {
        let mut all = own.clone();
        if scope != ALL {
            all.extend(of_everyone(&services, name));
        }
        if all.len() < 2 {
            continue;
        }
        let mut names: BTreeSet<String> = all
            .iter()
            .take(MAX_NAMES + 1)
            .map(|object| object.full_name())
            .collect();
        if names.len() > MAX_NAMES {
            names.pop_last();
            names.insert("and others".to_owned());
        }
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        for service in all {
            // One message for each object, about the first of its hosts.
            if reported.insert((&service.namespace, &service.name)) {
                let text = format!("sidecars see the host {name} ({scope}) in several VirtualServices: {names}");
                report.add(CONFLICTING_MESH_HOSTS, service, text);
            }
        }
    }
}

fn by_host(mesh: &Mesh) -> ByHost<'_> {
    let mut services = ByHost::new();
    for service in mesh.of(Kind::VirtualService) {
        if !applies_to_sidecars(service.spec("gateways")) {
            continue;
        }
        let exported = service.spec("exportTo");
        let mut scopes = scopes(texts(exported), &service.namespace);
        if scopes.iter().any(|scope| scope == ALL) {
            scopes = vec![ALL.to_owned()];
        }
        for scope in scopes {
            for host in texts(service.spec("hosts")) {
                let key = (scope.clone(), qualified(&service.namespace, host));
                services.entry(key).or_default().push(service);
            }
        }
    }
    services
}

/// Returns the VirtualServices for all namespaces with a host that has names in common with this one.
fn of_everyone<'a>(services: &ByHost<'a>, name: &str) -> Vec<&'a Object> {
    let at = |host: String| services.get(&(ALL.to_owned(), host)).into_iter().flatten().copied();
    if host::is_wildcard(name) {
        let first = (ALL.to_owned(), String::new());
        let all = services.range(first..).take_while(|((scope, _), _)| scope == ALL);
        let overlapping = all.filter(|((_, other), _)| host::overlaps(name, other));
        return overlapping.flat_map(|(_, found)| found.iter().copied()).collect();
    }
    // Wildcards that match the name: one lookup for each of its ends.
    let ends = name.char_indices().map(|(at, _)| at).chain([name.len()]);
    let wildcards = ends.map(|end| format!("*{}", &name[end..]));
    at(name.to_owned()).chain(wildcards.flat_map(at)).collect()
}
