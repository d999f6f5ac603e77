//! The precedence of proxies over everything else: a first configuration is more urgent than an update. But proxies
//! that connect or change their requests without a pause must not stop all changes. So once they have used much time,
//! everything else goes first, until it has used as much time or nothing of it waits.

use std::time::Duration;

/// The maximum time that proxies use before everything else goes first.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Decides whether proxies or other events go first; see the documentation of the module.
#[derive(Default)]
pub(super) struct Precedence {
    /// The time that proxies have used while everything else may have waited, less the time that it has used since.
    ahead: Duration,
    others_first: bool,
}

impl Precedence {
    /// Returns true if everything else goes before proxies.
    pub(super) fn are_others_first(&self) -> bool {
        self.others_first
    }

    /// Records the time that an event of proxies took.
    pub(super) fn record_proxies(&mut self, worked: Duration) {
        if self.others_first {
            // Nothing else waited.
            self.ahead = Duration::ZERO;
        }
        self.ahead = self.ahead.saturating_add(worked);
        self.others_first = self.ahead >= LONGEST_WAIT;
    }

    /// Records the time that another event took.
    pub(super) fn record_others(&mut self, worked: Duration) {
        self.ahead = if self.others_first {
            self.ahead.saturating_sub(worked)
        } else {
            // No proxy waited.
            Duration::ZERO
        };
        self.others_first = !self.ahead.is_zero();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_else_is_served_while_proxies_never_pause() {
        let mut precedence = Precedence::default();
        precedence.record_proxies(LONGEST_WAIT / 2);
        assert!(!precedence.are_others_first());
        precedence.record_proxies(LONGEST_WAIT);
        assert!(precedence.are_others_first());
        precedence.record_others(LONGEST_WAIT);
        assert!(precedence.are_others_first(), "proxies have used more time");
        precedence.record_others(LONGEST_WAIT / 2);
        assert!(!precedence.are_others_first());
    }

    #[test]
    fn proxies_go_first_if_nothing_else_waits() {
        let mut precedence = Precedence::default();
        precedence.record_proxies(LONGEST_WAIT);
        precedence.record_proxies(LONGEST_WAIT / 2);
        assert!(!precedence.are_others_first(), "nothing else waited");
        precedence.record_others(Duration::ZERO);
        precedence.record_proxies(LONGEST_WAIT / 2);
        assert!(!precedence.are_others_first(), "no proxy waited");
    }
}
