//! Injection with the files that replace the ConfigMap: paths and versions of requests, malformed ones, templates that
//! fail, and edits.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::cluster::TIMEOUT;
use super::server::{MAX_BYTES, post, sample, until_counted};
use crate::secure::authority::Authority;
use crate::support::daemon::Daemon;
use crate::support::{replace_file, scratch, wait};

const VALUES: &str = "global: {hub: example.com, tag: v1}";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "webhook::files::answer_every_form_of_request",
            answer_every_form_of_request,
        ),
        Trial::test(
            "webhook::files::failures_are_named_and_harmless",
            failures_are_named_and_harmless,
        ),
        Trial::test("webhook::files::edits_take_effect_if_valid", edits_take_effect_if_valid),
    ]
}

/// A daemon with files.
struct Injecting {
    daemon: Daemon,
    authority: Authority,
    folder: PathBuf,
}

/// A configuration whose template for the sidecar has this text in its image.
fn config(text: &str) -> String {
    let template = format!("    spec:\n      containers:\n      - name: istio-proxy\n        image: {text}\n");
    format!("policy: enabled\ndefaultTemplates: [sidecar]\ntemplates:\n  sidecar: |\n{template}")
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), String> {
    replace_file(folder, name, text).map_err(|error| error.to_string())
}

impl Injecting {
    fn start(name: &str, config: &str) -> Result<Injecting, String> {
        let authority = Authority::new("files");
        let folder = scratch(name);
        let (plugged, files) = (folder.join("cacerts"), folder.join("var/lib/istio/inject"));
        authority.plug_into(&plugged);
        std::fs::create_dir_all(&files).map_err(|error| error.to_string())?;
        write(&files, "config", config)?;
        write(&files, "values", VALUES)?;
        let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
            command.current_dir(&folder).arg("--configDir").arg(sample());
            command.env("ROOT_CA_DIR", &plugged);
        })?;
        Ok(Injecting {
            daemon,
            authority,
            folder: files,
        })
    }

    fn send(&self, path: &str, body: Vec<u8>) -> Result<Value, String> {
        let port = self.daemon.webhooks;
        let answer = post(port, &self.authority.root, path, "application/json", body)?;
        assert_eq!(answer.status, 200, "{}", answer.body);
        serde_json::from_str(&answer.body).map_err(|error| error.to_string())
    }

    /// Injects a pod. Returns its patch, or the reason of the refusal.
    fn inject(&self, path: &str, version: &str) -> Result<Result<Vec<Value>, String>, String> {
        let answer = self.send(path, review(version).to_string().into_bytes())?;
        assert_eq!(answer["apiVersion"], format!("admission.k8s.io/{version}"));
        let response = &answer["response"];
        assert_eq!(response["uid"], "7");
        if response["allowed"] == false {
            return Ok(Err(response["status"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned()));
        }
        assert_eq!(response["patchType"], "JSONPatch");
        let patch = response["patch"].as_str().unwrap_or_default();
        let patch =
            base64::Engine::decode(&base64::prelude::BASE64_STANDARD, patch).map_err(|error| error.to_string())?;
        let patch = serde_json::from_slice(&patch).map_err(|error| error.to_string())?;
        Ok(Ok(patch))
    }

    /// The image of the injected sidecar.
    fn image(&self) -> Result<String, String> {
        let patch = self.inject("/inject", "v1")??;
        let containers = patch.iter().find(|operation| operation["path"] == "/spec/containers/1");
        let image = containers.and_then(|operation| operation["value"]["image"].as_str());
        Ok(image.unwrap_or_default().to_owned())
    }
}

fn review(version: &str) -> Value {
    json!({ "kind": "AdmissionReview", "apiVersion": format!("admission.k8s.io/{version}"), "request": {
        "uid": "7", "operation": "CREATE", "namespace": "shop",
        "resource": { "group": "", "version": "v1", "resource": "pods" },
        "object": { "metadata": { "name": "web" },
            "spec": { "containers": [{ "name": "web", "image": "web" }] } } } })
}

fn answer_every_form_of_request() -> Result<(), Failed> {
    let injecting = Injecting::start("webhook/files-forms", &config("{{ .ProxyImage }}"))?;
    for (path, version, network) in [
        ("/inject", "v1", None),
        ("/inject/", "v1beta1", None),
        ("/inject/cluster/east/net/blue", "v1", Some("blue")),
        ("/inject/cluster/east/net/blue/", "v1", Some("blue")),
        ("/inject/:ENV:net=a/b:ENV:cluster=east", "v1", Some("a/b")),
    ] {
        let patch = injecting.inject(path, version)??;
        let labels = patch.iter().find(|operation| operation["path"] == "/metadata/labels");
        let label = labels.map(|labels| labels["value"]["topology.istio.io/network"].clone());
        assert_eq!(label.unwrap_or_default().as_str(), network, "{path}: {patch:?}");
    }
    assert_eq!(injecting.image()?, "example.com/proxyv2:v1");
    let mut skipped = review("v1");
    skipped["request"]["object"]["spec"]["hostNetwork"] = json!(true);
    let answer = injecting.send("/inject", skipped.to_string().into_bytes())?;
    assert_eq!(answer["response"], json!({ "uid": "7", "allowed": true }));
    for line in [
        "sidecar_injection_requests_total 7",
        "sidecar_injection_success_total 7",
        "sidecar_injection_skip_total 1",
        "sidecar_injection_failure_total 0",
        "sidecar_injection_time_seconds_count 7",
    ] {
        until_counted(&injecting.daemon, line)?;
    }
    Ok(())
}

fn failures_are_named_and_harmless() -> Result<(), Failed> {
    let injecting = Injecting::start("webhook/files-failures", &config("{{ .ProxyImage }}"))?;
    for (body, want) in [
        (b"{".to_vec(), "could not decode body"),
        ("[".repeat(1_000_000).into_bytes(), "could not decode body"),
        (vec![b'{'; MAX_BYTES], "could not decode body"),
        (br#"{"request": {"object": "#.repeat(100_000), "recursion limit"),
    ] {
        let answer = injecting.send("/inject", body)?;
        let message = answer["response"]["status"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(want), "{message}");
    }
    let mut wrong = review("v1");
    wrong["request"]["object"]["spec"]["containers"] = json!("none");
    let answer = injecting.send("/inject", wrong.to_string().into_bytes())?;
    let message = answer["response"]["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("spec.containers"), "{message}");

    // Templates that compile, and fail or never end where they are rendered.
    for (text, want) in [
        (
            "{{ range until 100000 }}{{ range until 100000 }}{{ end }}{{ end }}",
            "sidecar:4:",
        ),
        (
            "{{ define \"t\" }}{{ template \"t\" . }}{{ end }}{{ template \"t\" . }}",
            "sidecar:4:",
        ),
        ("{{ repeat 1000000 (repeat 1000000 \"x\") }}", "sidecar:4:"),
        ("{{ div 1 0 }}", "divi"),
        ("{{ .Spec.Nothing }}", "can't evaluate field Nothing"),
        ("{{ fail \"reason\" }}", "reason"),
    ] {
        write(&injecting.folder, "config", &config(text))?;
        let refusal = wait::until(text, TIMEOUT, || injecting.inject("/inject", "v1").ok()?.err())?;
        assert!(refusal.contains(want), "{text}: {refusal}");
        write(&injecting.folder, "config", &config("{{ .ProxyImage }}"))?;
        wait::until("valid templates", TIMEOUT, || {
            injecting.inject("/inject", "v1").ok()?.ok()
        })?;
    }
    Ok(())
}

fn edits_take_effect_if_valid() -> Result<(), Failed> {
    let injecting = Injecting::start("webhook/files-edits", &config("first"))?;
    assert_eq!(injecting.image()?, "first");
    for (number, wrong) in [
        config("{{ nothing }}"),
        config("{{ if }}"),
        "templates: 3\n".to_owned(),
        "[".repeat(100_000),
    ]
    .iter()
    .enumerate()
    {
        write(&injecting.folder, "config", wrong)?;
        let counted = format!("istiod_injector_configuration_errors_total {}", number + 1);
        until_counted(&injecting.daemon, &counted)?;
        assert_eq!(injecting.image()?, "first", "the last valid one stays");
    }
    write(&injecting.folder, "config", &config("second"))?;
    wait::until("the second configuration", TIMEOUT, || {
        (injecting.image().ok()? == "second").then_some(())
    })?;
    // Templates have the variables and randomness of the process.
    let random = config("{{ env `ROOT_CA_DIR` `none` | base }}-{{ uuidv4 | len }}");
    write(&injecting.folder, "config", &random)?;
    wait::until("the random configuration", TIMEOUT, || {
        (injecting.image().ok()? == "cacerts-36").then_some(())
    })?;
    // A removed file is no empty one.
    std::fs::remove_file(injecting.folder.join("config"))?;
    until_counted(&injecting.daemon, "istiod_injector_configuration_errors_total 5")?;
    assert_eq!(injecting.image()?, "cacerts-36");
    Ok(())
}
