//! Profiles, settings for older releases, and platforms.

use std::collections::BTreeMap;

use istiod::api::yaml;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::rendered::{find, names};
use crate::support::helm;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        helm::trial(
            "charts::presets::profiles_have_their_settings",
            profiles_have_their_settings,
        ),
        helm::trial(
            "charts::presets::compatibility_versions_set_variables",
            compatibility_versions_set_variables,
        ),
        helm::trial(
            "charts::presets::platforms_have_their_settings",
            platforms_have_their_settings,
        ),
        helm::trial("charts::presets::values_of_users_win", values_of_users_win),
        helm::trial("charts::presets::unknown_ones_are_refused", unknown_ones_are_refused),
        helm::trial("charts::presets::all_charts_accept_them", all_charts_accept_them),
    ]
}

/// Returns the container of istiod.
fn container(objects: &[Value]) -> &Value {
    &find(objects, "Deployment", "istiod")["spec"]["template"]["spec"]["containers"][0]
}

/// Returns the environment variables of istiod that have a literal value, by name.
pub(super) fn environment(objects: &[Value]) -> BTreeMap<String, String> {
    helm::environment(objects).into_iter().collect()
}

/// Parses a text in the data of a ConfigMap.
pub(super) fn data(objects: &[Value], name: &str, key: &str) -> Result<Value, Failed> {
    let text = find(objects, "ConfigMap", name)["data"][key].as_str();
    let text = text.ok_or_else(|| format!("no {key} in ConfigMap {name}"))?;
    Ok(yaml::documents(text)[0].parse()?)
}

fn profiles_have_their_settings() -> Result<(), Failed> {
    let ambient = helm::objects("istiod", &["profile=ambient"])?;
    assert_eq!(
        environment(&ambient).get("PILOT_ENABLE_AMBIENT"),
        Some(&"true".to_owned())
    );
    let mesh = data(&ambient, "istio", "mesh")?;
    assert_eq!(
        mesh["defaultConfig"]["proxyMetadata"],
        json!({ "ISTIO_META_ENABLE_HBONE": "true" })
    );
    assert_eq!(mesh["defaultConfig"]["image"], json!({ "imageType": "distroless" }));
    assert_eq!(mesh["serviceScopeConfigs"][0]["scope"], "GLOBAL");
    assert_eq!(
        container(&ambient)["image"],
        "localhost:5000/pilot:latest",
        "images of the project have no variants"
    );

    let demo = helm::objects("istiod", &["global.profile=demo"])?;
    let requests = &container(&demo)["resources"]["requests"];
    assert_eq!(*requests, json!({ "cpu": "10m", "memory": "100Mi" }));
    assert_eq!(environment(&demo).get("PILOT_TRACE_SAMPLING"), Some(&"100".to_owned()));
    assert!(
        !names(&demo)
            .iter()
            .any(|name| name.starts_with("HorizontalPodAutoscaler"))
    );
    let mesh = data(&demo, "istio", "mesh")?;
    assert_eq!(mesh["accessLogFile"], "/dev/stdout");
    let providers = mesh["extensionProviders"].as_array().into_iter().flatten();
    let providers: Vec<_> = providers.filter_map(|provider| provider["name"].as_str()).collect();
    assert_eq!(providers, ["otel", "skywalking", "otel-tracing", "jaeger"]);
    let proxy = &data(&demo, "istio-sidecar-injector", "values")?["global"]["proxy"]["resources"];
    assert_eq!(proxy["requests"], json!({ "cpu": "10m", "memory": "40Mi" }));
    assert_eq!(proxy["limits"]["cpu"], "2000m", "a profile keeps other defaults");

    let preview = data(&helm::objects("istiod", &["profile=preview"])?, "istio", "mesh")?;
    assert_eq!(
        preview["defaultConfig"]["proxyMetadata"],
        json!({ "ISTIO_META_DNS_CAPTURE": "true" })
    );
    let stable = names(&helm::objects("istiod", &["profile=stable"])?);
    assert!(stable.contains("ValidatingAdmissionPolicy /stable-channel-policy-istio-system.istio.io"));
    Ok(())
}

fn compatibility_versions_set_variables() -> Result<(), Failed> {
    let common = "PILOT_SIDECAR_PICK_BEST_SERVICE_NAMESPACE";
    let since_28 = [common, "DISABLE_TRACK_REMAINING_CB_METRICS"];
    let since_27 = [
        &since_28[..],
        &["DISABLE_SHADOW_HOST_SUFFIX", "PILOT_SPAWN_UPSTREAM_SPAN_FOR_GATEWAY"],
    ]
    .concat();
    let since_26 = [&since_27[..], &["ENABLE_NATIVE_SIDECARS"]].concat();
    let all = since_26.clone();
    for (version, set) in [
        ("1.29", vec![common]),
        ("1.28", since_28.to_vec()),
        ("1.27", since_27),
        ("1.26", since_26.clone()),
        ("1.25", since_26),
    ] {
        let value = format!("compatibilityVersion={version}");
        let objects = helm::objects("istiod", &[&value])?;
        let environment = environment(&objects);
        for variable in &all {
            let want = set.contains(variable).then(|| "false".to_owned());
            assert_eq!(environment.get(*variable), want.as_ref(), "{version}: {variable}");
        }
    }
    Ok(())
}

fn platforms_have_their_settings() -> Result<(), Failed> {
    for value in [
        "platform=openshift",
        "global.platform=openshift",
        "profile=platform-openshift",
        "profile=openshift",
        "profile=openshift-ambient",
    ] {
        let objects = helm::objects("istiod", &[value])?;
        let injection = data(&objects, "istio-sidecar-injector", "values")?;
        let cni = &injection["pilot"]["cni"];
        let (enabled, provider) = (&cni["enabled"], &cni["provider"]);
        assert_eq!((enabled, provider), (&json!(true), &json!("multus")), "{value}");
        let environment = environment(&objects);
        assert_eq!(
            environment["CA_TRUSTED_NODE_ACCOUNTS"], "kube-system/ztunnel",
            "{value}"
        );
        // The profile is not the platform, as in Istio's chart.
        let platform = if value.contains("platform-") { "" } else { "openshift" };
        assert_eq!(environment["PLATFORM"], platform, "{value}");
        // Templates of waypoints omit their user id by it.
        assert_eq!(injection["global"]["platform"], platform, "{value}");
        assert_eq!(
            environment.contains_key("PILOT_ENABLE_AMBIENT"),
            value.contains("ambient"),
            "{value}"
        );
    }
    for platform in ["gke", "k3d", "k3s", "microk8s", "minikube"] {
        let objects = helm::objects("istiod", &[&format!("platform={platform}")])?;
        assert_eq!(environment(&objects)["PLATFORM"], platform);
    }
    Ok(())
}

/// In Istio's chart, settings of a profile below `pilot` replace values at the top level.
fn values_of_users_win() -> Result<(), Failed> {
    for value in ["traceSampling=5", "pilot.traceSampling=5"] {
        let objects = helm::objects("istiod", &["profile=demo", "compatibilityVersion=1.29", value])?;
        assert_eq!(environment(&objects)["PILOT_TRACE_SAMPLING"], "5", "{value}");
    }
    let objects = helm::objects(
        "istiod",
        &[
            "compatibilityVersion=1.28",
            "env.DISABLE_TRACK_REMAINING_CB_METRICS=true",
            "pilot.autoscaleEnabled=true",
        ],
    )?;
    let environment = environment(&objects);
    assert_eq!(environment["DISABLE_TRACK_REMAINING_CB_METRICS"], "true");
    assert_eq!(environment["PILOT_SIDECAR_PICK_BEST_SERVICE_NAMESPACE"], "false");
    let both = helm::objects(
        "istiod",
        &["profile=ambient", "platform=openshift", "compatibilityVersion=1.29"],
    )?;
    let values = data(&both, "values", "merged-values")?;
    assert_eq!(values["trustedZtunnelNamespace"], "kube-system");
    assert_eq!(values["env"]["PILOT_ENABLE_AMBIENT"], "true");
    assert_eq!(values["env"]["PILOT_SIDECAR_PICK_BEST_SERVICE_NAMESPACE"], "false");
    let given = data(&both, "values", "original-values")?;
    assert_eq!(
        given,
        json!({ "profile": "ambient", "platform": "openshift", "compatibilityVersion": "1.29",
            "global": { "istioNamespace": "istio-system" } })
    );
    Ok(())
}

fn unknown_ones_are_refused() -> Result<(), Failed> {
    for (value, because) in [
        (
            "profile=ambiant",
            "unknown profile \"ambiant\"; known are: ambient, demo, openshift, openshift-ambient, preview,",
        ),
        (
            "compatibilityVersion=1.24",
            "unknown compatibilityVersion \"1.24\"; known are: 1.25, 1.26,",
        ),
        ("platform=aks", "unknown platform \"aks\"; known are: gke, k3d,"),
        ("profile=platform-aks", "unknown profile \"aks\"; known are: gke, k3d,"),
    ] {
        let refused = helm::objects("istiod", &[value]);
        assert!(
            refused.as_ref().is_err_and(|error| error.contains(because)),
            "{value}: {refused:?}"
        );
    }
    Ok(())
}

fn all_charts_accept_them() -> Result<(), Failed> {
    for chart in super::names::CHARTS {
        let values = ["profile=ambient", "platform=openshift", "compatibilityVersion=1.28"];
        assert!(!helm::objects(chart, &values)?.is_empty(), "{chart}");
    }
    let stable = names(&helm::objects("base", &["profile=stable"])?);
    assert!(stable.contains("ValidatingAdmissionPolicy /stable-channel-default-policy.istio.io"));
    Ok(())
}
