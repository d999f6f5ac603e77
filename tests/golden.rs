//! Golden cases: `tests/golden/<area>/<case>/` is a mesh folder with a `proxies.yaml`. Its folder `golden/` contains
//! the expected output of `istiod render`. `UPDATE_GOLDEN=1` writes the current output, which is then reviewed like any
//! other change.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};

use crate::support::{daemon, project, scratch, variable};

pub(crate) fn trials() -> Vec<Trial> {
    let root = project().join("tests/golden");
    folders(&root)
        .iter()
        .flat_map(|area| folders(area))
        .map(|case| {
            let name = case
                .strip_prefix(&root)
                .expect("the case was found below the root")
                .display()
                .to_string();
            Trial::test(format!("golden::{}", name.replace('/', "::")), move || {
                check(&case, &name)
            })
        })
        .collect()
}

/// Returns the folders directly below `folder`, sorted.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

fn check(case: &Path, name: &str) -> Result<(), Failed> {
    let actual = scratch(&format!("golden/{name}"));
    daemon::render(case, &actual)?;
    let golden = case.join("golden");
    if variable("UPDATE_GOLDEN").is_some() {
        return Ok(update(&golden, &actual)?);
    }
    let files: BTreeSet<PathBuf> = json_files(&golden).into_iter().chain(json_files(&actual)).collect();
    assert!(!files.is_empty(), "no resources");
    let unequal = files
        .iter()
        .filter(|file| read(&golden.join(file)) != read(&actual.join(file)));
    let lines: Vec<String> = unequal.map(|file| format!("  {}", file.display())).collect();
    if lines.is_empty() {
        return Ok(());
    }
    let (golden, actual) = (golden.display(), actual.display());
    Err(format!(
        "unequal:\n{}\nsee: diff -ru {golden} {actual}; UPDATE_GOLDEN=1 accepts",
        lines.join("\n")
    )
    .into())
}

/// Returns the files `<proxy>/<type>.json` below `folder`.
fn json_files(folder: &Path) -> Vec<PathBuf> {
    let proxies = folders(folder);
    let entries = proxies
        .iter()
        .filter_map(|proxy| std::fs::read_dir(proxy).ok())
        .flatten()
        .flatten();
    let files = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    files
        .map(|path| {
            path.strip_prefix(folder)
                .expect("it was found below the folder")
                .to_owned()
        })
        .collect()
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn update(golden: &Path, actual: &Path) -> std::io::Result<()> {
    if golden.exists() {
        std::fs::remove_dir_all(golden)?;
    }
    for file in json_files(actual) {
        let target = golden.join(&file);
        std::fs::create_dir_all(target.parent().expect("a file has a folder"))?;
        std::fs::copy(actual.join(&file), target)?;
    }
    Ok(())
}
