//! Connections of which nobody knows yet what they want: at most so many, and none for long.
//!
//! When the lobby is full, the oldest connection of the address that has most of them makes place; so a thousand half-open
//! connections of one client are in the way of that client.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    task::Context,
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// What a connection that is to make place may have expected at least.
const LEAST_STAY: Duration = Duration::from_secs(1);
/// Streams that a stranger may have open at once: more than any client opens before its first answer.
const STRANGERS_STREAMS: u32 = 16;
/// Streams of a connection that is no stranger's which may wait for their first message at once.
const WAITING_STREAMS: u32 = 256;
/// Offences that are put up with, and how long it takes until one is forgotten.
const OFFENCES: f64 = 100.0;
const OFFENCES_PER_SECOND: f64 = 1.0;

/// The lobby. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lobby {
    room: u32,
    least_stay: Duration,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    guests: BTreeMap<u64, Entry>,
    /// The numbers of the guests of each address; the first is the oldest.
    by_source: BTreeMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
    since: Instant,
    shown_out: CancellationToken,
}

/// The lobby is full of connections that have only just come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many connections are being opened")]
pub struct Full;

impl Lobby {
    /// A lobby for so many connections; at least one.
    pub fn new(room: u32) -> Self {
        Self {
            room: room.max(1),
            least_stay: LEAST_STAY,
            inner: Arc::default(),
        }
    }

    /// Takes in a connection from this address.
    pub fn enter(&self, source: IpAddr) -> Result<Arc<Guest>, Full> {
        let mut inner = self.lock();
        if inner.guests.len() >= self.room as usize {
            inner.make_place(self.least_stay).ok_or(Full)?;
        }
        let number = inner.next;
        inner.next += 1;
        let shown_out = CancellationToken::new();
        let entry = Entry {
            source,
            since: Instant::now(),
            shown_out: shown_out.clone(),
        };
        inner.guests.insert(number, entry);
        inner.by_source.entry(source).or_default().insert(number);
        Ok(Arc::new(Guest {
            lobby: self.clone(),
            number,
            shown_out,
            admitted: AtomicBool::new(false),
            trusted: AtomicBool::new(false),
            served: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            streams: AtomicU32::new(0),
            answered: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            waiting: AtomicU32::new(0),
            offences: Mutex::new((0.0, Instant::now())),
        }))
    }

    /// How many connections are in the lobby.
    pub fn len(&self) -> usize {
        self.lock().guests.len()
    }

    /// True when nobody is in the lobby.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends the oldest connection of whoever has most of them; false if all are young.
    pub fn show_one_out(&self) -> bool {
        self.lock().make_place(self.least_stay).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn make_place(&mut self, least_stay: Duration) -> Option<()> {
        let (_, numbers) = self.by_source.iter().max_by_key(|(_, numbers)| numbers.len())?;
        let oldest = *numbers.first()?;
        let entry = self.guests.get(&oldest)?;
        if entry.since.elapsed() < least_stay {
            return None;
        }
        entry.shown_out.cancel();
        self.remove(oldest);
        Some(())
    }

    fn remove(&mut self, number: u64) {
        let Some(entry) = self.guests.remove(&number) else {
            return;
        };
        if let Some(numbers) = self.by_source.get_mut(&entry.source) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_source.remove(&entry.source);
            }
        }
    }
}

/// A connection, from its beginning to its end; in the extensions of its requests.
#[derive(Debug)]
pub struct Guest {
    lobby: Lobby,
    number: u64,
    shown_out: CancellationToken,
    admitted: AtomicBool,
    trusted: AtomicBool,
    served: AtomicBool,
    /// Whoever waits for [`Self::trust`] to read on.
    reader: AtomicWaker,
    /// Streams that are open and not answered yet.
    streams: AtomicU32,
    /// Streams that were answered.
    answered: AtomicUsize,
    /// Bytes of requests that were taken by who reads them.
    taken: AtomicUsize,
    /// Streams that were answered and wait for their first message.
    waiting: AtomicU32,
    /// How many, and when that was.
    offences: Mutex<(f64, Instant)>,
}

impl Guest {
    /// What it wants is known, and it may have that: it leaves the lobby and stays as long as it likes.
    pub fn admit(&self) {
        self.trust();
        if !self.admitted.swap(true, Ordering::AcqRel) {
            self.lobby.lock().remove(self.number);
        }
    }

    /// True after [`Self::admit`].
    pub fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Acquire)
    }

    /// It was given what it came for: as much as it sends is read from now on. When thousands come at once, what they have to
    /// say until then is better left with them.
    pub fn serve(&self) {
        if !self.served.swap(true, Ordering::AcqRel) {
            self.reader.wake();
        }
    }

    /// True after [`Self::serve`].
    pub fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    /// As much as it sends may be read from now on, as long as it is taken; before, a few kilobytes.
    pub fn trust(&self) {
        if !self.trusted.swap(true, Ordering::AcqRel) {
            self.reader.wake();
        }
    }

    /// True after [`Self::trust`]. Whoever asks is woken when that or what may be read changes, until it is served.
    pub(super) fn is_trusted(&self, cx: &Context<'_>) -> bool {
        if !self.is_served() {
            self.reader.register(cx.waker());
        }
        self.trusted.load(Ordering::Acquire)
    }

    /// How many of its streams were answered. Whoever asked [`Self::is_trusted`] before is woken when there are more.
    pub(super) fn answered(&self) -> usize {
        self.answered.load(Ordering::Acquire)
    }

    /// So much of its requests was taken by who reads them.
    pub fn took(&self, bytes: usize) {
        if !self.is_served() {
            self.taken.fetch_add(bytes, Ordering::AcqRel);
            self.reader.wake();
        }
    }

    /// How much of its requests was taken before it was served. Whoever asked [`Self::is_trusted`] before is woken when it
    /// is more.
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// It did what clients do not do: reset a stream before it was answered, showed credentials that are none. After too
    /// many of these the connection ends.
    pub fn offend(&self) {
        let mut offences = self.offences.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let forgotten = now.duration_since(offences.1).as_secs_f64() * OFFENCES_PER_SECOND;
        *offences = ((offences.0 - forgotten).max(0.0) + 1.0, now);
        if offences.0 > OFFENCES {
            tracing::debug!("a connection opened too many streams in vain");
            self.shown_out.cancel();
        }
    }

    /// Completes when the connection has to end at once.
    pub(super) async fn shown_out(&self) {
        self.shown_out.cancelled().await;
    }

    /// A stream was opened; the handle is kept until it is answered.
    pub(super) fn stream(self: &Arc<Self>) -> OpenStream {
        let streams = self.streams.fetch_add(1, Ordering::AcqRel) + 1;
        if streams > STRANGERS_STREAMS && !self.is_admitted() {
            tracing::debug!("a connection opened {streams} streams before the first was admitted");
            self.shown_out.cancel();
        }
        OpenStream {
            guest: self.clone(),
            answered: false,
        }
    }

    /// A stream waits for its first message; the handle is kept until that has come. Streams that say nothing cost as much
    /// as others, and where nobody has to be known they are all that a stranger shows.
    pub fn waits(self: &Arc<Self>) -> Waiting {
        let waiting = self.waiting.fetch_add(1, Ordering::AcqRel) + 1;
        let most = if self.is_admitted() {
            WAITING_STREAMS
        } else {
            STRANGERS_STREAMS
        };
        if waiting > most {
            tracing::debug!("a connection opened {waiting} streams and says nothing on them");
            self.shown_out.cancel();
        }
        Waiting(self.clone())
    }
}

/// A stream that waits for its first message.
#[derive(Debug)]
pub struct Waiting(Arc<Guest>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.admit();
    }
}

/// A stream that waits for its answer.
pub(super) struct OpenStream {
    guest: Arc<Guest>,
    answered: bool,
}

impl OpenStream {
    /// It is answered.
    pub(super) fn answered(mut self) {
        self.answered = true;
        self.guest.answered.fetch_add(1, Ordering::AcqRel);
        self.guest.reader.wake();
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.guest.streams.fetch_sub(1, Ordering::AcqRel);
        if !self.answered {
            self.guest.offend();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    #[test]
    fn whoever_has_most_makes_place() {
        let mut lobby = Lobby::new(3);
        let first = lobby.enter(source(1)).expect("empty");
        let greedy = [lobby.enter(source(2)), lobby.enter(source(2))].map(|guest| guest.expect("place"));
        assert_eq!(lobby.enter(source(3)).err(), Some(Full), "all have only just come");
        lobby.least_stay = Duration::ZERO;
        let late = lobby.enter(source(3)).expect("place was made");
        assert!(greedy[0].shown_out.is_cancelled() && !greedy[1].shown_out.is_cancelled());
        assert!(
            !first.shown_out.is_cancelled(),
            "an older one of an address with fewer stays"
        );
        late.admit();
        assert_eq!(lobby.len(), 2);
        drop(first);
        drop(greedy);
        assert!(lobby.is_empty());
    }

    #[test]
    fn r3_streams_opened_in_vain_end_the_connection() {
        let guest = Lobby::new(1).enter(source(1)).expect("empty");
        guest.admit();
        for _ in 0..100 {
            guest.stream().answered();
            drop(guest.stream());
        }
        assert!(!guest.shown_out.is_cancelled());
        // Some may have been forgotten meanwhile.
        for _ in 0..50 {
            drop(guest.stream());
        }
        assert!(guest.shown_out.is_cancelled());

        let stranger = Lobby::new(1).enter(source(1)).expect("empty");
        let streams: Vec<_> = (0..STRANGERS_STREAMS).map(|_| stranger.stream()).collect();
        assert!(!stranger.shown_out.is_cancelled());
        let more = stranger.stream();
        assert!(stranger.shown_out.is_cancelled());
        drop((streams, more));

        let stranger = Lobby::new(1).enter(source(1)).expect("empty");
        let silent: Vec<_> = (0..STRANGERS_STREAMS).map(|_| stranger.waits()).collect();
        drop(silent);
        let silent: Vec<_> = (0..STRANGERS_STREAMS).map(|_| stranger.waits()).collect();
        assert!(!stranger.shown_out.is_cancelled());
        let more = stranger.waits();
        assert!(stranger.shown_out.is_cancelled());
        drop((silent, more));
    }
}
