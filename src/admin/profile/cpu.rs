//! CPU profiles: the stacks that the timer sampled.

use std::time::{Duration, UNIX_EPOCH};

use pprof::{Frames, ProfilerGuardBuilder, UnresolvedReport};

use super::format::{Builder, Kinds, Profile};

/// Samples in a second of CPU time. Not a divisor of common intervals, so that periodic work is not missed.
const FREQUENCY_HZ: i32 = 99;
/// Libraries whose frames are not unwound: a signal may arrive while they hold a lock that unwinding needs.
const NOT_UNWOUND: [&str; 4] = ["libc", "libgcc", "pthread", "vdso"];
/// Values of samples: their number, and the CPU time that they stand for.
const KINDS: Kinds = Kinds {
    values: &[("samples", "count"), ("cpu", "nanoseconds")],
    period: ("cpu", "nanoseconds"),
    default: "cpu",
};

/// Samples the process for a time. Sampling ends with the request too.
pub(super) async fn samples(duration: Duration) -> Result<UnresolvedReport, pprof::Error> {
    let builder = ProfilerGuardBuilder::default();
    let guard = builder.frequency(FREQUENCY_HZ).blocklist(&NOT_UNWOUND).build()?;
    tokio::time::sleep(duration).await;
    guard.report().build_unresolved()
}

/// Returns the profile of samples.
pub(super) fn profile(samples: UnresolvedReport) -> Profile {
    let period = 1_000_000_000 / i64::from(FREQUENCY_HZ);
    let mut builder = Builder::default();
    for (frames, count) in samples.data {
        let frames = Frames::from(frames);
        let count = count as i64;
        let locations = frames.frames.iter().map(|symbols| builder.location(symbols)).collect();
        let thread = frames.thread_name_or_id();
        builder.sample(locations, vec![count, count * period], &[("thread", &thread)]);
    }
    let since = samples.timing.start_time.duration_since(UNIX_EPOCH).unwrap_or_default();
    builder.finish(&KINDS, period, since, samples.timing.duration)
}
