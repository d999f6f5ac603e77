mod access;

use serde_json::{Value, json};

use crate::{
    api::{Kind, folder},
    generate::{
        Proxy, ResourceType,
        fixture::{self, names},
        proxy::Identity,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, Installation, World, fixture as model},
    table::ChangeSet,
};

const SECRETS: &str = r"
{apiVersion: v1, kind: Secret, metadata: {name: cred, namespace: default}, stringData: {tls.crt: chain, tls.key: key, ca.crt: roots}}
---
{apiVersion: v1, kind: Secret, metadata: {name: other, namespace: default}, stringData: {cert: chain2, key: key2}}
---
{apiVersion: v1, kind: Secret, metadata: {name: far, namespace: elsewhere}, stringData: {cert: far, key: key, cacert: roots}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: roots, namespace: elsewhere}, data: {ca.crt: public}}
";

fn gateway(tls: &str) -> String {
    format!(
        "{{apiVersion: networking.istio.io/v1, kind: Gateway, metadata: {{name: g, namespace: default}}, spec: {{
        selector: {{app: gw}}, servers: [{{port: {{number: 443, name: https, protocol: HTTPS}}, hosts: ['*'], tls: {tls}}}]}}}}"
    )
}

/// Adds a grant for Gateways in `default` to refer to a Secret in `elsewhere`.
fn granted(config: &str, secret: &str) -> String {
    format!(
        "{config}\n---\n{{apiVersion: gateway.networking.k8s.io/v1beta1, kind: ReferenceGrant, metadata: {{name: g,
        namespace: elsewhere}}, spec: {{from: [{{group: gateway.networking.k8s.io, kind: Gateway, namespace: default}}],
        to: [{{group: '', kind: Secret, name: {secret}}}]}}}}"
    )
}

fn proxy(kind: &str, namespace: &str, app: &str) -> Proxy {
    let node = format!("{kind}~10.0.0.1~{app}.{namespace}~{namespace}.svc.cluster.local");
    Proxy {
        identity: Identity::from_spiffe(&format!("spiffe://cluster.local/ns/{namespace}/sa/{app}")),
        ..fixture::client(&node, &json!({"LABELS": {"app": app}}))
    }
}

fn router() -> Proxy {
    proxy("router", "default", "gw")
}

fn store(config: &str, proxies: Vec<Proxy>) -> ConfigStore {
    let files = [("mesh.yaml", ""), ("kube.yaml", SECRETS), ("config.yaml", config)];
    fixture::store(Installation::default(), &files, proxies)
}

fn secret(store: &ConfigStore, client: u64, name: &str) -> Value {
    fixture::resource(store, client, ResourceType::Secret, name)
}

fn remarks(store: &ConfigStore) -> Vec<String> {
    let notes = store.notes();
    let notes = notes.iter().filter(|note| note.code == super::CERTIFICATE_ERROR);
    notes.map(|note| note.detail.to_string()).collect()
}

#[test]
fn gateways_receive_certificates_and_ca_certificates() {
    let config = gateway("{mode: MUTUAL, credentialName: cred}");
    let store = store(&config, vec![router()]);
    let all = names(&store, 0, ResourceType::Secret);
    assert_eq!(all, ["kubernetes://cred", "kubernetes://cred-cacert"]);
    let certificate = &secret(&store, 0, "kubernetes://cred")["tlsCertificate"];
    assert_eq!(certificate["certificateChain"]["inlineBytes"], "Y2hhaW4=");
    assert_eq!(certificate["privateKey"]["inlineBytes"], "a2V5");
    let context = &secret(&store, 0, "kubernetes://cred-cacert")["validationContext"];
    assert_eq!(context["trustedCa"]["inlineBytes"], "cm9vdHM=");
    // Malformed content is sent, with a note.
    assert!(remarks(&store)[0].contains("it is not PEM"), "{:?}", remarks(&store));
}

#[test]
fn streams_without_identity_receive_no_secrets() {
    let adrift = fixture::changed(router(), |kind| kind.cluster = "".into());
    let mut anonymous = router();
    anonymous.identity = None;
    let store = store(
        &gateway("{mode: SIMPLE, credentialName: cred}"),
        vec![anonymous, adrift, router()],
    );
    for client in [0, 1] {
        assert!(names(&store, client, ResourceType::Secret).is_empty());
    }
    assert_eq!(names(&store, 2, ResourceType::Secret), ["kubernetes://cred"]);
}

#[test]
fn verified_secrets_do_not_depend_on_the_cluster() {
    let far = fixture::changed(router(), |node| node.cluster = "unknown".into());
    let name = "kubernetes-gateway://default/cred";
    let config = gateway(&format!("{{mode: SIMPLE, credentialName: '{name}'}}"));
    let store = store(&config, vec![far]);
    assert_eq!(names(&store, 0, ResourceType::Secret), [name]);
}

#[test]
fn secrets_depend_on_the_identity() {
    let config = gateway("{mode: SIMPLE, credentialNames: [cred, 'kubernetes://elsewhere/far']}");
    // The same node with another identity: it receives no secret of the first.
    let mut other = router();
    other.identity = Identity::from_spiffe("spiffe://cluster.local/ns/elsewhere/sa/gw");
    let store = store(&config, vec![router(), other]);
    assert_eq!(names(&store, 0, ResourceType::Secret), ["kubernetes://cred"]);
    assert_eq!(names(&store, 1, ResourceType::Secret), ["kubernetes://elsewhere/far"]);
    let denied = "kubernetes://elsewhere/far: a Secret of another namespace needs a ReferenceGrant; requested by \
                  gw.default of cluster Kubernetes";
    assert!(remarks(&store).contains(&denied.to_owned()), "{:?}", remarks(&store));
}

#[test]
fn gateway_secrets_need_a_gateway_and_a_grant() {
    let config = gateway(
        "{mode: SIMPLE, credentialNames: ['kubernetes-gateway://default/cred', 'kubernetes-gateway://elsewhere/far']}",
    );
    let denied = store(&config, vec![router()]);
    assert_eq!(
        names(&denied, 0, ResourceType::Secret),
        ["kubernetes-gateway://default/cred"]
    );
    let all = |name: &str| names(&store(&granted(&config, name), vec![router()]), 0, ResourceType::Secret).len();
    assert_eq!((all("far"), all("near")), (2, 1));
}

#[test]
fn gateways_of_users_have_no_other_namespace() {
    let parents = ", internal.istio.io/parents: ListenerSet/g";
    for (more, from) in [
        ("", "kind: Gateway, namespace: default"),
        (parents, "kind: ListenerSet, namespace: tenant"),
    ] {
        let config = format!(
            "{{apiVersion: networking.istio.io/v1, kind: Gateway, metadata: {{name: g, namespace: tenant,
            annotations: {{internal.istio.io/parent-namespace: default{more}}}}}, spec: {{selector: {{app: gw}},
            servers: [{{port: {{number: 443, name: https, protocol: HTTPS}}, hosts: ['*'],
            tls: {{mode: SIMPLE, credentialName: 'kubernetes-gateway://elsewhere/far'}}}}]}}}}"
        );
        let config = granted(&config, "far").replace("kind: Gateway, namespace: default", from);
        let served = names(&store(&config, vec![router()]), 0, ResourceType::Secret);
        assert!(served.is_empty(), "{from}: {served:?}");
    }
}

#[test]
fn gateways_validate_clients_by_secrets_of_the_gateway_api() {
    let served = |config: &str| names(&store(config, vec![router()]), 0, ResourceType::Secret);
    let certificate = "kubernetes-gateway://default/other";
    let gateway = |mode: &str, authority: &str| {
        gateway(&format!(
            "{{mode: {mode}, credentialName: '{certificate}', caCertCredentialName: 'kubernetes-gateway://{authority}'}}"
        ))
    };
    for mode in ["MUTUAL", "OPTIONAL_MUTUAL"] {
        let own = gateway(mode, "default/cred-cacert");
        assert_eq!(served(&own), ["kubernetes-gateway://default/cred-cacert", certificate]);
        let key = gateway(mode, "default/cred");
        assert_eq!(served(&key), [certificate], "a key is no CA certificate");
        let far = gateway(mode, "elsewhere/far-cacert");
        assert_eq!(served(&far), [certificate], "without a grant");
        let granted = granted(&far, "far");
        assert_eq!(
            served(&granted),
            [certificate, "kubernetes-gateway://elsewhere/far-cacert"]
        );
    }
}

#[test]
fn optional_client_certificates_are_validated_by_the_secret_of_the_server() {
    let config = gateway("{mode: OPTIONAL_MUTUAL, credentialName: 'kubernetes-gateway://default/cred'}");
    let store = store(&config, vec![router()]);
    let all = names(&store, 0, ResourceType::Secret);
    assert_eq!(
        all,
        [
            "kubernetes-gateway://default/cred",
            "kubernetes-gateway://default/cred-cacert"
        ]
    );
}

#[test]
fn every_reference_to_a_credential_counts() {
    let rules = "
{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: default}, spec: {host: a.com,
  trafficPolicy: {tls: {mode: MUTUAL, credentialName: other}}}}
---
{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: b, namespace: default}, spec: {host: b.com,
  workloadSelector: {matchLabels: {app: web}}, subsets: [{name: s, labels: {a: b}, trafficPolicy: {portLevelSettings: [
  {port: {number: 80}, tls: {mode: MUTUAL, credentialName: cred}}]}}]}}
---
{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: c, namespace: elsewhere}, spec: {host: c.com,
  trafficPolicy: {tls: {mode: SIMPLE, credentialName: 'configmap://elsewhere/roots'}}}}
---
{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: f, namespace: default}, spec: {
  workloadSelector: {labels: {app: filtered}}, configPatches: [{applyTo: CLUSTER, match: {context: SIDECAR_OUTBOUND}, patch: {
  operation: ADD, value: {name: x, transport_socket: {name: tls, typed_config: {
  '@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext, common_tls_context: {
  tls_certificate_sds_secret_configs: [{name: 'kubernetes://other', sds_config: {ads: {}}}]}}}}}}]}}
";
    let proxies = vec![
        proxy("sidecar", "default", "web"),
        proxy("sidecar", "default", "filtered"),
        router(),
        proxy("router", "elsewhere", "gw"),
    ];
    let store = store(rules, proxies);
    let of = |client| names(&store, client, ResourceType::Secret);
    let roots = "configmap://elsewhere/roots-cacert";
    assert_eq!(of(0), [roots, "kubernetes://cred", "kubernetes://cred-cacert"]);
    assert_eq!(of(1), [roots, "kubernetes://other"]);
    // A rule for selected clients also refers gateways to its credential; `other` has no CA certificates.
    assert_eq!(
        of(2),
        [
            roots,
            "kubernetes://cred",
            "kubernetes://cred-cacert",
            "kubernetes://other"
        ]
    );
    assert_eq!(of(3), [roots]);
    let context = &secret(&store, 1, roots)["validationContext"];
    assert_eq!(context["trustedCa"]["inlineBytes"], "cHVibGlj");
}

/// Rules are exported by default unless the mesh says `.`; other values of the mesh do not count.
#[test]
fn rules_count_where_they_are_visible_by_default() {
    let rule = "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: c, namespace: elsewhere},
        spec: {host: c.com, trafficPolicy: {tls: {mode: SIMPLE, credentialName: 'configmap://elsewhere/roots'}}}}";
    for (default, is_visible) in [("[elsewhere]", true), ("['~']", true), ("['.']", false)] {
        let mesh = format!("defaultDestinationRuleExportTo: {default}");
        let files = [
            ("mesh.yaml", mesh.as_str()),
            ("kube.yaml", SECRETS),
            ("config.yaml", rule),
        ];
        let store = fixture::store(
            Installation::default(),
            &files,
            vec![proxy("sidecar", "default", "web")],
        );
        let found = names(&store, 0, ResourceType::Secret);
        assert_eq!(found.len(), usize::from(is_visible), "{default}: {found:?}");
    }
}

#[test]
fn keys_may_be_used_by_a_provider() {
    let mesh = "defaultConfig: {privateKeyProvider: {qat: {pollDelay: 2.005s, fallback: true}}}";
    let config = gateway("{mode: MUTUAL, credentialName: cred}");
    let files = [
        ("mesh.yaml", mesh),
        ("kube.yaml", SECRETS),
        ("config.yaml", config.as_str()),
    ];
    let plain = fixture::changed(router(), |kind| kind.extensions = fixture::extensions(Some(&[])));
    let store = fixture::store(Installation::default(), &files, vec![router(), plain]);
    let certificate = &secret(&store, 0, "kubernetes://cred")["tlsCertificate"];
    let provider = &certificate["privateKeyProvider"];
    assert_eq!(
        (&provider["providerName"], &provider["fallback"]),
        (&json!("qat"), &json!(true))
    );
    assert_eq!(provider["typedConfig"]["pollDelay"], "0.005s");
    assert!(certificate.get("privateKey").is_none());
    // An Envoy without the provider gets the key itself.
    let certificate = &secret(&store, 1, "kubernetes://cred")["tlsCertificate"];
    assert!(certificate.get("privateKeyProvider").is_none());
}

#[test]
fn a_rotated_secret_rebuilds_one_resource() {
    let config = gateway("{mode: SIMPLE, credentialNames: [cred, other]}");
    let files = [
        ("mesh.yaml", ""),
        ("kube.yaml", SECRETS),
        ("config.yaml", config.as_str()),
    ];
    let mut world = World::new(Installation::default());
    let rows = model::folder(&Installation::default(), &files);
    let first = world.commit(rows.into_iter().map(Change::Upsert).collect());
    let mut store = ConfigStore::default();
    let connected = ProxyEvents {
        connected: vec![(ConnectionId(0), router().into())],
        ..ProxyEvents::default()
    };
    store.update(&first.snapshot, &ChangeSet::default(), connected, &Serial);
    let rotated = SECRETS.replace("chain,", "renewed,");
    let content = folder::FileContent::read("kube.yaml", rotated.as_bytes(), &model::CLUSTER);
    let rows = content.objects.into_iter().map(|(row, _)| Change::Upsert(row));
    let second = world.commit(rows.collect());
    let update = store.update(&second.snapshot, &second.changes, ProxyEvents::default(), &Serial);
    assert_eq!((update.built, update.groups.len(), update.moved.len()), (1, 1, 0));
    let certificate = &secret(&store, 0, "kubernetes://cred")["tlsCertificate"];
    assert_eq!(certificate["certificateChain"]["inlineBytes"], "cmVuZXdlZA==");
    let gone = world.commit(vec![Change::Remove(Kind::Secret, model::key("default/cred"))]);
    let update = store.update(&gone.snapshot, &gone.changes, ProxyEvents::default(), &Serial);
    assert_eq!(update.built, 1);
    assert_eq!(names(&store, 0, ResourceType::Secret), ["kubernetes://other"]);
}
