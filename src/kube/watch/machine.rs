//! What a watch does next, as a function of what happened: no clock, no sockets.

use std::time::Duration;

use super::Failure;
use crate::base::SmolStr;

/// The first wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(800);
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// A stream that lived as long was no failure, even if nothing came over it.
const LIVED: Duration = Duration::from_secs(5);

/// What to ask the API server for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// A page of the list, or all of it.
    List {
        /// Where the last page ended.
        token: Option<SmolStr>,
        /// False after a list whose pages expired before they were read.
        in_pages: bool,
    },
    /// Changes after a version.
    Watch {
        /// The version.
        after: SmolStr,
    },
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page<T> {
    /// The objects.
    pub(super) items: Vec<T>,
    /// The version of the list.
    pub(super) version: SmolStr,
    /// Where the next page begins; none after the last.
    pub(super) token: Option<SmolStr>,
}

/// The state of one watch.
pub(super) struct Machine<T> {
    state: State<T>,
    in_pages: bool,
    failures: u32,
    seed: u64,
}

enum State<T> {
    Listing { items: Vec<T>, token: Option<SmolStr> },
    Watching { version: SmolStr },
}

impl<T> State<T> {
    const START: Self = Self::Listing {
        items: Vec::new(),
        token: None,
    };
}

impl<T> Machine<T> {
    /// A watch that begins. The seed decides by how much its waits differ from those of others.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            state: State::START,
            in_pages: true,
            failures: 0,
            seed,
        }
    }

    /// What to ask for.
    pub(super) fn ask(&self) -> Ask {
        match &self.state {
            State::Listing { token, .. } => Ask::List {
                token: token.clone(),
                in_pages: self.in_pages,
            },
            State::Watching { version } => Ask::Watch { after: version.clone() },
        }
    }

    /// A page came. After the last one: everything that there is.
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
        self.state = State::Watching { version: page.version };
        Some(items)
    }

    /// An event or a bookmark came: the watch resumes behind it from now on.
    pub(super) fn progress(&mut self, seen: &str) {
        self.failures = 0;
        if let State::Watching { version } = &mut self.state
            && !seen.is_empty()
        {
            *version = SmolStr::new(seen);
        }
    }

    /// The stream of changes ended by itself after this time. How long to wait before it is resumed.
    pub(super) fn ended(&mut self, lived: Duration) -> Duration {
        if lived >= LIVED {
            self.failures = 0;
            return Duration::ZERO;
        }
        self.back_off(true)
    }

    /// Something went wrong. How long to wait before the next try.
    pub(super) fn failed(&mut self, failure: &Failure) -> Duration {
        match failure {
            Failure::Gone(_) => {
                // Pages that expire before they are read would do so for ever.
                if matches!(self.state, State::Listing { token: Some(_), .. }) {
                    self.in_pages = false;
                }
                self.state = State::START;
                self.back_off(true)
            }
            Failure::Silent => Duration::ZERO,
            // The connection was fine until now: the next one may be at once.
            Failure::Dropped(_) => self.back_off(true),
            Failure::Refused { .. } | Failure::Unreachable(_) => self.back_off(false),
        }
    }

    /// The wait doubles with each failure in a row, plus up to a quarter that differs by watch.
    fn back_off(&mut self, first_at_once: bool) -> Duration {
        let failures = self.failures;
        self.failures = failures.saturating_add(1);
        let doublings = match (failures, first_at_once) {
            (0, true) => return Duration::ZERO,
            (failures, true) => failures - 1,
            (failures, false) => failures,
        };
        let wait = FIRST_WAIT * (1 << doublings.min(6));
        let spread = self.seed.rotate_left(failures * 7) % 256;
        (wait + wait * (spread as u32) / 1024).min(LONGEST_WAIT)
    }
}
