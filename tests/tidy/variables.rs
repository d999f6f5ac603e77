//! Environment variables: each one of Istio 1.30 has an effect, or a reason why it has none.

use istiod::model::features::{
    Features,
    other::{OTHER_VARIABLES, WITHOUT_EFFECT},
};
use libtest_mimic::{Failed, Trial};

use super::{
    source::{Source, sources},
    verdict,
};

/// The variables that `pilot-discovery` 1.30 registers.
const ISTIO: &str = include_str!("istio-variables.txt");

/// The files that declare the variables.
const DECLARATIONS: [&str; 2] = ["src/model/features.rs", "src/model/features/other.rs"];

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::test(
        "tidy::variables::variables_of_istio_have_an_effect_or_a_reason",
        variables_of_istio_have_an_effect_or_a_reason,
    )]
}

/// Returns true if code outside the declarations reads the variable: as the field of a feature, or by its name.
fn is_read(name: &str, sources: &[Source]) -> bool {
    let field = name.to_lowercase();
    let text = format!("\"{name}\"");
    let is_feature = Features::VARIABLES.contains(&name);
    let readers = sources
        .iter()
        .filter(|source| !DECLARATIONS.contains(&source.path.as_str()));
    let mut readers = readers.filter(|source| !source.path.contains("/tests"));
    readers.any(|source| source.text.contains(&text) || is_feature && source.words(&field).next().is_some())
}

fn variables_of_istio_have_an_effect_or_a_reason() -> Result<(), Failed> {
    let sources = sources();
    let mut breaches = Vec::new();
    let listed = |table: &[(&str, &str)], name: &str| table.iter().any(|(other, _)| *other == name);
    for name in ISTIO.lines() {
        let is_declared = Features::VARIABLES.contains(&name) || listed(OTHER_VARIABLES, name);
        match (is_read(name, &sources), listed(WITHOUT_EFFECT, name)) {
            (true, true) => breaches.push(format!("{name} is read, and WITHOUT_EFFECT says why it is not")),
            (false, false) => breaches.push(format!("{name} is not read, and WITHOUT_EFFECT does not say why")),
            (true, false) if !is_declared => breaches.push(format!("{name} is not in OTHER_VARIABLES")),
            _ => {}
        }
    }
    let unread = OTHER_VARIABLES.iter().filter(|(name, _)| !is_read(name, &sources));
    breaches.extend(unread.map(|(name, _)| format!("{name} in OTHER_VARIABLES is not read")));
    let foreign = WITHOUT_EFFECT
        .iter()
        .filter(|(name, _)| !ISTIO.lines().any(|line| line == *name));
    breaches.extend(foreign.map(|(name, _)| format!("{name} in WITHOUT_EFFECT is not a variable of Istio")));
    verdict(
        "src/model/features/other.rs lists the variables that are not features",
        breaches,
    )
}
