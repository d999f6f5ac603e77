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
    base::host::{self, HostsByEnd},
};

/// The maximum number of names in a message.
const MAX_NAMES: usize = 10;
/// The number of VirtualServices of one scope up to which their pairs are remembered.
const MAX_REMEMBERED: usize = 128;
/// The number of VirtualServices that are read for all hosts and scopes together, and of bytes of these hosts: each may
/// begin a part that a wildcard covers. Further conflicts are not reported: thousands of scopes may each have hundreds
/// of wildcards, one within the other, and thousands of hosts below all.
const MAX_READ: usize = 20_000_000;

/// VirtualServices of one scope (a namespace or [`ALL`]) by host.
type ByHost<'a> = BTreeMap<String, Vec<&'a Object>>;

/// Reports VirtualServices that sidecars of one namespace see with the same host.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/conflictingmeshgatewayhosts.go).
pub(in crate::analyze) fn conflicts(mesh: &Mesh, report: &mut Report) {
    report_conflicts(mesh, MAX_READ, report);
}

fn report_conflicts(mesh: &Mesh, most: usize, report: &mut Report) {
    let mut left = most;
    let all = mesh.of(Kind::VirtualService).iter();
    let services: Vec<&Object> = all
        .filter(|service| applies_to_sidecars(service.spec("gateways")))
        .collect();
    let scopes = by_scope(&services);
    let public_by_host = by_host(&services, scopes.get(ALL).map_or(&[][..], Vec::as_slice));
    let public = PublicServices::of(&public_by_host);
    let mut reported: BTreeSet<(&str, &str)> = BTreeSet::new();
    // An object may have a hundred thousand hosts and as many scopes, so no more than those of one scope are held.
    let mut seen = SeenPairs::default();
    for (scope, positions) in &scopes {
        if scope == ALL {
            for (name, own) in &public_by_host {
                compare(scope, name, own.clone(), &mut reported, report);
            }
        } else if seen.add(positions) {
            for (name, mut all) in by_host(&services, positions) {
                all.extend(public.overlapping(&name));
                let read = all.len() + name.len();
                if read > left {
                    return;
                }
                left -= read;
                compare(scope, &name, all, &mut reported, report);
            }
        }
    }
}

/// Reports the VirtualServices that sidecars see with a host, unless there is only one.
fn compare<'a>(
    scope: &str,
    name: &str,
    all: Vec<&'a Object>,
    reported: &mut BTreeSet<(&'a str, &'a str)>,
    report: &mut Report,
) {
    if all.len() >= 2 {
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

/// The VirtualServices of earlier scopes, and their pairs. A scope has something to report only if one of its
/// VirtualServices or pairs is new: the hosts that these have in common with each other, and with VirtualServices for
/// all namespaces, do not depend on the scope, and each VirtualService is reported once.
#[derive(Default)]
struct SeenPairs(BTreeSet<(usize, usize)>);

impl SeenPairs {
    /// Adds VirtualServices, in ascending order. Returns true if one or a pair of them may be new.
    fn add(&mut self, positions: &[usize]) -> bool {
        if positions.len() > MAX_REMEMBERED {
            return true;
        }
        let mut is_new = false;
        for (at, one) in positions.iter().enumerate() {
            for other in &positions[at..] {
                is_new |= self.0.insert((*one, *other));
            }
        }
        is_new
    }
}

/// Returns the positions of VirtualServices by the scopes that see them.
fn by_scope(services: &[&Object]) -> BTreeMap<String, Vec<usize>> {
    let mut by_scope: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (position, service) in services.iter().enumerate() {
        let mut scopes = scopes(texts(service.spec("exportTo")), &service.namespace);
        if scopes.iter().any(|scope| scope == ALL) {
            scopes = vec![ALL.to_owned()];
        }
        for scope in scopes {
            by_scope.entry(scope).or_default().push(position);
        }
    }
    by_scope
}

/// Returns some VirtualServices by host.
fn by_host<'a>(services: &[&'a Object], positions: &[usize]) -> ByHost<'a> {
    let mut by_host = ByHost::new();
    for service in positions.iter().map(|position| services[*position]) {
        for host in texts(service.spec("hosts")) {
            let host = qualified(&service.namespace, host);
            by_host.entry(host).or_default().push(service);
        }
    }
    by_host
}

/// The VirtualServices for all namespaces.
struct PublicServices<'m, 'a> {
    by_host: &'m ByHost<'a>,
    /// The same lists in the order of their hosts.
    lists: Vec<&'m Vec<&'a Object>>,
    /// Positions of the lists.
    by_end: HostsByEnd<Vec<usize>>,
}

impl<'m, 'a> PublicServices<'m, 'a> {
    fn of(by_host: &'m ByHost<'a>) -> Self {
        let hosts = by_host.keys().map(String::as_str);
        Self {
            by_host,
            lists: by_host.values().collect(),
            by_end: HostsByEnd::of(hosts.enumerate().map(|(position, host)| (host, position))),
        }
    }

    /// Returns those with a host that has names in common with this one.
    fn overlapping(&self, name: &str) -> Vec<&'a Object> {
        if host::is_wildcard(name) {
            let positions = self.by_end.overlapping(name).into_iter();
            return positions.flat_map(|position| self.lists[position]).copied().collect();
        }
        let at = |host: String| self.by_host.get(&host).into_iter().flatten().copied();
        // Wildcards that match the name: one lookup for each of its ends.
        let ends = name.char_indices().map(|(at, _)| at).chain([name.len()]);
        let wildcards = ends.map(|end| format!("*{}", &name[end..]));
        at(name.to_owned()).chain(wildcards.flat_map(at)).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::analyze::mesh::Settings;

    fn service(name: &str, hosts: &[String], scopes: &[String]) -> Object {
        let manifest = json!({"metadata": {"name": name, "namespace": "n"},
            "spec": {"hosts": hosts, "exportTo": scopes}});
        Object::of(Kind::VirtualService.into(), manifest, "").unwrap()
    }

    fn texts_of(objects: Vec<Object>) -> Vec<String> {
        let mesh = Mesh::new(objects, Settings::default());
        let mut report = Report::default();
        conflicts(&mesh, &mut report);
        let messages = report.into_messages().into_iter();
        messages
            .map(|message| format!("{}: {}", message.resource.name, message.text))
            .collect()
    }

    #[test]
    fn r21_conflicts_are_searched_among_a_limited_number_of_objects() {
        let private = |scope: &str| service(scope, &["*.test".to_owned()], &[scope.to_owned()]);
        let everyone = service("everyone", &["a.test".to_owned(), "b.test".to_owned()], &[]);
        let mesh = Mesh::new(vec![private("s1"), private("s2"), everyone], Settings::default());
        let reported = |most: usize| {
            let mut report = Report::default();
            report_conflicts(&mesh, most, &mut report);
            let mut names: Vec<String> = report
                .into_messages()
                .into_iter()
                .map(|message| message.resource.name.to_string())
                .collect();
            names.sort();
            names
        };
        // Each scope has three: the object itself, and the one for everyone, by two hosts. Its host has six bytes.
        assert_eq!(reported(18), ["everyone", "s1", "s2"]);
        assert_eq!(reported(17), ["everyone", "s1"]);
        assert_eq!(reported(8), [""; 0]);
    }

    #[test]
    fn r21_scopes_with_the_same_objects_are_compared_once() {
        let mut seen = SeenPairs::default();
        assert!(seen.add(&[1]) && seen.add(&[1, 2]) && seen.add(&[2, 3]));
        assert!(
            !seen.add(&[2]) && !seen.add(&[1, 2]) && seen.add(&[1, 2, 3]),
            "1 and 3 are new"
        );
        assert!(!seen.add(&[1, 3]));
    }

    #[test]
    fn each_object_is_reported_for_its_first_host() {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
        let objects = vec![
            service("a", &list(&["x.test", "y.test"]), &list(&["s2", "s1"])),
            service("b", &list(&["y.test"]), &list(&["s1", "s2", "s3"])),
            service("c", &list(&["w.wild.example"]), &list(&["s3"])),
            service("everyone", &list(&["*.wild.example"]), &list(&["*", "s1"])),
            service("wild", &list(&["*.example"]), &list(&["s4"])),
            service("apart", &list(&["x.test"]), &list(&["s4"])),
        ];
        let several = "in several VirtualServices:";
        let mut want = [
            format!("a: sidecars see the host y.test (s1) {several} n/a, n/b"),
            format!("b: sidecars see the host y.test (s1) {several} n/a, n/b"),
            format!("c: sidecars see the host w.wild.example (s3) {several} n/c, n/everyone"),
            format!("everyone: sidecars see the host w.wild.example (s3) {several} n/c, n/everyone"),
            format!("wild: sidecars see the host *.example (s4) {several} n/everyone, n/wild"),
        ];
        want.sort();
        let mut found = texts_of(objects);
        found.sort();
        assert_eq!(found, want);
        assert_eq!(
            texts_of(vec![service("a", &list(&["x.test"]), &[])]),
            Vec::<String>::new()
        );
    }
}
