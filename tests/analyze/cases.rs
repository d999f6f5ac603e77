//! The cases of Istio's conformance set: each is a set of files, an analyzer, and the codes and objects of its
//! messages.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::UNIX_EPOCH,
};

use istiod::{
    analyze::{self, Mesh, Scope, Settings, analyze, default_objects, table},
    api::{mesh_config, mesh_networks, yaml},
    environment,
    proto::json::to_json,
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::project;

/// The cases have to be as many, so that a missing file does not go unnoticed.
const CASES: usize = 100;

pub(super) fn trials() -> Vec<Trial> {
    let folder = project().join("../shared/conformance/upstream/analyzers");
    if !folder.exists() {
        return vec![Trial::ignorable_test("analyze::cases", || {
            Ok(Completion::ignored_with(
                "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
            ))
        })];
    }
    let cases = read(&folder.join("cases.json")).expect("the list of cases is readable");
    let cases: Vec<Value> = cases.as_array().cloned().unwrap_or_default();
    let count = cases.len();
    let mut trials = vec![Trial::test("analyze::cases::all_are_present", move || {
        assert_eq!(count, CASES);
        Ok(())
    })];
    for (number, fields) in cases.into_iter().enumerate() {
        let case = Case {
            folder: folder.clone(),
            fields,
        };
        let name = format!("analyze::cases::{:03}-{}", number + 1, case.text("analyzer"));
        trials.push(Trial::test(name, move || case.check()));
    }
    trials
}

fn read(path: &Path) -> Result<Value, Failed> {
    let text = fs::read_to_string(path)?;
    Ok(yaml::documents(&text).first().ok_or("the file is empty")?.parse()?)
}

struct Case {
    folder: PathBuf,
    fields: Value,
}

impl Case {
    fn text(&self, field: &str) -> &str {
        self.fields[field].as_str().unwrap_or_default()
    }

    /// Returns a file that a field names, or an empty object.
    fn file(&self, field: &str) -> Result<Value, Failed> {
        match self.text(field) {
            "" => Ok(json!({})),
            name => read(&self.folder.join(name)),
        }
    }

    fn settings(&self) -> Result<Settings, Failed> {
        let config = mesh_config::parse(&self.file("meshConfig")?).map_err(|errors| format!("{errors:?}"))?;
        let networks = mesh_networks::parse(&self.file("meshNetworks")?).map_err(|errors| format!("{errors:?}"))?;
        Ok(Settings {
            config: to_json(&config.config),
            networks: to_json(&networks.networks),
            istio_namespace: "istio-system".to_owned(),
            scopes_gateways: false,
            now: i64::try_from(environment::wall_clock().duration_since(UNIX_EPOCH)?.as_secs())?,
        })
    }

    fn check(&self) -> Result<(), Failed> {
        let analyzer = self.text("analyzer").to_owned();
        assert!(
            table::all().iter().any(|it| it.name == analyzer),
            "no analyzer {analyzer}"
        );
        let settings = self.settings()?;
        let mut objects = default_objects(&settings);
        for name in self.fields["inputs"].as_array().into_iter().flatten() {
            let name = name.as_str().ok_or("a file has a name")?;
            let content = analyze::read(name, &fs::read(self.folder.join(name))?, "");
            assert_eq!(content.problems, Vec::<String>::new());
            objects.extend(content.objects);
        }
        let scope = Scope {
            analyzers: vec![analyzer],
            ..Scope::default()
        };
        let reduced = objects.iter().cloned().map(|mut object| {
            analyze::reduce(object.kind, Arc::make_mut(&mut object.manifest));
            object
        });
        let reduced = analyze(&Mesh::new(reduced, settings.clone()), &scope);
        let messages = analyze(&Mesh::new(objects, settings), &scope);
        assert_eq!(reduced, messages, "the reduced objects must have the same messages");
        let mut actual: Vec<String> = messages
            .iter()
            .map(|it| format!("{} {} {}", it.level.name(), it.code, it.resource))
            .collect();
        let expected = self.fields["messages"].as_array().into_iter().flatten();
        let text = |message: &Value, field: &str| message[field].as_str().unwrap_or_default().to_owned();
        let mut expected: Vec<String> = expected
            .map(|it| format!("{} {} {}", text(it, "level"), text(it, "code"), text(it, "resource")))
            .collect();
        actual.sort();
        expected.sort();
        if actual != expected {
            let texts: Vec<String> = messages.iter().map(|it| format!("{}{it}", it.level.name())).collect();
            return Err(format!("want:\n{}\nhave:\n{}", expected.join("\n"), texts.join("\n")).into());
        }
        Ok(())
    }
}
