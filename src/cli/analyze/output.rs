//! Texts of messages and analyzers.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Value, ser::PrettyFormatter};

use super::Format;
use crate::{
    analyze::{Level, Message, table},
    api::yaml,
};

/// Returns the list of analyzers.
pub(super) fn list() -> String {
    let mut text = String::new();
    for analyzer in table::all() {
        // Writing into a string does not fail.
        let _ = writeln!(text, "* {}:\n    {}", analyzer.name, analyzer.description);
    }
    text
}

/// Prints the names of the analyzers that ran.
pub(super) fn executed(named: &[String]) {
    eprintln!("Executed analyzers:");
    for analyzer in table::selected(named) {
        eprintln!("\t{}", analyzer.name);
    }
}

/// Returns the text of the messages.
pub(super) fn messages(messages: &[&Message], format: Format, is_coloured: bool) -> String {
    let values = || -> Value { messages.iter().map(|message| message.json()).collect() };
    match format {
        Format::Log => {
            let mut text = String::new();
            for message in messages {
                // Writing into a string does not fail.
                let _ = writeln!(text, "{}{message}", level(message.level, is_coloured));
            }
            text
        }
        Format::Json => format!("{}\n", indented(&values())),
        Format::Yaml => yaml::to_text(&values()),
    }
}

fn level(level: Level, is_coloured: bool) -> String {
    let name = level.name();
    match (is_coloured, level) {
        (false, _) | (true, Level::Info) => name.to_owned(),
        (true, Level::Warning) => format!("\u{1b}[33m{name}\u{1b}[0m"),
        (true, Level::Error) => format!("\u{1b}[1;31m{name}\u{1b}[0m"),
    }
}

/// Returns JSON with tabs, as istioctl writes it.
fn indented(value: &Value) -> String {
    let mut text = Vec::new();
    let formatter = PrettyFormatter::with_indent(b"\t");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    value
        .serialize(&mut serializer)
        .expect("because JSON values can be written");
    String::from_utf8_lossy(&text).into_owned()
}
