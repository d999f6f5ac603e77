use super::*;
use crate::{
    model::{Installation, fixture},
    proto::envoy::config::{cluster::v3::Cluster, listener::v3::Filter},
};

const FILTER: &str = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata:
  name: all
  namespace: shop
  annotations: {envoyfilter.istio.io/referenced-services: 'shop/a.example,b.example'}
spec:
  configPatches:
  - applyTo: CLUSTER
    match: {context: SIDECAR_OUTBOUND, cluster: {name: one}, proxy: {proxyVersion: '^1\\.30.*', metadata: {A: b}}}
    patch: {operation: MERGE, value: {connect_timeout: 3s, unheard_of: 1}}
  - applyTo: NETWORK_FILTER
    patch: {operation: ADD, value: {name: x, typed_config: {'@type': type.googleapis.com/no.such.Type}}}
  - applyTo: CLUSTER
    match: {context: WAYPOINT}
    patch: {operation: ADD, value: {name: never}}
  - applyTo: CLUSTER
    patch: {operation: INSERT_BEFORE, value: {name: two}}
";

fn compile() -> CompiledFilter {
    compile_text(FILTER)
}

fn compile_text(text: &str) -> CompiledFilter {
    let world = fixture::folder_world(Installation::default(), &[("filter.yaml", text)]);
    let key = fixture::key("shop/all");
    let row = world
        .snapshot()
        .envoy_filter_patches
        .get(&Cx::untracked(), &key)
        .cloned();
    CompiledFilter::clone(&row.expect("the filter is compiled"))
}

#[test]
fn only_invalid_patches_are_omitted() {
    let filter = compile();
    let places: Vec<_> = filter.patches.iter().map(|patch| patch.place.as_str()).collect();
    assert_eq!(
        places,
        ["shop/all configPatches[0] CLUSTER", "shop/all configPatches[3] CLUSTER"]
    );
    let [first, last] = filter.patches.as_slice() else {
        panic!()
    };
    assert_eq!(first.context, Some(PatchContext::SidecarOutbound));
    assert_eq!(first.cluster().map(|found| found.name.as_str()), Some("one"));
    let value: Cluster = first.read().expect("the value is a cluster");
    assert_eq!(value.connect_timeout.map(|timeout| timeout.seconds), Some(3));
    assert!(first.read::<Filter>().is_none());
    assert_eq!(last.operation, Operation::Add, "clusters have no order to insert into");
    assert!(last.adds_in(PatchContext::Gateway) && !last.adds_in(PatchContext::SidecarInbound));
}

/// A proxy that lacks an extension in the value would keep what the patch removes.
#[test]
fn removals_have_no_value() {
    let removal = "
  - applyTo: HTTP_ROUTE
    match: {routeConfiguration: {vhost: {route: {name: admin}}}}
    patch:
      operation: REMOVE
      value:
        typed_per_filter_config:
          x: {'@type': type.googleapis.com/envoy.extensions.filters.http.lua.v3.LuaPerRoute, disabled: true}
";
    let filter = compile_text(&[FILTER.trim_end(), removal].concat());
    let removal = filter.patches.last().expect("a patch");
    assert_eq!((removal.operation, &removal.value), (Operation::Remove, &None));
}

#[test]
fn proxies_match_by_release_and_metadata() {
    let proxy = &compile().patches[0].proxy;
    let metadata = |value: &str| Labels::from_iter([("A".into(), value.into())]);
    assert!(proxy.matches("1.30.3", &metadata("b")));
    assert!(!proxy.matches("1.29.0", &metadata("b")));
    assert!(!proxy.matches("", &metadata("b")), "no release matches no pattern");
    assert!(!proxy.matches("1.30.3", &metadata("true")));
    assert!(!proxy.matches("1.30.3", &Labels::new()));
    assert!(
        !VersionMatch::new("(").matches("1.30.3"),
        "a refused pattern matches nothing"
    );
}

#[test]
fn annotations_name_services() {
    let named = compile().referenced_services;
    let text: Vec<_> = named
        .iter()
        .map(|service| (service.namespace.as_deref().unwrap_or("any"), service.host.as_str()))
        .collect();
    assert_eq!(text, [("shop", "a.example"), ("any", "b.example")]);
}
