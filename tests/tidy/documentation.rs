//! Doc comments of the public items of the lowest layers.

use libtest_mimic::{Failed, Trial};

use super::source::{Source, sources};
use super::verdict;

const DOCUMENTED: &[&str] = &["base", "table", "model"];

/// The beginnings of public items. `pub mod` is excluded: a module is documented in its own file.
const ITEMS: &[&str] = &[
    "pub fn ",
    "pub const ",
    "pub static ",
    "pub struct ",
    "pub enum ",
    "pub trait ",
    "pub type ",
    "pub macro ",
];

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::test(
        "tidy::documentation::public_items_are_documented",
        public_items_are_documented,
    )]
}

fn public_items_are_documented() -> Result<(), Failed> {
    let breaches = sources()
        .iter()
        .filter(|source| source.layer().is_some_and(|layer| DOCUMENTED.contains(&layer)))
        .flat_map(undocumented)
        .collect();
    verdict("public items of base, table and model have a doc comment", breaches)
}

fn undocumented(source: &Source) -> Vec<String> {
    let lines: Vec<&str> = source.text.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    let is_item = |line: &str| ITEMS.iter().any(|item| line.trim_start().starts_with(item));
    (0..lines.len())
        .filter(|&number| code.get(number).is_some_and(|line| is_item(line)) && !documented(&lines[..number]))
        .map(|number| format!("{}:{}: {}", source.path, number + 1, lines[number].trim()))
        .collect()
}

/// Returns true if the lines before an item end in a doc comment, except for attributes.
fn documented(before: &[&str]) -> bool {
    for line in before.iter().rev().map(|line| line.trim()) {
        if line.starts_with("///") || line.starts_with("#[doc") || line.starts_with("$(#[") || line.ends_with("*/") {
            return true;
        }
        // An attribute may span lines; its last one closes a bracket.
        let is_attribute = line.starts_with("#[") || line.ends_with(")]") || line.ends_with("\",") || line == "]";
        if !is_attribute {
            return false;
        }
    }
    false
}
