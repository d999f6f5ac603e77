//! The test cases of Istio's own authorization builder: policies in, filters out. They are part of Istio's conformance
//! set, where it is next to the project.

use std::{fmt::Write, path::Path};

use istiod::{
    api::yaml,
    model::Installation,
    proto::{
        envoy::{config::listener::v3::Filter, extensions::filters::network::http_connection_manager::v3::HttpFilter},
        json::{self, Unknown},
    },
};
use libtest_mimic::{Completion, Failed};
use serde_json::Value;

use super::fixture::Fixture;
use crate::support::project;

/// Known differences with their reasons: (case, reason). The list may only shrink.
const DIFFERENCES: &[(&str, &str)] = &[];

/// Compares all cases.
pub(super) fn filters_equal_those_of_istios_builder() -> Result<Completion, Failed> {
    let folder = project().join("../shared/conformance/upstream/authz-builder");
    if !folder.is_dir() {
        let reason =
            "skipped: Istio's cases are not next to the project (../shared/conformance/upstream/authz-builder)";
        println!("policy: {reason}");
        return Ok(Completion::ignored_with(reason));
    }
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json"))?)?;
    let mut errors = Vec::new();
    let mut equal = 0;
    for transport in ["http", "tcp"] {
        let folder = folder.join(transport);
        let cases = cases[transport]
            .as_array()
            .filter(|cases| !cases.is_empty())
            .ok_or("cases.json has no cases of this transport")?;
        for case in cases {
            let name = format!("{transport}/{}", text(case, "name"));
            let found = compare(&folder, transport, case).map_err(|failed| format!("{name}: {failed:?}"))?;
            let is_listed = DIFFERENCES.iter().any(|(known, _)| *known == name);
            match found {
                None if is_listed => errors.push(format!("{name}: listed in DIFFERENCES, but equal")),
                Some(difference) if !is_listed => errors.push(format!("{name}: {difference}")),
                None => equal += 1,
                Some(_) => {}
            }
        }
    }
    println!(
        "policy: {equal} cases of the builder are equal, {} differ as listed",
        DIFFERENCES.len()
    );
    if errors.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(errors.join("\n").into())
}

fn text<'v>(case: &'v Value, key: &str) -> &'v str {
    case[key].as_str().unwrap_or_default()
}

/// Returns the first difference of a case.
fn compare(folder: &Path, transport: &str, case: &Value) -> Result<Option<String>, Failed> {
    let mesh = mesh_config(folder, case)?;
    let is_custom = case.get("meshConfig").is_some();
    let objects = std::fs::read_to_string(folder.join(text(case, "input")))?;
    let mut of_pass = String::new();
    for document in yaml::documents(&objects) {
        let object = document.parse()?;
        // A case is one run of the builder, either over CUSTOM policies or over all others.
        if (object["spec"]["action"] == "CUSTOM") == is_custom {
            write!(of_pass, "---\n{object}\n")?;
        }
    }
    let fixture = Fixture::new(Installation::default(), &mesh, &of_pass)?;
    let is_authorization = |name: &str| name.ends_with("rbac") || name.ends_with("ext_authz");
    let found: Vec<Value> = if transport == "http" {
        let filters = fixture.http_filters()?;
        let filters = filters.iter().filter(|filter| is_authorization(&filter.name));
        filters.map(json::to_json).collect()
    } else {
        let filters = fixture.network_filters()?;
        let filters = filters.iter().filter(|filter| is_authorization(&filter.name));
        filters.map(json::to_json).collect()
    };
    let expected = case["want"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let expected: Vec<Value> = expected
        .map(|file| wanted_filter(&folder.join(file), transport))
        .collect::<Result<_, _>>()?;
    if found.len() != expected.len() {
        return Ok(Some(format!("{} filters, want {}", found.len(), expected.len())));
    }
    let differing = found
        .iter()
        .zip(&expected)
        .position(|(found, expected)| found != expected);
    Ok(differing.map(|position| {
        let (found, expected) = (&found[position], &expected[position]);
        format!("filter {position}:\n  found  {found}\n  expected {expected}")
    }))
}

/// Mesh config with the trust domains of a case.
fn mesh_config(folder: &Path, case: &Value) -> Result<String, Failed> {
    let mut mesh = match case["meshConfig"].as_str() {
        Some(file) => {
            let folder = folder.parent().ok_or("a case without a folder")?;
            let text = std::fs::read_to_string(folder.join(file))?;
            yaml::documents(&text)[0].parse()?
        }
        None => serde_json::json!({}),
    };
    for key in ["trustDomain", "trustDomainAliases"] {
        if let Some(value) = case.get(key) {
            mesh[key] = value.clone();
        }
    }
    Ok(mesh.to_string())
}

/// Returns the expected filter, in the canonical form of its message.
fn wanted_filter(file: &Path, transport: &str) -> Result<Value, Failed> {
    let text = std::fs::read_to_string(file)?;
    let value = yaml::documents(&text)[0].parse()?;
    Ok(if transport == "http" {
        json::to_json(&json::from_json::<HttpFilter>(&value, Unknown::Deny)?)
    } else {
        json::to_json(&json::from_json::<Filter>(&value, Unknown::Deny)?)
    })
}
