//! Repetition of requests to the API server that fail for reasons that pass.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep_until, timeout_at};

use crate::kube::client;

/// Delay after the first failure; it doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_millis(250);
/// Longest delay.
const MAX_DELAY: Duration = Duration::from_secs(4);

/// Repeats requests until a deadline.
pub(super) struct Retry {
    deadline: Instant,
    first_delay: Duration,
}

impl Retry {
    /// Returns the repetition of requests within this time.
    pub(super) fn within(limit: Duration) -> Self {
        Self {
            deadline: Instant::now() + limit,
            first_delay: FIRST_DELAY,
        }
    }

    /// Returns true after the deadline.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Sends a request until it succeeds, fails for good, or the deadline passes.
    pub(super) async fn send<T, F>(&self, request: impl Fn() -> F) -> kube::Result<T>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let mut failures = 0;
        loop {
            let error = match timeout_at(self.deadline, request()).await {
                Ok(Err(error)) if is_transient(&error) => error,
                Ok(answer) => return answer,
                Err(_) => return Err(kube::Error::Service("no answer of the API server in time".into())),
            };
            let next = Instant::now() + delay(self.first_delay, failures, seed());
            if next >= self.deadline {
                return Err(error);
            }
            if failures == 0 {
                eprintln!("warn: {}; trying again for a while", client::message(&error));
            }
            failures += 1;
            sleep_until(next).await;
        }
    }
}

/// Returns true for failures of the connection or of an overloaded server.
fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_) => true,
        _ => false,
    }
}

/// Returns the delay after a number of failures before this one: doubled each time, and then between half of it and
/// all.
fn delay(first: Duration, failures: u32, seed: u8) -> Duration {
    let most = (first * (1 << failures.min(10))).min(MAX_DELAY);
    most / 2 + most / 2 * u32::from(seed) / 255
}

fn seed() -> u8 {
    let mut seed = [0];
    // Without randomness there is no jitter.
    let _ = aws_lc_rs::rand::fill(&mut seed);
    seed[0]
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, io};

    use kube::core::Status;

    use super::*;

    fn refused(code: u16) -> kube::Error {
        let status = Status {
            code,
            ..Status::failure("refused", "Refused")
        };
        kube::Error::Api(Box::new(status))
    }

    fn unreachable() -> kube::Error {
        kube::Error::Service(io::Error::from(io::ErrorKind::ConnectionRefused).into())
    }

    /// Returns the outcome of a request with these failures before its success, and the number of attempts.
    async fn attempts(limit: Duration, failures: Vec<kube::Error>) -> (kube::Result<()>, usize) {
        let retry = Retry {
            first_delay: Duration::from_millis(1),
            ..Retry::within(limit)
        };
        let (left, sent) = (Cell::new(failures), Cell::new(0));
        let request = || {
            sent.set(sent.get() + 1);
            let mut failures = left.take();
            let answer = if failures.is_empty() {
                Ok(())
            } else {
                Err(failures.remove(0))
            };
            left.set(failures);
            async { answer }
        };
        let answer = retry.send(request).await;
        (answer, sent.get())
    }

    const LONG: Duration = Duration::from_mins(1);

    #[tokio::test]
    async fn transient_failures_are_repeated() {
        let failures = vec![unreachable(), refused(429), refused(500), refused(503)];
        let (answer, sent) = attempts(LONG, failures).await;
        assert!(answer.is_ok() && sent == 5, "{answer:?} after {sent}");
    }

    #[tokio::test]
    async fn other_failures_are_not_repeated() {
        for code in [400, 401, 403, 404, 409] {
            let (answer, sent) = attempts(LONG, vec![refused(code)]).await;
            assert!(answer.is_err() && sent == 1, "{code}: {answer:?} after {sent}");
        }
    }

    #[tokio::test]
    async fn repetition_ends_at_the_deadline() {
        let (answer, sent) = attempts(Duration::ZERO, vec![unreachable()]).await;
        assert!(
            matches!(answer, Err(kube::Error::Service(_))) && sent == 1,
            "{answer:?} after {sent}"
        );
        let retry = Retry::within(Duration::ZERO);
        let answer = retry.send(std::future::pending::<kube::Result<()>>).await;
        assert!(answer.is_err() && retry.is_over());
    }

    #[test]
    fn delays_double_with_jitter() {
        let first = Duration::from_millis(100);
        for (failures, most) in [(0, 100), (1, 200), (2, 400), (30, 4_000)] {
            let most = Duration::from_millis(most);
            assert_eq!(
                (delay(first, failures, 0), delay(first, failures, 255)),
                (most / 2, most)
            );
        }
    }
}
