//! Istio's own templates, where its conformance set is next to the project: all are parsed, and those for pods are
//! rendered with typed data and stand-ins for Istio's functions.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use istiod::{
    api::yaml,
    template::{
        Escapes, Failure, Function, Functions, Layout, Limits, List, Map, NoHost, Object, Templates, Type, Value,
        encode_json, print, sprig_functions,
    },
};
use libtest_mimic::{Completion, Failed, Trial};

use crate::support::project;

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "template::istios_templates_render",
        istios_templates_render,
    )]
}

/// Templates that render an overlay of a pod. The others render the objects of a Gateway.
const FOR_PODS: &[&str] = &["sidecar", "gateway", "grpc-simple", "grpc-agent", "spire", "custom"];

fn istios_templates_render() -> Result<Completion, Failed> {
    let set = project().join("../shared/conformance/upstream");
    if !set.exists() {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    }
    let folder = set.join("injection");
    let cases = read(&folder.join("cases.json"))?;
    let pairs: BTreeSet<(String, String)> = cases
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|case| {
            let file = |name: &str| case[name].as_str().map(str::to_owned);
            Some((file("configFile")?, file("valuesFile")?))
        })
        .collect();
    assert!(pairs.len() > 3, "cases.json names the files of the cases");
    let (mut parsed, mut rendered) = (0, 0);
    for (config, values) in pairs {
        let values = Value::from_json(&read(&folder.join(values))?);
        let (count, rendered_here) = check(&read(&folder.join(&config))?, &values)?;
        parsed += count;
        rendered += rendered_here;
    }
    parsed += check_chart(&set.join("chart/istio-discovery-1.30.3.yaml"))?;
    println!("{parsed} templates parse, {rendered} render");
    Ok(Completion::Completed)
}

fn read(path: &Path) -> Result<serde_json::Value, Failed> {
    let text = std::fs::read_to_string(path)?;
    let documents = yaml::documents(&text);
    Ok(documents.first().ok_or("the file is empty")?.parse()?)
}

/// Parses the templates of an injector configuration, and renders those for pods. Returns both numbers.
fn check(config: &serde_json::Value, values: &Value) -> Result<(usize, usize), Failed> {
    let templates = config["templates"].as_object().ok_or("there are no templates")?;
    let mut rendered = 0;
    for (name, text) in templates {
        let text = text.as_str().ok_or("a template is a text")?;
        let mut group = Templates::new(functions(), Limits::default());
        group.parse(name, text)?;
        if FOR_PODS.contains(&name.as_str()) {
            let output = group.render(name, &data(values.clone()), &NoHost)?;
            let overlay = yaml::documents(&output).first().ok_or("the overlay is empty")?.parse();
            let overlay = overlay.map_err(|error| format!("{name}: {error}\n{output}"))?;
            assert!(overlay["spec"].is_object(), "{name}: {overlay}");
            rendered += 1;
        }
    }
    Ok((templates.len(), rendered))
}

/// Parses the templates of the chart's ConfigMap.
fn check_chart(path: &Path) -> Result<usize, Failed> {
    let text = std::fs::read_to_string(path)?;
    let mut count = 0;
    for document in yaml::documents(&text) {
        let object: serde_json::Value = document.parse()?;
        if let Some(config) = object["data"]["config"].as_str() {
            let config: serde_json::Value = yaml::documents(config).first().ok_or("no config")?.parse()?;
            for (name, text) in config["templates"].as_object().into_iter().flatten() {
                let mut group = Templates::new(functions(), Limits::default());
                group.parse(name, text.as_str().unwrap_or_default())?;
                count += 1;
            }
        }
    }
    assert!(count > 0, "the chart has an injector configuration");
    Ok(count)
}

/// A struct with fields and methods without parameters.
struct Struct {
    name: &'static str,
    is_nil: bool,
    fields: Vec<(&'static str, Value)>,
    methods: Vec<(&'static str, Value)>,
}

impl Object for Struct {
    fn type_of(&self) -> Type {
        Type::named(self.name).pointer()
    }

    fn is_nil(&self) -> bool {
        self.is_nil
    }

    fn field_names(&self) -> Vec<&str> {
        self.fields.iter().map(|(name, _)| *name).collect()
    }

    fn field(&self, name: &str) -> Option<Value> {
        let found = self.fields.iter().find(|(field, _)| *field == name);
        found.map(|(_, value)| value.clone())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let (_, value) = self.methods.iter().find(|(method, _)| *method == name)?;
        Some(Arc::new(Function::getter(name, value.clone())))
    }
}

fn object(name: &'static str, fields: Vec<(&'static str, Value)>) -> Value {
    Value::object(Struct {
        name,
        is_nil: false,
        fields,
        methods: Vec::new(),
    })
}

/// An enum of a protobuf message.
struct Interception;

impl Object for Interception {
    fn type_of(&self) -> Type {
        Type::named("v1alpha1.ProxyConfig_InboundInterceptionMode")
    }

    fn basic(&self) -> Option<Value> {
        Some(Value::int(0))
    }

    fn to_text(&self) -> Option<String> {
        Some("REDIRECT".to_owned())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        (name == "String").then(|| Arc::new(Function::getter(name, "REDIRECT".into())))
    }
}

/// Returns a nil pointer with getters.
fn nil(name: &'static str, methods: Vec<(&'static str, Value)>) -> Value {
    Value::object(Struct {
        name,
        is_nil: true,
        fields: Vec::new(),
        methods,
    })
}

fn data(values: Value) -> Value {
    let metadata = || {
        object(
            "v1.ObjectMeta",
            vec![
                ("Name", "web".into()),
                ("Namespace", "default".into()),
                ("Labels", Map::of_strings([("app", "web")]).into()),
                (
                    "Annotations",
                    Map::of_strings([("sidecar.istio.io/proxyCPU", "1")]).into(),
                ),
            ],
        )
    };
    let port = object(
        "v1.ContainerPort",
        vec![("Name", "http".into()), ("ContainerPort", Value::int(8080))],
    );
    let ports = List::of(Type::named("v1.ContainerPort"), vec![port]);
    let container = object("v1.Container", vec![("Name", "app".into()), ("Ports", ports.into())]);
    let spec = object(
        "v1.PodSpec",
        vec![
            (
                "Containers",
                List::of(Type::named("v1.Container"), vec![container]).into(),
            ),
            ("InitContainers", List::nil(Type::named("v1.Container")).into()),
            ("ServiceAccountName", "web".into()),
            (
                "SecurityContext",
                Value::NilPointer(Type::named("v1.PodSecurityContext")),
            ),
        ],
    );
    let certificates = nil("v1alpha1.Tls", vec![("GetCaCertificates", "".into())]);
    let tracing = nil("v1alpha1.Tracing", vec![("GetTlsSettings", certificates)]);
    let hold = nil("wrapperspb.BoolValue", vec![("GetValue", false.into())]);
    let proxy = Value::object(Struct {
        name: "v1alpha1.ProxyConfig",
        is_nil: false,
        fields: vec![
            ("InterceptionMode", Value::object(Interception)),
            ("ProxyMetadata", Map::nil(Type::String).into()),
            ("HoldApplicationUntilProxyStarts", hold),
            ("DiscoveryAddress", "istiod:15012".into()),
            ("StatusPort", Value::int(15020)),
        ],
        methods: vec![("GetTracing", tracing)],
    });
    let mesh = object(
        "v1alpha1.MeshConfig",
        vec![
            ("ProxyListenPort", Value::int(15001)),
            ("ProxyInboundListenPort", Value::int(15006)),
            ("TrustDomain", "cluster.local".into()),
        ],
    );
    let of_owner = object("v1.TypeMeta", vec![("Kind", "Pod".into()), ("APIVersion", "v1".into())]);
    object(
        "inject.SidecarTemplateData",
        vec![
            ("TypeMeta", of_owner),
            ("DeploymentMeta", metadata()),
            ("ObjectMeta", metadata()),
            ("Spec", spec),
            ("ProxyConfig", proxy),
            ("MeshConfig", mesh),
            ("Values", values),
            ("Revision", "default".into()),
            ("NativeSidecars", true.into()),
            ("ProxyImage", "proxyv2".into()),
            ("ProxyUID", Value::int64(1337)),
            ("ProxyGID", Value::int64(1337)),
            ("InboundTrafficPolicyMode", "localhost".into()),
            ("CompliancePolicy", "".into()),
        ],
    )
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_str().into_owned(),
        _ => String::new(),
    }
}

fn entry(value: &Value, key: &Value) -> Option<Value> {
    match value {
        Value::Map(map) => map.get(text(key).as_bytes()),
        _ => None,
    }
}

/// Returns sprig's functions with stand-ins for Istio's.
fn functions() -> Functions {
    use Type::{Any, Bool, String as Text};
    let mut functions = sprig_functions();
    functions.extend([
        Function::new("annotation", &[Any, Text, Any], Text, |context, arguments| {
            let Value::Object(meta) = &arguments[0] else {
                return Err(Failure::message("the metadata of a pod is missing"));
            };
            let annotations = meta.field("Annotations").unwrap_or(Value::Nil);
            match entry(&annotations, &arguments[1]) {
                Some(value) => Ok(value),
                None => Ok(print(context, &arguments[2..])?.into()),
            }
        }),
        Function::new("isset", &[Text.map(), Text], Bool, |_, arguments| {
            Ok(entry(&arguments[0], &arguments[1]).is_some().into())
        }),
        Function::new("valueOrDefault", &[Any, Any], Any, |_, arguments| {
            let is_set = !matches!(&arguments[0], Value::Nil) && !text(&arguments[0]).is_empty();
            Ok(arguments[usize::from(!is_set)].clone())
        }),
        Function::new("contains", &[Text, Text], Bool, |_, arguments| {
            Ok(text(&arguments[1]).contains(&text(&arguments[0])).into())
        }),
        Function::new("directory", &[Text], Text, |_, arguments| Ok(arguments[0].clone())),
        Function::new("toLower", &[Text], Text, |_, arguments| {
            Ok(text(&arguments[0]).to_lowercase().into())
        }),
        Function::new("excludeInboundPort", &[Any, Text], Text, |_, arguments| {
            Ok(arguments[1].clone())
        }),
        Function::new("appendMultusNetwork", &[Text, Text], Text, |_, arguments| {
            Ok(arguments[1].clone())
        }),
        Function::variadic("otelResourceAttributes", &[Any], Text, |_, _| Ok("".into())),
        Function::variadic("toJsonMap", &[Any], Text, |context, arguments| {
            let first = arguments.first().unwrap_or(&Value::Nil);
            Ok(encode_json(context, first, Layout::Compact, Escapes::Html)?.into())
        }),
        Function::variadic("mergeMaps", &[Any], Any, |_, arguments| {
            Ok(arguments.first().cloned().unwrap_or(Value::Nil))
        }),
        Function::variadic("strdict", &[Text], Text.map(), |_, arguments| {
            let pairs = arguments.chunks_exact(2).map(|pair| (text(&pair[0]), text(&pair[1])));
            Ok(Map::of_strings(pairs).into())
        }),
        Function::variadic("omit", &[Any, Text], Any, |_, arguments| Ok(arguments[0].clone())),
        Function::new("omitNil", &[Any], Any, |_, arguments| Ok(arguments[0].clone())),
        Function::new("fromJSON", &[Text], Any, |_, _| Ok(Value::map::<&str>([]))),
        Function::new("indent", &[Type::INT, Text], Text, |_, arguments| {
            let Value::Int(_, spaces) = arguments[0] else {
                return Ok(Value::Nil);
            };
            let pad = " ".repeat(usize::try_from(spaces).unwrap_or(0));
            Ok(text(&arguments[1]).replace('\n', &format!("\n{pad}")).into())
        }),
        Function::new("env", &[Text, Text], Text, |_, arguments| Ok(arguments[1].clone())),
    ]);
    for name in ["toYaml", "toJSON", "structToJSON", "protoToJSON"] {
        // A JSON document is a YAML document.
        functions.add(Function::new(name, &[Any], Text, |context, arguments| {
            Ok(encode_json(context, &arguments[0], Layout::Compact, Escapes::Html)?.into())
        }));
    }
    functions
}
