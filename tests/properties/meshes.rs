//! Random meshes with odd objects, through `istiod render`: every reference has a target, nothing is there twice, and
//! neither the series of changes nor the order of objects matters. A mesh that fails is made smaller and written to a
//! folder, from which the test can be repeated.

mod check;
mod duplicates;
mod odd;
mod references;
mod shrink;
mod steps;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use crate::support::{project, scratch, variable, wait};
pub(crate) use steps::Mesh;

/// Number of meshes, unless a time is given.
const MESHES: u64 = 40;

/// The seeds to check: a fixed number, or as many as a time permits.
pub(crate) struct Seeds {
    next: u64,
    end: End,
}

enum End {
    /// Before this seed.
    Seed(u64),
    Time(Instant),
}

impl Seeds {
    /// Returns `count` seeds. `ISTIOD_FUZZ_SEED` is the first one, and `ISTIOD_FUZZ_SECONDS` a time instead of the
    /// number.
    pub(crate) fn new(count: u64) -> Result<Seeds, String> {
        let number = |name: &str| -> Result<Option<u64>, String> {
            let parse = |text: String| text.parse().map_err(|error| format!("{name}={text}: {error}"));
            variable(name).map(parse).transpose()
        };
        let next = number("ISTIOD_FUZZ_SEED")?.unwrap_or(1);
        let end = match number("ISTIOD_FUZZ_SECONDS")? {
            Some(seconds) => End::Time(wait::now() + Duration::from_secs(seconds)),
            None => End::Seed(next.saturating_add(count)),
        };
        Ok(Seeds { next, end })
    }
}

impl Iterator for Seeds {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let is_over = match self.end {
            End::Seed(end) => self.next >= end,
            End::Time(end) => wait::now() >= end,
        };
        let seed = self.next;
        self.next = seed.wrapping_add(1);
        (!is_over).then_some(seed)
    }
}

/// Checks random meshes, or that of the folder `ISTIOD_FUZZ_MESH`.
pub(super) fn are_consistent() -> Result<(), Failed> {
    if let Some(folder) = variable("ISTIOD_FUZZ_MESH") {
        let mesh = Mesh::read(Path::new(&folder))?;
        let outcome = check::all(&mesh, &scratch("properties/meshes/repeated"));
        return outcome.map(|_| ()).map_err(|failure| failure.to_string().into());
    }
    let folder = scratch("properties/meshes");
    let mut tally = check::Tally::default();
    // One report for each rule: the first mesh that breaks it.
    let mut reports: BTreeMap<&str, String> = BTreeMap::new();
    for seed in Seeds::new(MESHES)? {
        let mesh = Mesh::random(seed);
        match check::all(&mesh, &folder.join("work")) {
            Ok(checked) => tally += checked,
            Err(failure) => {
                let report = || report(seed, &mesh, failure.clone(), &folder);
                reports.entry(failure.rule).or_insert_with(report);
            }
        }
    }
    if !reports.is_empty() {
        let reports: Vec<String> = reports.into_values().collect();
        return Err(reports.join("\n\n").into());
    }
    Ok(tally.is_enough()?)
}

/// Writes the smallest mesh that fails in the same way, and says how to repeat the test with it.
fn report(seed: u64, mesh: &Mesh, failure: check::Failure, folder: &Path) -> String {
    let work = folder.join("work");
    let fails = |mesh: &Mesh| check::one(mesh, failure.rule, &work).err();
    let (small, failure) = shrink::smallest(mesh, failure.clone(), fails);
    let target = folder.join(format!("{}-{seed}", failure.rule));
    let written = match small.write(&target) {
        Ok(()) => repeat(&target),
        Err(error) => format!("cannot write {}: {error}", target.display()),
    };
    format!(
        "seed {seed}: {failure}\n{} of {} steps cause it.\n{written}",
        small.steps.len(),
        mesh.steps.len()
    )
}

fn repeat(folder: &Path) -> String {
    let folder: PathBuf = folder.strip_prefix(project()).unwrap_or(folder).to_owned();
    format!(
        "repeat with: ISTIOD_FUZZ_MESH={} cargo test --test integration -- properties::meshes_are_consistent",
        folder.display()
    )
}
