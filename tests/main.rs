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
    let trials = [
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
        fuzz::trials(),
        template::trials(),
        traces::trials(),
        webhook::trials(),
        bounds::trials(),
    ]
    .into_iter()
    .flatten()
    .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
