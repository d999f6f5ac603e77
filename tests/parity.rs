//! Parity with Istio's own control plane: renders every scenario of Istio's conformance set, where it is next to the
//! project, and compares the result with the responses of istiod 1.30.3.
//!
//! The share of equal resources may only rise: `parity/floor.txt` holds the highest share reached, and
//! `parity/differences.txt` lists every remaining difference. A sample of random meshes of that set may differ a
//! little: the list names the causes.

mod differences;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use istiod::cli::render;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::Value;

use crate::golden::folders;
use crate::support::project;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test("parity::conformance", conformance),
        Trial::ignorable_test("parity::random_meshes", random_meshes),
    ]
}

/// Returns Istio's conformance set.
fn conformance_set() -> Result<PathBuf, Completion> {
    let set = project().join("../shared/conformance");
    if set.is_dir() {
        return Ok(set);
    }
    let reason = "skipped: Istio's conformance set is not next to the project (../shared/conformance)";
    println!("parity: {reason}");
    Err(Completion::ignored_with(reason))
}

/// Returns an empty folder for the output of a test.
fn output(name: &str) -> PathBuf {
    let out = project().join("target").join(name);
    if out.exists() {
        std::fs::remove_dir_all(&out).expect("the output of the previous run can be removed");
    }
    out
}

fn conformance() -> Result<Completion, Failed> {
    let set = match conformance_set() {
        Ok(set) => set,
        Err(skipped) => return Ok(skipped),
    };
    let out = output("parity");
    let scenarios: Vec<PathBuf> = folders(&set.join("scenarios"))
        .iter()
        .flat_map(|group| folders(group))
        .collect();
    let meshes = folders(&set.join(FOUND));
    let mut crashes = render_all(&set.join("scenarios"), &scenarios, &out.join("scenarios"));
    crashes.extend(render_all(&set.join(FOUND), &meshes, &out.join(FOUND)));
    let program = set.join("compare.py");
    let figures = compare(&program, &set, &out, "scenarios")?;
    let found = compare(&program, &set, &out, FOUND)?;
    println!("{}", figures.table());
    if !crashes.is_empty() {
        return Err(format!("cannot render {} scenarios:\n{}", crashes.len(), crashes.join("\n")).into());
    }
    let mut differences = figures.differences.clone();
    let of_group = |(mesh, difference)| (format!("{FOUND}/{mesh}"), difference);
    differences.extend(found.differences.into_iter().map(of_group));
    let errors = differences::check(&differences);
    if !errors.is_empty() {
        return Err(errors.join("\n").into());
    }
    let floor = floor();
    let reached = figures.total().percent();
    if reached < floor {
        return Err(format!("{reached:.2} % of resources are equal, below the floor of {floor:.2} %").into());
    }
    if reached >= floor + 0.01 {
        println!(
            "parity: raise tests/parity/floor.txt from {floor:.2} to {:.2}",
            (reached * 100.0).floor() / 100.0
        );
    }
    Ok(Completion::Completed)
}

/// Least share of equal resources of the random meshes, in per cent. `differences.txt` names the causes of the rest.
const RANDOM_FLOOR: f64 = 99.3;

fn random_meshes() -> Result<Completion, Failed> {
    let set = match conformance_set() {
        Ok(set) => set,
        Err(skipped) => return Ok(skipped),
    };
    let out = output("parity-random");
    std::fs::create_dir_all(&out)?;
    let unpacked = Command::new("python3")
        .args(["-m", "tarfile", "--extract"])
        .args([&set.join("random.tar.xz"), &out.join("expected")])
        .status()?;
    assert!(unpacked.success(), "random.tar.xz is unpacked");
    let expected = out.join("expected");
    let meshes = folders(&expected.join(RANDOM));
    let mut errors = render_all(&expected, &meshes, &out.join("actual"));
    let figures = compare(&set.join("compare.py"), &expected, &out.join("actual"), RANDOM)?;
    let total = figures.total();
    println!(
        "parity: {} of {} resources of random meshes are equal",
        total.equal, total.all
    );
    if total.percent() < RANDOM_FLOOR {
        errors.push(format!(
            "{:.2} % are below the floor of {RANDOM_FLOOR} %",
            total.percent()
        ));
        errors.extend(
            figures
                .differences
                .iter()
                .map(|(mesh, difference)| format!("{mesh}: {difference}")),
        );
    }
    if errors.is_empty() {
        Ok(Completion::Completed)
    } else {
        Err(errors.join("\n").into())
    }
}

/// The sample of random meshes.
const RANDOM: &str = "random";

/// Part of the set with small meshes that differed once. They do not count for the share of equal resources.
const FOUND: &str = "differences";

/// Renders on all cores. Returns a line for each scenario that failed.
///
/// It calls what `istiod render` calls, because a process of its own would load the descriptors of all of Envoy's
/// messages for each scenario. The golden cases run the command.
fn render_all(root: &Path, scenarios: &[PathBuf], out: &Path) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let render_some = || {
        while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
            let name = scenario.strip_prefix(root).expect("it was found below the root");
            if let Err(error) = rendered(scenario, &out.join(name)) {
                let line = format!("{}: {error}", name.display());
                failures
                    .lock()
                    .expect("no thread panics while it holds the lock")
                    .push(line);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            // The stack that the command has.
            let thread = std::thread::Builder::new().stack_size(8 << 20);
            thread
                .spawn_scoped(scope, render_some)
                .expect("a thread can be started");
        }
    });
    let mut failures = failures
        .into_inner()
        .expect("no thread panicked while it held the lock");
    failures.sort();
    failures
}

fn rendered(scenario: &Path, out: &Path) -> Result<(), String> {
    std::fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let report = std::panic::catch_unwind(|| render::render(scenario, out)).map_err(|_| "panic, see above")?;
    let panics = report.map_err(|error| error.to_string())?.panics;
    if panics.is_empty() {
        Ok(())
    } else {
        Err(panics.join("\n"))
    }
}

/// Compares one part of the expected output with the actual one.
fn compare(program: &Path, expected: &Path, out: &Path, part: &str) -> Result<Figures, Failed> {
    let json = out.join(format!("{part}.json"));
    let result = Command::new("python3")
        .arg(program)
        .args(["--quiet", "--json"])
        .args([&json, &expected.join(part), &out.join(part)])
        .output()?;
    let text = std::fs::read_to_string(&json).map_err(|error| {
        format!(
            "compare.py wrote no figures ({error}): {}",
            String::from_utf8_lossy(&result.stderr)
        )
    })?;
    Ok(Figures::read(&serde_json::from_str(&text)?))
}

fn floor() -> f64 {
    let text = include_str!("parity/floor.txt");
    let number = text
        .lines()
        .find(|line| !line.starts_with('#'))
        .expect("floor.txt holds a number");
    number.trim().parse().expect("floor.txt holds a percentage")
}

/// Equal resources, and all resources of both sides.
#[derive(Clone, Copy, Default)]
struct Share {
    equal: u64,
    all: u64,
}

impl Share {
    fn plus(self, other: Share) -> Share {
        Share {
            equal: self.equal + other.equal,
            all: self.all + other.all,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a few thousand resources")]
    fn percent(self) -> f64 {
        // A comparison of nothing must not pass.
        if self.all == 0 {
            0.0
        } else {
            self.equal as f64 * 100.0 / self.all as f64
        }
    }
}

/// The result of compare.py.
struct Figures {
    /// Shares by scenario group.
    groups: BTreeMap<String, Share>,
    /// Scenario and difference.
    differences: Vec<(String, String)>,
}

impl Figures {
    fn read(json: &Value) -> Figures {
        let mut groups = BTreeMap::<String, Share>::new();
        let mut differences = Vec::new();
        for (name, scenario) in json["scenarios"].as_object().into_iter().flatten() {
            let count = |key: &str| scenario[key].as_u64().unwrap_or_default();
            let share = Share {
                equal: count("match"),
                all: count("match") + count("differ") + count("missing") + count("extra"),
            };
            let group = groups
                .entry(name.split('/').next().unwrap_or(name).to_owned())
                .or_default();
            *group = group.plus(share);
            let found = scenario["diffs"].as_array().into_iter().flatten();
            differences.extend(
                found
                    .filter_map(Value::as_str)
                    .map(|found| (name.clone(), found.to_owned())),
            );
        }
        Figures { groups, differences }
    }

    fn total(&self) -> Share {
        self.groups.values().copied().fold(Share::default(), Share::plus)
    }

    fn table(&self) -> String {
        let row = |name: &str, share: Share| {
            format!(
                "{name:<18} {:>5} of {:>5} {:>7.2} %\n",
                share.equal,
                share.all,
                share.percent()
            )
        };
        let groups: String = self.groups.iter().map(|(name, share)| row(name, *share)).collect();
        format!(
            "\nparity with istiod 1.30.3, equal resources by group\n{groups}{}",
            row("all", self.total())
        )
    }
}
