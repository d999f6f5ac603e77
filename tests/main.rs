//! The integration tests, in one binary, so that the daemon is linked once.
//!
//! Each module lists its tests. A test starts the processes that it needs (daemon, Envoy, applications).
//! `support::process` ends every child by its id: when the test drops it, at the end of the run, on a panic and on a
//! signal.

mod accept;
mod analyze;
mod bounds;
mod charts;
mod clients;
mod command_line;
mod conformance;
mod controlz;
mod convert;
mod debug;
mod e2e;
mod fuzz;
mod gateway_api;
mod golden;
mod ingress;
mod inject;
mod kube;
mod lab;
mod matrix;
mod monitoring;
mod page;
mod parity;
mod policy;
mod properties;
mod registries;
mod secure;
mod support;
mod template;
mod tidy;
mod traces;
mod webhook;

use std::process::ExitCode;

use libtest_mimic::Trial;

/// Tests that take long and leave a core free, or that exclude each other, in the order of their start. At the end of
/// the run, nothing else would use that core.
const WAITING: [&str; 4] = [
    "bounds::r20_admitted_clients_do_not_harm_others",
    "bounds::r3_slow_clients_do_not_delay_others",
    "bounds::r3_slow_tls_clients_do_not_delay_others",
    "bounds::r3_slow_page_clients_do_not_delay_others",
];

fn main() -> ExitCode {
    // `make graph`
    if std::env::args().any(|argument| argument == "--graph") {
        tidy::print_graph();
        return ExitCode::SUCCESS;
    }
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Most tests wait for other processes most of the time.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.test_threads.get_or_insert(2 * cores);
    let _children = support::process::end_all_on_drop();
    support::process::end_all_on_signal();
    let trials: Vec<Trial> = [
        tidy::trials(),
        golden::trials(),
        inject::trials(),
        analyze::trials(),
        parity::trials(),
        policy::trials(),
        gateway_api::trials(),
        ingress::trials(),
        properties::trials(),
        kube::trials(),
        lab::trials(),
        matrix::trials(),
        monitoring::trials(),
        page::trials(),
        clients::trials(),
        charts::trials(),
        command_line::trials(),
        conformance::trials(),
        controlz::trials(),
        debug::trials(),
        secure::trials(),
        registries::trials(),
        convert::trials(),
        e2e::trials(),
        accept::trials(),
        template::trials(),
        traces::trials(),
        webhook::trials(),
        bounds::trials(),
        // Each takes a core for the same short time, so that all cores are in use until the end.
        fuzz::trials(),
    ]
    .into_iter()
    .flatten()
    .collect();
    libtest_mimic::run(&arguments, spread(trials)).exit_code()
}

/// Moves the first of [`WAITING`] to the start, and the others to places between there and the end.
fn spread(mut trials: Vec<Trial>) -> Vec<Trial> {
    let distance = trials.len() / WAITING.len();
    for (number, name) in WAITING.into_iter().enumerate() {
        let position = trials.iter().position(|trial| trial.name() == name);
        let trial = trials.remove(position.expect("WAITING has names of tests"));
        trials.insert(number * distance, trial);
    }
    trials
}
