use super::*;
use crate::base::host;

const NAMES: [&str; 16] = [
    "*",
    "*.com",
    "*.a.com",
    "*.b.a.com",
    "*a.com",
    "*-a.com",
    "*m",
    "*.b",
    "com",
    "a.com",
    "b.a.com",
    "c.b.a.com",
    "x-a.com",
    "ba.com",
    "b",
    "a.b",
];

#[test]
fn hosts_are_imported_as_if_each_were_compared() {
    let own = Namespace::new("own");
    // Each pair of names.
    for (first, second) in NAMES.iter().flat_map(|first| NAMES.map(|second| (*first, second))) {
        let written = [first, second].map(|name| format!("./{name}"));
        let imports = Imports::of(&written, &own);
        let hosts = imports.for_namespace("own").next().expect("the hosts of the namespace");
        for name in NAMES {
            let imported = [first, second];
            let is_covered = imported.iter().any(|one| host::subset_of(name, one));
            assert_eq!(hosts.cover(name), is_covered, "{imported:?} cover {name}");
            let is_met = imported.iter().any(|one| host::overlaps(name, one));
            assert_eq!(hosts.meet(name, Semantics::Istio), is_met, "{imported:?} meet {name}");
            let is_met_as_a_whole = hosts.meet(name, Semantics::Gateway);
            assert_eq!(is_met_as_a_whole, is_covered, "{imported:?} meet {name}");
        }
    }
}

#[test]
fn r21_services_of_a_row_share_their_visible_aliases() {
    let own = Namespace::new("own");
    let key = |name: &str| ServiceKey {
        hostname: Hostname::new(name),
        namespace: own.clone(),
    };
    let aliases = vec![key("a.test"), key("b.test")];
    let visibility = |members: Vec<Visibility>| Visibility {
        export_to: Shared::new(ExportTo::Public),
        registry: Registry::External,
        creation: 0,
        name: "s.test".into(),
        ports: vec![80],
        aliases: aliases.clone().into(),
        external_name: Hostname::default(),
        merge_class: 1,
        members: members.into(),
    };
    let row = visibility(vec![visibility(Vec::new()), visibility(Vec::new())]);
    let service = key("s.test");
    let written = ["./s.test", "./a.test"].map(str::to_owned);
    let imports = Imports::of(&written, &own);
    let mut known = VisibleAliases::default();
    let mut visible = |member: u32| {
        let (key, row) = (&service, &row);
        let import = imports.import(VisibleService { key, row, member }, None, &mut known);
        import.and_then(|import| import.aliases).expect("one alias is hidden")
    };
    let (first, second) = (visible(0), visible(1));
    assert_eq!(*first, [key("a.test")]);
    assert!(first.ptr_eq(&second));
}
