//! The budget of one connection for frames: open streams, headers, and frames that carry no content.
//!
//! Each of these is cheap for a client and costs the server memory or CPU, before and after authentication. Clients
//! that exceed the number of streams or the rate of headers are read more slowly, so they delay only themselves. A
//! client that floods its connection with other frames is disconnected.

use std::time::Duration;

use tokio::time::Instant;

use super::frame::{Head, kind};

/// The flow-control window of a stream, and of a connection without encryption. When thousands of clients reconnect at
/// once, this much is buffered for each; the transport reads less from unauthenticated ones. It must not be less than
/// 65,535, the initial window of every client (RFC 9113, section 6.9.2). A client that has used more than a smaller
/// window waits for the difference, which the h2 crate does not return in every case; then the stream hangs.
pub(super) const WINDOW_BYTES: u32 = 64 << 10;
/// The burst and the rate of headers, in units of one header block and of [`HEADER_UNIT_BYTES`]. A certificate request
/// with a token has about four units.
const HEADER_BURST: f64 = 4000.0;
const HEADERS_PER_SECOND: f64 = 2000.0;
/// The size of a header block that costs another unit: decoding may copy what a byte refers to.
const HEADER_UNIT_BYTES: usize = 512;
/// The burst and the rate of frames without content: PING, SETTINGS, WINDOW_UPDATE, PRIORITY, RST_STREAM, unknown ones,
/// and almost empty DATA.
const CONTROL_BURST: f64 = 2048.0;
const CONTROLS_PER_SECOND: f64 = 128.0;
/// The number of such frames that a client may send for each KiB that it was sent. Clients enlarge their windows and
/// measure the bandwidth as they receive, two or three times for each frame of 16 KiB.
const CONTROLS_PER_SENT_KIB: f64 = 1.0;
/// The number of such frames that a client may send for each stream that has ended.
const CONTROLS_PER_STREAM: f64 = 4.0;
/// The maximum number of such frames that a client can save up.
const MAX_CONTROLS: f64 = 16_384.0;
/// The size below which a DATA frame counts as one without content.
const SMALL_DATA_BYTES: usize = 16;
/// The maximum number of bytes of a stream that are returned when it ends.
const MAX_RETURNED_BYTES: usize = WINDOW_BYTES as usize;

/// The decision about a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    Pass,
    /// The client has too many open streams.
    TooManyStreams,
    /// The client sends headers too fast; it is read on at this time.
    Wait(Instant),
    /// The client floods its connection.
    Flood,
}

/// A number of units that are used up and refilled over time.
#[derive(Debug)]
struct Bucket {
    units: f64,
    per_second: f64,
    most: f64,
    at: Instant,
}

impl Bucket {
    fn new(units: f64, per_second: f64, now: Instant) -> Self {
        Self {
            units,
            per_second,
            most: units,
            at: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        if self.units < self.most {
            self.units = passed.mul_add(self.per_second, self.units).min(self.most);
        }
    }

    /// Uses units if any are left; the rest is a debt. Otherwise returns the time when it is paid.
    fn take(&mut self, units: f64, now: Instant) -> Result<(), Instant> {
        if self.units <= 0.0 {
            self.refill(now);
        }
        if self.units > 0.0 {
            self.units -= units;
            return Ok(());
        }
        Err(now + Duration::from_secs_f64((1.0 - self.units) / self.per_second))
    }
}

/// A stream that the client has opened and that has not ended.
#[derive(Debug)]
struct OpenStream {
    id: u32,
    /// The DATA bytes that were received on it.
    received: usize,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct FrameBudget {
    /// By id.
    open: Vec<OpenStream>,
    last_stream: u32,
    headers: Bucket,
    controls: Bucket,
    /// DATA bytes of open streams, and of ended ones as far as they may have been consumed.
    received_bytes: usize,
}

impl FrameBudget {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            open: Vec::new(),
            last_stream: 0,
            headers: Bucket::new(HEADER_BURST, HEADERS_PER_SECOND, now),
            controls: Bucket::new(CONTROL_BURST, CONTROLS_PER_SECOND, now),
            received_bytes: 0,
        }
    }

    /// Returns the number of open streams.
    pub(super) fn open_streams(&self) -> usize {
        self.open.len()
    }

    /// Returns true if the client has opened this stream and neither side has ended it.
    pub(super) fn is_open(&self, stream: u32) -> bool {
        self.position(stream).is_ok()
    }

    /// Returns the highest stream that the client has opened.
    pub(super) fn last_stream(&self) -> u32 {
        self.last_stream
    }

    /// Returns the number of DATA bytes that must have been consumed, or that count as such because the stream that
    /// they belong to has ended.
    pub(super) fn received_bytes(&self) -> usize {
        self.received_bytes
    }

    /// Records a frame of the client, which may have at most this many open streams.
    pub(super) fn receive(&mut self, head: Head, most_streams: usize, now: Instant) -> Received {
        match head.kind {
            kind::HEADERS | kind::CONTINUATION => self.receive_headers(head, most_streams, now),
            kind::DATA if head.len >= SMALL_DATA_BYTES || head.ends_stream() => {
                self.receive_data(head);
                Received::Pass
            }
            _ => {
                if self.controls.take(1.0, now).is_err() {
                    return Received::Flood;
                }
                match head.kind {
                    kind::DATA => self.receive_data(head),
                    kind::RST_STREAM => self.end(head.stream),
                    _ => {}
                }
                Received::Pass
            }
        }
    }

    fn receive_headers(&mut self, head: Head, most_streams: usize, now: Instant) -> Received {
        let is_new = head.kind == kind::HEADERS && head.stream > self.last_stream;
        if is_new && self.open.len() >= most_streams {
            return Received::TooManyStreams;
        }
        let units = 1 + head.len / HEADER_UNIT_BYTES;
        if let Err(until) = self.headers.take(units as f64, now) {
            return Received::Wait(until);
        }
        if is_new {
            self.last_stream = head.stream;
            let (id, received) = (head.stream, 0);
            self.open.push(OpenStream { id, received });
        }
        Received::Pass
    }

    /// Data of a stream that has ended is discarded, so it does not count.
    fn receive_data(&mut self, head: Head) {
        if let Ok(at) = self.position(head.stream) {
            self.open[at].received += head.len;
            self.received_bytes += head.len;
        }
    }

    /// Records a frame of the server. Returns true if it ends a stream.
    pub(super) fn send(&mut self, head: Head) -> bool {
        if head.kind == kind::DATA {
            self.earn(head.len as f64 / 1024.0 * CONTROLS_PER_SENT_KIB);
        }
        let ends = head.ends_stream() && self.position(head.stream).is_ok();
        if ends {
            self.end(head.stream);
            self.earn(CONTROLS_PER_STREAM);
        }
        ends
    }

    fn earn(&mut self, units: f64) {
        self.controls.units = (self.controls.units + units).min(MAX_CONTROLS);
    }

    fn end(&mut self, stream: u32) {
        if let Ok(at) = self.position(stream) {
            let ended = self.open.remove(at);
            self.received_bytes = self
                .received_bytes
                .saturating_sub(ended.received.min(MAX_RETURNED_BYTES));
        }
        if self.open.is_empty() {
            // Thousands of connections are idle.
            self.open = Vec::new();
        }
    }

    fn position(&self, stream: u32) -> Result<usize, usize> {
        self.open.binary_search_by_key(&stream, |open| open.id)
    }
}
