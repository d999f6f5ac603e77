//! The chart gateway.

use istiod::api::yaml;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::effects::{at, have_effects};
use super::rendered::{find, names};
use crate::support::{daemon::istiod, helm, scratch};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        helm::trial("charts::gateway::object_names_match_istio", object_names_match_istio),
        helm::trial("charts::gateway::labels_select_the_pods", labels_select_the_pods),
        helm::trial("charts::gateway::values_have_their_effects", values_have_their_effects),
        helm::trial(
            "charts::gateway::network_gateways_have_their_ports",
            network_gateways_have_their_ports,
        ),
        helm::trial("charts::gateway::replicas_follow_values", replicas_follow_values),
        helm::trial("charts::gateway::pods_are_injected", pods_are_injected),
        helm::trial(
            "charts::gateway::image_types_apply_to_the_default_image",
            image_types_apply_to_the_default_image,
        ),
    ]
}

const CONTAINER: &str = "spec template spec containers istio-proxy";

fn object_names_match_istio() -> Result<(), Failed> {
    let usual = [
        "Deployment istio-system/mesh",
        "HorizontalPodAutoscaler istio-system/mesh",
        "Role istio-system/mesh",
        "RoleBinding istio-system/mesh",
        "Service istio-system/mesh",
        "ServiceAccount istio-system/mesh",
    ];
    assert_eq!(names(&helm::objects("gateway", &[])?), usual.map(str::to_owned).into());
    let all = [
        "name=istio-egress",
        "revision=canary",
        "global.networkPolicy.enabled=true",
        "podDisruptionBudget.minAvailable=1",
        "autoscaling.minReplicas=2",
        "serviceAccount.name=egress",
    ];
    let of_all = [
        "Deployment istio-system/istio-egress",
        "HorizontalPodAutoscaler istio-system/istio-egress",
        "NetworkPolicy istio-system/istio-egress-canary",
        "PodDisruptionBudget istio-system/istio-egress",
        "Role istio-system/egress",
        "RoleBinding istio-system/egress",
        "Service istio-system/istio-egress",
        "ServiceAccount istio-system/egress",
    ];
    assert_eq!(
        names(&helm::objects("gateway", &all)?),
        of_all.map(str::to_owned).into()
    );
    let none = [
        "kind=DaemonSet",
        "service.type=None",
        "rbac.enabled=false",
        "serviceAccount.create=false",
    ];
    let objects = helm::objects("gateway", &none)?;
    assert_eq!(names(&objects), ["DaemonSet istio-system/mesh".to_owned()].into());
    assert_eq!(at(&objects[0], "spec template spec serviceAccountName"), "default");
    Ok(())
}

fn labels_select_the_pods() -> Result<(), Failed> {
    for (values, selector) in [
        (
            &["name=istio-ingress"][..],
            json!({ "app": "istio-ingress", "istio": "ingress" }),
        ),
        (&["labels.app=a", "labels.istio=b"], json!({ "app": "a", "istio": "b" })),
    ] {
        let more = [
            "global.networkPolicy.enabled=true",
            "podDisruptionBudget.minAvailable=1",
            "autoscaling.minReplicas=2",
        ];
        let objects = helm::objects("gateway", &[values, &more].concat())?;
        let of_kind = |kind: &str| {
            objects
                .iter()
                .find(|object| object["kind"] == kind)
                .ok_or(format!("no {kind}"))
        };
        let labels = at(of_kind("Deployment")?, "spec template metadata labels");
        assert!(
            selector
                .as_object()
                .into_iter()
                .flatten()
                .all(|(name, value)| labels[name] == *value)
        );
        assert_eq!(labels["istio.io/dataplane-mode"], "none");
        assert_eq!(labels["sidecar.istio.io/inject"], "true");
        for (kind, path) in [
            ("Deployment", "spec selector matchLabels"),
            ("Service", "spec selector"),
            ("PodDisruptionBudget", "spec selector matchLabels"),
            ("NetworkPolicy", "spec podSelector matchLabels"),
        ] {
            assert_eq!(*at(of_kind(kind)?, path), selector, "{kind}");
        }
    }
    Ok(())
}

fn values_have_their_effects() -> Result<(), Failed> {
    let in_pod = |value, path, want| (value, "Deployment", "mesh", path, want);
    let in_service = |value, path, want| (value, "Service", "mesh", path, want);
    let proxy = "spec template spec containers istio-proxy resources";
    have_effects(
        "gateway",
        &[
            in_pod(
                "revision=canary",
                "spec template metadata labels istio.io/rev",
                json!("canary"),
            ),
            in_pod("labels.a=b", "metadata labels a", json!("b")),
            in_pod("annotations.a=b", "metadata annotations", json!({ "a": "b" })),
            in_pod("podAnnotations.a=b", "spec template metadata annotations a", json!("b")),
            in_pod("strategy.type=Recreate", "spec strategy", json!({ "type": "Recreate" })),
            in_pod("minReadySeconds=3", "spec minReadySeconds", json!(3)),
            in_pod(
                "securityContext.fsGroup=1",
                "spec template spec securityContext",
                json!({ "fsGroup": 1 }),
            ),
            in_pod(
                "containerSecurityContext.runAsUser=1",
                "spec template spec containers istio-proxy securityContext",
                json!({ "runAsUser": 1 }),
            ),
            in_pod(
                "env.A=1",
                "spec template spec containers istio-proxy env A value",
                json!("1"),
            ),
            in_pod(
                "resources.limits=null",
                proxy,
                json!({ "requests": { "cpu": "100m", "memory": "128Mi" } }),
            ),
            in_pod(
                "global.imagePullPolicy=Never",
                "spec template spec containers istio-proxy imagePullPolicy",
                json!("Never"),
            ),
            in_pod(
                "imagePullSecrets[0].name=a",
                "spec template spec imagePullSecrets",
                json!([{ "name": "a" }]),
            ),
            in_pod(
                "global.imagePullSecrets={a}",
                "spec template spec imagePullSecrets",
                json!([{ "name": "a" }]),
            ),
            in_pod(
                "lifecycle.preStop.sleep.seconds=5",
                "spec template spec containers istio-proxy lifecycle",
                json!({ "preStop": { "sleep": { "seconds": 5 } } }),
            ),
            in_pod(
                "readinessProbe.httpGet.port=1",
                "spec template spec containers istio-proxy readinessProbe httpGet port",
                json!(1),
            ),
            in_pod(
                "additionalContainers[0].name=b",
                "spec template spec containers 1 name",
                json!("b"),
            ),
            in_pod(
                "initContainers[0].name=b",
                "spec template spec initContainers 0 name",
                json!("b"),
            ),
            in_pod(
                "volumes[0].name=v",
                "spec template spec volumes",
                json!([{ "name": "v" }]),
            ),
            in_pod(
                "volumeMounts[0].name=v",
                "spec template spec containers istio-proxy volumeMounts 0 name",
                json!("v"),
            ),
            in_pod(
                "tolerations[0].key=a",
                "spec template spec tolerations",
                json!([{ "key": "a" }]),
            ),
            in_pod(
                "priorityClassName=a",
                "spec template spec priorityClassName",
                json!("a"),
            ),
            in_pod(
                "terminationGracePeriodSeconds=60",
                "spec template spec terminationGracePeriodSeconds",
                json!(60),
            ),
            in_service("service.type=ClusterIP", "spec type", json!("ClusterIP")),
            in_service("service.annotations.a=b", "metadata annotations", json!({ "a": "b" })),
            in_service(
                "service.loadBalancerIP=192.0.2.1",
                "spec loadBalancerIP",
                json!("192.0.2.1"),
            ),
            in_service("service.loadBalancerClass=a", "spec loadBalancerClass", json!("a")),
            in_service(
                "service.allocateLoadBalancerNodePorts=false",
                "spec allocateLoadBalancerNodePorts",
                json!(false),
            ),
            in_service(
                "service.loadBalancerSourceRanges={10.0.0.0/8}",
                "spec loadBalancerSourceRanges",
                json!(["10.0.0.0/8"]),
            ),
            in_service(
                "service.externalTrafficPolicy=Local",
                "spec externalTrafficPolicy",
                json!("Local"),
            ),
            in_service(
                "service.externalIPs={192.0.2.2}",
                "spec externalIPs",
                json!(["192.0.2.2"]),
            ),
            in_service(
                "service.ipFamilyPolicy=SingleStack",
                "spec ipFamilyPolicy",
                json!("SingleStack"),
            ),
            in_service("service.selectorLabels.a=b", "spec selector a", json!("b")),
            (
                "autoscaling.targetMemoryUtilizationPercentage=70",
                "HorizontalPodAutoscaler",
                "mesh",
                "spec metrics 1 resource",
                json!({ "name": "memory", "target": { "type": "Utilization", "averageUtilization": 70 } }),
            ),
            (
                "serviceAccount.annotations.a=b",
                "ServiceAccount",
                "mesh",
                "metadata annotations a",
                json!("b"),
            ),
        ],
    )
}

fn network_gateways_have_their_ports() -> Result<(), Failed> {
    let values = [
        "networkGateway=east",
        "service.annotations.a=b",
        "global.networkPolicy.enabled=true",
        "networkGatewayPorts.tls.port=443",
    ];
    let objects = helm::objects("gateway", &values)?;
    let service = find(&objects, "Service", "mesh");
    let port = |name: &str, port: u16, target: u16| json!({ "name": name, "port": port, "targetPort": target, "protocol": "TCP" });
    assert_eq!(
        service["spec"]["ports"],
        json!([
            port("status-port", 15021, 15021),
            port("tls", 443, 15443),
            port("tls-istiod", 15012, 15012),
            port("tls-webhook", 15017, 15017)
        ])
    );
    assert_eq!(service["metadata"]["labels"]["topology.istio.io/network"], "east");
    assert_eq!(service["metadata"]["annotations"], json!({ "a": "b" }));
    let deployment = find(&objects, "Deployment", "mesh");
    let labels = at(deployment, "spec template metadata labels");
    assert_eq!(labels["topology.istio.io/network"], "east");
    let view = at(at(deployment, CONTAINER), "env ISTIO_META_REQUESTED_NETWORK_VIEW value");
    assert_eq!(*view, "east");
    let allowed = at(find(&objects, "NetworkPolicy", "mesh"), "spec ingress 1 ports");
    let allowed: Vec<_> = allowed
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| it["port"].as_u64())
        .collect();
    assert_eq!(
        allowed,
        [15021, 15443, 15012, 15017],
        "the policy allows the ports of pods"
    );
    for (value, because) in [
        (
            "networkGateway=east,networkGatewayPorts.tls=null",
            "at '/networkGatewayPorts/tls': got null, want object",
        ),
        ("service.ports=null", "service.ports is empty"),
    ] {
        let refused = helm::objects("gateway", &[value]);
        assert!(
            refused.as_ref().is_err_and(|error| error.contains(because)),
            "{value}: {refused:?}"
        );
    }
    Ok(())
}

fn replicas_follow_values() -> Result<(), Failed> {
    let scaled = helm::objects(
        "gateway",
        &["autoscaling.minReplicas=2", "podDisruptionBudget.maxUnavailable=1"],
    )?;
    assert_eq!(find(&scaled, "Deployment", "mesh")["spec"]["replicas"], Value::Null);
    assert_eq!(
        find(&scaled, "PodDisruptionBudget", "mesh")["spec"]["maxUnavailable"],
        1
    );
    let fixed = [
        "autoscaling.enabled=false",
        "replicaCount=3",
        "podDisruptionBudget.minAvailable=2",
    ];
    let fixed = helm::objects("gateway", &fixed)?;
    assert_eq!(find(&fixed, "Deployment", "mesh")["spec"]["replicas"], 3);
    assert_eq!(find(&fixed, "PodDisruptionBudget", "mesh")["spec"]["minAvailable"], 2);
    let one = names(&helm::objects(
        "gateway",
        &["autoscaling.enabled=false", "podDisruptionBudget.minAvailable=1"],
    )?);
    assert!(
        !one.iter()
            .any(|name| name.starts_with("PodDisruption") || name.starts_with("Horizontal")),
        "{one:?}"
    );
    Ok(())
}

/// The injector replaces the image `auto`, by the templates of the chart istiod.
fn pods_are_injected() -> Result<(), Failed> {
    let documents = injected("charts/gateway-injected", &[])?;
    let proxy = at(find(&documents, "Deployment", "mesh"), CONTAINER);
    assert_eq!(proxy["image"], "registry.istio.io/release/proxyv2:1.30.3");
    assert_eq!(at(proxy, "args 1"), "router");
    assert_eq!(at(proxy, "ports http-envoy-prom containerPort"), 15090);
    assert_eq!(at(proxy, "resources limits cpu"), "2", "settings of the chart remain");
    assert!(proxy["readinessProbe"].is_object() && proxy["volumeMounts"].is_array());
    Ok(())
}

/// The default image is complete, which types of images leave alone otherwise.
fn image_types_apply_to_the_default_image() -> Result<(), Failed> {
    for (name, values, image) in [
        (
            "default",
            &["profile=ambient"][..],
            "registry.istio.io/release/proxyv2:1.30.3-distroless",
        ),
        (
            "own",
            &["profile=ambient", "global.proxy.image=example.com/proxy:v1"],
            "example.com/proxy:v1",
        ),
    ] {
        let documents = injected(&format!("charts/gateway-image-{name}"), values)?;
        let proxy = at(find(&documents, "Deployment", "mesh"), CONTAINER);
        assert_eq!(proxy["image"], image, "{values:?}");
    }
    Ok(())
}

/// Returns the objects of the chart, injected by the templates of the chart istiod with these values.
fn injected(folder: &str, values: &[&str]) -> Result<Vec<Value>, Failed> {
    let folder = scratch(folder);
    let objects = helm::objects("istiod", values)?;
    let injector = &find(&objects, "ConfigMap", "istio-sidecar-injector")["data"];
    let write = |file: &str, text: &str| std::fs::write(folder.join(file), text);
    write("config.yaml", injector["config"].as_str().unwrap_or_default())?;
    write("values.yaml", injector["values"].as_str().unwrap_or_default())?;
    let mesh = find(&objects, "ConfigMap", "istio")["data"]["mesh"].as_str();
    write("mesh.yaml", mesh.unwrap_or_default())?;
    let gateway = helm::run(&["template", "mesh", "gateway", "--namespace", "ingress"])?;
    write("gateway.yaml", &gateway)?;
    let mut command = istiod();
    command.arg("inject");
    for (flag, file) in [
        ("-f", "gateway.yaml"),
        ("--injectConfigFile", "config.yaml"),
        ("--valuesFile", "values.yaml"),
        ("--meshConfigFile", "mesh.yaml"),
    ] {
        command.arg(flag).arg(folder.join(file));
    }
    let output = command.output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
    Ok(documents?)
}
