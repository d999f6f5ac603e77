//! Values of the chart istiod, and what each changes.

use istiod::api::yaml;
use istiod::inject::gateway::{GatewayClass, GatewayRequest, ObjectKind};
use istiod::inject::{Environment, Injector};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::presets::{data, environment};
use super::rendered::{find, names};
use crate::support::helm;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        helm::trial("charts::values::deployment_follows_values", deployment_follows_values),
        helm::trial("charts::values::monitoring_follows_values", monitoring_follows_values),
        helm::trial("charts::values::webhooks_follow_values", webhooks_follow_values),
        helm::trial(
            "charts::values::other_objects_follow_values",
            other_objects_follow_values,
        ),
        helm::trial("charts::values::kubeconfig_is_mounted", kubeconfig_is_mounted),
        helm::trial(
            "charts::values::annotations_of_pods_are_texts",
            annotations_of_pods_are_texts,
        ),
        helm::trial("charts::values::of_base_have_their_effects", of_base_have_their_effects),
        helm::trial("charts::values::variables_are_set_once", variables_are_set_once),
        helm::trial(
            "charts::values::numbers_in_metadata_are_texts",
            numbers_in_metadata_are_texts,
        ),
        helm::trial("charts::values::mesh_config_follows_values", mesh_config_follows_values),
        helm::trial(
            "charts::values::injection_has_all_global_values",
            injection_has_all_global_values,
        ),
        helm::trial("charts::values::switches_omit_objects", switches_omit_objects),
        helm::trial(
            "charts::values::upgrades_keep_failure_policies",
            upgrades_keep_failure_policies,
        ),
        helm::trial(
            "charts::values::deployed_gateways_follow_values",
            deployed_gateways_follow_values,
        ),
        helm::trial("charts::remote::has_what_the_cluster_needs", has_what_the_cluster_needs),
        helm::trial("charts::remote::addresses_have_their_forms", addresses_have_their_forms),
        helm::trial(
            "charts::remote::local_injector_is_installed",
            local_injector_is_installed,
        ),
    ]
}

/// Returns what is at a path of words: names of fields, numbers of items, or the `name` of an item.
pub(super) fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split_whitespace().fold(value, |value, word| match value {
        Value::Array(items) => {
            let named = items.iter().find(|item| item["name"] == word);
            let numbered = word.parse::<usize>().ok().and_then(|index| items.get(index));
            named.or(numbered).unwrap_or(&Value::Null)
        }
        _ => &value[word],
    })
}

/// A value, the kind and name of an object, a path in it, and what is there with the value.
pub(super) type Effect = (&'static str, &'static str, &'static str, &'static str, Value);

/// Each value changes what is at the path to what is expected.
pub(super) fn have_effects(chart: &str, effects: &[Effect]) -> Result<(), Failed> {
    let before = helm::objects(chart, &[])?;
    for (value, kind, name, path, want) in effects {
        let objects = helm::objects(chart, &[value])?;
        assert_eq!(
            at(find(&objects, kind, name), path),
            want,
            "{value}: {kind} {name} {path}"
        );
        let was = before
            .iter()
            .find(|it| it["kind"] == *kind && it["metadata"]["name"] == *name);
        assert_ne!(
            was.map(|object| at(object, path)),
            Some(want),
            "{value} changes nothing"
        );
    }
    Ok(())
}

/// Each value changes the pods of a waypoint or of a gateway.
fn deployed_gateways_follow_values() -> Result<(), Failed> {
    let seccomp = "spec template spec containers istio-proxy securityContext seccompProfile type";
    for (value, template, path, want) in [
        (
            "global.waypoint.nodeSelector.a=b",
            "waypoint",
            "spec template spec nodeSelector a",
            json!("b"),
        ),
        (
            "global.waypoint.affinity.nodeAffinity.a=b",
            "waypoint",
            "spec template spec affinity nodeAffinity a",
            json!("b"),
        ),
        (
            "global.waypoint.tolerations[0].key=a",
            "waypoint",
            "spec template spec tolerations 0 key",
            json!("a"),
        ),
        (
            "global.waypoint.topologySpreadConstraints[0].maxSkew=1",
            "waypoint",
            "spec template spec topologySpreadConstraints 0 maxSkew",
            json!(1),
        ),
        (
            "global.waypoint.resources.requests.cpu=7m",
            "waypoint",
            "spec template spec containers istio-proxy resources requests cpu",
            json!("7m"),
        ),
        (
            "gateways.seccompProfile.type=RuntimeDefault",
            "waypoint",
            seccomp,
            json!("RuntimeDefault"),
        ),
        (
            "gateways.securityContext.runAsUser=5",
            "kube-gateway",
            "spec template spec securityContext runAsUser",
            json!(5),
        ),
        (
            "global.proxy.resources.requests.cpu=7m",
            "kube-gateway",
            "spec template spec containers istio-proxy resources requests cpu",
            json!("7m"),
        ),
        (
            "env.ENABLE_CLUSTER_TRUST_BUNDLE_API=true,global.trustBundleName=roots",
            "kube-gateway",
            "spec template spec volumes istiod-ca-cert projected sources 0 clusterTrustBundle name",
            json!("istio.io:istiod-ca:root-cert"),
        ),
        (
            "env.PILOT_CA_CERT_CONFIGMAP=roots",
            "waypoint",
            "spec template spec volumes istiod-ca-cert configMap name",
            json!("roots"),
        ),
        (
            "global.variant=debug",
            "waypoint",
            "spec template spec containers istio-proxy image",
            json!("registry.istio.io/release/proxyv2:1.30.3-debug"),
        ),
        (
            "global.proxy.image=proxy",
            "kube-gateway",
            "spec template spec containers istio-proxy image",
            json!("localhost:5000/proxy:latest"),
        ),
        (
            "global.imagePullSecrets={a}",
            "kube-gateway",
            "spec template spec imagePullSecrets 0 name",
            json!("a"),
        ),
    ] {
        let [before, after] = [&[][..], &[value][..]].map(|values| deployment(template, values));
        assert_eq!(at(&after?, path), &want, "{value}: {path}");
        assert_ne!(at(&before?, path), &want, "{value} changes nothing");
    }
    Ok(())
}

/// Returns the Deployment of a Gateway, rendered from a template of the chart.
fn deployment(template: &'static str, values: &[&str]) -> Result<Value, Failed> {
    let objects = helm::objects("istiod", values)?;
    let [config, values] = helm::injector(&objects)?;
    let injector = Injector::parse(config, values)?;
    let class = GatewayClass {
        controller: "istio.io/mesh-controller".to_owned(),
        label: "istio.io-mesh-controller",
        template,
        service_type: "ClusterIP",
        has_plain_names: true,
        is_east_west: false,
    };
    let request = GatewayRequest {
        gateway: &json!({ "metadata": { "name": "a", "namespace": "b" }, "spec": { "gatewayClassName": "c" } }),
        class: &class,
        more_ports: &[],
        class_parameters: None,
        parameters: None,
        cluster: "Kubernetes",
        kubernetes_version: 133,
        ambient: true,
        copies_metadata: true,
    };
    let objects = injector.gateway_objects(&request, &Environment::default())?;
    let deployment = objects.into_iter().find(|object| object.kind == ObjectKind::Deployment);
    Ok(deployment.ok_or("no Deployment")?.value)
}

const POD: &str = "spec template spec";
const CONTAINER: &str = "spec template spec containers discovery";

/// Each value changes the Deployment.
fn deployment_follows_values() -> Result<(), Failed> {
    let in_pod = |value, path, want| (value, "Deployment", "istiod", path, want);
    have_effects(
        "istiod",
        &[
            in_pod(
                "taint.namespace=cni",
                "spec template spec containers discovery args 5",
                json!("--cniNamespace=cni"),
            ),
            in_pod(
                "ownerName=me",
                "metadata labels install.operator.istio.io/owning-resource",
                json!("me"),
            ),
            in_pod("deploymentLabels.a=b", "metadata labels a", json!("b")),
            in_pod("deploymentAnnotations.a=b", "metadata annotations a", json!("b")),
            in_pod("podLabels.a=1", "spec template metadata labels a", json!("1")),
            in_pod("podAnnotations.a=b", "spec template metadata annotations a", json!("b")),
            in_pod(
                "nodeSelector.a=b",
                "spec template spec nodeSelector",
                json!({ "a": "b" }),
            ),
            in_pod(
                "affinity.podAffinity.a=b",
                "spec template spec affinity podAffinity",
                json!({ "a": "b" }),
            ),
            in_pod(
                "taint.name=example.com/not-ready",
                "spec template spec tolerations 0 key",
                json!("example.com/not-ready"),
            ),
            in_pod(
                "env.PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME=example.com/not-ready",
                "spec template spec tolerations 0 key",
                json!("example.com/not-ready"),
            ),
            in_pod(
                "tolerations[0].key=a",
                "spec template spec tolerations 1 key",
                json!("a"),
            ),
            in_pod(
                "topologySpreadConstraints[0].maxSkew=1",
                "spec template spec topologySpreadConstraints",
                json!([{ "maxSkew": 1 }]),
            ),
            in_pod(
                "initContainers[0].name=first",
                "spec template spec initContainers first name",
                json!("first"),
            ),
            in_pod(
                "volumes[0].name=more",
                "spec template spec volumes more",
                json!({ "name": "more" }),
            ),
            in_pod(
                "volumeMounts[0].name=more",
                "spec template spec containers discovery volumeMounts more",
                json!({ "name": "more" }),
            ),
            in_pod(
                "envVarFrom[0].name=A,envVarFrom[0].valueFrom.configMapKeyRef.name=b",
                "spec template spec containers discovery env A valueFrom configMapKeyRef name",
                json!("b"),
            ),
            in_pod(
                "resources.requests.memory=null",
                "spec template spec containers discovery resources",
                json!({ "requests": { "cpu": "500m" } }),
            ),
            in_pod(
                "resources=null",
                "spec template spec containers discovery resources",
                json!({ "requests": { "cpu": "10m" } }),
            ),
            in_pod(
                "global.imagePullPolicy=Always",
                "spec template spec containers discovery imagePullPolicy",
                json!("Always"),
            ),
            in_pod("rollingMaxSurge=1", "spec strategy rollingUpdate maxSurge", json!(1)),
        ],
    )
}

/// Each value changes an object for Prometheus or Grafana.
fn monitoring_follows_values() -> Result<(), Failed> {
    have_effects(
        "istiod",
        &[
            (
                "monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.interval=5s",
                "ServiceMonitor",
                "istiod",
                "spec endpoints",
                json!([{ "port": "http-monitoring", "interval": "5s" }]),
            ),
            (
                "monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.labels.a=b",
                "ServiceMonitor",
                "istiod",
                "metadata labels a",
                json!("b"),
            ),
            (
                "monitoring.podMonitor.enabled=true,monitoring.podMonitor.interval=5s",
                "PodMonitor",
                "istiod",
                "spec podMetricsEndpoints",
                json!([{ "port": "http-monitoring", "interval": "5s" }]),
            ),
            (
                "monitoring.podMonitor.enabled=true,monitoring.podMonitor.labels.a=b",
                "PodMonitor",
                "istiod",
                "metadata labels a",
                json!("b"),
            ),
            (
                "monitoring.rules.enabled=true",
                "PrometheusRule",
                "istiod",
                "spec groups istiod rules 0 alert",
                json!("IstiodConvergenceSlow"),
            ),
            (
                "monitoring.rules.enabled=true",
                "PrometheusRule",
                "istiod",
                "spec groups istiod rules 11 alert",
                json!("IstiodCaCertificateExpires"),
            ),
            (
                "monitoring.rules.enabled=true,monitoring.rules.labels.a=b",
                "PrometheusRule",
                "istiod",
                "metadata labels a",
                json!("b"),
            ),
            (
                "monitoring.dashboards.enabled=true",
                "ConfigMap",
                "istiod-dashboards",
                "metadata labels grafana_dashboard",
                json!("1"),
            ),
            (
                "monitoring.dashboards.enabled=true,monitoring.dashboards.labels.a=b",
                "ConfigMap",
                "istiod-dashboards",
                "metadata labels a",
                json!("b"),
            ),
        ],
    )
}

/// Each value changes the injector or the validator.
fn webhooks_follow_values() -> Result<(), Failed> {
    let in_webhook = |value, path, want| {
        (
            value,
            "MutatingWebhookConfiguration",
            "istio-sidecar-injector",
            path,
            want,
        )
    };
    have_effects(
        "istiod",
        &[
            in_webhook(
                "sidecarInjectorWebhookAnnotations.a=b",
                "metadata annotations a",
                json!("b"),
            ),
            in_webhook(
                "istiodRemote.injectionPath=/inject/net/a",
                "webhooks 1 clientConfig service path",
                json!("/inject/net/a"),
            ),
            in_webhook(
                "istiodRemote.injectionURL=https://a/inject",
                "webhooks 1 clientConfig",
                json!({ "url": "https://a/inject" }),
            ),
            in_webhook(
                "istiodRemote.injectionCABundle=YQ==",
                "webhooks 1 clientConfig caBundle",
                json!("YQ=="),
            ),
            in_webhook(
                "sidecarInjectorWebhook.reinvocationPolicy=IfNeeded",
                "webhooks 0 reinvocationPolicy",
                json!("IfNeeded"),
            ),
            in_webhook(
                "sidecarInjectorWebhook.enableNamespacesByDefault=true",
                "webhooks 4 name",
                json!("auto.sidecar-injector.istio.io"),
            ),
            (
                "base.validationURL=https://example.com/validate",
                "ValidatingWebhookConfiguration",
                "istio-validator-istio-system",
                "webhooks 0 clientConfig",
                json!({ "url": "https://example.com/validate" }),
            ),
            (
                "base.validationFailurePolicy=Fail",
                "ValidatingWebhookConfiguration",
                "istio-validator-istio-system",
                "webhooks 0 failurePolicy",
                json!("Fail"),
            ),
        ],
    )
}

/// Each value changes the Service, its account, its autoscaler or the defaults of Gateways.
fn other_objects_follow_values() -> Result<(), Failed> {
    let in_service = |value, path, want| (value, "Service", "istiod", path, want);
    let class = "gatewayClasses.istio.service.spec.type=ClusterIP";
    let class_map = "istio-default-gatewayclass-istio";
    have_effects(
        "istiod",
        &[
            in_service("serviceAnnotations.a=b", "metadata annotations a", json!("b")),
            in_service(
                "ipFamilyPolicy=SingleStack",
                "spec ipFamilyPolicy",
                json!("SingleStack"),
            ),
            in_service("ipFamilies={IPv6}", "spec ipFamilies", json!(["IPv6"])),
            in_service(
                "trafficDistribution=PreferClose",
                "spec trafficDistribution",
                json!("PreferClose"),
            ),
            (
                "serviceAccountAnnotations.a=b",
                "ServiceAccount",
                "istiod",
                "metadata annotations a",
                json!("b"),
            ),
            (
                class,
                "ConfigMap",
                class_map,
                "data service",
                json!("spec:\n  type: ClusterIP\n"),
            ),
            (
                class,
                "ConfigMap",
                class_map,
                "metadata labels gateway.istio.io/defaults-for-class",
                json!("istio"),
            ),
            (
                "memory.targetAverageUtilization=70",
                "HorizontalPodAutoscaler",
                "istiod",
                "spec metrics 1 resource target averageUtilization",
                json!(70),
            ),
        ],
    )
}

fn kubeconfig_is_mounted() -> Result<(), Failed> {
    let objects = helm::objects("istiod", &[])?;
    let deployment = find(&objects, "Deployment", "istiod");
    let mount = at(at(deployment, CONTAINER), "volumeMounts istio-kubeconfig mountPath");
    assert_eq!(*mount, "/var/run/secrets/remote", "the folder of KUBECONFIG");
    let secret = json!({ "secretName": "istio-kubeconfig", "optional": true });
    assert_eq!(*at(at(deployment, POD), "volumes istio-kubeconfig secret"), secret);
    Ok(())
}

/// Helm reads `true` and `1` as other types than text; an annotation that is no text would invalidate the injector.
fn annotations_of_pods_are_texts() -> Result<(), Failed> {
    let value = r#"sidecarInjectorWebhook.injectedAnnotations={"a": true, "b": 1000000, "c": "d", "e": null}"#;
    let text = helm::run(&["template", "mesh", "istiod", "--set-json", value])?;
    let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
    let objects = documents?;
    let config = data(&objects, "istio-sidecar-injector", "config")?;
    let want = json!({ "a": "true", "b": "1000000", "c": "d", "e": "" });
    assert_eq!(config["injectedAnnotations"], want);
    let [config, values] = helm::injector(&objects)?;
    Injector::parse(config, values)?;
    Ok(())
}

/// The API server refuses other types, and large numbers in files of values print as 2.0241129e+07.
fn numbers_in_metadata_are_texts() -> Result<(), Failed> {
    let rendered = |chart: &str, value: &str| -> Result<Vec<Value>, Failed> {
        let text = helm::run(&["template", "mesh", chart, "--set-json", value])?;
        let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
        Ok(documents?)
    };
    for (chart, value, kind, name, path) in [
        ("istiod", "deploymentLabels", "Deployment", "istiod", "metadata labels"),
        (
            "istiod",
            "podLabels",
            "Deployment",
            "istiod",
            "spec template metadata labels",
        ),
        (
            "istiod",
            "podAnnotations",
            "Deployment",
            "istiod",
            "spec template metadata annotations",
        ),
        (
            "istiod",
            "nodeSelector",
            "Deployment",
            "istiod",
            "spec template spec nodeSelector",
        ),
        (
            "istiod",
            "serviceAnnotations",
            "Service",
            "istiod",
            "metadata annotations",
        ),
        (
            "gateway",
            "labels",
            "Deployment",
            "mesh",
            "spec template metadata labels",
        ),
        ("gateway", "annotations", "Service", "mesh", "metadata annotations"),
        (
            "gateway",
            "podAnnotations",
            "Deployment",
            "mesh",
            "spec template metadata annotations",
        ),
    ] {
        let objects = rendered(
            chart,
            &format!(r#"{value}={{"build": 20241129, "on": true, "none": null}}"#),
        )?;
        let found = at(find(&objects, kind, name), path);
        for (key, want) in [
            ("build", json!("20241129")),
            ("on", json!("true")),
            ("none", Value::Null),
        ] {
            assert_eq!(found[key], want, "{chart} {value}: {key}");
        }
    }
    let objects = rendered("istiod", "tag=20241129")?;
    let image = at(find(&objects, "Deployment", "istiod"), CONTAINER)["image"].clone();
    assert_eq!(image, "localhost:5000/pilot:20241129");
    Ok(())
}

fn of_base_have_their_effects() -> Result<(), Failed> {
    let webhook = |value, path, want| {
        (
            value,
            "ValidatingWebhookConfiguration",
            "istiod-default-validator",
            path,
            want,
        )
    };
    have_effects(
        "base",
        &[
            webhook(
                "defaultRevision=canary",
                "webhooks 0 clientConfig service name",
                json!("istiod-canary"),
            ),
            webhook(
                "base.validationURL=https://a/b",
                "webhooks 0 clientConfig url",
                json!("https://a/b"),
            ),
            webhook(
                "base.validationCABundle=YQ==",
                "webhooks 0 clientConfig caBundle",
                json!("YQ=="),
            ),
            webhook(
                "base.validationCABundle=YQ==",
                "webhooks 0 failurePolicy",
                json!("Fail"),
            ),
            (
                "experimental.stableValidationPolicy=true",
                "ValidatingAdmissionPolicyBinding",
                "stable-channel-default-policy-binding.istio.io",
                "spec policyName",
                json!("stable-channel-default-policy.istio.io"),
            ),
        ],
    )
}

fn variables_are_set_once() -> Result<(), Failed> {
    let values = [
        "env.CA_TRUSTED_NODE_ACCOUNTS=a/b",
        "env.PILOT_TRACE_SAMPLING=7",
        "env.KUBECONFIG=/config",
        "env.EXTERNAL_ISTIOD=false",
        "global.externalIstiod=true",
        "global.istiod.enableAnalysis=true",
        "taint.enabled=true",
        "taint.name=example.com/not-ready",
        "crlConfigMapName=crl",
    ];
    let objects = helm::objects("istiod", &values)?;
    let environment = environment(&objects);
    for (name, value) in [
        ("CA_TRUSTED_NODE_ACCOUNTS", "a/b"),
        ("PILOT_TRACE_SAMPLING", "7"),
        ("KUBECONFIG", "/config"),
        ("EXTERNAL_ISTIOD", "false"),
        ("PILOT_ENABLE_ANALYSIS", "true"),
        ("PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS", "true"),
        ("PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME", "example.com/not-ready"),
        ("PILOT_CRL_CONFIGMAP", "crl"),
    ] {
        assert_eq!(environment[name], value, "{name}");
    }
    let entries = at(find(&objects, "Deployment", "istiod"), CONTAINER)["env"].as_array();
    let literal = entries.into_iter().flatten().filter(|entry| entry["value"].is_string());
    assert_eq!(literal.count(), environment.len(), "a variable is set twice");
    let numbers = r#"env={"LARGE": 1000000, "PART": 0.5, "TEXT": "007", "KUBECONFIG": null}"#;
    let text = helm::run(&["template", "mesh", "istiod", "--set-json", numbers])?;
    let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
    let environment = self::environment(&documents?);
    for (name, value) in [("LARGE", "1000000"), ("PART", "0.5"), ("TEXT", "007")] {
        assert_eq!(environment[name], value, "{name}");
    }
    assert!(!environment.contains_key("KUBECONFIG"), "null removes a variable");
    for sampling in ["0", "0.25", "100.0"] {
        let value = format!("pilot.traceSampling={sampling}");
        let environment = self::environment(&helm::objects("istiod", &[&value])?);
        assert_eq!(
            environment["PILOT_TRACE_SAMPLING"], sampling,
            "the default of istiod is 1"
        );
    }
    let trusted = ["trustedZtunnelNamespace=ambient", "trustedZtunnelName=tunnels"];
    let objects = helm::objects("istiod", &trusted)?;
    assert_eq!(
        self::environment(&objects)["CA_TRUSTED_NODE_ACCOUNTS"],
        "ambient/tunnels"
    );
    assert_eq!(
        self::environment(&objects)["KUBECONFIG"],
        "/var/run/secrets/remote/config"
    );
    Ok(())
}

fn mesh_config_follows_values() -> Result<(), Failed> {
    for (values, path, want) in [
        (
            &["global.variant=debug"][..],
            "defaultConfig image imageType",
            json!("debug"),
        ),
        (
            &["global.proxy.variant=distroless"],
            "defaultConfig image imageType",
            json!("distroless"),
        ),
        (
            &["telemetry.v2.stackdriver.enabled=true"],
            "defaultProviders",
            json!({ "metrics": ["prometheus", "stackdriver"], "accessLogging": ["stackdriver"] }),
        ),
        (
            &["telemetry.v2.prometheus.enabled=false"],
            "defaultProviders",
            Value::Null,
        ),
        (&["telemetry.v2.enabled=false"], "defaultProviders", Value::Null),
        (
            &["global.proxy.tracer=lightstep", "global.tracer.lightstep.address=a:1"],
            "defaultConfig tracing lightstep address",
            json!("a:1"),
        ),
        (&["meshConfig.rootNamespace=mesh"], "rootNamespace", json!("mesh")),
    ] {
        let mesh = data(&helm::objects("istiod", values)?, "istio", "mesh")?;
        assert_eq!(*at(&mesh, path), want, "{values:?}: {path}");
    }
    let incomplete = helm::objects("istiod", &["global.proxy.tracer=lightstep"]);
    assert!(
        incomplete.is_err_and(|error| error.contains("needs global.tracer.lightstep.address")),
        "istiod refuses a mesh config without the address"
    );
    Ok(())
}

fn switches_omit_objects() -> Result<(), Failed> {
    let all = names(&helm::objects("istiod", &["revisionTags={prod}"])?);
    for (value, omitted) in [
        ("configMap=false", &["ConfigMap istio-system/istio"][..]),
        (
            "global.omitSidecarInjectorConfigMap=true",
            &["ConfigMap istio-system/istio-sidecar-injector"],
        ),
        (
            "global.operatorManageWebhooks=true",
            &[
                "MutatingWebhookConfiguration /istio-revision-tag-prod",
                "MutatingWebhookConfiguration /istio-sidecar-injector",
            ],
        ),
        (
            "global.configValidation=false",
            &["ValidatingWebhookConfiguration /istio-validator-istio-system"],
        ),
        (
            "global.enableReaderRBAC=false",
            &[
                "ClusterRole /istio-reader-clusterrole-istio-system",
                "ClusterRoleBinding /istio-reader-clusterrole-istio-system",
            ],
        ),
        (
            "autoscaleEnabled=false",
            &["HorizontalPodAutoscaler istio-system/istiod"],
        ),
    ] {
        let rest = names(&helm::objects("istiod", &["revisionTags={prod}", value])?);
        let missing: Vec<_> = all.difference(&rest).map(String::as_str).collect();
        assert_eq!(missing, omitted, "{value}");
    }
    Ok(())
}

/// Templates of users may read any value below `global`.
fn injection_has_all_global_values() -> Result<(), Failed> {
    let values = [
        "profile=demo",
        "global.platform=openshift",
        "global.network=east",
        "global.proxy.image=example.com/proxy:v1",
        "global.proxy.logLevel=debug",
        "pilot.env.ENABLE_CLUSTER_TRUST_BUNDLE_API=true",
        "gateways.seccompProfile.type=RuntimeDefault",
        "gateways.istio-ingressgateway.enabled=true",
    ];
    let objects = helm::objects("istiod", &values)?;
    let injection = data(&objects, "istio-sidecar-injector", "values")?;
    let all = data(&objects, "values", "merged-values")?;
    for key in ["global", "sidecarInjectorWebhook", "revision"] {
        assert_eq!(injection[key], all[key], "{key}");
    }
    assert_eq!(injection["global"]["network"], "east");
    assert_eq!(injection["pilot"]["env"]["ENABLE_CLUSTER_TRUST_BUNDLE_API"], true);
    let gateways = json!({ "securityContext": {}, "seccompProfile": { "type": "RuntimeDefault" } });
    assert_eq!(injection["gateways"], gateways, "as in Istio's chart");
    for (value, is_on) in [("True", json!(true)), ("1", json!(true)), ("f", Value::Null)] {
        let value = format!("env.ENABLE_CLUSTER_TRUST_BUNDLE_API={value}");
        let objects = helm::objects("istiod", &[&value])?;
        let injection = data(&objects, "istio-sidecar-injector", "values")?;
        assert_eq!(
            injection["pilot"]["env"]["ENABLE_CLUSTER_TRUST_BUNDLE_API"], is_on,
            "{value}"
        );
    }
    Ok(())
}

/// istiod raises the policy of the validator to Fail; an upgrade must not lower it again.
fn upgrades_keep_failure_policies() -> Result<(), Failed> {
    for (chart, name) in [
        ("istiod", "istio-validator-istio-system"),
        ("base", "istiod-default-validator"),
    ] {
        let template = "templates/".to_owned()
            + if chart == "base" {
                "default-validator.yaml"
            } else {
                "validatingwebhook.yaml"
            };
        let render =
            |more: &[&str]| helm::run(&[&["template", "mesh", chart, "--show-only", &template], more].concat());
        let new = render(&[])?;
        assert!(new.contains(name.split("-istio-").next().unwrap_or(name)) && new.contains("failurePolicy: Ignore"));
        assert!(!render(&["--is-upgrade"])?.contains("failurePolicy:"), "{chart}");
        let given = render(&["--is-upgrade", "--set", "base.validationFailurePolicy=Fail"])?;
        assert!(given.contains("failurePolicy: Fail"), "{chart}");
    }
    Ok(())
}

fn has_what_the_cluster_needs() -> Result<(), Failed> {
    let remote = names(&helm::objects("istiod", &["profile=remote"])?);
    let unused: Vec<_> = remote
        .iter()
        .filter(|name| {
            let of_control_plane = [
                "Deployment",
                "Horizontal",
                "ServiceAccount",
                "Role",
                "ConfigMap istio-system/istio",
            ];
            let is_role = name.contains("/istiod-clusterrole") || name.contains("/istio-validator");
            of_control_plane.iter().any(|kind| name.starts_with(kind)) || is_role
        })
        .collect();
    assert!(unused.is_empty(), "{unused:?}");
    for needed in [
        "ClusterRole /istio-reader-clusterrole-istio-system",
        "MutatingWebhookConfiguration /istio-sidecar-injector",
    ] {
        assert!(remote.contains(needed), "{needed}");
    }
    let values = ["profile=remote", "global.configCluster=true"];
    let config = names(&helm::objects("istiod", &values)?);
    for needed in [
        "ServiceAccount istio-system/istiod",
        "ClusterRole /istiod-clusterrole-istio-system",
        "ValidatingWebhookConfiguration /istio-validator-istio-system",
    ] {
        assert!(config.contains(needed), "{needed}");
    }
    assert!(!config.contains("Deployment istio-system/istiod"));
    Ok(())
}

fn addresses_have_their_forms() -> Result<(), Failed> {
    for (address, family) in [("192.0.2.1", "IPv4"), ("2001:db8::1", "IPv6")] {
        let value = format!("global.remotePilotAddress={address}");
        let objects = helm::objects("istiod", &["profile=remote", &value, "ipFamilyPolicy=SingleStack"])?;
        let service = &find(&objects, "Service", "istiod")["spec"];
        assert_eq!(at(service, "ports tcp-webhook targetPort"), 15017);
        assert_eq!(
            (&service["selector"], &service["ipFamilyPolicy"]),
            (&Value::Null, &json!("SingleStack"))
        );
        let slice = find(&objects, "EndpointSlice", "istiod");
        assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "istiod");
        assert_eq!(slice["addressType"], family);
        assert_eq!(slice["endpoints"], json!([{ "addresses": [address] }]));
        assert_eq!(*at(slice, "ports tcp-istiod port"), 15012);
    }
    let host = helm::objects(
        "istiod",
        &["profile=remote", "global.remotePilotAddress=istiod.example.com"],
    )?;
    let service = &find(&host, "Service", "istiod")["spec"];
    assert_eq!(
        (&service["type"], &service["externalName"]),
        (&json!("ExternalName"), &json!("istiod.example.com"))
    );
    assert!(!names(&host).iter().any(|name| name.starts_with("EndpointSlice")));
    Ok(())
}

fn local_injector_is_installed() -> Result<(), Failed> {
    for (revision, name) in [("", "istiod"), ("canary", "istiod-canary")] {
        let values = [
            &format!("revision={revision}"),
            "istiodRemote.enabled=true",
            "istiodRemote.enabledLocalInjectorIstiod=true",
            "global.remotePilotAddress=192.0.2.1",
        ];
        let objects = helm::objects("istiod", &values)?;
        find(&objects, "Deployment", name);
        assert!(find(&objects, "Service", name)["spec"]["selector"].is_object());
        find(&objects, "EndpointSlice", &format!("{name}-remote"));
        let config = if revision.is_empty() {
            "istio".to_owned()
        } else {
            format!("istio-{revision}")
        };
        let mesh = data(&objects, &config, "mesh")?;
        assert_eq!(
            mesh["defaultConfig"]["discoveryAddress"],
            format!("{name}-remote.istio-system.svc:15012"),
            "proxies connect to the other control plane"
        );
    }
    Ok(())
}
