//! The test cases of Istio's conversion of policies for ztunnels: objects in, the policy out. They are part of Istio's
//! conformance set, where it is next to the project.

use std::{fs, path::Path};

use istiod::{
    api::yaml,
    generate::{Proxy, ResourceType, proxy::Extensions},
    model::{Installation, features::Features},
    proto::json,
};
use libtest_mimic::{Completion, Failed};
use serde_json::Value;

use super::fixture::Fixture;
use crate::support::project;

/// The policy that requires mutual TLS. It exists with every PeerAuthentication, and the cases leave it out.
const STRICT: &str = "istio_converted_static_strict";

/// Compares all cases.
pub(super) fn policies_of_ztunnels_equal_istios() -> Result<Completion, Failed> {
    let folder = project().join("../shared/conformance/upstream/ambient-rbac");
    if !folder.is_dir() {
        let reason = "skipped: Istio's cases are not next to the project (../shared/conformance/upstream/ambient-rbac)";
        println!("policy: {reason}");
        return Ok(Completion::ignored_with(reason));
    }
    let mut cases = 0;
    let mut errors = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        let Some(case) = file.strip_suffix("-in.yaml") else {
            continue;
        };
        cases += 1;
        let (want, found) = (wanted(&folder, case)?, converted(&folder, case)?);
        if want != found {
            errors.push(format!("{case}: want {want:?}, found {found:?}"));
        }
    }
    println!("policy: {cases} cases of policies for ztunnels");
    match (cases, errors.is_empty()) {
        (0, _) => Err("no case".into()),
        (_, true) => Ok(Completion::Completed),
        (_, false) => Err(errors.join("\n").into()),
    }
}

/// Returns the expected policy of a case, if there is one.
fn wanted(folder: &Path, case: &str) -> Result<Vec<Value>, Failed> {
    let text = fs::read_to_string(folder.join(format!("{case}.yaml")))?;
    let documents = yaml::documents(&text);
    let parsed: Result<Vec<Value>, _> = documents.iter().map(yaml::Document::parse).collect();
    Ok(parsed?.into_iter().filter(Value::is_object).collect())
}

/// Returns the policies of a ztunnel in a mesh with the objects of a case.
fn converted(folder: &Path, case: &str) -> Result<Vec<Value>, Failed> {
    let text = fs::read_to_string(folder.join(format!("{case}-in.yaml")))?;
    let installation = Installation {
        features: Features {
            pilot_enable_ambient: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let node = "ztunnel~10.0.0.1~ztunnel-0.istio-system~istio-system.svc.cluster.local";
    let proxy = Proxy::new(node, "", [].into(), "".into(), Extensions::default())?;
    let fixture = Fixture::of(installation, "{}", &text, proxy)?;
    let names = fixture.names(ResourceType::Authorization);
    let policies = names
        .iter()
        .filter_map(|name| fixture.resource(ResourceType::Authorization, name));
    let policies = policies.map(|policy| json::any_to_json(&policy));
    let mut found: Vec<Value> = policies.filter(|policy| policy["name"] != STRICT).collect();
    for policy in &mut found {
        let fields = policy.as_object_mut().ok_or("a policy is not an object")?;
        fields.remove("@type");
        // Objects of some cases have no namespace.
        if !text.contains("namespace:") || fields.get("namespace") == Some(&Value::from("default")) {
            fields.remove("namespace");
        }
    }
    Ok(found)
}
