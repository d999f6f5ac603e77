//! Unit tests of whole injections.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::api::label::NETWORK;

/// A small template with a proxy, an init container and a volume.
const SIDECAR: &str = "
policy: enabled
aliases: {both: [sidecar, extra]}
injectedAnnotations: {injected: \"yes\"}
templates:
  sidecar: |
    metadata:
      labels:
        tls: {{ index .ObjectMeta.Labels `tls` | default `istio` | quote }}
    spec:
      initContainers:
      - name: istio-init
        args: [\"-u\", \"{{ .ProxyUID }}\"]
      containers:
      - name: istio-proxy
        image: {{ .ProxyImage }}
        ports:
        - containerPort: 15090
        env:
        - name: OWNER
          value: {{ .TypeMeta.Kind }}/{{ .DeploymentMeta.Name }}
        - name: APPS
          value: '{{ range .Spec.Containers }}{{ if ne .Name `istio-proxy` }}{{ .Name }};{{ end }}{{ end }}'
        resources:
          limits:
            cpu: 2000m
      volumes:
      - name: istio-data
        emptyDir: {}
  extra: |
    spec:
      containers:
      - name: istio-proxy
        env:
        - name: EXTRA
          value: \"{{ .NativeSidecars }}\"
  native: |
    spec:
      initContainers:
      - name: istio-proxy
        image: {{ .ProxyImage }}
        restartPolicy: Always
  loop: '{{ range until 100000 }}{{ range until 100000 }}x{{ end }}{{ end }}'
  list: '[a]'
  broken: 'a: b: c'
  typed: 'spec: {containers: [{name: a, args: [1]}]}'
  nil: '{{ .Spec.SecurityContext.RunAsUser }}'
";

const VALUES: &str = "
global: {hub: hub, tag: v1, network: n1}
sidecarInjectorWebhook: {rewriteAppHTTPProbe: true}
";

fn injector() -> Injector {
    Injector::parse(SIDECAR, VALUES).expect("the configuration is valid")
}

fn environment() -> Environment {
    Environment {
        namespace: Arc::new(Namespace {
            name: "ns".to_owned(),
            ..Namespace::default()
        }),
        ..Environment::default()
    }
}

/// Applies operations as the API server does.
fn applied(mut document: Json, patch: &Patch) -> Json {
    for operation in patch.operations() {
        let path = operation["path"].as_str().expect("a path");
        let (parent, member) = path.rsplit_once('/').expect("not the root");
        let member = member.replace("~1", "/").replace("~0", "~");
        let target = document
            .pointer_mut(parent)
            .unwrap_or_else(|| panic!("{parent} exists"));
        let value = || operation["value"].clone();
        match (operation["op"].as_str(), target) {
            (Some("remove"), Json::Object(entries)) => drop(entries.remove(&member).expect("it exists")),
            (Some("remove"), Json::Array(items)) => drop(items.remove(member.parse().expect("an index"))),
            (Some("add"), Json::Array(items)) => items.insert(member.parse().expect("an index"), value()),
            (Some("replace"), Json::Array(items)) => items[member.parse::<usize>().expect("an index")] = value(),
            (Some("add" | "replace"), Json::Object(entries)) => drop(entries.insert(member, value())),
            other => panic!("{other:?}"),
        }
    }
    document
}

fn inject(pod: &Json, environment: &Environment) -> Json {
    match injector().inject(pod, environment) {
        Ok(Outcome::Patch(patch)) => applied(pod.clone(), &patch),
        other => panic!("{pod} is not injected: {other:?}"),
    }
}

fn error(template: &str) -> String {
    let pod = json!({"metadata": {"annotations": {"inject.istio.io/templates": template}}});
    injector().inject(&pod, &environment()).unwrap_err().to_string()
}

fn names(pod: &Json, field: &str) -> Vec<String> {
    pod::list(pod, field)
        .iter()
        .map(|it| pod::name(it).to_owned())
        .collect()
}

fn variable<'a>(pod: &'a Json, name: &str) -> Option<&'a str> {
    let variables = pod::sidecar(pod)?.get("env")?.as_array()?;
    pod::find(variables, name)?.get("value")?.as_str()
}

fn web() -> Json {
    json!({
        "metadata": {"generateName": "web-5d9-", "labels": {"pod-template-hash": "5d9"}, "ownerReferences": [
            {"controller": true, "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d9", "uid": "u"}]},
        "spec": {"containers": [
            {"name": "web", "ports": [{"name": "http", "containerPort": 80}],
             "readinessProbe": {"httpGet": {"port": "http", "path": "/ok?a=1&b=2", "scheme": "HTTPS"},
                                "timeoutSeconds": 3},
             "livenessProbe": {"grpc": {"port": 81}},
             "startupProbe": {"exec": {"command": ["true"]}},
             "lifecycle": {"preStop": {"tcpSocket": {"port": 82}}, "postStart": {"sleep": {"seconds": 1}}}},
        ]},
    })
}

/// A pod for each treatment that injection knows.
fn pods() -> Vec<Json> {
    let annotated = |annotations: Json, containers: Json| {
        let metadata = json!({"name": "p", "annotations": annotations});
        json!({"metadata": metadata, "spec": {"containers": containers}})
    };
    let app = || json!([{"name": "app", "image": "a"}]);
    vec![
        web(),
        annotated(json!({"prometheus.io/port": "9090", "prometheus.io/path": "/m"}), app()),
        annotated(json!({"prometheus-io/scrape": "false"}), app()),
        annotated(json!({"inject.istio.io/templates": "both"}), app()),
        annotated(
            json!({}),
            json!([{"name": "istio-proxy", "image": "auto", "resources": {"limits": {"cpu": "1"}},
                    "securityContext": {"runAsUser": 7}}, {"name": "app"}]),
        ),
        annotated(
            json!({"inject.istio.io/templates": "native"}),
            json!([{"name": "istio-proxy", "image": "own", "args": ["x"]}, {"name": "app"}]),
        ),
        annotated(
            json!({"proxy.istio.io/config": "holdApplicationUntilProxyStarts: true"}),
            app(),
        ),
        annotated(json!(null), json!([])),
    ]
}

#[test]
fn templates_see_the_workload() {
    let pod = inject(&web(), &environment());
    assert_eq!(variable(&pod, "OWNER"), Some("Deployment/web"));
    assert_eq!(variable(&pod, "APPS"), Some("web;"));
    assert_eq!(names(&pod, "containers"), ["web", "istio-proxy"]);
    assert_eq!(pod::annotation(&pod, "injected"), Some("yes"));
    assert_eq!(pod::label(&pod, "tls"), Some("istio"));
    assert_eq!(pod::label(&pod, NETWORK), Some("n1"));
    assert_eq!(variable(&pod, "ISTIO_META_NETWORK"), Some("n1"));
    let sidecar = pod::sidecar(&pod).expect("a proxy");
    assert_eq!(sidecar["image"], "hub/proxyv2:v1");
    assert_eq!(sidecar["resources"]["limits"]["cpu"], "2");
}

#[test]
fn second_injection_changes_nothing() {
    for pod in pods() {
        let once = inject(&pod, &environment());
        match injector().inject(&once, &environment()) {
            Ok(Outcome::Patch(patch)) => assert_eq!(patch.operations(), &[] as &[Json], "{once:#}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn variables_with_equal_names_keep_their_places() {
    let sidecar = "spec:\n  containers:\n  - name: istio-proxy\n    env:\n    - {name: A, value: a}\n    \
                   - {name: B, value: b}\n    - {name: A, value: c}\n";
    let config = json!({"policy": "enabled", "templates": {"sidecar": sidecar}});
    let injector = Injector::parse(&config.to_string(), VALUES).expect("the configuration is valid");
    let patch = |pod: &Json| match injector.inject(pod, &environment()) {
        Ok(Outcome::Patch(patch)) => patch,
        other => panic!("{other:?}"),
    };
    let once = applied(web(), &patch(&web()));
    let variables = &pod::sidecar(&once).expect("a proxy")["env"];
    let names: Vec<&str> = variables.as_array().into_iter().flatten().map(pod::name).collect();
    assert_eq!(names[..3], ["A", "B", "A"]);
    assert_eq!(patch(&once).operations(), &[] as &[Json]);
}

#[test]
fn patches_fit_pods_as_they_were_written() {
    let sparse = json!({"spec": {"containers": [{"name": "istio-proxy", "image": "auto"}]}});
    let verbose = json!({
        "metadata": {"annotations": null, "labels": {}, "creationTimestamp": null, "managedFields": [{"manager": "m"}]},
        "spec": {"containers": [{"name": "istio-proxy", "image": "auto", "resources": {}, "env": [], "args": null}],
                 "initContainers": [], "volumes": null, "unknownField": {"kept": 1}},
    });
    let (sparse, verbose) = (inject(&sparse, &environment()), inject(&verbose, &environment()));
    assert_eq!(verbose["spec"]["unknownField"]["kept"], 1);
    assert_eq!(verbose["metadata"]["managedFields"][0]["manager"], "m");
    assert_eq!(verbose["spec"]["initContainers"], sparse["spec"]["initContainers"]);
    assert_eq!(verbose["spec"]["volumes"], sparse["spec"]["volumes"]);
}

#[test]
fn probes_are_redirected() {
    let pod = inject(&web(), &environment());
    let web = pod::find(pod::list(&pod, "containers"), "web").expect("the application");
    assert_eq!(
        web["readinessProbe"],
        json!({"httpGet": {"path": "/app-health/web/readyz", "port": 15020, "scheme": "HTTP"}, "timeoutSeconds": 3})
    );
    assert_eq!(
        web["livenessProbe"],
        json!({"httpGet": {"path": "/app-health/web/livez", "port": 15020}})
    );
    assert_eq!(web["startupProbe"], json!({"exec": {"command": ["true"]}}));
    assert_eq!(
        web["lifecycle"],
        json!({"preStop": {"httpGet": {"path": "/app-lifecycle/web/prestopz", "port": 15020}},
               "postStart": {"sleep": {"seconds": 1}}})
    );
    assert_eq!(
        variable(&pod, "ISTIO_KUBE_APP_PROBERS"),
        Some(
            "{\"/app-health/web/livez\":{\"grpc\":{\"port\":81,\"service\":null}},\
             \"/app-health/web/readyz\":{\"httpGet\":{\"path\":\"/ok?a=1\\u0026b=2\",\"port\":80,\"scheme\":\"HTTPS\"},\
             \"timeoutSeconds\":3},\"/app-lifecycle/web/prestopz\":{\"tcpSocket\":{\"port\":82}}}"
        )
    );
}

#[test]
fn intercepted_ports_do_not_limit_probes() {
    let expected = inject(&web(), &environment());
    for (name, value) in [
        ("traffic.sidecar.istio.io/includeInboundPorts", ""),
        ("traffic.sidecar.istio.io/includeInboundPorts", "9000"),
        ("traffic.sidecar.istio.io/excludeInboundPorts", "80,81"),
    ] {
        let mut pod = web();
        pod["metadata"]["annotations"] = json!({name: value});
        let pod = inject(&pod, &environment());
        assert_eq!(pod["spec"], expected["spec"], "{name}: {value}");
    }
}

#[test]
fn annotation_and_port_keep_probes() {
    let mut pod = web();
    pod["metadata"]["annotations"] = json!({"sidecar.istio.io/rewriteAppHTTPProbers": "false"});
    let kept = inject(&pod, &environment());
    assert_eq!(
        kept["spec"]["containers"][0]["readinessProbe"],
        pod["spec"]["containers"][0]["readinessProbe"]
    );
    for port in ["9", " 9 "] {
        pod["metadata"]["annotations"] = json!({"status.sidecar.istio.io/port": port});
        let moved = inject(&pod, &environment());
        assert_eq!(moved["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"], 9);
    }
    pod["metadata"]["annotations"] = json!({"status.sidecar.istio.io/port": "0"});
    let kept = inject(&pod, &environment());
    for field in ["readinessProbe", "livenessProbe", "startupProbe", "lifecycle"] {
        let (kept, own) = (&kept["spec"]["containers"][0], &pod["spec"]["containers"][0]);
        assert_eq!(kept[field], own[field], "{field}");
    }
    assert_eq!(variable(&kept, "ISTIO_KUBE_APP_PROBERS"), None);
}

#[test]
fn prometheus_scrapes_the_agent() {
    let annotated = |annotations: Json| {
        let pod = json!({"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "a"}]}});
        inject(&pod, &environment())
    };
    let merged = annotated(json!({"prometheus.io/port": "9090", "prometheus_io_scrape": "true"}));
    assert_eq!(
        variable(&merged, "ISTIO_PROMETHEUS_ANNOTATIONS"),
        Some("{\"scrape\":\"true\",\"path\":\"\",\"port\":\"9090\"}")
    );
    assert_eq!(pod::annotation(&merged, "prometheus_io_scrape"), None);
    assert_eq!(pod::annotation(&merged, "prometheus.io/port"), Some("15020"));
    let unmerged = annotated(json!({"prometheus.io/scrape": "false"}));
    assert_eq!(pod::annotation(&unmerged, "prometheus.io/port"), None);
    let opted_out = annotated(json!({"prometheus.istio.io/merge-metrics": "false", "prometheus.io/port": "9090"}));
    assert_eq!(pod::annotation(&opted_out, "prometheus.io/port"), Some("9090"));
}

#[test]
fn settings_of_users_take_precedence() {
    let pod = inject(&pods()[4], &environment());
    let sidecar = pod::sidecar(&pod).expect("a proxy");
    assert_eq!(sidecar["image"], "hub/proxyv2:v1");
    assert_eq!(sidecar["resources"]["limits"]["cpu"], "1");
    assert_eq!(pod["spec"]["initContainers"][0]["args"], json!(["-u", "7"]));
    assert_eq!(
        pod::annotation(&pod, "proxy.istio.io/overrides"),
        Some(
            "{\"containers\":[{\"name\":\"istio-proxy\",\"resources\":{\"limits\":{\"cpu\":\"1\"}},\
             \"securityContext\":{\"runAsUser\":7}}]}"
        )
    );
    let native = inject(&pods()[5], &environment());
    assert_eq!(names(&native, "containers"), ["app"]);
    assert_eq!(native["spec"]["initContainers"][0]["image"], "own");
    assert_eq!(native["spec"]["initContainers"][0]["restartPolicy"], "Always");
}

#[test]
fn proxy_comes_first_if_applications_wait() {
    assert_eq!(
        names(&inject(&pods()[6], &environment()), "containers"),
        ["istio-proxy", "app"]
    );
}

#[test]
fn path_sets_variables_of_the_proxy() {
    let mut environment = environment();
    environment.proxy_variables = proxy_variables("/inject/cluster/east/net/n2/owner/path");
    let pod = inject(&web(), &environment);
    assert_eq!(variable(&pod, "ISTIO_META_CLUSTER_ID"), Some("east"));
    assert_eq!(variable(&pod, "ISTIO_META_NETWORK"), Some("n2"));
    assert_eq!(variable(&pod, "OWNER"), Some("path"));
    let mut labeled = web();
    labeled["metadata"]["labels"][NETWORK] = json!("n3");
    assert_eq!(
        variable(&inject(&labeled, &environment), "ISTIO_META_NETWORK"),
        Some("n3")
    );
}

#[test]
fn templates_see_the_types_of_go() {
    let pod = json!({
        "metadata": {"name": "web", "namespace": "ns", "labels": {"app": "x"}, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]},
        "spec": {
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
            "containers": [{"name": "web", "resources": {"limits": {"memory": "512Mi"}, "requests": {"cpu": "1500u"}},
                "readinessProbe": {"httpGet": {"port": 8080}}, "livenessProbe": {"httpGet": {"port": "http"}}}],
            "volumes": [{"name": "v", "configMap": {"name": "c"}}],
        },
    });
    for (template, expected) in [
        (
            "{{ $resources.Limits.Memory }} {{ $resources.Limits.Memory.Value }}",
            "512Mi 536870912",
        ),
        (
            "{{ $resources.Limits.Cpu }} {{ $resources.Limits.Cpu.IsZero }}",
            "0 true",
        ),
        (
            "{{ $resources.Requests.Cpu.IsZero }} {{ $resources.Requests.Cpu.MilliValue }}",
            "false 2",
        ),
        (
            "{{ range $name, $value := $resources.Requests }}{{ $name }}={{ $value }}{{ end }}",
            "cpu=1500u",
        ),
        (
            "{{ if $resources.Limits }}limited {{ len $resources.Limits }}{{ end }}",
            "limited 1",
        ),
        (
            "{{ if .Spec.Overhead }}overhead{{ end }}{{ toJson $resources }}",
            "{\"limits\":{\"memory\":\"512Mi\"},\"requests\":{\"cpu\":\"1500u\"}}",
        ),
        (
            "{{ with $container.ReadinessProbe.HTTPGet }}{{ .Port }} {{ .Port.Type }} {{ .Port.IntVal }}{{ end }} \
             {{ $container.ReadinessProbe.HTTPGet.Port.IntValue }}",
            "8080 0 8080 8080",
        ),
        (
            "{{ with $container.LivenessProbe.HTTPGet }}{{ .Port }} {{ .Port.Type }} {{ .Port.StrVal }}{{ end }} \
             {{ $container.LivenessProbe.HTTPGet.Port.IntValue }}",
            "http 1 http 0",
        ),
        (
            "{{ with $container.LivenessProbe.ProbeHandler }}{{ .HTTPGet.Port }} {{ toJson . }}{{ end }}",
            "http {\"httpGet\":{\"port\":\"http\"}}",
        ),
        (
            "{{ with (index .Spec.Volumes 0).VolumeSource }}\
             {{ .ConfigMap.LocalObjectReference.Name }} {{ toJson . }}{{ end }}",
            "c {\"configMap\":{\"name\":\"c\"}}",
        ),
        (
            "{{ .ProxyConfig.DrainDuration.AsDuration }} {{ .ProxyConfig.DrainDuration.AsDuration.Seconds }}",
            "45s 45",
        ),
        (
            "{{ deepEqual $resources.Limits.Cpu $resources.Requests.Pods }} \
             {{ deepEqual $resources.Limits.Memory $resources.Limits.Cpu }}",
            "true false",
        ),
        (
            "{{ .ObjectMeta.GetNamespace }}/{{ .ObjectMeta.GetName }} {{ .ObjectMeta.GetLabels.app }}",
            "ns/web x",
        ),
        ("{{ (index .ObjectMeta.GetOwnerReferences 0).Kind }}", "Node"),
        (
            "{{ .DeploymentMeta }} {{ .DeploymentMeta.String }} {{ .DeploymentMeta.Name }}",
            "ns/web ns/web web",
        ),
        (
            "{{ with .Spec.Affinity.NodeAffinity }}\
             {{ range .RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms }}\
             {{ range .MatchExpressions }}{{ .Key }}{{ .Values }}{{ end }}{{ end }}{{ end }}\
             {{ if .Spec.Affinity.PodAffinity }}pods{{ end }}",
            "zone[a]",
        ),
    ] {
        let variables = "{{ $container := index .Spec.Containers 0 }}{{ $resources := $container.Resources }}";
        let sidecar = format!(
            "metadata:\n  annotations:\n    seen: '{variables}{template}'\n\
             spec:\n  containers:\n  - name: istio-proxy\n"
        );
        let config = json!({"policy": "enabled", "templates": {"sidecar": sidecar}});
        let injector =
            Injector::parse(&config.to_string(), "global: {hub: hub, tag: v1}").expect("the configuration is valid");
        let seen = match injector.inject(&pod, &environment()) {
            Ok(Outcome::Patch(patch)) => applied(pod.clone(), &patch)["metadata"]["annotations"]["seen"].clone(),
            other => panic!("{template}: {other:?}"),
        };
        assert_eq!(seen, expected, "{template}");
    }
}

/// Returns an environment with ProxyConfig resources of these namespaces.
fn with_proxy_configs<const N: usize>(resources: [(&str, Json); N]) -> Environment {
    let resource = |(namespace, json): (&str, Json)| {
        let config = crate::proto::json::from_json(&json, crate::proto::json::Unknown::Deny);
        (namespace.to_owned(), config.expect("a ProxyConfig"))
    };
    Environment {
        proxy_configs: resources.into_iter().map(resource).collect(),
        ..environment()
    }
}

/// Returns the image of the proxy of a pod.
fn image(environment: &Environment, metadata: Json) -> Option<Json> {
    let pod = json!({"metadata": metadata, "spec": {"containers": []}});
    pod::sidecar(&inject(&pod, environment)).map(|sidecar| sidecar["image"].clone())
}

#[test]
fn proxy_config_resources_apply_by_scope() {
    let selecting = json!({"selector": {"matchLabels": {"app": "x"}}, "image": {"imageType": "distroless"}});
    let environment = with_proxy_configs([
        ("istio-system", json!({"image": {"imageType": "debug"}})),
        ("ns", selecting),
    ]);
    let image = |metadata: Json| image(&environment, metadata);
    let selected = json!({"app": "x"});
    assert_eq!(image(json!({})), Some(json!("hub/proxyv2:v1-debug")));
    assert_eq!(
        image(json!({"labels": selected})),
        Some(json!("hub/proxyv2:v1-distroless"))
    );
    let annotations = json!({"proxy.istio.io/config": "image: {imageType: own}"});
    assert_eq!(
        image(json!({"annotations": annotations})),
        Some(json!("hub/proxyv2:v1-own"))
    );
    assert_eq!(
        image(json!({"annotations": annotations, "labels": selected})),
        Some(json!("hub/proxyv2:v1-distroless"))
    );
}

#[test]
fn annotation_replaces_the_interception_mode_of_the_mesh() {
    let mesh = json!({"defaultConfig": {"interceptionMode": "TPROXY"}});
    let mesh = crate::api::mesh_config::parse(&mesh).expect("the mesh config is valid");
    let environment = Environment {
        mesh: Arc::new(Mesh::new(mesh.config)),
        ..environment()
    };
    let sidecar = "metadata: {labels: {seen: '{{ .ProxyConfig.InterceptionMode }}'}}";
    let config = json!({"policy": "enabled", "templates": {"sidecar": sidecar}});
    let injector = Injector::parse(&config.to_string(), VALUES).expect("the configuration is valid");
    for (annotation, expected) in [("{}", "TPROXY"), ("interceptionMode: REDIRECT", "REDIRECT")] {
        let pod = json!({"metadata": {"annotations": {"proxy.istio.io/config": annotation}}, "spec": {}});
        let injected = match injector.inject(&pod, &environment) {
            Ok(Outcome::Patch(patch)) => applied(pod, &patch),
            other => panic!("{annotation}: {other:?}"),
        };
        assert_eq!(pod::label(&injected, "seen"), Some(expected), "{annotation}");
    }
}

#[test]
fn empty_image_type_replaces_the_variant() {
    let values = VALUES.replace("tag: v1", "tag: v1, variant: distroless");
    let injector = Injector::parse(SIDECAR, &values).expect("the configuration is valid");
    let pod = json!({"spec": {"containers": []}});
    let image = |environment: &Environment| match injector.inject(&pod, environment) {
        Ok(Outcome::Patch(patch)) => pod::sidecar(&applied(pod.clone(), &patch)).map(|it| it["image"].clone()),
        other => panic!("{other:?}"),
    };
    assert_eq!(image(&environment()), Some(json!("hub/proxyv2:v1-distroless")));
    let empty = with_proxy_configs([("ns", json!({"image": {"imageType": ""}}))]);
    assert_eq!(image(&empty), Some(json!("hub/proxyv2:v1")));
}

#[test]
fn proxy_config_resources_select_pods_of_the_root_namespace() {
    let selecting = json!({"selector": {"matchLabels": {"app": "x"}}, "image": {"imageType": "debug"}});
    let mut environment = with_proxy_configs([("istio-system", selecting)]);
    let selected = json!({"labels": {"app": "x"}});
    assert_eq!(image(&environment, selected.clone()), Some(json!("hub/proxyv2:v1")));
    environment.namespace = Arc::new(Namespace {
        name: "istio-system".to_owned(),
        ..Namespace::default()
    });
    assert_eq!(image(&environment, selected), Some(json!("hub/proxyv2:v1-debug")));
    assert_eq!(image(&environment, json!({})), Some(json!("hub/proxyv2:v1")));
}

#[test]
fn proxy_config_resources_with_an_empty_selector_have_no_effect() {
    let resource = |selector: Json| json!({"selector": selector, "image": {"imageType": "debug"}});
    let environment = with_proxy_configs([
        ("istio-system", resource(json!({}))),
        ("ns", resource(json!({"matchLabels": {}}))),
    ]);
    let metadata = json!({"labels": {"app": "x"}});
    assert_eq!(image(&environment, metadata), Some(json!("hub/proxyv2:v1")));
}

#[test]
fn user_that_openshift_assigned_is_no_setting_of_the_proxy() {
    let environment = Environment {
        platform: Platform::OpenShift,
        ..environment()
    };
    let container = |name: &str, user: i64| json!({"name": name, "securityContext": {"runAsUser": user}});
    let list = |name: &str, users: &[i64]| -> Vec<Json> {
        let users = users.iter().enumerate();
        users
            .map(|(index, user)| container(&format!("{name}{index}"), *user))
            .collect()
    };
    let cases: [(&[i64], &[i64], Option<i64>); 6] = [
        (&[5], &[], None),
        (&[5, 7], &[], None),
        (&[7], &[5], None),
        (&[5], &[7], None),
        (&[7], &[8], Some(5)),
        (&[], &[], Some(5)),
    ];
    for (users, init_users, expected) in cases {
        let mut containers = list("app", users);
        containers.push(container("istio-proxy", 5));
        let pod = json!({"spec": {"containers": containers, "initContainers": list("init", init_users)}});
        let injected = inject(&pod, &environment);
        let user = pod::sidecar(&injected).and_then(|sidecar| sidecar.pointer("/securityContext/runAsUser"));
        assert_eq!(user.and_then(Json::as_i64), expected, "{pod}");
    }
}

#[test]
fn templates_of_a_pod_are_bounded() {
    let repeated = |name: &str, count: usize| vec![name; count].join(",");
    let annotations = json!({"inject.istio.io/templates": repeated("sidecar", MAX_TEMPLATES)});
    let pod = json!({"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "app"}]}});
    assert_eq!(
        names(&inject(&pod, &environment()), "containers"),
        ["app", "istio-proxy"]
    );
    let expected = "more than 32 templates requested, with aliases expanded";
    assert_eq!(error(&repeated("sidecar", MAX_TEMPLATES + 1)), expected);
    assert_eq!(error(&repeated("both", MAX_TEMPLATES / 2 + 1)), expected);
}

/// A merge of the whole pod for each container would take minutes.
#[test]
fn many_containers_are_injected_fast() {
    const COUNT: usize = 5_000;
    let template = "{{ range .Spec.Containers }}\n  - {name: {{ .Name }}, tty: true}\n{{ end }}";
    let config = json!({"policy": "enabled", "templates": {"sidecar": format!("spec:\n  containers:\n{template}")}});
    let injector = Injector::parse(&config.to_string(), VALUES).expect("the configuration is valid");
    let containers = (0..COUNT).map(|number| json!({"name": format!("c{number}"), "image": "own"}));
    let pod = json!({"spec": {"containers": containers.collect::<Vec<_>>()}});
    let Ok(Outcome::Patch(patch)) = injector.inject(&pod, &environment()) else {
        panic!("the pod is not injected");
    };
    let containers = applied(pod, &patch)["spec"]["containers"].take();
    assert_eq!(containers.as_array().map(Vec::len), Some(COUNT));
    let last = json!({"name": format!("c{}", COUNT - 1), "image": "own", "tty": true});
    assert_eq!(containers[COUNT - 1], last);
}

/// A host whose deadline has passed.
struct Late;

impl template::Host for Late {
    fn is_expired(&self) -> bool {
        true
    }
}

#[test]
fn the_deadline_ends_an_injection() {
    let environment = Environment {
        host: Arc::new(Late),
        ..environment()
    };
    assert_eq!(injector().inject(&web(), &environment), Err(InjectError::Deadline));
}

#[test]
fn errors_name_template_and_place() {
    for (template, expected) in [
        ("none", "requested template \"none\" not found; have broken, extra, "),
        ("loop", "failed to run injection template: template: loop:1:"),
        (
            "list",
            "template \"list\": failed applying injection overlay: the output must be an object",
        ),
        (
            "broken",
            "template \"broken\": failed applying injection overlay: the output is not YAML: line 1",
        ),
        (
            "typed",
            "spec.containers[0].args[0]: expected a string, found the number 1",
        ),
        (
            "nil",
            "template: nil:1:8: executing \"nil\" at <.Spec.SecurityContext.RunAsUser>: nil pointer",
        ),
    ] {
        let error = error(template);
        assert!(error.contains(expected), "{error}");
    }
    let error_of_loop = error("loop");
    assert!(
        error_of_loop.contains("values take more than 33554432 bytes"),
        "{error_of_loop}"
    );
    let pod = json!({"spec": {"containers": "none"}});
    let error = injector().inject(&pod, &environment()).unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot read the pod: spec.containers: expected a list, found the string \"none\""
    );
}

#[test]
fn unknown_policies_are_named() {
    for (config, expected) in [
        ("policy: enabled", None),
        ("policy: disabled", None),
        ("policy: sometimes", Some("sometimes")),
        ("templates: {}", Some("")),
    ] {
        let injector = Injector::parse(config, VALUES).expect("the configuration is valid");
        assert_eq!(injector.unknown_policy(), expected, "{config}");
    }
}

#[test]
fn files_keep_what_is_no_workload() {
    let text = "# first\nkind: Service\napiVersion: v1\n---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  \
                hostNetwork: true\n  containers:\n  - name: a\n";
    let result = workload::inject_text(&injector(), &environment(), text).expect("the file is valid");
    let kept = "# first\nkind: Service\napiVersion: v1\n---\n";
    let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  containers:\n  - name: a\n    \
               resources: {}\n  hostNetwork: true\nstatus: {}\n---\n";
    assert_eq!(result.text, format!("{kept}{pod}"));
    assert_eq!(
        result.warnings,
        ["===> Skipping injection because Pod \"p\" has host networking enabled"]
    );
}

#[test]
fn errors_of_files_name_the_workload() {
    for (annotation, expected) in [
        (
            "status.sidecar.istio.io/port: x",
            "annotation status.sidecar.istio.io/port: port invalid: \"x\" is not a port",
        ),
        (
            "proxy.istio.io/config: \"[a]\"",
            "annotation proxy.istio.io/config: must be a mapping",
        ),
    ] {
        let text = format!(
            "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\n  namespace: shop\nspec:\n  template:\n    \
             metadata:\n      annotations:\n        {annotation}\n    spec:\n      containers:\n      - name: a\n"
        );
        let error = workload::inject_text(&injector(), &environment(), &text).unwrap_err();
        let expected = format!("Deployment \"shop/web\": invalid annotations: {expected}");
        assert_eq!(error.to_string(), expected);
    }
}
