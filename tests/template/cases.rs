//! The cases: each renders as in Go, or has Go's error.

use std::{collections::BTreeMap, sync::OnceLock};

use istiod::template::{Functions, Host, Limits, MissingKey, Templates, builtin_functions, sprig_functions};
use libtest_mimic::{Completion, Failed, Trial};

use super::data::data;
use crate::support::{go_run, missing, project};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("template::cases_render_as_in_go", cases_render_as_in_go),
        Trial::test("template::every_function_has_a_case", every_function_has_a_case),
        Trial::ignorable_test("template::expected_results_are_current", expected_results_are_current),
    ]
}

/// Templates of one group. The first one is rendered.
pub(super) struct Case {
    pub(super) name: String,
    options: Vec<String>,
    pub(super) texts: Vec<String>,
}

/// Returns the cases of all files, in the order of their names.
pub(super) fn cases() -> Vec<Case> {
    let folder = project().join("tests/template/cases");
    let entries = std::fs::read_dir(folder).expect("the cases are readable");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("the cases are readable").path())
        .collect();
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let area = file
            .file_stem()
            .expect("a file has a name")
            .to_string_lossy()
            .into_owned();
        let text = std::fs::read_to_string(&file).expect("the cases are text");
        for part in format!("\n{text}").split("\n=== ").skip(1) {
            let (header, body) = part.split_once('\n').unwrap_or((part, ""));
            let mut words = header.split_whitespace();
            let name = words.next().unwrap_or_default();
            let body = body.strip_suffix('\n').unwrap_or(body);
            // The last case of a file ends in the line break of the file.
            let body = format!("\n{body}\n");
            let texts = body
                .split("\n---\n")
                .map(|text| text.trim_start_matches('\u{0}').to_owned());
            let mut texts: Vec<String> = texts.collect();
            if let Some(first) = texts.first_mut() {
                first.remove(0);
            }
            if let Some(last) = texts.last_mut() {
                last.pop();
            }
            cases.push(Case {
                name: format!("{area}/{name}"),
                options: words.map(str::to_owned).collect(),
                texts,
            });
        }
    }
    cases
}

/// The functions, which are built once.
pub(super) fn functions() -> &'static Functions {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    FUNCTIONS.get_or_init(sprig_functions)
}

/// A host whose random bytes are all alike. Its time is the start of 1970.
struct Dice;

impl Host for Dice {
    fn fill_random(&self, buffer: &mut [u8]) -> bool {
        buffer.fill(4);
        true
    }
}

impl Case {
    fn has(&self, option: &str) -> bool {
        self.options.iter().any(|other| other == option)
    }

    /// Renders the case. The error is its text.
    fn render(&self) -> Result<String, String> {
        let functions = if self.has("builtin") {
            builtin_functions()
        } else {
            functions().clone()
        };
        let missing_key = if self.has("missingkey=zero") {
            MissingKey::Zero
        } else if self.has("missingkey=error") {
            MissingKey::Error
        } else {
            MissingKey::Invalid
        };
        let mut templates = Templates::new(functions, Limits::default()).with_missing_key(missing_key);
        for (position, text) in self.texts.iter().enumerate() {
            let name = match position {
                0 => "main".to_owned(),
                position => format!("part{position}"),
            };
            templates.parse(&name, text).map_err(|error| error.message)?;
        }
        let rendered = templates.render("main", &data(), &Dice);
        rendered.map_err(|error| error.message)
    }
}

/// Returns what Go renders, by case.
fn expected() -> BTreeMap<String, Result<String, String>> {
    let text = std::fs::read_to_string(project().join("tests/template/expected.json"));
    let document = serde_json::from_str::<serde_json::Value>(&text.expect("the results are readable"));
    let document = document.expect("the results are JSON");
    let entries = document.as_object().expect("the results are an object");
    let outcome = |value: &serde_json::Value| match (value["output"].as_str(), value["error"].as_str()) {
        (Some(output), _) => Ok(output.to_owned()),
        (None, error) => Err(error.unwrap_or_default().to_owned()),
    };
    entries
        .iter()
        .map(|(name, value)| (name.clone(), outcome(value)))
        .collect()
}

fn cases_render_as_in_go() -> Result<(), Failed> {
    let mut expected = expected();
    let mut differences = Vec::new();
    let mut count = 0;
    for case in cases() {
        count += 1;
        let Some(wanted) = expected.remove(&case.name) else {
            differences.push(format!("{}: not in expected.json", case.name));
            continue;
        };
        let rendered = case.render();
        if rendered != wanted {
            differences.push(format!(
                "{}\n  template {:?}\n  ours     {rendered:?}\n  Go's     {wanted:?}",
                case.name,
                case.texts.join("\n---\n")
            ));
        }
    }
    differences.extend(expected.keys().map(|name| format!("{name}: only in expected.json")));
    if differences.is_empty() {
        println!("{count} cases render as in Go");
        return Ok(());
    }
    Err(format!(
        "{} of {count} cases differ\n{}",
        differences.len(),
        differences.join("\n")
    )
    .into())
}

/// Functions that are refused; `bounds` has tests of them.
const UNTESTED: &[&str] = &[
    "bcrypt",
    "buildCustomCert",
    "decryptAES",
    "derivePassword",
    "encryptAES",
    "genCA",
    "genCAWithKey",
    "genPrivateKey",
    "genSelfSignedCert",
    "genSelfSignedCertWithKey",
    "genSignedCert",
    "genSignedCertWithKey",
    "getHostByName",
    "htpasswd",
];

fn every_function_has_a_case() -> Result<(), Failed> {
    let texts: Vec<String> = cases().into_iter().flat_map(|case| case.texts).collect();
    let text = texts.join("\n");
    let mut words: Vec<&str> = text
        .split(|character: char| !character.is_alphanumeric() && character != '_')
        .collect();
    words.sort_unstable();
    let is_absent = |name: &&str| words.binary_search(name).is_err() && !UNTESTED.contains(name);
    let absent: Vec<&str> = functions().names().filter(is_absent).collect();
    if absent.is_empty() {
        return Ok(());
    }
    Err(format!("functions without a case: {}", absent.join(", ")).into())
}

fn expected_results_are_current() -> Result<Completion, Failed> {
    let folder = project().join("tests/template");
    let run = go_run().args([".", "cases"]).current_dir(&folder).output();
    let output = match run {
        Ok(output) => output,
        Err(error) => return missing(&format!("Go is missing: {error}")),
    };
    if !output.status.success() {
        return Err(format!("go run: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let kept = std::fs::read(folder.join("expected.json")).expect("the results are readable");
    if output.stdout != kept {
        return Err("tests/template/expected.json is old: go run -C tests/template . cases > … renews it".into());
    }
    Ok(Completion::Completed)
}
