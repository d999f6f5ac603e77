//! Rules about the sources that neither the compiler nor clippy checks: imports and layers, purity, documentation and
//! wording, and references from the Dockerfile.

mod dockerfile;
mod documentation;
mod graph;
mod imports;
mod language;
mod layers;
mod purity;
mod source;
mod variables;

use libtest_mimic::Trial;

pub(crate) use graph::print as print_graph;

pub(crate) fn trials() -> Vec<Trial> {
    [
        imports::trials(),
        layers::trials(),
        purity::trials(),
        documentation::trials(),
        language::trials(),
        dockerfile::trials(),
        variables::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The outcome of a rule: an error with one line for each breach.
fn verdict(rule: &str, breaches: Vec<String>) -> Result<(), libtest_mimic::Failed> {
    if breaches.is_empty() {
        return Ok(());
    }
    Err(format!("{rule}\n{}", breaches.join("\n")).into())
}
