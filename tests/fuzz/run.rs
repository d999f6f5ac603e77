//! Runs a target for a while, and minimises failing inputs.

use std::{
    cell::RefCell,
    fs::File,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Once,
    time::Duration,
};

use libtest_mimic::Failed;

use super::{mutate::mutate, targets::Target};
use crate::support::{project, random::Random, scratch, wait};

/// Time limit of an input, on a quiet machine.
const LONGEST: Duration = Duration::from_secs(5);
/// Time limit of the minimisation of a failure.
const MINIMISE: Duration = Duration::from_secs(10);
/// Maximum number of inputs kept because their outcome was new.
const MAX_KEPT: usize = 2000;

thread_local! {
    /// The first panic of the current input; `None` while none runs.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs a panic hook that records the panics of inputs, even caught ones, and does not print them.
fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = format!("{info}");
            let ours = PANIC.with_borrow_mut(|panic| match panic {
                Some(first) if first.is_empty() => {
                    *first = text;
                    true
                }
                panic => panic.is_some(),
            });
            if !ours {
                usual(info);
            }
        }));
    });
}

/// Runs one input. Returns the class of its outcome, or the failure.
fn one(target: &Target, input: &[u8]) -> Result<u64, String> {
    PANIC.set(Some(String::new()));
    let started_at = wait::now();
    let sort = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let elapsed = started_at.elapsed();
    let panic = PANIC.take().unwrap_or_default();
    match sort {
        // The load is read only after the limit.
        Ok(sort) if panic.is_empty() && (elapsed < LONGEST || elapsed < wait::extended(LONGEST)) => Ok(sort),
        Ok(_) if panic.is_empty() => Err(format!("it took {} s", elapsed.as_secs())),
        _ => Err(panic),
    }
}

/// Runs the corpus of a target and mutations of it.
pub(super) fn run(target: &Target, seed: u64, time: Duration) -> Result<(), Failed> {
    watch_panics();
    let folder = scratch(&format!("fuzz-{}", target.name));
    // If the process dies (stack or memory exhausted), this file holds the input that killed it.
    let current = File::create(folder.join("current")).expect("target/ is writable");
    let mut corpus = corpus(target);
    if corpus.is_empty() {
        return Err(format!("{} has no corpus", target.name).into());
    }
    let mut seen = std::collections::BTreeSet::new();
    for (index, input) in corpus.iter().enumerate() {
        let sort =
            checked(target, input, &current).map_err(|error| failure(target, &folder, seed, index, input, &error))?;
        seen.insert(sort);
    }
    let mut random = Random::new(seed);
    let started_at = wait::now();
    let mut runs = 0;
    while started_at.elapsed() < time {
        let mut input = corpus[random.below(corpus.len())].clone();
        mutate(&mut random, &mut input, &corpus, target.words);
        let sort =
            checked(target, &input, &current).map_err(|error| failure(target, &folder, seed, runs, &input, &error))?;
        if seen.insert(sort) && corpus.len() < MAX_KEPT {
            corpus.push(input);
        }
        runs += 1;
    }
    println!(
        "fuzz::{}: seed {seed}, {runs} inputs, {} outcomes",
        target.name,
        seen.len()
    );
    Ok(())
}

fn checked(target: &Target, input: &[u8], current: &File) -> Result<u64, String> {
    current.write_all_at(input, 0).expect("target/ is writable");
    current.set_len(input.len() as u64).expect("target/ is writable");
    one(target, input)
}

/// Returns the corpus, ordered by file name.
fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = project().join("tests/fuzz/corpus").join(target.name);
    let entries = std::fs::read_dir(&folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("the corpus is readable").path())
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read(file).expect("the corpus is readable"))
        .collect()
}

fn failure(target: &Target, folder: &Path, seed: u64, index: usize, input: &[u8], error: &str) -> Failed {
    let small = minimised(target, input);
    let file = folder.join("failure");
    std::fs::write(&file, &small).expect("target/ is writable");
    format!(
        "input {index} of seed {seed} fails: {error}\n{} bytes, made smaller: {}; when it is repaired, keep it as \
         tests/fuzz/corpus/{}/NAME",
        input.len(),
        file.display(),
        target.name
    )
    .into()
}

/// Removes ranges while the input still fails, larger ones first.
fn minimised(target: &Target, input: &[u8]) -> Vec<u8> {
    let started_at = wait::now();
    let mut small = input.to_vec();
    let mut size = small.len() / 2;
    while size > 0 {
        let mut start = 0;
        while start < small.len() {
            if started_at.elapsed() > MINIMISE {
                return small;
            }
            let end = (start + size).min(small.len());
            let shorter = [&small[..start], &small[end..]].concat();
            if one(target, &shorter).is_err() {
                small = shorter;
            } else {
                start = end;
            }
        }
        size /= 2;
    }
    small
}
