//! `istiod inject` as a process: files in, files out, differences and errors.

use std::{fs, path::Path};

use istiod::api::yaml;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::kubernetes::{self, Cluster};
use crate::support::{daemon::istiod, helm, missing, scratch};

const CONFIG: &str = "
policy: enabled
templates:
  sidecar: |
    spec:
      containers:
      - name: istio-proxy
        image: {{ .ProxyImage }}
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: web
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: kept
";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("inject::command::files_are_injected", files_are_injected),
        Trial::test("inject::command::errors_end_the_command", errors_end_the_command),
        Trial::test(
            "inject::command::templates_have_clock_randomness_and_variables",
            templates_have_clock_randomness_and_variables,
        ),
        helm::trial(
            "inject::command::labels_of_selectors_need_no_quotes",
            labels_of_selectors_need_no_quotes,
        ),
        helm::trial("inject::command::built_in_templates_are_those_of_the_chart", || {
            built_in_templates_are_those_of_the_chart()
        }),
        helm::trial(
            "inject::command::address_of_the_ca_has_the_revision_of_the_values",
            address_of_the_ca_has_the_revision_of_the_values,
        ),
        helm::trial(
            "inject::command::cni_plugin_gets_empty_lists_of_inbound_ports",
            cni_plugin_gets_empty_lists_of_inbound_ports,
        ),
        helm::trial(
            "inject::command::native_sidecars_end_only_with_false",
            native_sidecars_end_only_with_false,
        ),
        helm::trial(
            "inject::command::values_hold_applications_whatever_the_mesh_says",
            values_hold_applications_whatever_the_mesh_says,
        ),
        helm::trial(
            "inject::command::gateways_and_agents_honour_annotations",
            gateways_and_agents_honour_annotations,
        ),
        helm::trial(
            "inject::command::lightstep_has_its_ca_certificate",
            lightstep_has_its_ca_certificate,
        ),
        kubernetes::optional_trial("inject::command::clusters_have_templates", |name| {
            if !helm::is_installed() {
                return missing("Helm is missing; `make tools` installs it");
            }
            clusters_have_templates(name).map(|()| Completion::Completed)
        }),
    ]
}

/// Runs `istiod inject` with these arguments. Returns the exit code, the output, and the errors.
fn run(arguments: &[&str]) -> Result<(Option<i32>, String, String), Failed> {
    run_with(&[], arguments)
}

/// Like [`run`], with environment variables.
fn run_with(environment: &[(&str, &str)], arguments: &[&str]) -> Result<(Option<i32>, String, String), Failed> {
    let output = istiod()
        .arg("inject")
        .args(arguments)
        .envs(environment.iter().copied())
        .output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// Returns the arguments of `istiod inject` for the files of a folder.
fn files(folder: &Path) -> Vec<String> {
    let files = [
        ("-f", "pod.yaml"),
        ("--injectConfigFile", "config.yaml"),
        ("--valuesFile", "values.yaml"),
        ("--meshConfigFile", "mesh.yaml"),
    ];
    let files = files.map(|(flag, file)| [flag.to_owned(), folder.join(file).display().to_string()]);
    files.into_iter().flatten().collect()
}

/// Runs `istiod inject` with files of a folder.
fn inject(folder: &Path, more: &[&str]) -> Result<(Option<i32>, String, String), Failed> {
    let files = files(folder);
    let files = files.iter().map(String::as_str);
    run(&files.chain(more.iter().copied()).collect::<Vec<_>>())
}

/// Writes the files of an injection.
fn write(folder: &Path, config: &str) -> Result<(), Failed> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("pod.yaml"), POD)?;
    fs::write(folder.join("config.yaml"), config)?;
    fs::write(folder.join("values.yaml"), "global: {hub: example.com, tag: v1}")?;
    fs::write(folder.join("mesh.yaml"), "{}")?;
    Ok(())
}

fn files_are_injected() -> Result<(), Failed> {
    let folder = scratch("inject-command");
    write(&folder, CONFIG)?;
    let (code, output, errors) = inject(&folder, &[])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("image: \"example.com/proxyv2:v1\""), "{output}");
    assert!(
        output.ends_with("---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: kept\n---\n"),
        "{output}"
    );
    let (code, difference, errors) = inject(&folder, &["--diff"])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(
        difference.contains("\n+  - image: \"example.com/proxyv2:v1\"\n"),
        "{difference}"
    );
    assert!(!difference.contains("kept"), "{difference}");
    let file = folder.join("injected.yaml");
    let (code, printed, errors) = inject(&folder, &["-o", &file.display().to_string()])?;
    assert_eq!((code, printed.as_str()), (Some(0), ""), "{errors}");
    assert_eq!(fs::read_to_string(file)?, output);
    Ok(())
}

fn errors_end_the_command() -> Result<(), Failed> {
    let folder = scratch("inject-command-errors");
    for (template, expected) in [
        (
            "{{ nothing . }}",
            "templates.sidecar: template: sidecar:1: function \"nothing\" not defined (line 1)",
        ),
        (
            "{{ range until 100000 }}{{ range until 100000 }}{{ end }}{{ end }}",
            "template: sidecar:1:",
        ),
        ("{{ .Spec.Nothing }}", "can't evaluate field Nothing in type"),
    ] {
        write(
            &folder,
            &format!("policy: enabled\ntemplates:\n  sidecar: |\n    {template}\n"),
        )?;
        let (code, _, errors) = inject(&folder, &[])?;
        assert_eq!(code, Some(255), "{errors}");
        assert!(errors.contains(expected), "{errors}");
    }
    Ok(())
}

fn templates_have_clock_randomness_and_variables() -> Result<(), Failed> {
    let folder = scratch("inject-command-host");
    let text = "{{ uuidv4 | len }}-{{ env `INJECT_TEST` `none` }}-{{ now | date `2006` }}";
    write(&folder, &CONFIG.replace("{{ .ProxyImage }}", text))?;
    let files = files(&folder);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let (code, output, errors) = run_with(&[("INJECT_TEST", "set")], &files)?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("36-set-"), "{output}");
    assert!(!output.contains("36-set-1970"), "{output}");
    Ok(())
}

/// Helm writes selectors as it reads them from values: with numbers and booleans in place of texts.
fn labels_of_selectors_need_no_quotes() -> Result<(), Failed> {
    let folder = scratch("inject-command-selectors");
    let label = "sidecarInjectorWebhook.neverInjectSelector[0].matchLabels.no-sidecar=true";
    let objects = helm::objects("istiod", &[label])?;
    let [config, _] = helm::injector(&objects)?;
    assert!(config.contains("no-sidecar: true"), "{config}");
    write_chart(&folder, &objects)?;
    let (code, output, errors) = inject(&folder, &[])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("name: istio-init"), "{output}");
    Ok(())
}

/// Writes the chart's injector and mesh config into files.
fn write_chart(folder: &Path, objects: &[Value]) -> Result<(), Failed> {
    write(folder, "")?;
    let [config, values] = helm::injector(objects)?;
    let mesh = objects
        .iter()
        .find(|object| object["kind"] == "ConfigMap" && object["metadata"]["name"] == "istio");
    let mesh = mesh.and_then(|mesh| mesh["data"]["mesh"].as_str());
    fs::write(folder.join("config.yaml"), config)?;
    fs::write(folder.join("values.yaml"), values)?;
    fs::write(folder.join("mesh.yaml"), mesh.ok_or("the chart has no mesh config")?)?;
    Ok(())
}

fn built_in_templates_are_those_of_the_chart() -> Result<(), Failed> {
    let folder = scratch("inject-command-built-in");
    write_chart(&folder, &helm::objects("istiod", &[])?)?;
    let pod = folder.join("pod.yaml").display().to_string();
    let (code, of_chart, errors) = inject(&folder, &[])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(of_chart.contains("name: istio-init"), "{of_chart}");
    let (code, built_in, errors) = run(&["-f", &pod, "--builtIn"])?;
    assert_eq!((code, &built_in), (Some(0), &of_chart), "{errors}");
    let (code, canary, errors) = run(&["-f", &pod, "--builtIn", "--revision", "canary"])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(canary.contains("istiod-canary.istio-system.svc:15012"), "{canary}");
    let (code, _, errors) = run(&["-f", &pod])?;
    assert_eq!(code, Some(255), "{errors}");
    assert!(errors.contains("hint: --builtIn needs no cluster"), "{errors}");
    fs::write(
        &pod,
        "{apiVersion: v1, kind: Pod, metadata: {name: a, annotations: {sidecar.istio.io/proxyImageType: debug}},
          spec: {containers: [{name: b, image: c}]}}",
    )?;
    let (code, of_type, errors) = run(&["-f", &pod, "--builtIn"])?;
    assert_eq!(code, Some(0), "{errors}");
    let image = "registry.istio.io/release/proxyv2:1.30.3-debug";
    assert_eq!(of_type.matches(image).count(), 2, "{of_type}");
    Ok(())
}

/// Returns the values of the chart's injector.
fn injector_values(objects: &[Value]) -> Result<Value, Failed> {
    let [_, values] = helm::injector(objects)?;
    Ok(serde_json::from_str(values)?)
}

fn address_of_the_ca_has_the_revision_of_the_values() -> Result<(), Failed> {
    let folder = scratch("inject-command-revision");
    let objects = helm::objects("istiod", &[])?;
    write_chart(&folder, &objects)?;
    let mut values = injector_values(&objects)?;
    for revision in ["default", "canary"] {
        values["revision"] = json!(revision);
        fs::write(folder.join("values.yaml"), values.to_string())?;
        let (code, output, errors) = inject(&folder, &["--revision", revision])?;
        assert_eq!(code, Some(0), "{errors}");
        let address = format!("istiod-{revision}.istio-system.svc:15012");
        assert!(output.contains(&address), "{output}");
    }
    Ok(())
}

/// Without the annotation, the plugin redirects all inbound ports.
fn cni_plugin_gets_empty_lists_of_inbound_ports() -> Result<(), Failed> {
    let folder = scratch("inject-command-cni");
    let objects = helm::objects("istiod", &["cni.enabled=true"])?;
    write_chart(&folder, &objects)?;
    let mut values = injector_values(&objects)?;
    values["global"]["proxy"]["includeInboundPorts"] = json!("");
    fs::write(folder.join("values.yaml"), values.to_string())?;
    let annotated = "  name: web\n  annotations: {status.sidecar.istio.io/port: \"0\"}\nspec:\n";
    fs::write(folder.join("pod.yaml"), POD.replace("  name: web\nspec:\n", annotated))?;
    let (code, output, errors) = inject(&folder, &[])?;
    assert_eq!(code, Some(0), "{errors}");
    let documents = yaml::documents(&output);
    let pod = documents.first().ok_or("no pod")?.parse()?;
    for name in ["includeInboundPorts", "excludeInboundPorts"] {
        let name = format!("traffic.sidecar.istio.io/{name}");
        assert_eq!(pod["metadata"]["annotations"][&name], "", "{name}: {output}");
    }
    Ok(())
}

/// Returns a pod with these annotations, injected by the templates and the mesh config of the chart with values.
fn injected_by_chart(
    name: &str,
    values: &[&str],
    environment: &[(&str, &str)],
    annotations: &Value,
    containers: &Value,
) -> Result<Value, Failed> {
    let folder = scratch(name);
    write_chart(&folder, &helm::objects("istiod", values)?)?;
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web", "annotations": annotations },
        "spec": { "containers": containers } });
    fs::write(folder.join("pod.yaml"), pod.to_string())?;
    let files = files(&folder);
    let (code, output, errors) = run_with(environment, &files.iter().map(String::as_str).collect::<Vec<_>>())?;
    assert_eq!(code, Some(0), "{errors}");
    Ok(yaml::documents(&output).first().ok_or("no pod")?.parse()?)
}

/// Returns the item of a list that has this name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let mut items = list.as_array().into_iter().flatten();
    items.find(|item| item["name"] == name).unwrap_or(&Value::Null)
}

/// As in Istio, texts other than `false` do not turn native sidecars off.
fn native_sidecars_end_only_with_false() -> Result<(), Failed> {
    let web = json!([{ "name": "web" }]);
    for (text, default, is_native) in [
        ("True", "true", true),
        ("1", "false", true),
        ("", "true", true),
        ("", "false", false),
        ("false", "true", false),
    ] {
        let annotations = json!({ "sidecar.istio.io/nativeSidecar": text });
        let environment = [("ENABLE_NATIVE_SIDECARS", default)];
        let pod = injected_by_chart("inject-command-native", &[], &environment, &annotations, &web)?;
        let native = named(&pod["spec"]["initContainers"], "istio-proxy");
        assert_eq!(native["restartPolicy"] == "Always", is_native, "{text:?}, {default}");
        let plain = named(&pod["spec"]["containers"], "istio-proxy");
        assert_eq!(plain.is_null(), is_native, "{text:?}, {default}");
    }
    Ok(())
}

/// The value and the mesh config are joined by "or", for the order of containers and for the hook.
fn values_hold_applications_whatever_the_mesh_says() -> Result<(), Failed> {
    let values = [
        "global.proxy.holdApplicationUntilProxyStarts=true",
        "meshConfig.defaultConfig.holdApplicationUntilProxyStarts=false",
    ];
    let environment = [("ENABLE_NATIVE_SIDECARS", "false")];
    let web = json!([{ "name": "web" }]);
    let pod = injected_by_chart("inject-command-hold", &values, &environment, &json!({}), &web)?;
    let first = &pod["spec"]["containers"][0];
    assert_eq!(first["name"], "istio-proxy");
    let command = &first["lifecycle"]["postStart"]["exec"]["command"];
    assert_eq!(*command, json!(["pilot-agent", "wait"]));
    Ok(())
}

fn gateways_and_agents_honour_annotations() -> Result<(), Failed> {
    let annotations = json!({ "inject.istio.io/templates": "gateway",
        "sidecar.istio.io/bootstrapOverride": "overload-bootstrap" });
    let containers = json!([{ "name": "istio-proxy", "image": "auto" }, { "name": "metrics" }]);
    let pod = injected_by_chart("inject-command-gateway", &[], &[], &annotations, &containers)?;
    for name in ["default-container", "default-logs-container"] {
        let name = format!("kubectl.kubernetes.io/{name}");
        assert_eq!(pod["metadata"]["annotations"][&name], "metrics", "{name}");
    }
    let proxy = named(&pod["spec"]["containers"], "istio-proxy");
    let file = &named(&proxy["env"], "ISTIO_BOOTSTRAP_OVERRIDE")["value"];
    assert_eq!(*file, "/etc/istio/custom-bootstrap/custom_bootstrap.json");
    let mount = named(&proxy["volumeMounts"], "custom-bootstrap-volume");
    assert_eq!(mount["mountPath"], "/etc/istio/custom-bootstrap");
    let volume = named(&pod["spec"]["volumes"], "custom-bootstrap-volume");
    assert_eq!(volume["configMap"], json!({ "name": "overload-bootstrap" }));

    let annotations = json!({ "inject.istio.io/templates": "grpc-agent",
        "sidecar.istio.io/userVolume": r#"{"more": {"secret": {"secretName": "more"}}}"#,
        "sidecar.istio.io/userVolumeMount": r#"{"more": {"mountPath": "/more"}}"# });
    let web = json!([{ "name": "web" }]);
    let pod = injected_by_chart("inject-command-agent", &[], &[], &annotations, &web)?;
    let agent = named(&pod["spec"]["containers"], "istio-proxy");
    assert_eq!(named(&agent["volumeMounts"], "more")["mountPath"], "/more");
    let volume = named(&pod["spec"]["volumes"], "more");
    assert_eq!(volume["secret"], json!({ "secretName": "more" }));
    Ok(())
}

fn lightstep_has_its_ca_certificate() -> Result<(), Failed> {
    let values = [
        "global.proxy.tracer=lightstep",
        "global.tracer.lightstep.address=collector:443",
        "global.tracer.lightstep.accessToken=token",
        "meshConfig.defaultConfig.tracing.tlsSettings.mode=SIMPLE",
        "meshConfig.defaultConfig.tracing.tlsSettings.caCertificates=/etc/lightstep/cacert.pem",
    ];
    let environment = [("ENABLE_NATIVE_SIDECARS", "false")];
    let web = json!([{ "name": "web" }]);
    for (values, is_mounted) in [(&values[..], true), (&values[..3], false)] {
        let pod = injected_by_chart("inject-command-lightstep", values, &environment, &json!({}), &web)?;
        let proxy = named(&pod["spec"]["containers"], "istio-proxy");
        let mount = named(&proxy["volumeMounts"], "lightstep-certs");
        assert_eq!(mount["mountPath"] == "/etc/lightstep/", is_mounted, "{mount}");
        let volume = named(&pod["spec"]["volumes"], "lightstep-certs");
        assert_eq!(
            volume["secret"]["secretName"] == "lightstep.cacert",
            is_mounted,
            "{volume}"
        );
    }
    Ok(())
}

fn clusters_have_templates(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = scratch(&format!("{name}-files"));
    let objects = helm::objects("istiod", &[])?;
    write_chart(&folder, &objects)?;
    let pod = folder.join("pod.yaml").display().to_string();
    let kubeconfig = cluster.admin_kubeconfig().display().to_string();
    let (code, _, errors) = run(&["-f", &pod, "--kubeconfig", &kubeconfig])?;
    assert_eq!(code, Some(255), "{errors}");
    assert!(
        errors.contains("ConfigMap istio-system/istio-sidecar-injector"),
        "{errors}"
    );
    cluster.namespace("istio-system", &json!({}))?;
    for object in objects.iter().filter(|object| object["kind"] == "ConfigMap") {
        cluster.api.apply(object)?;
    }
    let (code, of_cluster, errors) = run(&["-f", &pod, "--kubeconfig", &kubeconfig])?;
    let (_, of_files, _) = inject(&folder, &[])?;
    assert_eq!((code, of_cluster), (Some(0), of_files), "{errors}");
    let (code, _, errors) = run(&["-f", &pod, "--kubeconfig", &kubeconfig, "--context", "nowhere"])?;
    assert_eq!(code, Some(255), "{errors}");
    assert!(errors.contains("nowhere"), "{errors}");
    Ok(())
}
