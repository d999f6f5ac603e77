//! References of the Dockerfile: copied paths, make targets, stages and the entry point exist. Needs no container
//! engine.

use libtest_mimic::{Failed, Trial};

use super::verdict;
use crate::support::project;

/// The project folder in the build stage.
const BUILD_FOLDER: &str = "/src/";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("tidy::dockerfile::copied_paths_exist", copied_paths_exist),
        Trial::test("tidy::dockerfile::make_targets_exist", make_targets_exist),
        Trial::test("tidy::dockerfile::entrypoint_is_built", entrypoint_is_built),
        Trial::test("tidy::dockerfile::runs_without_privileges", runs_without_privileges),
        Trial::test("tidy::dockerfile::compiler_is_new_enough", compiler_is_new_enough),
    ]
}

/// Returns the instructions of the Dockerfile: the first word, and the words after it.
fn instructions() -> Vec<(String, Vec<String>)> {
    let text = read("Dockerfile").replace("\\\n", " ");
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace().map(str::to_owned);
            (words.next().unwrap_or_default(), words.collect())
        })
        .collect()
}

fn words_of(instruction: &str) -> Vec<Vec<String>> {
    instructions()
        .into_iter()
        .filter(|(name, _)| name == instruction)
        .map(|(_, words)| words)
        .collect()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(project().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the recipe lines of a make target; `None` if it does not exist.
fn recipe(target: &str) -> Option<String> {
    let makefile = read("Makefile");
    let mut lines = makefile
        .lines()
        .skip_while(|line| !line.starts_with(&format!("{target}:")));
    lines.next()?;
    Some(
        lines
            .take_while(|line| line.starts_with('\t'))
            .collect::<Vec<_>>()
            .join("\n"),
    )
}

fn copied_paths_exist() -> Result<(), Failed> {
    let stages: Vec<String> = words_of("FROM")
        .into_iter()
        .filter(|words| words.len() == 3)
        .map(|words| words[2].clone())
        .collect();
    let ignored = read(".dockerignore");
    let mut breaches = Vec::new();
    for words in words_of("COPY") {
        let (from, paths): (Vec<_>, Vec<_>) = words.iter().partition(|word| word.starts_with("--from="));
        let sources = &paths[..paths.len() - 1];
        if let Some(from) = from.first() {
            let stage = from.trim_start_matches("--from=");
            if !stages.iter().any(|known| known == stage) {
                breaches.push(format!("stage {stage} does not exist"));
            }
            let built = recipe("build").unwrap_or_default();
            let ours = sources.iter().filter_map(|source| source.strip_prefix(BUILD_FOLDER));
            breaches.extend(
                ours.filter(|path| !built.contains(path.trim_end_matches('/')))
                    .map(|path| format!("`make build` does not create {path}")),
            );
        } else {
            let absent = |path: &str| !project().join(path).exists() || ignored.lines().any(|line| line == path);
            breaches.extend(
                sources
                    .iter()
                    .filter(|path| absent(path))
                    .map(|path| format!("{path} does not exist")),
            );
        }
    }
    verdict("paths that the Dockerfile copies must exist", breaches)
}

fn make_targets_exist() -> Result<(), Failed> {
    let targets: Vec<String> = words_of("RUN")
        .into_iter()
        .flat_map(|words| {
            words
                .split(|word| word == "&&")
                .map(<[String]>::to_vec)
                .collect::<Vec<_>>()
        })
        .filter(|words| words.first().is_some_and(|word| word == "make"))
        .flat_map(|words| words[1..].to_vec())
        .collect();
    assert!(
        targets.iter().any(|target| target == "build"),
        "the image must be built by `make build`"
    );
    let absent = targets.iter().filter(|target| recipe(target).is_none());
    verdict("make targets of the Dockerfile must exist", absent.cloned().collect())
}

fn entrypoint_is_built() -> Result<(), Failed> {
    let words = words_of("ENTRYPOINT").concat().concat();
    let entrypoint = words.trim_matches(['[', ']', '"']);
    let name = entrypoint
        .strip_prefix("/usr/local/bin/")
        .ok_or("the entry point is not in /usr/local/bin")?;
    let copied = words_of("COPY")
        .iter()
        .any(|words| words.ends_with(&["/src/out/".into(), "/usr/local/bin/".into()]));
    if copied && recipe("build").is_some_and(|recipe| recipe.contains(&format!("out/{name}"))) {
        return Ok(());
    }
    Err(format!("`make build` creates no out/{name} for {entrypoint}").into())
}

fn runs_without_privileges() -> Result<(), Failed> {
    match words_of("USER").concat().as_slice() {
        [user] if user == "1337:1337" => Ok(()),
        other => Err(format!("USER is {other:?}, but the charts require 1337:1337").into()),
    }
}

fn compiler_is_new_enough() -> Result<(), Failed> {
    let manifest = read("Cargo.toml");
    let required = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = \""))
        .and_then(|rest| rest.strip_suffix('"'))
        .ok_or("Cargo.toml names no rust-version")?;
    let image = words_of("FROM")
        .concat()
        .into_iter()
        .find(|word| word.starts_with("rust:"))
        .ok_or("no Rust image")?;
    let have = image.trim_start_matches("rust:").split('-').next().unwrap_or_default();
    let number = |version: &str| -> Vec<u32> { version.split('.').filter_map(|part| part.parse().ok()).collect() };
    if number(have) >= number(required) {
        return Ok(());
    }
    Err(format!("the Dockerfile builds with Rust {have}, the project needs {required}").into())
}
