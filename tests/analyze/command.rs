//! `istiod analyze` as a process: exit codes, formats, suppression, files that cannot be parsed, and clusters.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Stdio,
};

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::{
    daemon::istiod,
    kubernetes::{self, Cluster},
    scratch,
};

const GATEWAY: &str = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: web, namespace: shop}
spec:
  hosts: [web.example.com]
  gateways: [missing]
  http:
  - route:
    - destination: {host: web}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  ports: [{name: http, port: 80}]
";

const NAMESPACE: &str = "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}\n";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("analyze::command::exit_codes_are_istios", exit_codes_are_istios),
        Trial::test("analyze::command::formats_have_messages", formats_have_messages),
        Trial::test("analyze::command::messages_are_suppressed", messages_are_suppressed),
        Trial::test("analyze::command::bad_documents_are_named", bad_documents_are_named),
        Trial::test(
            "analyze::command::folders_and_input_are_read",
            folders_and_input_are_read,
        ),
        Trial::test("analyze::command::analyzers_are_listed", analyzers_are_listed),
        kubernetes::trial("analyze::command::clusters_are_read", clusters_are_read),
    ]
}

/// The result of a command.
struct Output {
    code: Option<i32>,
    text: String,
    errors: String,
}

fn run(arguments: &[&str]) -> Result<Output, Failed> {
    let output = istiod().arg("analyze").args(arguments).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Output {
        code: output.status.code(),
        text: text(&output.stdout),
        errors: text(&output.stderr),
    })
}

/// Analyzes files without a cluster, in the namespace shop.
fn analyze(path: &Path, more: &[&str]) -> Result<Output, Failed> {
    let path = path.display().to_string();
    let mut arguments = vec!["--use-kube=false", "-n", "shop", &path];
    arguments.extend(more);
    run(&arguments)
}

fn file(name: &str, text: &str) -> Result<PathBuf, Failed> {
    let path = scratch(&format!("analyze-{name}")).join("mesh.yaml");
    fs::write(&path, text)?;
    Ok(path)
}

fn exit_codes_are_istios() -> Result<(), Failed> {
    let (errors, infos) = (file("codes-error", GATEWAY)?, file("codes-info", NAMESPACE)?);
    let missing = infos.with_file_name("missing.yaml");
    for (path, arguments, code) in [
        (&errors, &[][..], 79),
        (&errors, &["-o", "json"], 0),
        (
            &errors,
            &["--output-threshold", "error", "--failure-threshold=ERROR"],
            79,
        ),
        (&infos, &[], 0),
        (&infos, &["--failure-threshold", "Info"], 79),
        (
            &infos,
            &["--failure-threshold", "Info", "--output-threshold", "Error"],
            79,
        ),
        (&infos, &["--failure-threshold", "all"], 64),
        (&infos, &["-o", "xml"], 64),
        (&infos, &["--bogus"], 64),
        (&infos, &["-S", "IST0102"], 1),
        (&infos, &["--meshConfigFile", "/nowhere.yaml"], 1),
        (&missing, &[], 1),
    ] {
        let output = analyze(path, arguments)?;
        assert_eq!(output.code, Some(code), "{arguments:?}: {}", output.errors);
    }
    let output = run(&["--use-kube=false"])?;
    assert_eq!(output.code, Some(1), "{}", output.errors);
    assert!(output.errors.contains("nothing to analyze"), "{}", output.errors);
    Ok(())
}

fn formats_have_messages() -> Result<(), Failed> {
    let path = file("formats", GATEWAY)?;
    let place = format!("{}:2", path.display());
    let log = analyze(&path, &["--color=false"])?;
    let start = format!("Error [IST0101] (VirtualService shop/web {place}) spec.gateways[0]: ");
    assert!(log.text.starts_with(&start), "{}", log.text);
    let coloured = analyze(&path, &["--color"])?;
    assert!(
        coloured.text.starts_with("\u{1b}[1;31mError\u{1b}[0m [IST0101]"),
        "{}",
        coloured.text
    );
    let messages: Value = serde_json::from_str(&analyze(&path, &["-o", "JSON"])?.text)?;
    let first = &messages[0];
    let text = first["message"].as_str().ok_or("a message has a text")?;
    assert!(text.contains("missing"), "{text}");
    let expected = json!({
        "code": "IST0101",
        "level": "Error",
        "message": text,
        "origin": "VirtualService shop/web",
        "reference": place,
        "documentationUrl": "https://istio.io/v1.30/docs/reference/config/analysis/ist0101/?ref=istioctl-analyze",
    });
    assert_eq!(*first, expected);
    let yaml = analyze(&path, &["-o", "yaml"])?.text;
    assert!(
        yaml.contains("code: IST0101") && yaml.contains("code: IST0132"),
        "{yaml}"
    );
    let none = file("formats-none", "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")?;
    let none = analyze(&none, &["-o", "json"])?;
    assert_eq!(none.text, "[]\n");
    assert!(
        none.errors.contains("No issues found in namespace shop"),
        "{}",
        none.errors
    );
    Ok(())
}

fn messages_are_suppressed() -> Result<(), Failed> {
    let path = file("suppressed", NAMESPACE)?;
    assert!(analyze(&path, &[])?.text.contains("IST0102"));
    for suppression in ["IST0102=Namespace shop", "IST0102=Namespace *", "IST0102=* sh*p"] {
        let output = analyze(&path, &["--suppress", suppression])?;
        assert_eq!(output.text, "", "{suppression}");
    }
    let output = analyze(&path, &["-S", "IST0102=Namespace other", "-S", "IST9999=*"])?;
    assert!(output.text.contains("IST0102"), "{}", output.text);
    assert!(output.errors.contains("IST9999"), "{}", output.errors);
    let output = analyze(&path, &["-n", "other"])?;
    assert_eq!(output.text, "", "the last namespace counts: {}", output.errors);
    let path = path.display().to_string();
    assert_eq!(
        run(&["--use-kube=false", &path])?.text,
        "",
        "the namespace default has no message"
    );
    assert!(run(&["--use-kube=false", "-A", &path])?.text.contains("IST0102"));
    Ok(())
}

fn bad_documents_are_named() -> Result<(), Failed> {
    let text = format!("{NAMESPACE}---\na:\n  - b\n c: d\n---\nkind: Pod\n");
    let path = file("bad", &text)?;
    let output = analyze(&path, &[])?;
    assert_eq!(output.code, Some(65), "{}", output.errors);
    let name = path.display().to_string();
    assert!(
        output.errors.contains(&format!("{name}: line 5, column")),
        "{}",
        output.errors
    );
    assert!(output.errors.contains(&format!("{name}:7: ")), "{}", output.errors);
    assert!(
        output.text.contains("IST0102"),
        "the other documents count: {}",
        output.text
    );
    assert_eq!(analyze(&path, &["--ignore-unknown"])?.code, Some(0));
    Ok(())
}

fn folders_and_input_are_read() -> Result<(), Failed> {
    let folder = scratch("analyze-folder");
    fs::create_dir_all(folder.join("a/b"))?;
    fs::write(folder.join("a/b/namespace.yml"), NAMESPACE)?;
    fs::write(folder.join("a/gateway.yaml"), GATEWAY)?;
    fs::write(folder.join("README"), "text")?;
    let output = analyze(&folder, &["--recursive", "-v"])?;
    assert!(
        output.text.contains("IST0102") && output.text.contains("IST0101"),
        "{}",
        output.text
    );
    assert!(output.errors.contains("README"), "{}", output.errors);
    assert!(output.errors.contains("gateway.SecretAnalyzer"), "{}", output.errors);
    let mut process = istiod()
        .args(["analyze", "-k=false", "-A", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    process
        .stdin
        .take()
        .ok_or("input is piped")?
        .write_all(NAMESPACE.as_bytes())?;
    let output = String::from_utf8(process.wait_with_output()?.stdout)?;
    assert!(output.contains("(Namespace shop -:1)"), "{output}");
    Ok(())
}

fn analyzers_are_listed() -> Result<(), Failed> {
    let output = run(&["-L"])?;
    assert_eq!(output.code, Some(0));
    for name in [
        "gateway.SecretAnalyzer",
        "schema.ValidationAnalyzer.VirtualService",
        "webhook.Analyzer",
    ] {
        assert!(output.text.contains(&format!("* {name}:\n")), "{}", output.text);
    }
    let path = file("listed", &format!("{GATEWAY}---\n{NAMESPACE}"))?;
    let output = analyze(&path, &["--analyzer", "injection.Analyzer", "--analyzer", "bogus"])?;
    assert!(
        output.text.contains("IST0102") && !output.text.contains("IST0101"),
        "{}",
        output.text
    );
    assert!(output.errors.contains("bogus"), "{}", output.errors);
    Ok(())
}

/// A cluster without Istio's definitions, with a namespace without a label; files replace its objects.
fn clusters_are_read(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    cluster.namespace("shop", &json!({}))?;
    let kubeconfig = cluster.admin_kubeconfig().display().to_string();
    let output = run(&["-n", "shop", "--kubeconfig", &kubeconfig])?;
    assert_eq!(output.code, Some(0), "{}", output.errors);
    assert!(
        output.text.contains("Info [IST0102] (Namespace shop) "),
        "{}",
        output.text
    );
    let path = file(
        "cluster",
        &format!(
            "{GATEWAY}---\n{}",
            NAMESPACE.replace("shop}", "shop, labels: {istio-injection: enabled}}")
        ),
    )?;
    let path = path.display().to_string();
    let output = run(&["-n", "shop", "--kubeconfig", &kubeconfig, &path])?;
    assert_eq!(output.code, Some(79), "{}", output.errors);
    assert!(!output.text.contains("IST0102"), "{}", output.text);
    let output = run(&["-n", "shop", "--kubeconfig", &kubeconfig, "--context", "nowhere"])?;
    assert_eq!(output.code, Some(1), "{}", output.errors);
    assert!(output.errors.contains("nowhere"), "{}", output.errors);
    contexts_count(&kubeconfig, &path)
}

/// The context names the namespace, and files replace the objects of the config cluster beside further clusters.
fn contexts_count(kubeconfig: &str, path: &str) -> Result<(), Failed> {
    let mut several: Value = serde_json::from_str(&fs::read_to_string(kubeconfig)?)?;
    let mut other = several["contexts"][0].clone();
    other["name"] = json!("other");
    other["context"]["namespace"] = json!("shop");
    several["contexts"].as_array_mut().ok_or("no contexts")?.push(other);
    let kubeconfig = file("contexts", &several.to_string())?.display().to_string();
    let output = run(&["--kubeconfig", &kubeconfig, "--context", "other"])?;
    assert!(output.text.contains("[IST0102] (Namespace shop) "), "{}", output.text);
    let output = run(&["--kubeconfig", &kubeconfig])?;
    assert!(!output.text.contains("Namespace shop"), "{}", output.text);
    let output = run(&["--kubeconfig", &kubeconfig, "-n", "shpo"])?;
    assert_eq!((output.code, output.text.as_str()), (Some(0), ""), "as in Istio");
    assert_eq!(output.errors, "namespace \"shpo\" not found\n");
    let output = run(&[
        "-n",
        "shop",
        "--kubeconfig",
        &kubeconfig,
        "--remote-contexts",
        "other",
        path,
    ])?;
    assert_eq!(output.code, Some(79), "{}", output.errors);
    for (message, is_shown) in [
        ("[IST0101] [cluster-default] (VirtualService shop/web ", true),
        ("[IST0102] [cluster-default] ", false),
        ("[IST0102] [cluster-other] (Namespace shop) ", true),
    ] {
        assert_eq!(output.text.contains(message), is_shown, "{message}: {}", output.text);
    }
    Ok(())
}
