//! Rules about the sources themselves that neither the compiler nor clippy checks: who may import whom, what pure code
//! may not touch, what has to be documented, and that the Dockerfile names only what exists.

mod dockerfile;
mod documentation;
mod imports;
mod purity;
mod source;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = imports::trials();
    trials.extend(purity::trials());
    trials.extend(documentation::trials());
    trials.extend(dockerfile::trials());
    trials
}

/// What a rule found: nothing, or one line for each breach.
fn verdict(rule: &str, breaches: Vec<String>) -> Result<(), libtest_mimic::Failed> {
    if breaches.is_empty() {
        return Ok(());
    }
    Err(format!("{rule}\n{}", breaches.join("\n")).into())
}
