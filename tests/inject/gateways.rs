//! Deployments of Gateways: Istio's own cases with the templates of its chart, and the project's templates, which make
//! the same objects as Istio's.

use std::sync::Arc;

use istiod::{
    api::{mesh_config, yaml},
    inject::{
        Environment, Injector, Mesh, Namespace,
        gateway::{GatewayClass, GatewayRequest, Parameters, Port},
    },
    proto::{
        istio::networking::v1beta1::ProxyConfig,
        json::{Unknown, from_json},
    },
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::compare::assert_same;
use crate::support::{helm, missing, project};

const CASES: &str = include_str!("gateways.yaml");

pub(super) fn trials() -> Vec<Trial> {
    let set = project().join("../shared/conformance/upstream");
    if !set.exists() {
        return vec![Trial::ignorable_test("inject::gateways", || {
            Ok(Completion::ignored_with(
                "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
            ))
        })];
    }
    let documents = yaml::documents(CASES);
    let cases = documents[0].parse().expect("the cases are YAML");
    let cases = cases.as_array().cloned().unwrap_or_default();
    let mut trials: Vec<Trial> = cases
        .into_iter()
        .map(|case| {
            let set = set.clone();
            let name = format!("inject::gateways::{}", case["name"].as_str().unwrap_or_default());
            Trial::test(name, move || equals_istio(&set, &case))
        })
        .collect();
    trials.push(Trial::ignorable_test(
        "inject::gateways::chart_makes_the_same_objects",
        move || {
            if !helm::is_installed() {
                return missing("Helm is missing; `make tools` installs it");
            }
            chart_makes_the_same_objects(&set)?;
            Ok(Completion::Completed)
        },
    ));
    trials
}

/// Returns the keys `config` and `values` of the injector that Istio's chart makes.
fn istio(set: &std::path::Path) -> Result<[String; 2], Failed> {
    let text = std::fs::read_to_string(set.join("chart/istio-discovery-1.30.3.yaml"))?;
    let documents = yaml::documents(&text);
    let objects: Vec<Value> = documents.iter().map(yaml::Document::parse).collect::<Result<_, _>>()?;
    let keys = helm::injector(&objects)?;
    Ok(keys.map(str::to_owned))
}

fn class(name: &str) -> GatewayClass {
    let (controller, label, template, service_type) = match name {
        "istio-waypoint" => (
            "istio.io/mesh-controller",
            "istio.io-mesh-controller",
            "waypoint",
            "ClusterIP",
        ),
        "istio-east-west" => (
            "istio.io/eastwest-controller",
            "istio.io-eastwest-controller",
            "waypoint",
            "LoadBalancer",
        ),
        _ => (
            "istio.io/gateway-controller",
            "istio.io-gateway-controller",
            "kube-gateway",
            "LoadBalancer",
        ),
    };
    GatewayClass {
        controller: controller.to_owned(),
        label,
        template,
        service_type,
        has_plain_names: template == "waypoint",
        is_east_west: name == "istio-east-west",
    }
}

/// Returns a Gateway with the defaults of the cases.
fn gateway(given: &Value) -> Value {
    let mut gateway = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
        "metadata": {"name": "default", "namespace": "default"}, "spec": {"gatewayClassName": "istio"}});
    for part in ["metadata", "spec"] {
        for (key, value) in given[part].as_object().into_iter().flatten() {
            gateway[part][key] = value.clone();
        }
    }
    gateway
}

/// The settings of a case besides the Gateway.
struct Settings {
    environment: Environment,
    parameters: Option<Parameters>,
    class_parameters: Option<Parameters>,
    more_ports: Vec<Port>,
    ambient: bool,
    copies_metadata: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            environment: Environment {
                namespace: Arc::new(Namespace {
                    name: "default".to_owned(),
                    ..Namespace::default()
                }),
                ..Environment::default()
            },
            parameters: None,
            class_parameters: None,
            more_ports: Vec::new(),
            ambient: false,
            copies_metadata: true,
        }
    }
}

fn rendered(injector: &Injector, gateway: &Value, settings: &Settings) -> Result<Vec<Value>, String> {
    let class = class(gateway["spec"]["gatewayClassName"].as_str().unwrap_or_default());
    let request = GatewayRequest {
        gateway,
        class: &class,
        more_ports: &settings.more_ports,
        class_parameters: settings.class_parameters.as_ref(),
        parameters: settings.parameters.as_ref(),
        cluster: "Kubernetes",
        kubernetes_version: 128,
        ambient: settings.ambient,
        copies_metadata: settings.copies_metadata,
    };
    let objects = injector.gateway_objects(&request, &settings.environment);
    let objects = objects.map_err(|error| error.to_string())?;
    Ok(objects.into_iter().map(|object| object.value).collect())
}

/// Returns ConfigMap `gw-options` of a case.
fn parameters(data: &Value) -> Option<Parameters> {
    let data = data.as_object()?.iter();
    Some(Parameters {
        namespace: "default".to_owned(),
        name: "gw-options".to_owned(),
        data: data
            .map(|(key, text)| (key.clone(), text.as_str().unwrap_or_default().to_owned()))
            .collect(),
    })
}

fn equals_istio(set: &std::path::Path, case: &Value) -> Result<(), Failed> {
    let [config, _] = istio(set)?;
    let values = match &case["values"] {
        Value::Null => json!({"global": {"hub": "test", "tag": "test"}}),
        values => values.clone(),
    };
    let injector = Injector::parse(&config, &values.to_string())?;
    let mut settings = Settings {
        parameters: parameters(&case["parameters"]),
        copies_metadata: case["copiesMetadata"] != false,
        ..Settings::default()
    };
    if !case["proxyConfig"].is_null() {
        settings.environment.proxy_configs = Arc::new([proxy_config(&case["proxyConfig"])?]);
    }
    let result = rendered(&injector, &gateway(&case["gateway"]), &settings);
    let name = case["name"].as_str().unwrap_or_default();
    let file = set.join(format!("gateway-deployment/deployment/{name}.yaml"));
    let golden = std::fs::read_to_string(file)?;
    let documents = yaml::documents(&golden);
    // The first one is the Gateway with the version of the controller.
    let want: Vec<Value> = documents
        .iter()
        .skip(1)
        .map(yaml::Document::parse)
        .collect::<Result<_, _>>()?;
    if let Some(refused) = case["refused"].as_str() {
        assert_eq!(result, Err(refused.to_owned()));
        assert_eq!(want, Vec::<Value>::new());
        return Ok(());
    }
    assert_same(result?.into(), want.into())
}

/// Returns a ProxyConfig resource with its namespace.
fn proxy_config(spec: &Value) -> Result<(String, ProxyConfig), Failed> {
    Ok(("default".to_owned(), from_json(spec, Unknown::Deny)?))
}

/// Values, laid over the defaults of Istio's chart, for the comparison of templates.
const VALUES: [&str; 8] = [
    "{}",
    "{revision: canary, global: {network: n1, meshID: m, caAddress: 'ca:1', imagePullPolicy: Always, logAsJson: true}}",
    "{global: {imagePullSecrets: [a, b], sts: {servicePort: 7}, caName: GkeWorkloadCertificate, variant: distroless}}",
    "{global: {pilotCertProvider: kubernetes, trustBundleName: roots, multiCluster: {clusterName: c1}}}",
    "{global: {proxy: {lifecycle: {preStop: {exec: {command: [sleep]}}}, outlierLogPath: /tmp/o, resources: null}}}",
    "{gateways: {securityContext: {runAsUser: 5}, seccompProfile: {type: RuntimeDefault}}, global: {tag: 7}}",
    "{gateways: {seccompProfile: {type: RuntimeDefault}}, pilot: {env: {ENABLE_CLUSTER_TRUST_BUNDLE_API: true}},
      global: {platform: openshift}}",
    "{global: {waypoint: {affinity: {nodeAffinity: {a: b}}, nodeSelector: {a: b}, tolerations: [{key: a}],
      topologySpreadConstraints: [{maxSkew: 1}], resources: {limits: {cpu: null, memory: 1Gi}}}}}",
];

/// Gateways for the comparison of templates.
const GATEWAYS: [&str; 6] = [
    "{}",
    "{metadata: {name: a, uid: u1, labels: {topology.istio.io/network: n2, l: '1'}, annotations: {
      sidecar.istio.io/proxyImage: 'r/i:t', sidecar.istio.io/logLevel: debug, other: \"a\\nb\",
      gateway.istio.io/controller-version: '5', kubectl.kubernetes.io/last-applied-configuration: '{}'}},
      spec: {listeners: [{name: a.b, port: 80, protocol: HTTP}, {name: c, port: 443, protocol: HTTPS},
      {name: d, port: 80, protocol: HTTP}], addresses: [{value: 1.2.3.4}]}}",
    "{spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}}",
    "{metadata: {labels: {istio.io/dataplane-mode: ambient}, annotations: {sidecar.istio.io/proxyImageType: debug,
      networking.istio.io/service-type: NodePort}}, spec: {gatewayClassName: istio-waypoint}}",
    "{metadata: {name: ew, namespace: istio-system}, spec: {gatewayClassName: istio-east-west,
      infrastructure: {labels: {a: b}, annotations: {networking.istio.io/traffic-distribution: Any}},
      listeners: [{name: mesh, port: 15008, protocol: HBONE}]}}",
    "{metadata: {name: p}, spec: {infrastructure: {parametersRef: {group: '', kind: ConfigMap, name: gw-options}}}}",
];

/// The project's templates make the same objects as Istio's, for each of the Gateways and values.
fn chart_makes_the_same_objects(set: &std::path::Path) -> Result<(), Failed> {
    let [istio_config, istio_values] = istio(set)?;
    let objects = helm::objects("istiod", &[])?;
    let [own_config, _] = helm::injector(&objects)?;
    let parse = |text: &str| -> Result<Value, Failed> { Ok(yaml::documents(text)[0].parse()?) };
    for values in VALUES {
        let mut all = parse(&istio_values)?;
        lay_over(&mut all, &parse(values)?);
        let all = all.to_string();
        let [theirs, ours] = [&istio_config, own_config].map(|config| Injector::parse(config, &all));
        let (theirs, ours) = (theirs?, ours?);
        let mut settings = Settings {
            parameters: parameters(&json!({"horizontalPodAutoscaler": "", "service": "spec: {type: ClusterIP}"})),
            class_parameters: parameters(&json!({"podDisruptionBudget": "spec: {minAvailable: 1}"})),
            more_ports: vec![Port {
                name: "set".to_owned(),
                number: 8443,
                protocol: "HTTPS".to_owned(),
            }],
            ambient: true,
            ..Settings::default()
        };
        settings.environment.revision = "canary".to_owned();
        let mesh = json!({"trustDomain": "td", "defaultConfig": {"proxyMetadata": {"A": "1"}}});
        let mesh = mesh_config::parse(&mesh).map_err(|errors| format!("{errors:?}"))?;
        settings.environment.mesh = Arc::new(Mesh::new(mesh.config));
        for given in GATEWAYS {
            let gateway = gateway(&parse(given)?);
            let [theirs, ours] = [&theirs, &ours].map(|injector| rendered(injector, &gateway, &settings));
            let (theirs, ours) = (theirs?, ours?);
            assert!(ours.len() >= 4, "{} objects", ours.len());
            assert_same(normal(ours), normal(theirs)).map_err(|error| format!("{values} {given}: {}", text(&error)))?;
        }
    }
    Ok(())
}

fn text(error: &Failed) -> &str {
    error.message().unwrap_or_default()
}

/// Returns objects without the difference between an empty text and none.
fn normal(mut objects: Vec<Value>) -> Value {
    for object in &mut objects {
        let uid = &mut object["metadata"]["ownerReferences"][0]["uid"];
        if uid.is_null() {
            *uid = "".into();
        }
    }
    objects.into()
}

fn lay_over(value: &mut Value, over: &Value) {
    match (value, over) {
        (Value::Object(value), Value::Object(over)) => {
            for (key, over) in over {
                lay_over(value.entry(key.clone()).or_insert(Value::Null), over);
            }
        }
        (value, over) => *value = over.clone(),
    }
}
