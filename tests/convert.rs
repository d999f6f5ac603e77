//! `istiod convert`: a table of inputs and outputs for every old kind.
//!
//! `convert/NAME.yaml` has old objects with the Services that they name, and `convert/NAME.expected.yaml` the objects
//! that they become, followed by the notes as comments. `UPDATE_GOLDEN=1` writes the expected files.

use std::collections::BTreeSet;
use std::path::PathBuf;

use istiod::api::{Severity, document, yaml};
use istiod::convert::{Options, convert};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;

use crate::support::daemon::istiod;
use crate::support::{project, scratch, variable};

/// The inputs.
const CASES: [&str; 8] = [
    "authentication-policy",
    "destination-policy",
    "egress-rule",
    "mesh-policy",
    "mixer",
    "rbac-exclusion",
    "rbac-inclusion",
    "route-rule",
];

/// The kinds of old releases, each of which is in a case.
const OLD_KINDS: [&str; 14] = [
    "ClusterRbacConfig",
    "DestinationPolicy",
    "EgressRule",
    "HTTPAPISpec",
    "HTTPAPISpecBinding",
    "IngressRule",
    "MeshPolicy",
    "Policy",
    "QuotaSpec",
    "QuotaSpecBinding",
    "RbacConfig",
    "RouteRule",
    "ServiceRole",
    "ServiceRoleBinding",
];

pub(crate) fn trials() -> Vec<Trial> {
    let cases = CASES
        .iter()
        .map(|name| Trial::test(format!("convert::{name}"), move || is_converted(name)));
    let mut trials: Vec<Trial> = cases.collect();
    trials.push(Trial::test("convert::command_writes_objects_and_notes", command_writes));
    trials.push(Trial::test(
        "convert::folders_name_the_command",
        folders_name_the_command,
    ));
    trials
}

fn file(name: &str) -> PathBuf {
    project().join("tests/convert").join(name)
}

fn objects(text: &str) -> Vec<Value> {
    let documents = yaml::documents(text).into_iter();
    documents
        .map(|document| document.parse().expect("a valid document"))
        .collect()
}

fn options() -> Options {
    Options {
        domain: "cluster.local".to_owned(),
        root_namespace: "istio-system".to_owned(),
    }
}

fn is_converted(name: &str) -> Result<(), Failed> {
    let input = std::fs::read_to_string(file(&format!("{name}.yaml")))?;
    let conversion = convert(&objects(&input), &options());
    for object in &conversion.objects {
        let parsed = document::parse(&"Kubernetes".into(), object);
        let errors = parsed
            .diagnostics
            .iter()
            .filter(|found| found.severity == Severity::Error);
        let errors: Vec<String> = errors.map(ToString::to_string).collect();
        assert_eq!((errors.as_slice(), parsed.rows.len()), (&[][..], 1), "{object}");
    }
    let documents: Vec<String> = conversion.objects.iter().map(yaml::to_text).collect();
    let notes: Vec<String> = conversion.notes.iter().map(|note| format!("# {note}\n")).collect();
    let text = documents.join("---\n") + &notes.concat();
    let expected = file(&format!("{name}.expected.yaml"));
    if variable("UPDATE_GOLDEN").is_some() {
        std::fs::write(&expected, &text)?;
    }
    let expected = std::fs::read_to_string(expected)?;
    if text == expected {
        Ok(())
    } else {
        Err(format!("{name} becomes\n{text}\nexpected\n{expected}").into())
    }
}

fn command_writes() -> Result<(), Failed> {
    let output = istiod()
        .arg("convert")
        .arg(file("route-rule.yaml"))
        .arg(file("mixer.yaml"))
        .output()?;
    assert!(output.status.success(), "{output:?}");
    let (objects, notes) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    assert!(objects.contains("kind: VirtualService"), "{objects}");
    assert!(
        notes.contains("QuotaSpec default/requests: only Mixer read it"),
        "{notes}"
    );
    let missing = istiod().args(["convert", "/nowhere.yaml"]).output()?;
    assert_eq!(missing.status.code(), Some(255));
    Ok(())
}

fn folders_name_the_command() -> Result<(), Failed> {
    let folder = scratch("convert-folder");
    let mut old = Vec::new();
    for name in CASES {
        std::fs::copy(file(&format!("{name}.yaml")), folder.join(format!("{name}.yaml")))?;
        for object in objects(&std::fs::read_to_string(file(&format!("{name}.yaml")))?) {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            if !["v1", "apps/v1"].contains(&text(&object["apiVersion"]).as_str()) {
                old.push((text(&object["kind"]), text(&object["metadata"]["name"])));
            }
        }
    }
    std::fs::write(folder.join("proxies.yaml"), "proxies: []\n")?;
    let output = istiod()
        .arg("render")
        .arg(&folder)
        .arg("--out")
        .arg(folder.join("out"))
        .output()?;
    let printed = String::from_utf8(output.stderr)? + &String::from_utf8(output.stdout)?;
    for (kind, name) in &old {
        let mut lines = printed.lines();
        let is_named = lines.any(|line| line.contains(kind) && line.contains(name) && line.contains("istiod convert"));
        assert!(is_named, "{kind} {name}:\n{printed}");
    }
    let kinds: BTreeSet<&str> = old.iter().map(|(kind, _)| kind.as_str()).collect();
    for kind in OLD_KINDS {
        assert!(kinds.contains(kind), "{kind} is in no case: {kinds:?}");
    }
    Ok(())
}
