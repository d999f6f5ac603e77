//! The cases of Istio's conformance set: each is injected as a file, and each of its pods through the webhook's path.
//! The templates of the project's own chart make the same objects.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, OnceLock},
};

use istiod::{
    api::{mesh_config, yaml},
    inject::{Environment, InjectError, Injector, Mesh, Namespace, NativeSidecars, Outcome, Platform, workload},
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::{
    compare::{assert_same, patched},
    pods::{self, AdmittedPod},
};
use crate::support::{helm, missing, project};

/// The cases have to be as many, so that a missing file does not go unnoticed.
const CASES: usize = 125;

pub(super) fn trials() -> Vec<Trial> {
    let folder = project().join("../shared/conformance/upstream/injection");
    if !folder.exists() {
        return vec![Trial::ignorable_test("inject::cases", || {
            Ok(Completion::ignored_with(
                "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
            ))
        })];
    }
    let cases = read(&folder.join("cases.json")).expect("the list of cases is readable");
    let cases: Vec<Case> = cases
        .as_array()
        .into_iter()
        .flatten()
        .map(|fields| Case {
            folder: folder.clone(),
            fields: fields.clone(),
            templates: Templates::OfCase,
        })
        .collect();
    let count = cases.len();
    let mut trials = vec![Trial::test("inject::cases::all_are_present", move || {
        assert_eq!(count, CASES);
        Ok(())
    })];
    trials.push(Trial::test("inject::cases::chart_is_valid", move || {
        chart_is_valid(&folder.join("../chart/istio-discovery-1.30.3.yaml"))
    }));
    trials.push(helm::trial(
        "inject::cases::tracing_proxies_run_in_the_group_of_the_namespace",
        tracing_proxies_run_in_the_group_of_the_namespace,
    ));
    for (number, case) in cases.into_iter().enumerate() {
        let name = case.name(number + 1);
        if case.fits_chart().expect("the files of the case are readable") {
            let case = Case {
                templates: Templates::OfChart,
                ..case.clone()
            };
            let name = format!("inject::chart::{name}");
            trials.push(Trial::ignorable_test(name, move || case.check_chart()));
        }
        if !case.is_set("skipInjection") {
            let case = case.clone();
            trials.push(Trial::test(format!("inject::file::{name}"), move || case.check_file()));
        }
        if !case.is_set("skipWebhook") {
            trials.push(Trial::test(format!("inject::webhook::{name}"), move || {
                case.check_webhook()
            }));
        }
    }
    trials
}

/// The ConfigMap of Istio's own chart compiles, with the templates of gateways and waypoints.
fn chart_is_valid(path: &Path) -> Result<(), Failed> {
    let text = std::fs::read_to_string(path)?;
    let objects = documents(&text)?;
    let injectors: Vec<&Value> = objects
        .iter()
        .map(|it| &it["data"])
        .filter(|it| it["config"].is_string())
        .collect();
    assert_eq!(injectors.len(), 1, "the chart has one injector");
    let key = |name: &str| injectors[0][name].as_str().unwrap_or_default();
    let injector = Injector::parse(key("config"), key("values"))?;
    let names: Vec<&str> = injector.templates().collect();
    assert!(names.contains(&"sidecar") && names.contains(&"waypoint"), "{names:?}");
    Ok(())
}

/// A proxy that traces rules runs as root, so its traffic is exempt from them by its group alone: that of istio-init's
/// option `-u`, which OpenShift assigns to the namespace.
fn tracing_proxies_run_in_the_group_of_the_namespace() -> Result<(), Failed> {
    let objects = helm::objects("istiod", &[])?;
    let [config, values] = helm::injector(&objects)?;
    let injector = Injector::parse(config, values)?;
    let environment = Environment {
        namespace: Arc::new(namespace("test-ns")),
        platform: Platform::OpenShift,
        ..Environment::default()
    };
    let annotations = json!({ "proxy.istio.io/config": "proxyMetadata: {IPTABLES_TRACE_LOGGING: \"true\"}" });
    let pod = json!({ "metadata": { "annotations": annotations }, "spec": { "containers": [{ "name": "web" }] } });
    let Outcome::Patch(patch) = injector.inject(&pod, &environment)? else {
        return Err("the pod is not injected".into());
    };
    let pod = patched(&pod, patch.operations())?;
    let lists = [&pod["spec"]["initContainers"], &pod["spec"]["containers"]];
    let mut containers = lists.into_iter().filter_map(Value::as_array).flatten();
    let proxy = containers.find(|container| container["name"] == "istio-proxy");
    let context = &proxy.ok_or("no proxy")?["securityContext"];
    assert_eq!(context["runAsUser"], 0);
    assert_eq!(context["runAsGroup"], 1_000_629_999);
    Ok(())
}

/// Returns the injector configuration that the project's own chart renders.
fn chart_config() -> Result<String, Failed> {
    static CONFIG: OnceLock<Result<String, String>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| {
        let objects = helm::objects("istiod", &[])?;
        let [config, _] = helm::injector(&objects)?;
        Ok(config.to_owned())
    });
    Ok(config.clone()?)
}

fn read(path: &Path) -> Result<Value, Failed> {
    let text = std::fs::read_to_string(path)?;
    Ok(yaml::documents(&text).first().ok_or("the file is empty")?.parse()?)
}

/// Compiled configurations by the names of their files.
type Injectors = BTreeMap<(Templates, String, String), Arc<Injector>>;

/// The source of the templates.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Templates {
    OfCase,
    OfChart,
}

#[derive(Clone)]
struct Case {
    folder: PathBuf,
    fields: Value,
    templates: Templates,
}

impl Case {
    fn name(&self, number: usize) -> String {
        let file = self.text("golden").or_else(|| self.text("input")).unwrap_or_default();
        format!("{number:03}-{}", file.replace(".yaml", "").replace(".injected", ""))
    }

    fn text(&self, field: &str) -> Option<&str> {
        self.fields[field].as_str()
    }

    fn is_set(&self, field: &str) -> bool {
        self.fields[field] == true
    }

    fn file(&self, field: &str) -> Result<String, Failed> {
        let name = self.text(field).ok_or_else(|| format!("the case has no {field}"))?;
        Ok(std::fs::read_to_string(self.folder.join(name))?)
    }

    /// Returns the compiled configuration, which cases share.
    fn injector(&self) -> Result<Arc<Injector>, Failed> {
        static INJECTORS: LazyLock<Mutex<Injectors>> = LazyLock::new(Mutex::default);
        let key = |field: &str| self.text(field).unwrap_or_default().to_owned();
        let key = (self.templates, key("configFile"), key("valuesFile"));
        let mut injectors = INJECTORS.lock().map_err(|_| "another case failed")?;
        if let Some(injector) = injectors.get(&key) {
            return Ok(injector.clone());
        }
        let config = match self.templates {
            Templates::OfCase => self.file("configFile")?,
            Templates::OfChart => chart_config()?,
        };
        let injector = Arc::new(Injector::parse(&config, &self.file("valuesFile")?)?);
        injectors.insert(key, injector.clone());
        Ok(injector)
    }

    fn environment(&self) -> Result<Environment, Failed> {
        let mesh = read(
            &self
                .folder
                .join(self.text("meshFile").ok_or("the case has no mesh config")?),
        )?;
        let mesh = mesh_config::parse(&mesh).map_err(|errors| format!("{errors:?}"))?;
        let variable = |name: &str| self.fields["env"][name].as_str().unwrap_or_default();
        Ok(Environment {
            mesh: Arc::new(Mesh::new(mesh.config)),
            kubelets: Arc::new([("node-1".to_owned(), 33), ("node-2".to_owned(), 34)].into()),
            native_sidecars: NativeSidecars::parse(variable("ENABLE_NATIVE_SIDECARS"))
                .ok_or("the variable is valid")?,
            platform: match variable("PLATFORM") {
                "openshift" => Platform::OpenShift,
                _ => Platform::Other,
            },
            ..Environment::default()
        })
    }

    /// True if the case has no templates of its own, and its pods do not name the template grpc-simple: the chart's
    /// writes the same bootstrap file with another script.
    fn fits_chart(&self) -> Result<bool, Failed> {
        let values = read(
            &self
                .folder
                .join(self.text("valuesFile").ok_or("the case has no values")?),
        )?;
        let own = &values["sidecarInjectorWebhook"]["templates"];
        let has_none = own.as_object().is_none_or(serde_json::Map::is_empty);
        Ok(has_none && !self.is_set("skipInjection") && !self.file("input")?.contains("grpc-simple"))
    }

    fn check_chart(&self) -> Result<Completion, Failed> {
        if !helm::is_installed() {
            return missing("Helm is missing; `make tools` installs it");
        }
        self.check_file()?;
        Ok(Completion::Completed)
    }

    fn check_file(&self) -> Result<(), Failed> {
        let input = self.file("input")?;
        let injector = self.injector()?;
        let result = workload::inject_text(&injector, &self.environment()?, &input);
        let Some(result) = self.expected(result)? else {
            return Ok(());
        };
        if let Some(log) = self.text("expectedLog") {
            let warnings = result.warnings.join("\n");
            assert!(warnings.contains(&log.replace("\\\"", "\"")), "{warnings}");
        }
        let golden = self.file("golden")?;
        let (actual, expected) = (documents(&result.text)?, documents(&golden)?);
        assert_eq!(actual.len(), expected.len(), "the number of documents");
        for (actual, expected) in actual.into_iter().zip(expected) {
            assert_same(actual, expected)?;
        }
        Ok(())
    }

    fn check_webhook(&self) -> Result<(), Failed> {
        let injector = self.injector()?;
        let input = documents(&self.file("input")?)?;
        let pods: Vec<AdmittedPod> = input.iter().flat_map(pods::admitted).collect();
        let mut injected = Vec::new();
        for pod in &pods {
            let mut environment = self.environment()?;
            environment.revision = "default".to_owned();
            environment.namespace = Arc::new(namespace(&pod.namespace));
            match self.expected(injector.inject(&pod.object, &environment))? {
                None => return Ok(()),
                Some(Outcome::Skipped(_)) => injected.push(pod.object.clone()),
                Some(Outcome::Patch(patch)) => {
                    let once = patched(&pod.object, patch.operations())?;
                    // A pod with settings of an older injector takes one injection more until it is stable.
                    let stable = if pod.was_injected() {
                        again(&injector, &once, &environment)?.0
                    } else {
                        once.clone()
                    };
                    assert_idempotent(&again(&injector, &stable, &environment)?.1)?;
                    injected.push(once);
                }
            }
        }
        let golden = documents(&self.file("golden")?)?;
        let golden: Vec<Value> = golden.iter().flat_map(pods::templates).collect();
        assert_eq!(injected.len(), golden.len(), "the number of pods");
        for (actual, expected) in injected.into_iter().zip(golden) {
            assert_same(pods::comparable(actual), pods::comparable(expected))?;
        }
        Ok(())
    }

    /// Returns the result; `None` if the case expects an error and has it.
    fn expected<T>(&self, result: Result<T, InjectError>) -> Result<Option<T>, Failed> {
        match (self.text("expectedError"), result) {
            (None, result) => Ok(Some(result?)),
            (Some(expected), Ok(_)) => Err(format!("no error with {expected:?}").into()),
            (Some(expected), Err(error)) => {
                let text = error.to_string();
                assert!(text.to_lowercase().contains(expected), "{text}");
                Ok(None)
            }
        }
    }
}

/// Injects a pod that was injected. Returns the result and the operations.
fn again(injector: &Injector, pod: &Value, environment: &Environment) -> Result<(Value, Vec<Value>), Failed> {
    match injector.inject(pod, environment)? {
        Outcome::Patch(patch) => Ok((patched(pod, patch.operations())?, patch.operations().to_vec())),
        Outcome::Skipped(reason) => Err(format!("skipped the second time: {reason}").into()),
    }
}

fn assert_idempotent(operations: &[Value]) -> Result<(), Failed> {
    if operations.is_empty() {
        return Ok(());
    }
    Err(format!("the second injection changes the pod: {:#}", json!(operations)).into())
}

fn documents(text: &str) -> Result<Vec<Value>, Failed> {
    let documents = yaml::documents(text);
    Ok(documents.iter().map(yaml::Document::parse).collect::<Result<_, _>>()?)
}

/// Returns a namespace of the cluster of the cases.
fn namespace(name: &str) -> Namespace {
    let range = || "1000620000/10000".to_owned();
    let annotations = [
        ("openshift.io/sa.scc.uid-range".to_owned(), range()),
        ("openshift.io/sa.scc.supplemental-groups".to_owned(), range()),
    ];
    Namespace {
        name: name.to_owned(),
        annotations: if name == "test-ns" {
            annotations.into()
        } else {
            BTreeMap::new()
        },
    }
}
