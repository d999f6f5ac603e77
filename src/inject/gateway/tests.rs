use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::*;
use crate::{
    api::label::NETWORK,
    inject::{Injector, Namespace},
};

const TEMPLATE: &str = r#"
templates:
  kube-gateway: |
    {{- range list "ServiceAccount" "Service" }}
    apiVersion: v1
    kind: {{ . }}
    metadata:
      name: {{ $.DeploymentName }}
      namespace: {{ $.Namespace }}
      labels: {{ toJsonMap $.InfrastructureLabels }}
      annotations:
        template: "{{ annotation $.ObjectMeta `sidecar.istio.io/proxyImage` `none` }}"
    spec:
      ports:
      {{- range $.Ports }}
      - {name: {{ .Name }}, port: {{ .Port }}, appProtocol: {{ .AppProtocol }}}
      {{- end }}
    ---
    {{- end }}
    apiVersion: policy/v1
    kind: PodDisruptionBudget
    metadata: {name: {{ .DeploymentName }}, namespace: {{ .Namespace }}}
    spec: {selector: {matchLabels: {a: b}}}
"#;

fn class() -> GatewayClass {
    GatewayClass {
        controller: "example.com/controller".to_owned(),
        label: "istio.io-gateway-controller",
        template: "kube-gateway",
        service_type: "LoadBalancer",
        has_plain_names: false,
        is_east_west: false,
    }
}

fn gateway(metadata: Json, spec: Json) -> Json {
    let mut gateway = json!({"metadata": {"name": "g", "namespace": "web", "uid": "u"},
        "spec": {"gatewayClassName": "istio"}});
    for (part, given) in [("metadata", metadata), ("spec", spec)] {
        for (key, value) in given.as_object().into_iter().flatten() {
            gateway[part][key] = value.clone();
        }
    }
    gateway
}

fn parameters(name: &str, data: &[(&str, &str)]) -> Parameters {
    let pair = |(key, text): &(&str, &str)| ((*key).to_owned(), (*text).to_owned());
    Parameters {
        namespace: "web".to_owned(),
        name: name.to_owned(),
        data: data.iter().map(pair).collect(),
    }
}

fn rendered(
    template: &str,
    gateway: &Json,
    class_parameters: Option<&Parameters>,
    parameters: Option<&Parameters>,
) -> Result<Vec<GatewayObject>, String> {
    let injector = Injector::parse(template, "global: {hub: h, tag: t}").expect("a valid configuration");
    let more = [Port {
        name: "set".to_owned(),
        number: 443,
        protocol: "HTTPS".to_owned(),
    }];
    let request = GatewayRequest {
        gateway,
        class: &class(),
        more_ports: &more,
        class_parameters,
        parameters,
        cluster: "c",
        kubernetes_version: 133,
        ambient: true,
        copies_metadata: true,
    };
    let environment = Environment {
        namespace: Arc::new(Namespace::default()),
        ..Environment::default()
    };
    let objects = injector.gateway_objects(&request, &environment);
    objects.map_err(|error| error.to_string())
}

#[test]
fn objects_have_labels_and_ports() {
    let listeners = json!([{"name": "a.b", "port": 80, "protocol": "HTTP"}, {"name": "c", "port": 80, "protocol": "TCP"},
        {"name": "d".repeat(80), "port": 81, "protocol": "TLS"}]);
    let gateway = gateway(json!({"labels": {"x": "y"}}), json!({"listeners": listeners}));
    let objects = rendered(TEMPLATE, &gateway, None, None).expect("objects");
    let kinds: Vec<ObjectKind> = objects.iter().map(|object| object.kind).collect();
    assert_eq!(
        kinds,
        [ObjectKind::ServiceAccount, ObjectKind::Service],
        "the budget has no patch"
    );
    let service = &objects[1];
    assert_eq!(service.name, "g-istio");
    assert_eq!(
        service.value["metadata"]["labels"],
        json!({"x": "y", "istio.io/dataplane-mode": "none", MANAGED: "example.com-controller"})
    );
    assert_eq!(
        service.value["spec"]["ports"],
        json!([
            {"name": "status-port", "port": 15021, "appProtocol": "tcp"},
            {"name": "a-b", "port": 80, "appProtocol": "http"},
            {"name": "d".repeat(63), "port": 81, "appProtocol": "tls"},
            {"name": "set", "port": 443, "appProtocol": "https"},
        ])
    );
}

#[test]
fn ports_differ_in_number_and_name() {
    let long = "d".repeat(70);
    let listener = |name: &str, port: u16| json!({"name": name, "port": port, "protocol": "HTTP"});
    let listeners = json!([
        listener("set", 80),
        listener("a.b", 81),
        listener("a-b", 82),
        listener("a-b-83", 84),
        listener("a-b", 83),
        listener(&long, 85),
        listener(&long, 86),
        listener("probes", 15021),
    ]);
    let gateway = gateway(json!({}), json!({"listeners": listeners}));
    let objects = rendered(TEMPLATE, &gateway, None, None).expect("objects");
    let ports = objects[1].value["spec"]["ports"].as_array().expect("a list").iter();
    let names: Vec<&str> = ports.map(|port| port["name"].as_str().expect("a name")).collect();
    let (first, second) = ("d".repeat(63), "d".repeat(60) + "-86");
    assert_eq!(
        names,
        [
            "status-port",
            "set",
            "a-b",
            "a-b-82",
            "a-b-83",
            "a-b-83-1",
            first.as_str(),
            second.as_str(),
            "set-443"
        ]
    );
}

#[test]
fn templates_see_the_types_of_go() {
    let listeners = json!([{"name": "a", "port": 443, "protocol": "HTTPS",
        "tls": {"mode": "Terminate", "certificateRefs": [{"name": "cert"}]},
        "allowedRoutes": {"namespaces": {"from": "Same"}}}]);
    let gateway = gateway(json!({"labels": {"x": "y"}}), json!({"listeners": listeners}));
    let seen = "{{ range .Spec.Listeners }}{{ .TLS.Mode }}{{ range .TLS.CertificateRefs }} {{ .Name }}{{ end }} \
                {{ .AllowedRoutes.Namespaces.From }}{{ end }} {{ .GetName }} {{ .GetLabels.x }} {{ .Gateway.Name }}";
    let template = format!(
        "templates:\n  kube-gateway: |\n    apiVersion: v1\n    kind: Service\n    metadata:\n      \
         name: {{{{ .DeploymentName }}}}\n      namespace: {{{{ .Namespace }}}}\n      \
         annotations: {{seen: '{seen}'}}\n"
    );
    let objects = rendered(&template, &gateway, None, None).expect("objects");
    assert_eq!(
        objects[0].value["metadata"]["annotations"]["seen"],
        "Terminate cert Same g y g"
    );
}

#[test]
fn patches_apply_in_order() {
    let reference = json!({"parametersRef": {"group": "", "kind": "ConfigMap", "name": "own"}});
    let gateway = gateway(json!({}), json!({"infrastructure": reference}));
    let of_class = parameters("class", &[("service", "spec: {type: A, clusterIP: None}")]);
    let own = parameters(
        "own",
        &[
            ("service", "spec:\n  type: B\n  ports: [{port: 443, nodePort: 7}]"),
            ("podDisruptionBudget", "spec: {selector: {matchExpressions: []}}"),
        ],
    );
    let objects = rendered(TEMPLATE, &gateway, Some(&of_class), Some(&own)).expect("objects");
    let spec = &objects[1].value["spec"];
    assert_eq!((&spec["type"], &spec["clusterIP"]), (&json!("B"), &json!("None")));
    let https = json!({"name": "set", "port": 443, "appProtocol": "https", "nodePort": 7});
    assert!(
        spec["ports"].as_array().is_some_and(|ports| ports.contains(&https)),
        "{spec}"
    );
    // As in Kubernetes, the selector of a budget is replaced as a whole.
    assert_eq!(objects[2].value["spec"]["selector"], json!({"matchExpressions": []}));
    let error = rendered(TEMPLATE, &gateway, None, None).map(|objects| objects.len());
    assert_eq!(
        error,
        Err(
            "Gateway web/g: spec.infrastructure.parametersRef: parametersRef targeting configmap \"web/own\", \
             but configmap does not exist"
                .to_owned()
        )
    );
}

#[test]
fn r12_patches_change_no_identity() {
    let reference = json!({"parametersRef": {"group": "", "kind": "ConfigMap", "name": "own"}});
    let gateway = gateway(json!({}), json!({"infrastructure": reference}));
    for (patch, reason) in [
        (
            "metadata: {name: other}",
            "illegal metadata change: metadata.name may not be set",
        ),
        (
            "metadata: {namespace: kube-system}",
            "metadata.namespace may not be set",
        ),
        (
            "metadata: {ownerReferences: [{uid: x}]}",
            "metadata.ownerReferences may not be set",
        ),
        ("metadata: {finalizers: [a]}", "metadata.finalizers may not be set"),
        ("metadata: {managedFields: []}", "metadata.managedFields may not be set"),
        ("metadata: null", "metadata.name may not be set"),
        ("metadata: {$patch: replace}", "metadata.name may not be set"),
        ("metadata: text", "metadata.name may not be set"),
        ("$patch: delete", "metadata.name may not be set"),
        ("text", "the patch must be an object"),
        ("a: b\n---\nc: d", "the patch must be one document"),
        ("spec: {ports: [{name: a}]}", "strategic merge patch failed"),
        ("a: [", "the patch is not YAML"),
    ] {
        let own = parameters("own", &[("service", patch)]);
        let error = rendered(TEMPLATE, &gateway, None, Some(&own)).map(|objects| objects.len());
        let error = error.expect_err(patch);
        assert!(
            error.starts_with("ConfigMap web/own: data.service: ") && error.contains(reason),
            "{error}"
        );
    }
    let own = parameters("own", &[("service", "{apiVersion: v1, kind: Secret}")]);
    let error = rendered(TEMPLATE, &gateway, None, Some(&own)).expect_err("a secret");
    assert!(error.contains("unexpected object kind \"Secret\""), "{error}");
    let own = parameters("own", &[("ingress", "{}")]);
    let error = rendered(TEMPLATE, &gateway, None, Some(&own)).expect_err("another key");
    assert!(
        error.starts_with("ConfigMap web/own: data.ingress: unsupported overlay"),
        "{error}"
    );
}

#[test]
fn labels_of_any_shape_do_not_panic() {
    let reference = json!({"parametersRef": {"group": "", "kind": "ConfigMap", "name": "own"}});
    let gateway = gateway(json!({}), json!({"infrastructure": reference}));
    let own = parameters(
        "own",
        &[("service", "metadata: {labels: [1], annotations: 7}\nspec: 1")],
    );
    let objects = rendered(TEMPLATE, &gateway, None, Some(&own)).expect("objects");
    assert_eq!(
        objects[1].value["metadata"]["labels"],
        json!({MANAGED: "example.com-controller"})
    );
}

#[test]
fn r12_templates_render_allowed_objects_only() {
    let with = |object: &str| {
        format!(
            "templates:\n  kube-gateway: |\n    {}\n",
            object.replace('\n', "\n    ")
        )
    };
    let gateway = gateway(json!({}), json!({}));
    for (object, reason) in [
        (
            "{apiVersion: v1, kind: Secret, metadata: {name: g, namespace: web}}",
            "unexpected object kind",
        ),
        (
            "{apiVersion: v2, kind: Service, metadata: {name: g, namespace: web}}",
            "unexpected object kind",
        ),
        (
            "{apiVersion: a.b/v1, kind: Service, metadata: {name: g, namespace: web}}",
            "unexpected object kind",
        ),
        (
            "{apiVersion: v1, kind: Service, metadata: {name: g, namespace: kube-system}}",
            "object namespace",
        ),
        (
            "{apiVersion: v1, kind: Service, metadata: {name: other, namespace: web}}",
            "object name",
        ),
        (
            "{apiVersion: v1, kind: Service, metadata: {name: g/../x, namespace: web}}",
            "object name",
        ),
        ("[1]", "unexpected object kind"),
        ("{{ fail \"x\" }}", "x"),
    ] {
        let error = rendered(&with(object), &gateway, None, None).map(|objects| objects.len());
        let error = error.expect_err(object);
        assert!(
            error.starts_with("injector configuration: templates.kube-gateway: "),
            "{error}"
        );
        assert!(error.contains(reason), "{error}");
    }
    let error = rendered("templates: {}", &gateway, None, None).expect_err("no template");
    assert!(error.ends_with("the template does not exist"), "{error}");
}

#[test]
fn r12_control_characters_are_refused() {
    let image = "sidecar.istio.io/proxyImage";
    for (metadata, spec, field) in [
        (
            json!({"annotations": {image: "a\n  b: c"}}),
            json!({}),
            "metadata.annotations[\"sidecar.istio.io/proxyImage\"]",
        ),
        (
            json!({"annotations": {SERVICE_TYPE: "a\u{85}"}}),
            json!({}),
            "metadata.annotations[\"networking.istio.io/service-type\"]",
        ),
        (
            json!({"labels": {NETWORK: "a\u{7}"}}),
            json!({}),
            "metadata.labels[\"topology.istio.io/network\"]",
        ),
        (
            json!({}),
            json!({"infrastructure": {"annotations": {image: "a\r"}}}),
            "spec.infrastructure.annotations[\"sidecar.istio.io/proxyImage\"]",
        ),
        (
            json!({}),
            json!({"addresses": [{"value": "1\n"}]}),
            "spec.addresses[0].value",
        ),
        (
            json!({}),
            json!({"listeners": [{"name": "a\nb"}]}),
            "spec.listeners[0].name",
        ),
    ] {
        let error = rendered(TEMPLATE, &gateway(metadata, spec), None, None).expect_err(field);
        assert!(
            error.starts_with(&format!(
                "Gateway web/g: {field}: the value contains the control character"
            )),
            "{error}"
        );
    }
    for annotation in [NAME_OVERRIDE, SERVICE_ACCOUNT] {
        let gateway = gateway(json!({"annotations": {annotation: "a: b"}}), json!({}));
        let error = rendered(TEMPLATE, &gateway, None, None).expect_err(annotation);
        assert!(error.ends_with("\"a: b\" is not the name of an object"), "{error}");
    }
    // Copied as JSON.
    let copied = gateway(
        json!({"annotations": {"note": "a\nb", "proxy.istio.io/config": "a:\n  b"}}),
        json!({}),
    );
    assert!(rendered(TEMPLATE, &copied, None, None).is_ok());
}

#[test]
fn addresses_decide_who_deploys() {
    let of = |addresses: Json| gateway(json!({}), json!({"addresses": addresses}));
    assert!(is_managed(&gateway(json!({}), json!({})), true));
    assert!(is_managed(&of(json!([{"value": "1.2.3.4"}])), true));
    assert!(is_managed(
        &of(json!([{"type": "IPAddress", "value": "1.2.3.4"}])),
        true
    ));
    assert!(!is_managed(&of(json!([{"type": "Hostname", "value": "a"}])), true));
    assert!(!is_managed(
        &of(json!([{"value": "1.2.3.4"}, {"value": "1.2.3.5"}])),
        true
    ));
    assert!(is_managed(&of(json!([{"type": "Hostname", "value": "a"}])), false));
}
