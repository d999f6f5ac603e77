//! The benches. They form one binary, so that the library is optimised and linked once.
//!
//! `cargo bench --profile dist --bench benches -- NAME ARGUMENTS…` runs one; its module describes the arguments.

mod admission;
mod ca;
mod fixture;
mod generation;
mod kubernetes;
mod report;
mod scale;
mod steps;
mod suite;
mod template;
mod usage;

#[path = "../tests"]
#[allow(dead_code, reason = "shared test code, of which the benches use a part")]
mod tests {
    pub(crate) mod support;
}

use std::process::ExitCode;

use tests::support;

/// The name of a bench, and the function that runs it with the arguments after its name.
type Bench = (&'static str, fn(&[String]) -> Result<(), String>);

const BENCHES: [Bench; 9] = [
    ("admission", admission::run),
    ("ca", ca::run),
    ("generation", generation::run),
    ("kubernetes", kubernetes::run),
    ("report", report::run),
    ("scale", scale::run),
    ("steps", steps::run),
    ("suite", suite::run),
    ("template", template::run),
];

fn main() -> ExitCode {
    let _children = support::process::end_all_on_drop();
    support::process::end_all_on_signal();
    // Cargo passes `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let name = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    let Some((_, run)) = BENCHES.into_iter().find(|(bench, _)| *bench == name) else {
        let names = BENCHES.map(|(bench, _)| bench).join(", ");
        eprintln!("unknown bench {name:?}; the benches are {names}");
        return ExitCode::FAILURE;
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
