//! The charts as rendered by Helm.

use std::collections::{BTreeMap, BTreeSet};

use istiod::api::{crd, mesh_config, mesh_networks, yaml};
use istiod::ingest::kinds::{Role, Rules};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::helm;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        helm::trial("charts::lint", lint),
        helm::trial("charts::base::installs_the_crds", base_installs_the_crds),
        helm::trial("charts::base::omits_excluded_crds", base_omits_excluded_crds),
        helm::trial("charts::istiod::object_names_match_istio", object_names_match_istio),
        helm::trial("charts::istiod::tags_are_rendered_alone", tags_are_rendered_alone),
        helm::trial("charts::istiod::ports_match_istio", ports_match_istio),
        helm::trial("charts::istiod::selectors_match_the_pods", selectors_match_the_pods),
        helm::trial("charts::istiod::flags_are_known", flags_are_known),
        helm::trial(
            "charts::istiod::remote_states_have_a_volume",
            remote_states_have_a_volume,
        ),
        helm::trial(
            "charts::istiod::roles_allow_all_watched_kinds",
            roles_allow_all_watched_kinds,
        ),
        helm::trial("charts::istiod::mesh_config_is_valid", mesh_config_is_valid),
        helm::trial("charts::istiod::pilot_values_apply", pilot_values_apply),
        helm::trial("charts::istiod::scope_splits_the_objects", scope_splits_the_objects),
        helm::trial(
            "charts::istiod::disruption_budget_follows_replicas",
            disruption_budget_follows_replicas,
        ),
    ]
}

/// Values that enable everything optional.
const ALL: &[&str] = &[
    "revision=canary",
    "revisionTags={prod,stage}",
    "autoscaleMin=2",
    "env.ENABLE_MCS_AUTO_EXPORT=true",
    "env.MCS_API_GROUP=mcs.example.com",
    "global.networkPolicy.enabled=true",
    "global.imagePullSecrets={registry}",
    "global.externalIstiod=true",
    "global.logAsJson=true",
    "global.multiCluster.clusterName=east",
    "global.trustBundleName=roots",
    "global.priorityClassName=system-cluster-critical",
    "ipFamilyPolicy=PreferDualStack",
    "ipFamilies={IPv4,IPv6}",
    "pdb.maxUnavailable=1",
    "seccompProfile.type=RuntimeDefault",
    "podAnnotations.a=b",
    "podLabels.c=d",
];

pub(super) fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

pub(super) fn names(objects: &[Value]) -> BTreeSet<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = |object: &Value| {
        let metadata = &object["metadata"];
        format!(
            "{} {}/{}",
            text(&object["kind"]),
            text(&metadata["namespace"]),
            text(&metadata["name"])
        )
    };
    objects.iter().map(name).collect()
}

fn lint() -> Result<(), Failed> {
    let mut all = vec!["lint", "--strict", "istiod"];
    for value in ALL {
        all.extend(["--set", value]);
    }
    helm::run(&["lint", "--strict", "base", "gateway", "istiod"])?;
    helm::run(&all)?;
    Ok(())
}

fn base_installs_the_crds() -> Result<(), Failed> {
    let plain = helm::objects("base", &["base.enableCRDTemplates=false"])?;
    let templated = helm::objects("base", &[])?;
    for definition in crd::definitions() {
        let name = definition["metadata"]["name"]
            .as_str()
            .ok_or("a definition without name")?;
        assert_eq!(find(&plain, "CustomResourceDefinition", name), &definition);
        let installed = find(&templated, "CustomResourceDefinition", name);
        assert_eq!(installed["spec"], definition["spec"]);
        assert_eq!(
            installed["metadata"]["annotations"],
            definition["metadata"]["annotations"]
        );
        assert_eq!(installed["metadata"]["labels"]["app.kubernetes.io/instance"], "mesh");
    }
    for objects in [plain, templated] {
        assert_eq!(objects.len(), crd::definitions().len() + 2, "{:?}", names(&objects));
        find(&objects, "ServiceAccount", "istio-reader-service-account");
        let validator = find(&objects, "ValidatingWebhookConfiguration", "istiod-default-validator");
        let selector = &validator["webhooks"][0]["objectSelector"];
        assert!(selector.is_null(), "objects with the label of a tag are validated, too");
    }
    Ok(())
}

fn base_omits_excluded_crds() -> Result<(), Failed> {
    let objects = helm::objects("base", &["base.excludedCRDs={envoyfilters.networking.istio.io}"])?;
    assert_eq!(objects.len(), crd::definitions().len() + 1);
    assert!(!names(&objects).contains("CustomResourceDefinition /envoyfilters.networking.istio.io"));
    let objects = helm::objects(
        "base",
        &["global.resourceScope=namespace", "global.istioNamespace=mesh"],
    )?;
    assert_eq!(
        names(&objects),
        ["ServiceAccount mesh/istio-reader-service-account".to_owned()].into()
    );
    assert!(
        helm::objects(
            "base",
            &["global.resourceScope=namespace", "global.enableReaderRBAC=false"]
        )?
        .is_empty()
    );
    Ok(())
}

fn object_names_match_istio() -> Result<(), Failed> {
    let of_default = [
        "ClusterRole /istio-reader-clusterrole-istio-system",
        "ClusterRole /istiod-clusterrole-istio-system",
        "ClusterRole /istiod-gateway-controller-istio-system",
        "ClusterRoleBinding /istio-reader-clusterrole-istio-system",
        "ClusterRoleBinding /istiod-clusterrole-istio-system",
        "ClusterRoleBinding /istiod-gateway-controller-istio-system",
        "ConfigMap istio-system/istio",
        "ConfigMap istio-system/istio-sidecar-injector",
        "ConfigMap istio-system/values",
        "Deployment istio-system/istiod",
        "HorizontalPodAutoscaler istio-system/istiod",
        "MutatingWebhookConfiguration /istio-sidecar-injector",
        "Role istio-system/istiod",
        "RoleBinding istio-system/istiod",
        "Service istio-system/istiod",
        "ServiceAccount istio-system/istiod",
        "ValidatingWebhookConfiguration /istio-validator-istio-system",
    ];
    assert_eq!(
        names(&helm::objects("istiod", &[])?),
        of_default.map(str::to_owned).into()
    );
    let of_revision = [
        "ClusterRole /istio-reader-clusterrole-canary-istio-system",
        "ClusterRole /istiod-clusterrole-canary-istio-system",
        "ClusterRole /istiod-gateway-controller-canary-istio-system",
        "ClusterRoleBinding /istio-reader-clusterrole-canary-istio-system",
        "ClusterRoleBinding /istiod-clusterrole-canary-istio-system",
        "ClusterRoleBinding /istiod-gateway-controller-canary-istio-system",
        "ConfigMap istio-system/istio-canary",
        "ConfigMap istio-system/istio-sidecar-injector-canary",
        "ConfigMap istio-system/values-canary",
        "Deployment istio-system/istiod-canary",
        "HorizontalPodAutoscaler istio-system/istiod-canary",
        "MutatingWebhookConfiguration /istio-revision-tag-prod",
        "MutatingWebhookConfiguration /istio-revision-tag-stage",
        "MutatingWebhookConfiguration /istio-sidecar-injector-canary",
        "NetworkPolicy istio-system/istiod-canary",
        "PodDisruptionBudget istio-system/istiod-canary",
        "Role istio-system/istiod-canary",
        "RoleBinding istio-system/istiod-canary",
        "Service istio-system/istiod-canary",
        "Service istio-system/istiod-revision-tag-prod",
        "Service istio-system/istiod-revision-tag-stage",
        "ServiceAccount istio-system/istiod-canary",
        "ValidatingWebhookConfiguration /istio-validator-canary-istio-system",
    ];
    assert_eq!(
        names(&helm::objects("istiod", ALL)?),
        of_revision.map(str::to_owned).into()
    );
    Ok(())
}

/// Users of Istio's chart move a tag between revisions by these two templates.
fn tags_are_rendered_alone() -> Result<(), Failed> {
    let [webhooks, services] = ["mwc", "svc"].map(|kind| format!("templates/revision-tags-{kind}.yaml"));
    let text = helm::run(&[
        "template",
        "mesh",
        "istiod",
        "--namespace",
        "istio-system",
        "--set",
        "revision=canary,revisionTags={prod}",
        "--show-only",
        &webhooks,
        "--show-only",
        &services,
    ])?;
    let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
    let of_tag = [
        "MutatingWebhookConfiguration /istio-revision-tag-prod",
        "Service istio-system/istiod-revision-tag-prod",
    ];
    assert_eq!(names(&documents?), of_tag.map(str::to_owned).into());
    Ok(())
}

fn ports_match_istio() -> Result<(), Failed> {
    let objects = helm::objects("istiod", ALL)?;
    let want = json!([
        { "name": "grpc-xds", "port": 15010, "protocol": "TCP" },
        { "name": "https-dns", "port": 15012, "protocol": "TCP" },
        { "name": "https-webhook", "port": 443, "targetPort": 15017, "protocol": "TCP" },
        { "name": "http-monitoring", "port": 15014, "protocol": "TCP" },
    ]);
    for service in ["istiod-canary", "istiod-revision-tag-prod"] {
        assert_eq!(find(&objects, "Service", service)["spec"]["ports"], want);
    }
    let tag = &find(&objects, "Service", "istiod-revision-tag-prod")["metadata"]["labels"];
    assert_eq!(
        (&tag["istio.io/tag"], &tag["istio.io/rev"]),
        (&json!("prod"), &json!("canary"))
    );
    let container = &find(&objects, "Deployment", "istiod-canary")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(
        container["readinessProbe"]["httpGet"],
        json!({ "path": "/ready", "port": 8080 })
    );
    let ports = container["ports"].as_array().into_iter().flatten();
    let ports: BTreeMap<_, _> = ports
        .map(|port| (port["containerPort"].as_u64(), port["name"].as_str()))
        .collect();
    let names = [
        (8080, "http-debug"),
        (15010, "grpc-xds"),
        (15012, "tls-xds"),
        (15014, "http-monitoring"),
        (15017, "https-webhooks"),
    ];
    assert_eq!(ports, names.map(|(port, name)| (Some(port), Some(name))).into());
    Ok(())
}

fn selectors_match_the_pods() -> Result<(), Failed> {
    for (values, suffix) in [(&["autoscaleMin=2"][..], ""), (ALL, "-canary")] {
        let objects = helm::objects("istiod", values)?;
        let deployment = find(&objects, "Deployment", &format!("istiod{suffix}"));
        let template = &deployment["spec"]["template"];
        let labels = template["metadata"]["labels"].as_object().ok_or("no labels")?;
        let service = find(&objects, "Service", &format!("istiod{suffix}"));
        let budget = find(&objects, "PodDisruptionBudget", &format!("istiod{suffix}"));
        for selector in [
            &service["spec"]["selector"],
            &deployment["spec"]["selector"]["matchLabels"],
            &budget["spec"]["selector"]["matchLabels"],
        ] {
            let selector = selector.as_object().ok_or("no selector")?;
            assert!(
                selector.iter().all(|(name, value)| labels.get(name) == Some(value)),
                "{selector:?} of {labels:?}"
            );
        }
        let account = template["spec"]["serviceAccountName"].as_str().ok_or("no account")?;
        find(&objects, "ServiceAccount", account);
        for kind in ["RoleBinding", "ClusterRoleBinding"] {
            let binding = objects
                .iter()
                .find(|object| object["kind"] == kind && object["subjects"][0]["name"] == account);
            let role = &binding.ok_or("the account has no role")?["roleRef"];
            find(
                &objects,
                role["kind"].as_str().unwrap_or_default(),
                role["name"].as_str().unwrap_or_default(),
            );
        }
    }
    Ok(())
}

fn flags_are_known() -> Result<(), Failed> {
    let objects = helm::objects("istiod", ALL)?;
    let container = &find(&objects, "Deployment", "istiod-canary")["spec"]["template"]["spec"]["containers"][0];
    let words = container["args"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let words: Vec<String> = words.map(str::to_owned).collect();
    assert_eq!(words[0], "discovery");
    let discovery = <istiod::settings::DiscoveryFlags as clap::Args>::augment_args(clap::Command::new("discovery"));
    let command = clap::Command::new("istiod").subcommand(discovery);
    let words = istiod::cli::arguments::rewrite(&command, words);
    assert!(words.unknown.is_empty(), "{:?}", words.unknown);
    command.try_get_matches_from(std::iter::once("istiod".to_owned()).chain(words.kept))?;
    let environment = container["env"].as_array().into_iter().flatten();
    let environment: BTreeMap<_, _> = environment
        .map(|entry| (entry["name"].as_str(), entry["value"].as_str()))
        .collect();
    for (name, value) in [
        ("REVISION", "canary"),
        ("CLUSTER_ID", "east"),
        ("EXTERNAL_ISTIOD", "true"),
        ("PILOT_CA_CERT_CONFIGMAP", "roots"),
        ("PILOT_TRACE_SAMPLING", "1"),
        ("ENABLE_MCS_AUTO_EXPORT", "true"),
    ] {
        assert_eq!(environment.get(&Some(name)), Some(&Some(value)), "{name}");
    }
    Ok(())
}

fn remote_states_have_a_volume() -> Result<(), Failed> {
    let claim = "remoteState.volume.persistentVolumeClaim.claimName=states";
    let of_claim = json!({ "name": "remote-state", "persistentVolumeClaim": { "claimName": "states" } });
    for (values, volume) in [
        (&[][..], Some(json!({ "name": "remote-state", "emptyDir": {} }))),
        (&[claim][..], Some(of_claim)),
        (&["remoteState.enabled=false"][..], None),
    ] {
        let objects = helm::objects("istiod", values)?;
        let pod = &find(&objects, "Deployment", "istiod")["spec"]["template"]["spec"];
        // Volumes belong to root, and istiod runs as another user.
        let has_claim = values.contains(&claim);
        assert_eq!(pod["securityContext"]["fsGroup"] == 1337, has_claim, "{values:?}");
        let named = |list: &Value| {
            let mut entries = list.as_array().into_iter().flatten();
            entries.find(|entry| entry["name"] == "remote-state").cloned()
        };
        assert_eq!(named(&pod["volumes"]), volume);
        let container = &pod["containers"][0];
        let mounted = named(&container["volumeMounts"]).map(|mount| mount["mountPath"].clone());
        let flags = container["args"].as_array().into_iter().flatten();
        let mut flags = flags.filter_map(Value::as_str);
        let folder = flags.find_map(|flag| flag.strip_prefix("--remoteStateDir="));
        assert_eq!(
            mounted,
            folder.map(Value::from),
            "the flag must name the mounted folder"
        );
        assert_eq!(mounted.is_some(), volume.is_some());
    }
    Ok(())
}

fn roles_allow_all_watched_kinds() -> Result<(), Failed> {
    let objects = helm::objects("istiod", &["env.MCS_API_GROUP=mcs.example.com"])?;
    let rules = Rules {
        config_kinds: true,
        gateway_api: true,
        mcs: Some(("mcs.example.com".into(), "v1".into())),
        remote_workload_entries: true,
        ..Rules::default()
    };
    for (role, name) in [
        (Role::Config, "istiod-clusterrole"),
        (Role::Remote, "istio-reader-clusterrole"),
    ] {
        let allowed = &find(&objects, "ClusterRole", &format!("{name}-istio-system"))["rules"];
        for kind in rules.kinds(role) {
            let resource = rules.resource(kind);
            let (group, plural) = (json!(resource.group), json!(resource.plural));
            let names = |rule: &Value, key: &str, expected: &Value| {
                rule[key]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|value| value == expected || value == "*")
            };
            let allows = |verb: &str| {
                allowed.as_array().into_iter().flatten().any(|rule| {
                    names(rule, "apiGroups", &group)
                        && names(rule, "resources", &plural)
                        && names(rule, "verbs", &json!(verb))
                })
            };
            assert!(allows("list") && allows("watch"), "{name}: {group} {plural}");
        }
    }
    // Of ConfigMaps, other control planes read only the mesh config: that of the revision, or the default one.
    let objects = helm::objects("istiod", &["revision=canary"])?;
    let rules = &find(&objects, "ClusterRole", "istio-reader-clusterrole-canary-istio-system")["rules"];
    let mut rules = rules.as_array().into_iter().flatten();
    let of_maps = rules.find(|rule| rule["resources"] == json!(["configmaps"]));
    let names = of_maps.map(|rule| &rule["resourceNames"]);
    assert_eq!(names, Some(&json!(["istio", "istio-canary"])));
    Ok(())
}

fn mesh_config_is_valid() -> Result<(), Failed> {
    let values = [
        "revision=canary",
        "global.meshID=mesh1",
        "global.proxy.tracer=zipkin",
        "meshConfig.accessLogFile=/dev/stdout",
        "meshConfig.defaultConfig.holdApplicationUntilProxyStarts=true",
        "global.meshNetworks.east.endpoints[0].fromRegistry=east",
        "global.meshNetworks.east.gateways[0].address=192.0.2.1",
        "global.meshNetworks.east.gateways[0].port=15443",
    ];
    for (values, name) in [(&[][..], "istio"), (&values[..], "istio-canary")] {
        let objects = helm::objects("istiod", values)?;
        let data = &find(&objects, "ConfigMap", name)["data"];
        let read = |key: &str| yaml::documents(data[key].as_str().unwrap_or_default())[0].parse();
        let mesh = mesh_config::parse(&read("mesh")?).map_err(|errors| format!("{errors:?}"))?;
        assert_eq!(mesh.warnings, [], "mesh of {values:?}");
        let networks = mesh_networks::parse(&read("meshNetworks")?).map_err(|errors| format!("{errors:?}"))?;
        assert_eq!(networks.warnings, [], "meshNetworks of {values:?}");
        let proxies = mesh.config.default_config.ok_or("no defaultConfig")?;
        if values.is_empty() {
            assert_eq!(proxies.discovery_address, "istiod.istio-system.svc:15012");
            assert_eq!(
                mesh.config.default_providers.ok_or("no providers")?.metrics,
                ["prometheus"]
            );
        } else {
            assert_eq!(proxies.discovery_address, "istiod-canary.istio-system.svc:15012");
            assert_eq!(proxies.mesh_id, "mesh1");
            assert!(proxies.tracing.is_some());
            assert_eq!(mesh.config.access_log_file, "/dev/stdout");
            assert_eq!(networks.networks.networks.keys().collect::<Vec<_>>(), ["east"]);
        }
    }
    Ok(())
}

fn pilot_values_apply() -> Result<(), Failed> {
    let below = helm::objects(
        "istiod",
        &[
            "pilot.image=example.com/a:b",
            "pilot.env.A=x",
            "pilot.resources.limits.cpu=2",
        ],
    )?;
    let top = helm::objects(
        "istiod",
        &["image=example.com/a:b", "env.A=x", "resources.limits.cpu=2"],
    )?;
    let rendered = |objects: &[Value]| -> Vec<Value> {
        let is_rendered = |object: &&Value| object["metadata"]["name"] != "values";
        objects.iter().filter(is_rendered).cloned().collect()
    };
    assert_eq!(rendered(&below), rendered(&top));
    let container = &find(&top, "Deployment", "istiod")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "example.com/a:b");
    let hub = helm::objects(
        "istiod",
        &["global.hub=example.com/mesh", "tag=v1", "global.variant=debug"],
    )?;
    let container = &find(&hub, "Deployment", "istiod")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "example.com/mesh/pilot:v1-debug");
    Ok(())
}

fn scope_splits_the_objects() -> Result<(), Failed> {
    let with = |scope: &str| {
        let mut values = ALL.to_vec();
        let scope = format!("global.resourceScope={scope}");
        values.push(&scope);
        helm::objects("istiod", &values).map(|objects| names(&objects))
    };
    let (all, cluster, namespace) = (with("all")?, with("cluster")?, with("namespace")?);
    assert!(cluster.iter().all(|name| name.contains(" /")) && namespace.iter().all(|name| !name.contains(" /")));
    assert_eq!(cluster.union(&namespace).cloned().collect::<BTreeSet<_>>(), all);
    Ok(())
}

fn disruption_budget_follows_replicas() -> Result<(), Failed> {
    let one = helm::objects("istiod", &["autoscaleEnabled=false"])?;
    assert_eq!(find(&one, "Deployment", "istiod")["spec"]["replicas"], 1);
    assert!(
        !names(&one)
            .iter()
            .any(|name| name.starts_with("HorizontalPod") || name.starts_with("PodDisruption"))
    );
    let three = helm::objects(
        "istiod",
        &["autoscaleEnabled=false", "replicaCount=3", "pdb.minAvailable=2"],
    )?;
    assert_eq!(find(&three, "Deployment", "istiod")["spec"]["replicas"], 3);
    assert_eq!(find(&three, "PodDisruptionBudget", "istiod")["spec"]["minAvailable"], 2);
    for (value, least, most) in [
        ("pdb.minAvailable=null,pdb.maxUnavailable=1", Value::Null, json!(1)),
        ("pdb.maxUnavailable=null", json!(1), Value::Null),
    ] {
        let objects = helm::objects("istiod", &["autoscaleMin=2", value])?;
        let budget = &find(&objects, "PodDisruptionBudget", "istiod")["spec"];
        assert_eq!(
            (&budget["minAvailable"], &budget["maxUnavailable"]),
            (&least, &most),
            "{value}"
        );
    }
    let scaled = helm::objects("istiod", &["autoscaleMin=2", "memory.targetAverageUtilization=70"])?;
    assert_eq!(find(&scaled, "Deployment", "istiod")["spec"]["replicas"], Value::Null);
    let scaler = &find(&scaled, "HorizontalPodAutoscaler", "istiod")["spec"];
    assert_eq!((&scaler["minReplicas"], &scaler["maxReplicas"]), (&json!(2), &json!(5)));
    assert_eq!(scaler["metrics"][1]["resource"]["name"], "memory");
    Ok(())
}
