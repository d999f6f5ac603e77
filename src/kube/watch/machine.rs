//! State machine of a watch, without clock and sockets.

use std::time::Duration;

use super::{Failure, PAGE, SMALL_PAGE};
use crate::base::SmolStr;

/// First delay after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(800);
/// Longest delay between attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Lifetime after which the end of a stream is not a failure, even without events.
const LIVED: Duration = Duration::from_secs(5);
/// Number of refused probes after which a watch resumes without one.
const REFUSED_PROBES: u32 = 4;

/// Next request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// A page of the list, or all of it.
    List {
        /// Continue token of the previous page.
        token: Option<SmolStr>,
        /// Number of objects of the page; `None` for all, after pages expired before they were read.
        limit: Option<u32>,
    },
    /// The present version of the server, before a watch resumes after an outage.
    Probe,
    /// Changes after a version.
    Watch {
        /// Version.
        after: SmolStr,
    },
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page<T> {
    /// Objects.
    pub(super) items: Vec<T>,
    /// Version of the list.
    pub(super) version: SmolStr,
    /// Continue token; `None` on the last page.
    pub(super) token: Option<SmolStr>,
}

/// State of one watch.
pub(super) struct Machine<T> {
    state: State<T>,
    in_pages: bool,
    page_size: u32,
    failures: u32,
    /// Number of silent watches since the last event or bookmark.
    silences: u32,
    seed: u64,
}

enum State<T> {
    Listing {
        items: Vec<T>,
        token: Option<SmolStr>,
    },
    Watching {
        version: SmolStr,
        /// Number of refused probes since an outage, from which the server may return with an older version; `None`
        /// without an outage.
        refused_probes: Option<u32>,
    },
}

/// The attempt after the first of consecutive failures.
#[derive(Clone, Copy)]
enum FirstRetry {
    /// It follows at once, because the server answered until now.
    AtOnce,
    /// It waits as later ones do.
    Delayed,
}

impl<T> State<T> {
    const START: Self = Self::Listing {
        items: Vec::new(),
        token: None,
    };
}

impl<T> Machine<T> {
    /// Returns the initial state. The seed decides the jitter of its delays.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            state: State::START,
            in_pages: true,
            page_size: PAGE,
            failures: 0,
            silences: 0,
            seed,
        }
    }

    /// Returns the next request.
    pub(super) fn ask(&self) -> Ask {
        match &self.state {
            State::Listing { token, .. } => Ask::List {
                token: token.clone(),
                limit: self.in_pages.then_some(self.page_size),
            },
            State::Watching {
                refused_probes: Some(_),
                ..
            } => Ask::Probe,
            State::Watching { version, .. } => Ask::Watch { after: version.clone() },
        }
    }

    /// Adds a page. Returns all objects after the last one.
    pub(super) fn page(&mut self, page: Page<T>) -> Option<Vec<T>> {
        let State::Listing { items, token } = &mut self.state else {
            return None;
        };
        items.extend(page.items);
        *token = page.token;
        if token.is_some() {
            return None;
        }
        let items = std::mem::take(items);
        self.in_pages = true;
        self.page_size = PAGE;
        self.state = State::Watching {
            version: page.version,
            refused_probes: None,
        };
        Some(items)
    }

    /// Records the present version of the server. Returns true if it is older than that of the watch, which then starts
    /// over: the server was restored from a backup. Without that, the watch would resume in another history as soon as
    /// the server has reached the old version again.
    pub(super) fn probed(&mut self, present: &str) -> bool {
        let State::Watching {
            version,
            refused_probes,
        } = &mut self.state
        else {
            return false;
        };
        *refused_probes = None;
        // Versions that are not numbers have no order.
        let versions = (present.parse::<u64>(), version.parse::<u64>());
        let is_older = matches!(versions, (Ok(present), Ok(known)) if present < known);
        if is_older {
            self.state = State::START;
        }
        is_older
    }

    /// Records the version of an event or bookmark, after which the watch resumes.
    pub(super) fn progress(&mut self, seen: &str) {
        self.failures = 0;
        self.silences = 0;
        if let State::Watching { version, .. } = &mut self.state
            && !seen.is_empty()
        {
            *version = SmolStr::new(seen);
        }
    }

    /// Records the end of a stream after this lifetime. Returns the delay before it is resumed.
    pub(super) fn ended(&mut self, lived: Duration) -> Duration {
        if lived >= LIVED {
            self.failures = 0;
            return Duration::ZERO;
        }
        self.back_off(FirstRetry::AtOnce)
    }

    /// Records a failure. Returns the delay before the next attempt.
    pub(super) fn failed(&mut self, failure: &Failure) -> Duration {
        let is_outage = matches!(
            failure,
            Failure::Silent | Failure::Unreachable(_) | Failure::Refused { code: 500.., .. }
        );
        // Without the right to list, or the form of a probe, a watch may go on. A server that starts may refuse all.
        let is_refusal = matches!(
            failure,
            Failure::Refused {
                code: 400 | 403 | 405 | 406,
                ..
            }
        );
        if let State::Watching { refused_probes, .. } = &mut self.state {
            *refused_probes = match *refused_probes {
                Some(refused) if is_refusal => Some(refused + 1).filter(|refused| *refused < REFUSED_PROBES),
                None if is_outage => Some(0),
                probes => probes,
            };
        }
        let asked = failure.retry_after().unwrap_or_default().min(LONGEST_WAIT);
        self.delay_after(failure).max(asked)
    }

    fn delay_after(&mut self, failure: &Failure) -> Duration {
        match failure {
            Failure::Gone(_) => {
                // Pages that expire before they are read would do so again.
                if matches!(self.state, State::Listing { token: Some(_), .. }) {
                    self.in_pages = false;
                }
                self.state = State::START;
                self.back_off(FirstRetry::AtOnce)
            }
            // A server that was restored from a backup accepts a version in the future, and sends nothing until it
            // has reached that version. The probe does not find that if versions are not numbers.
            Failure::Silent => {
                self.silences += 1;
                if self.silences > 1 {
                    self.silences = 0;
                    self.state = State::START;
                }
                Duration::ZERO
            }
            // The rest of the list is read in small pages. Continue tokens do not depend on the size of pages.
            Failure::TooLarge(_) => {
                self.in_pages = true;
                self.page_size = SMALL_PAGE;
                self.back_off(FirstRetry::AtOnce)
            }
            // The connection worked until now, so the next attempt follows at once.
            Failure::Dropped(_) => self.back_off(FirstRetry::AtOnce),
            // A server that was restored from a backup between two pages refuses the token of the first one for ever.
            Failure::Refused { code: 400 | 500, .. } => {
                if matches!(self.state, State::Listing { .. }) {
                    self.state = State::START;
                }
                self.back_off(FirstRetry::Delayed)
            }
            Failure::Refused { .. } | Failure::Unreachable(_) => self.back_off(FirstRetry::Delayed),
        }
    }

    /// Returns the delay: between an eighth and all of a period that doubles with each consecutive failure. Each watch
    /// of a cluster has other delays, so that one of them soon finds that the server is back, and wakes the others.
    fn back_off(&mut self, first: FirstRetry) -> Duration {
        let failures = self.failures;
        self.failures = failures.saturating_add(1);
        let doublings = match (failures, first) {
            (0, FirstRetry::AtOnce) => return Duration::ZERO,
            (failures, FirstRetry::AtOnce) => failures - 1,
            (failures, FirstRetry::Delayed) => failures,
        };
        let period = (FIRST_WAIT * (1 << doublings.min(6))).min(LONGEST_WAIT);
        let part = self.seed.rotate_left(failures * 7) % 8 + 1;
        period * part as u32 / 8
    }
}
