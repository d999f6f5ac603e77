//! jemalloc's dumps of sampled allocations, in its text format `heap_v2`.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Add, Sub},
    time::Duration,
};

use pprof::Symbol;

use crate::admin::profile::format::{Builder, Kinds, Profile};

/// Parts of the names of functions through which allocations reach jemalloc: its own, and Rust's.
const ALLOCATOR: [&str; 4] = ["_rjem_", "tikv_jemallocator", "__rust_alloc", "__rust_realloc"];

/// An error in a dump.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DumpError {
    /// It does not begin with the format and the interval.
    #[error("the allocator's dump has an unknown format: {0:?}")]
    Format(String),
    /// A line is not understood.
    #[error("the allocator's dump has an unknown line: {0:?}")]
    Line(String),
}

/// Allocations of one stack, as estimated from its samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amounts {
    /// The number of allocations since sampling began.
    allocated: i64,
    /// Their bytes.
    allocated_bytes: i64,
    /// The number of allocations that have not been freed.
    live: i64,
    /// Their bytes.
    live_bytes: i64,
}

impl Amounts {
    fn values(self) -> [i64; 4] {
        [self.allocated, self.allocated_bytes, self.live, self.live_bytes]
    }

    fn combined(self, other: Self, combine: fn(i64, i64) -> i64) -> Self {
        Self {
            allocated: combine(self.allocated, other.allocated),
            allocated_bytes: combine(self.allocated_bytes, other.allocated_bytes),
            live: combine(self.live, other.live),
            live_bytes: combine(self.live_bytes, other.live_bytes),
        }
    }
}

/// The samples of the process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Dump {
    /// The mean number of allocated bytes between samples.
    interval: u64,
    /// Amounts by return addresses, the leaf first.
    stacks: BTreeMap<Vec<usize>, Amounts>,
}

impl Dump {
    /// Parses a dump: the format and the interval; a line `@ ADDRESS…` for each stack, before the amounts of all
    /// threads (`t*`) and of each thread; and the mappings of the process.
    pub(super) fn parse(text: &str) -> Result<Self, DumpError> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let interval = first
            .strip_prefix("heap_v2/")
            .and_then(|interval| interval.parse().ok())
            .filter(|interval| *interval > 0)
            .ok_or_else(|| DumpError::Format(first.to_owned()))?;
        let mut stacks: BTreeMap<Vec<usize>, Amounts> = BTreeMap::new();
        let mut stack = None;
        for line in lines.map(str::trim) {
            let unknown = || DumpError::Line(line.to_owned());
            if line.starts_with("MAPPED_LIBRARIES:") {
                break;
            }
            if let Some(addresses) = line.strip_prefix('@') {
                let addresses = addresses.split_whitespace().map(address);
                stack = Some(addresses.collect::<Option<Vec<usize>>>().ok_or_else(unknown)?);
            } else if let Some(counts) = line.strip_prefix("t*:") {
                let amounts = amounts(counts, interval).ok_or_else(unknown)?;
                // Those before the first stack are of the whole process.
                if let Some(stack) = stack.take() {
                    let sum = stacks.entry(stack).or_default();
                    *sum = sum.combined(amounts, i64::add);
                }
            } else if !line.is_empty() && !line.starts_with('t') {
                return Err(unknown());
            }
        }
        Ok(Self { interval, stacks })
    }

    /// Returns true without samples.
    pub(super) fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// Returns the change since an earlier dump. Allocations of before that were freed are negative.
    pub(super) fn since(mut self, before: &Self) -> Self {
        for (stack, amounts) in &before.stacks {
            let now = self.stacks.entry(stack.clone()).or_default();
            *now = now.combined(*amounts, i64::sub);
        }
        self.stacks.retain(|_, amounts| *amounts != Amounts::default());
        self
    }

    /// Returns the profile. `symbols` returns the functions at a return address: that of the call, and those that are
    /// inlined into it, the innermost first.
    pub(super) fn profile(
        &self,
        kinds: &Kinds,
        since: Duration,
        duration: Duration,
        symbols: impl Fn(usize) -> Vec<Symbol>,
    ) -> Profile {
        let mut builder = Builder::default();
        // Stacks share most of their addresses, and looking one up reads debug information.
        let addresses: BTreeSet<usize> = self.stacks.keys().flatten().copied().collect();
        let places: BTreeMap<usize, Place> = addresses
            .into_iter()
            .map(|address| (address, Place::of(&symbols(address), &mut builder)))
            .collect();
        for (stack, amounts) in &self.stacks {
            let frames: Vec<&Place> = stack.iter().filter_map(|address| places.get(address)).collect();
            // Frames of the allocator are the same in each stack.
            let last = frames.iter().rposition(|place| place.is_allocator);
            let callers = frames.iter().skip(last.map_or(0, |last| last + 1));
            let locations = callers.filter_map(|place| place.location).collect();
            builder.sample(locations, amounts.values().to_vec(), &[]);
        }
        builder.finish(kinds, i64::try_from(self.interval).unwrap_or(i64::MAX), since, duration)
    }
}

/// A place in the program.
struct Place {
    /// Its id in the profile; none if no function is known.
    location: Option<u64>,
    is_allocator: bool,
}

impl Place {
    fn of(symbols: &[Symbol], builder: &mut Builder) -> Self {
        let mut names = symbols.iter().map(Symbol::name);
        let is_allocator = names.any(|name| ALLOCATOR.iter().any(|part| name.contains(part)));
        Self {
            location: (!symbols.is_empty()).then(|| builder.location(symbols)),
            is_allocator,
        }
    }
}

fn address(text: &str) -> Option<usize> {
    usize::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Parses `LIVE: BYTES [ALLOCATED: BYTES]`.
fn amounts(text: &str, interval: u64) -> Option<Amounts> {
    let (live, allocated) = text.trim().strip_suffix(']')?.split_once('[')?;
    let (live, live_bytes) = estimate(live, interval)?;
    let (allocated, allocated_bytes) = estimate(allocated, interval)?;
    Some(Amounts {
        allocated,
        allocated_bytes,
        live,
        live_bytes,
    })
}

/// Returns the estimated number and bytes of allocations from those of samples, `NUMBER: BYTES`.
///
/// Each byte is sampled with the same probability, so an allocation of n bytes is sampled with the probability
/// 1 - exp(-n/interval). jemalloc writes numbers to which this correction applies (option `prof_unbias`).
fn estimate(samples: &str, interval: u64) -> Option<(i64, i64)> {
    let (number, bytes) = samples.split_once(':')?;
    let number: u64 = number.trim().parse().ok()?;
    let bytes: u64 = bytes.trim().parse().ok()?;
    if number == 0 || bytes == 0 {
        return Some((0, 0));
    }
    let mean = bytes as f64 / number as f64;
    let scale = 1.0 / -(-mean / interval as f64).exp_m1();
    let scaled = |value: u64| (value as f64 * scale).round() as i64;
    Some((scaled(number), scaled(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::profile::heap::KINDS;

    const TEXT: &str = "heap_v2/524288
  t*: 3: 1050000 [5: 2000000]
  t0: 3: 1050000 [5: 2000000]
@ 0x10 0x20 0x30
  t*: 2: 1048576 [4: 2097152]
  t0: 2: 1048576 [4: 2097152]
@ 0x10 0x20 0x40
  t*: 1: 64 [1: 64]
  t1: 1: 64 [1: 64]

MAPPED_LIBRARIES:
00400000-00500000 r-xp 00000000 00:00 0 /istiod
";

    fn symbols(address: usize) -> Vec<Symbol> {
        let names: &[&str] = match address {
            0x10 => &["_rjem_malloc"],
            0x20 => &["__rust_alloc", "inner", "outer"],
            0x30 => &["main"],
            _ => &["other"],
        };
        let symbol = |name: &&str| Symbol {
            name: Some(name.as_bytes().to_vec()),
            addr: None,
            lineno: Some(1),
            filename: None,
        };
        names.iter().map(symbol).collect()
    }

    fn profile(dump: &Dump) -> Profile {
        let profile = dump.profile(&KINDS, Duration::from_secs(1), Duration::ZERO, symbols);
        profile.check();
        profile
    }

    #[test]
    fn samples_stand_for_allocations_by_their_size() {
        let dump = Dump::parse(TEXT).expect("a dump");
        let profile = profile(&dump);
        // Samples of the size of the interval stand for 1 / (1 - 1/e) each.
        assert_eq!(profile.sum("inuse_objects", Some("main")), 3);
        assert_eq!(profile.sum("inuse_space", Some("main")), 1_658_823);
        assert_eq!(profile.sum("alloc_objects", Some("main")), 6);
        // A sampled small allocation stands for the whole interval.
        assert_eq!(profile.sum("inuse_space", Some("other")), 524_320);
        assert_eq!(profile.sum("inuse_objects", Some("other")), 8193);
    }

    #[test]
    fn frames_of_the_allocator_are_left_out() {
        let dump = Dump::parse(TEXT).expect("a dump");
        assert_eq!(profile(&dump).sum("alloc_space", Some("malloc")), 0);
        assert_eq!(profile(&dump).sum("alloc_space", Some("__rust_alloc")), 0);
    }

    #[test]
    fn a_difference_has_what_changed() {
        let before = Dump::parse(TEXT).expect("a dump");
        let freed = "heap_v2/524288\n t*: 1: 64 [5: 2097216]\n@ 0x10 0x20 0x30\n t*: 0: 0 [4: 2097152]\n\
                     @ 0x10 0x20 0x40\n t*: 1: 64 [1: 64]\n";
        let difference = Dump::parse(freed).expect("a dump").since(&before);
        assert_eq!(difference.stacks.len(), 1);
        let profile = profile(&difference);
        assert_eq!(profile.sum("inuse_space", None), -1_658_823);
        assert_eq!(profile.sum("alloc_space", None), 0);
        assert!(Dump::parse(TEXT).expect("a dump").since(&before).is_empty());
    }

    #[test]
    fn other_texts_are_errors() {
        for text in ["", "heap_v1/524288\n", "heap_v2/0\n", "heap_v2/many\n"] {
            assert!(matches!(Dump::parse(text), Err(DumpError::Format(_))), "{text:?}");
        }
        for line in ["@ 0x10 20", "@ 0x1g", "t*: 1: 64", "t*: -1: 64 [0: 0]", "nonsense"] {
            let text = format!("heap_v2/524288\n@ 0x10\n{line}\n");
            assert_eq!(Dump::parse(&text), Err(DumpError::Line(line.to_owned())));
        }
    }
}
