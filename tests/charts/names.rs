//! Names and types of values: what the charts know, and what they refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use istiod::api::yaml;
use libtest_mimic::{Failed, Trial};
use serde_json::Value;

use crate::support::{helm, project, scratch};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("charts::values::shared_files_are_equal", shared_files_are_equal),
        Trial::test("charts::values::schemas_have_all_names", schemas_have_all_names),
        Trial::test(
            "charts::values::base_accepts_the_values_of_istiod",
            base_accepts_the_values_of_istiod,
        ),
        helm::trial(
            "charts::values::unknown_names_are_refused_with_the_nearest",
            unknown_names_are_refused_with_the_nearest,
        ),
        Trial::test("charts::values::presets_are_documented", presets_are_documented),
        helm::trial("charts::values::wrong_types_are_refused", wrong_types_are_refused),
        helm::trial(
            "charts::values::images_of_istio_are_refused",
            images_of_istio_are_refused,
        ),
        helm::trial(
            "charts::values::a_subchart_accepts_globals_of_others",
            a_subchart_accepts_globals_of_others,
        ),
    ]
}

/// All charts.
pub(super) const CHARTS: [&str; 3] = ["base", "gateway", "istiod"];

fn text(path: &str) -> Result<String, Failed> {
    let path = project().join("charts").join(path);
    std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn read(path: &str) -> Result<Value, Failed> {
    Ok(yaml::documents(&text(path)?)[0].parse()?)
}

/// Helm has no files for several charts, so each has a copy.
fn shared_files_are_equal() -> Result<(), Failed> {
    for (file, charts) in [
        ("templates/_values.tpl", &CHARTS[..]),
        ("files/profiles.yaml", &CHARTS[..]),
        ("templates/_validation.tpl", &["base", "istiod"][..]),
    ] {
        for chart in charts {
            let (original, copy) = (text(&format!("istiod/{file}"))?, text(&format!("{chart}/{file}"))?);
            assert_eq!(copy, original, "{chart}/{file} must equal istiod/{file}");
        }
    }
    Ok(())
}

/// The names of values that a chart knows: a tree whose leaves are open or have no names below.
#[derive(Debug, Default, PartialEq, Eq)]
struct Names(BTreeMap<String, Names>);

impl Names {
    /// Adds the names in `values`, except below the paths in `open`.
    fn add(&mut self, values: &Value, path: &str, open: &BTreeSet<String>) {
        for (name, value) in values.as_object().into_iter().flatten() {
            let path = format!("{path}.{name}").trim_start_matches('.').to_owned();
            let below = self.0.entry(name.clone()).or_default();
            if !open.contains(&path) {
                below.add(value, &path, open);
            }
        }
    }

    /// Returns the names in the properties of a schema, except below the paths in `open`.
    fn of_schema(schema: &Value, path: &str, open: &BTreeSet<String>) -> Self {
        let properties = schema["properties"].as_object().into_iter().flatten();
        let of_property = |(name, schema): (&String, &Value)| {
            let path = format!("{path}.{name}").trim_start_matches('.').to_owned();
            let below = if open.contains(&path) {
                Self::default()
            } else {
                Self::of_schema(schema, &path, open)
            };
            (name.clone(), below)
        };
        Self(properties.map(of_property).collect())
    }
}

fn strings(list: &Value) -> BTreeSet<String> {
    let items = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    items.map(str::to_owned).collect()
}

fn schemas_have_all_names() -> Result<(), Failed> {
    for chart in CHARTS {
        let rules = read(&format!("{chart}/files/values.yaml"))?;
        let open = strings(&rules["open"]);
        let mut known = Names::default();
        let defaults = &read(&format!("{chart}/values.yaml"))?["_internal_defaults_do_not_set"];
        known.add(defaults, "", &open);
        known.add(&rules["more"], "", &open);
        let schema: Value = serde_json::from_str(&text(&format!("{chart}/values.schema.json"))?)?;
        let in_schema = Names::of_schema(&schema["$defs"]["values"], "", &open);
        assert_eq!(in_schema, known, "names in the schema and the known values of {chart}");
    }
    Ok(())
}

/// Installations have one file of values for all charts.
fn base_accepts_the_values_of_istiod() -> Result<(), Failed> {
    let names = |chart: &str| -> Result<BTreeSet<String>, Failed> {
        let rules = read(&format!("{chart}/files/values.yaml"))?;
        let defaults = read(&format!("{chart}/values.yaml"))?["_internal_defaults_do_not_set"].take();
        let mut names = strings(&rules["elsewhere"]);
        names.extend(rules["over"].as_str().map(str::to_owned));
        for values in [&defaults, &rules["more"]] {
            names.extend(values.as_object().into_iter().flat_map(|it| it.keys().cloned()));
            let global = values["global"].as_object().into_iter().flat_map(|it| it.keys());
            names.extend(global.map(|name| format!("global.{name}")));
        }
        Ok(names)
    };
    let (of_base, of_istiod) = (names("base")?, names("istiod")?);
    assert!(!of_istiod.is_empty(), "no values");
    let missing: Vec<String> = of_istiod
        .into_iter()
        .filter(|name| !of_base.contains(name) && !name.starts_with("base."))
        .collect();
    assert!(
        missing.is_empty(),
        "elsewhere of base/files/values.yaml lacks {missing:?}"
    );
    Ok(())
}

fn unknown_names_are_refused_with_the_nearest() -> Result<(), Failed> {
    for (chart, value, because) in [
        ("istiod", "hubb=a", "unknown value \"hubb\"; did you mean \"hub\"?"),
        ("istiod", "tga=a", "unknown value \"tga\"; did you mean \"tag\"?"),
        (
            "istiod",
            "accessLogFile=a",
            "did you mean \"meshConfig.accessLogFile\"?",
        ),
        ("istiod", "labels.a=b", "did you mean \"podLabels\"?"),
        ("gateway", "replicas=2", "did you mean \"replicaCount\"?"),
        ("istiod", "meshconfig.a=b", "did you mean \"meshConfig\"?"),
        (
            "istiod",
            "pilot.replicacount=2",
            "unknown value \"pilot.replicacount\"; did you mean \"replicaCount\"?",
        ),
        ("istiod", "istioNamespace=a", "did you mean \"global.istioNamespace\"?"),
        ("istiod", "global.autoscaleMin=2", "did you mean \"autoscaleMin\"?"),
        (
            "istiod",
            "global.proxy.resource.limits.cpu=1",
            "unknown value \"global.proxy.resource\"; did you mean \"global.proxy.resources\"?",
        ),
        (
            "istiod",
            "global.proxy.accessLogFile=a",
            "Istio no longer has it; use meshConfig.accessLogFile",
        ),
        (
            "istiod",
            "xyz=a",
            "unknown value \"xyz\"; `helm show values` lists the known ones",
        ),
        ("base", "defaultRevison=a", "did you mean \"defaultRevision\"?"),
        (
            "gateway",
            "service.loadbalancerIP=a",
            "did you mean \"service.loadBalancerIP\"?",
        ),
        (
            "gateway",
            "autoscaleEnabled=false",
            "unknown value \"autoscaleEnabled\"",
        ),
    ] {
        let refused = helm::objects(chart, &[value])
            .err()
            .ok_or(format!("{chart} accepts {value}"))?;
        assert!(
            refused.contains(&format!("chart {chart}: ")) && refused.contains(because),
            "{value}: {refused}"
        );
    }
    let both = helm::objects("istiod", &["hubb=a", "global.tagg=b"])
        .err()
        .unwrap_or_default();
    assert!(
        both.contains("\"hub\"") && both.contains("\"global.tag\""),
        "all errors are reported at once: {both}"
    );
    for value in [
        "meshConfig.unknown=1",
        "pilot.meshConfig.unknown=1",
        "resources.requests.gpu=1",
        "nodeSelector.any=a",
        "cni.ambient.enabled=true",
        "ztunnel.resources.requests.cpu=1m",
        "defaultRevision=canary",
        "pilot.cni.enabled=true",
        // The agent splits it.
        "global.proxy.logLevel=info\\,misc:error",
    ] {
        helm::objects("istiod", &[value])?;
    }
    Ok(())
}

/// The documentation lists profiles, releases and platforms, and the variables that they set exist.
fn presets_are_documented() -> Result<(), Failed> {
    let page = std::fs::read_to_string(project().join("docs/charts.md"))?;
    let variables = std::fs::read_to_string(project().join("docs/feature-variables.md"))?;
    let presets = read("istiod/files/profiles.yaml")?;
    for kind in ["profile", "compatibilityVersion", "platform"] {
        let presets = presets[kind].as_object().filter(|presets| !presets.is_empty());
        for (name, settings) in presets.ok_or("no presets")? {
            assert!(
                page.contains(&format!("`{name}`")),
                "docs/charts.md has no {kind} {name}"
            );
            for variable in settings["pilot"]["env"]
                .as_object()
                .into_iter()
                .flat_map(|env| env.keys())
            {
                let variable = format!("`{variable}`");
                assert!(
                    variables.contains(&variable),
                    "{kind} {name} sets {variable}, which does not exist"
                );
                assert!(
                    page.contains(&variable),
                    "docs/charts.md does not say that {kind} {name} sets {variable}"
                );
            }
        }
    }
    Ok(())
}

fn wrong_types_are_refused() -> Result<(), Failed> {
    for (chart, value, because) in [
        (
            "istiod",
            "autoscaleEnabled=maybe",
            "at '/autoscaleEnabled': got string, want boolean",
        ),
        (
            "istiod",
            "pilot.traceSampling=101",
            "at '/pilot/traceSampling': maximum",
        ),
        ("istiod", "env=null", "at '/env': got null, want object"),
        ("istiod", "pilot=null", "at '/pilot': got null, want object"),
        (
            "istiod",
            "global.resourceScope=some",
            "at '/global/resourceScope': value must be one of",
        ),
        (
            "istiod",
            "global.pilotCertProvider=kubernetes",
            "at '/global/pilotCertProvider'",
        ),
        (
            "base",
            "base.excludedCRDs=a",
            "at '/base/excludedCRDs': got string, want",
        ),
        (
            "base",
            "base.excludedCRDs={envoyfilters}",
            "base.excludedCRDs: there is no CRD \"envoyfilters\"",
        ),
        (
            "base",
            "base.enableCRDTemplates=false,base.excludedCRDs={envoyfilters.networking.istio.io}",
            "base.excludedCRDs needs base.enableCRDTemplates",
        ),
        ("gateway", "kind=StatefulSet", "at '/kind': value must be one of"),
    ] {
        let refused = helm::objects(chart, &[value])
            .err()
            .ok_or(format!("{chart} accepts {value}"))?;
        assert!(refused.contains(because), "{value}: {refused}");
    }
    Ok(())
}

/// Values of a release of Istio's chart name its images, which are those of another control plane.
fn images_of_istio_are_refused() -> Result<(), Failed> {
    for value in [
        "global.hub=docker.io/istio",
        "hub=istio,tag=1.30.3",
        "pilot.hub=registry.istio.io/release",
        "image=gcr.io/istio-release/pilot:1.30.3",
    ] {
        let refused = helm::objects("istiod", &[value])
            .err()
            .ok_or(format!("the chart istiod accepts {value}"))?;
        assert!(
            refused.contains("is that of Istio's own control plane; set image, hub or global.hub"),
            "{value}: {refused}"
        );
    }
    for value in [
        "hub=mirror.example.com/istio",
        "global.hub=docker.io/istio,image=example.com/pilot:v1",
        "global.hub=docker.io/istio,profile=remote",
    ] {
        helm::objects("istiod", &[value])?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Helm passes globals of the parent and its other subcharts to every subchart.
fn a_subchart_accepts_globals_of_others() -> Result<(), Failed> {
    let parent = scratch("charts/parent");
    std::fs::write(
        parent.join("Chart.yaml"),
        "apiVersion: v2\nname: parent\nversion: 0.1.0\n",
    )?;
    for chart in CHARTS {
        copy(
            &project().join("charts").join(chart),
            &parent.join("charts").join(chart),
        )?;
    }
    let parent = parent.display().to_string();
    let globals = "global.imageRegistry=registry.example.com,global.hub=example.com/mesh";
    let text = helm::run(&["template", "mesh", &parent, "--set", globals])?;
    assert!(text.contains("image: \"example.com/mesh/pilot:latest\""));
    let unknown = format!("{globals},istiod.autoscaleMn=2");
    let refused = helm::run(&["template", "mesh", &parent, "--set", &unknown])
        .err()
        .unwrap_or_default();
    assert!(
        refused.contains("unknown value \"autoscaleMn\"; did you mean \"autoscaleMin\"?"),
        "{refused}"
    );
    Ok(())
}
