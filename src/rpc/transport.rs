//! A transport whose client is read within limits. Whatever flow-control windows a client has, no more memory can be
//! used for it than was read, and a frame is passed on only if the [budget](super::frame_budget) of the connection has
//! room for it.
//!
//! Before authentication, few bytes are read at all. Note: few bytes can be many headers, since HPACK refers to earlier
//! headers by index. So streams are counted here, before their headers are decoded, for as long as the connection
//! lives.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::{
    data_parts::PART_BYTES,
    frame::{FrameParser, PREFACE_BYTES, Verdict, kind},
    frame_budget::{FrameBudget, Received},
    pre_auth::UnauthenticatedConnection,
};

/// The total number of bytes read from an unauthenticated client: the headers of some streams and the start of a
/// request.
const UNAUTHENTICATED_BYTES: usize = 24 << 10;
/// The number of unconsumed bytes of a client with accepted credentials, before its first configuration is sent: two
/// [parts](super::data_parts) of a request and a few small frames. A frame that exceeds it is not begun, since the
/// HTTP/2 server allocates memory for all of it.
const UNCONSUMED_BYTES: usize = 10 << 10;
/// The number of bytes that are read in one poll before credentials are accepted or large frames are allowed. Thousands
/// of clients that reconnect may wait with that much.
const BYTES_PER_READ: usize = 2 << 10;
/// The error code of a GOAWAY frame for a client that floods its connection (RFC 9113, section 7).
const ENHANCE_YOUR_CALM: u32 = 0xb;

/// A transport with limits for its client.
pub(super) struct LimitedTransport<I> {
    io: I,
    pre_auth: Arc<UnauthenticatedConnection>,
    /// The number of bytes that may be read before authentication.
    left: usize,
    /// True if the last poll has read; the next one yields.
    yields: bool,
    received: FrameParser,
    sent: FrameParser,
    budget: FrameBudget,
    /// Bytes that were read and not passed on yet.
    held: Vec<u8>,
    /// The time until which no headers are read.
    pause: Option<Pin<Box<Sleep>>>,
}

impl<I> LimitedTransport<I> {
    pub(super) fn new(io: I, pre_auth: Arc<UnauthenticatedConnection>) -> Self {
        Self {
            io,
            pre_auth,
            left: UNAUTHENTICATED_BYTES,
            yields: false,
            received: FrameParser::after(PREFACE_BYTES),
            sent: FrameParser::after(0),
            budget: FrameBudget::new(Instant::now()),
            held: Vec::new(),
            pause: None,
        }
    }

    /// Parses bytes of the client. Returns how many may be passed on, or an error for a flood.
    fn admit(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (most, now) = (self.pre_auth.max_open_streams(), Instant::now());
        let (budget, pause, pre_auth) = (&mut self.budget, &mut self.pause, &self.pre_auth);
        let consumed = (!self.pre_auth.is_read_unlimited()).then(|| self.pre_auth.consumed());
        let mut is_flood = false;
        let before = budget.open_streams();
        let passing = self.received.parse(bytes, |head| {
            if let Some(consumed) = consumed
                && head.kind == kind::DATA
            {
                let unconsumed = budget.received_bytes().saturating_sub(consumed);
                if unconsumed > 0 && unconsumed + head.len > UNCONSUMED_BYTES {
                    return Verdict::Hold;
                }
                // Of thousands of clients that reconnect at once, a few send their large requests at a time.
                if head.len >= PART_BYTES && !pre_auth.is_large_data_allowed() && budget.is_open(head.stream) {
                    pre_auth.hold_large_data();
                    return Verdict::Hold;
                }
            }
            match budget.receive(head, most, now) {
                Received::Pass => Verdict::Pass,
                Received::TooManyStreams => Verdict::Hold,
                Received::Wait(until) => {
                    *pause = Some(Box::pin(sleep_until(until)));
                    Verdict::Hold
                }
                Received::Flood => {
                    is_flood = true;
                    Verdict::Hold
                }
            }
        });
        self.pre_auth.count_open_streams(before, budget.open_streams());
        if is_flood {
            return Err(io::Error::other("the client floods its connection with control frames"));
        }
        Ok(passing)
    }

    /// Passes on bytes that were held back, up to a frame that must wait. An empty read would mean the end of the
    /// stream, so the reader waits instead. It is woken when a stream ends or is served, when the credentials are
    /// accepted, and after a pause.
    fn pass_held(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.pre_auth.wake_on_change(cx);
        let held = std::mem::take(&mut self.held);
        let len = held.len().min(buffer.remaining());
        let admitted = self.admit(&held[..len]);
        self.held = held;
        let passing = admitted?;
        if passing == 0 {
            self.poll_pause(cx);
            return Poll::Pending;
        }
        buffer.put_slice(&self.held[..passing]);
        self.held.drain(..passing);
        if self.held.is_empty() {
            // Thousands of connections are idle.
            self.held = Vec::new();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_pause(&mut self, cx: &mut Context<'_>) {
        if let Some(pause) = &mut self.pause
            && pause.as_mut().poll(cx).is_ready()
        {
            self.pause = None;
            cx.waker().wake_by_ref();
        }
    }

    /// Records what was written, and wakes the reader if a stream has ended.
    fn record_sent(&mut self, parts: &[IoSlice<'_>], written: &Poll<io::Result<usize>>) {
        let Poll::Ready(Ok(mut left)) = *written else { return };
        let before = self.budget.open_streams();
        let budget = &mut self.budget;
        let mut ended = false;
        for part in parts {
            let len = left.min(part.len());
            left -= len;
            self.sent.parse(&part[..len], |head| {
                ended |= budget.send(head);
                Verdict::Pass
            });
        }
        self.pre_auth.count_open_streams(before, budget.open_streams());
        if ended {
            self.pre_auth.wake_reader();
        }
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> LimitedTransport<I> {
    /// Reads a few bytes of an unauthenticated client. They are held back until they are passed on.
    fn read_unauthenticated(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.left == 0 {
            return Poll::Pending;
        }
        if std::mem::take(&mut self.yields) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut part = [0; BYTES_PER_READ];
        let len = self.left.min(buffer.remaining()).min(BYTES_PER_READ);
        let mut part = ReadBuf::new(&mut part[..len]);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
        let part = part.filled();
        self.left -= part.len();
        self.yields = true;
        if part.is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.held.extend_from_slice(part);
        self.pass_held(cx, buffer)
    }

    /// Reads as much as may be unconsumed until the limit is lifted; then everything.
    fn read_on(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if self.pre_auth.is_read_unlimited() {
            ready!(Pin::new(&mut self.io).poll_read(cx, buffer))?;
        } else {
            let unconsumed = self.budget.received_bytes().saturating_sub(self.pre_auth.consumed());
            let most = if self.pre_auth.is_large_data_allowed() {
                UNCONSUMED_BYTES
            } else {
                BYTES_PER_READ
            };
            // A frame that was begun is read to its end.
            let len = most.saturating_sub(unconsumed).max(self.received.missing_bytes());
            let len = len.min(buffer.remaining());
            if len == 0 {
                return Poll::Pending;
            }
            let mut part = ReadBuf::new(buffer.initialize_unfilled_to(len));
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
            let read = part.filled().len();
            buffer.advance(read);
        }
        let part = &buffer.filled()[before..];
        if part.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let admitted = self.admit(part);
        if let Ok(passing) = admitted {
            self.held.extend_from_slice(&part[passing..]);
        }
        // After an error, the buffer must be as before.
        buffer.set_filled(before + admitted.as_ref().map_or(0, |passing| *passing));
        let passing = admitted?;
        if passing == 0 {
            // Waits with the held bytes.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn read(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let is_accepted = self.pre_auth.has_accepted_credentials(cx);
        if !self.held.is_empty() {
            return self.pass_held(cx, buffer);
        }
        if is_accepted {
            self.read_on(cx, buffer)
        } else {
            self.read_unauthenticated(cx, buffer)
        }
    }

    /// Sends the reason for the end of the connection, if that is possible without waiting.
    fn send_goaway(&mut self, cx: &mut Context<'_>) {
        if !self.sent.is_between_frames() {
            return;
        }
        let mut frame = vec![0, 0, 8, kind::GOAWAY, 0, 0, 0, 0, 0];
        frame.extend(self.budget.last_stream().to_be_bytes());
        frame.extend(ENHANCE_YOUR_CALM.to_be_bytes());
        // The connection ends in any case.
        let _ = Pin::new(&mut self.io).poll_write(cx, &frame);
        let _ = Pin::new(&mut self.io).poll_flush(cx);
    }
}

impl<I> Drop for LimitedTransport<I> {
    fn drop(&mut self) {
        self.pre_auth.count_open_streams(self.budget.open_streams(), 0);
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncRead for LimitedTransport<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = self.read(cx, buffer);
        if let Poll::Ready(Err(_)) = &read {
            self.send_goaway(cx);
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for LimitedTransport<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buffer);
        self.record_sent(&[IoSlice::new(buffer)], &written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, buffers);
        self.record_sent(buffers, &written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;
    use crate::rpc::{
        frame::tests::frame,
        pre_auth::{MAX_WAITING_STREAMS, PreAuthLimiter},
    };

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const END_HEADERS: u8 = 4;
    const END_STREAM: u8 = 1;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;

    struct Fixture {
        pre_auth: Arc<UnauthenticatedConnection>,
        client: DuplexStream,
        server: LimitedTransport<DuplexStream>,
    }

    impl Fixture {
        async fn sent(frames: &[Vec<u8>]) -> Self {
            let pre_auth = PreAuthLimiter::new(1)
                .register(Ipv4Addr::LOCALHOST.into())
                .expect("an empty limiter");
            let (mut client, server) = tokio::io::duplex(4 << 20);
            client.write_all(PREFACE).await.expect("the pipe is larger");
            client.write_all(&frames.concat()).await.expect("the pipe is larger");
            pre_auth.allow_large_data();
            Self {
                server: LimitedTransport::new(server, pre_auth.clone()),
                pre_auth,
                client,
            }
        }

        /// Returns the number of bytes after the preface that can be read without waiting.
        async fn readable(&mut self) -> usize {
            let mut buffer = vec![0; 64 << 10];
            let mut len = 0;
            // The reader of an unauthenticated client yields after each read.
            let mut idle = 0;
            while idle < 2 {
                let mut reading = std::pin::pin!(AsyncReadExt::read(&mut self.server, &mut buffer));
                match futures::poll!(reading.as_mut()) {
                    Poll::Ready(read) => {
                        len += read.expect("no flood");
                        idle = 0;
                    }
                    Poll::Pending => idle += 1,
                }
            }
            len
        }
    }

    /// Returns short HEADERS frames, which refer to earlier headers.
    fn headers(streams: std::ops::Range<u32>) -> Vec<Vec<u8>> {
        let stream = |number| frame(kind::HEADERS, END_HEADERS, 2 * number + 1, 5);
        streams.map(stream).collect()
    }

    /// The number of bytes of a HEADERS frame, and of the head that is passed on before a stream is held.
    const HEADERS_BYTES: usize = 14;
    const INCOMPLETE_HEAD_BYTES: usize = 8;

    #[tokio::test]
    async fn unauthenticated_clients_are_read_up_to_a_limit() {
        let data = frame(kind::DATA, 0, 1, 16 << 10);
        let frames = [headers(0..1), vec![data; 6]].concat();
        let mut fixture = Fixture::sent(&frames).await;
        fixture.pre_auth.record_consumed(1 << 20);
        assert_eq!(fixture.readable().await, UNAUTHENTICATED_BYTES);
    }

    #[tokio::test]
    async fn a_frame_is_begun_when_others_are_consumed() {
        let data = frame(kind::DATA, 0, 1, 16 << 10);
        let frames = [headers(0..1), vec![data.clone(); 6]].concat();
        let all = PREFACE.len() + frames.concat().len();
        let mut fixture = Fixture::sent(&frames).await;
        let first = PREFACE.len() + HEADERS_BYTES + data.len() + INCOMPLETE_HEAD_BYTES;
        assert_eq!(fixture.readable().await, first);
        fixture.pre_auth.accept_credentials();
        assert_eq!(fixture.readable().await, 0, "not consumed");
        fixture.pre_auth.record_consumed(16 << 10);
        let second = fixture.readable().await;
        assert_eq!(second, data.len() - INCOMPLETE_HEAD_BYTES, "to the end of the frame");
        fixture.pre_auth.lift_read_limit();
        assert_eq!(first + second + fixture.readable().await, all);
    }

    #[tokio::test]
    async fn the_first_large_frame_waits_until_it_is_allowed() {
        let frames = [
            headers(0..1),
            vec![
                frame(kind::DATA, 0, 1, PART_BYTES - 1),
                frame(kind::DATA, 0, 1, PART_BYTES),
            ],
        ];
        let frames = frames.concat();
        let all = PREFACE.len() + frames.concat().len();
        for is_accepted in [false, true] {
            let mut fixture = Fixture::sent(&frames).await;
            fixture.pre_auth = PreAuthLimiter::new(1)
                .register(Ipv4Addr::LOCALHOST.into())
                .expect("an empty limiter");
            fixture.server.pre_auth = fixture.pre_auth.clone();
            if is_accepted {
                fixture.pre_auth.accept_credentials();
            }
            fixture.pre_auth.record_consumed(PART_BYTES - 1);
            assert!(fixture.pre_auth.large_data_waits().now_or_never().is_none());
            let before = fixture.readable().await;
            assert_eq!(before, all - PART_BYTES - 1);
            assert!(fixture.server.held.len() <= BYTES_PER_READ);
            assert!(fixture.pre_auth.large_data_waits().now_or_never().is_some());
            fixture.pre_auth.allow_large_data();
            assert!(fixture.pre_auth.large_data_waits().now_or_never().is_none());
            fixture.pre_auth.accept_credentials();
            assert_eq!(before + fixture.readable().await, all);
        }
    }

    #[tokio::test]
    async fn data_of_ended_streams_does_not_block_a_connection() {
        let data = frame(kind::DATA, 0, 1, 16 << 10);
        let frames = [headers(0..1), vec![data; 3], headers(1..2)].concat();
        let all = PREFACE.len() + frames.concat().len();
        let mut fixture = Fixture::sent(&frames).await;
        fixture.pre_auth.accept_credentials();
        let len = fixture.readable().await;
        assert!(len < all, "{len} bytes of {all}");
        let trailers = frame(kind::HEADERS, END_HEADERS | END_STREAM, 1, 5);
        fixture.server.write_all(&trailers).await.expect("the pipe is larger");
        assert_eq!(len + fixture.readable().await, all);
    }

    #[tokio::test]
    async fn r3_unauthenticated_clients_open_few_streams() {
        let frames = headers(0..90);
        let mut fixture = Fixture::sent(&frames).await;
        let len = fixture.readable().await;
        assert_eq!(len, PREFACE.len() + HEADERS_BYTES + INCOMPLETE_HEAD_BYTES);
        // A stream that ends makes room for another.
        let trailers = frame(kind::HEADERS, END_HEADERS | END_STREAM, 1, 5);
        fixture.server.write_all(&trailers).await.expect("the pipe is larger");
        assert_eq!(fixture.readable().await, HEADERS_BYTES);
        fixture.pre_auth.admit();
        assert_eq!(fixture.readable().await, 88 * HEADERS_BYTES - INCOMPLETE_HEAD_BYTES);
    }

    #[tokio::test]
    async fn r20_streams_without_a_request_are_bounded_after_admission() {
        let streams = MAX_WAITING_STREAMS as u32;
        let mut fixture = Fixture::sent(&headers(0..streams + 9)).await;
        fixture.pre_auth.admit();
        fixture.pre_auth.lift_read_limit();
        let passed = MAX_WAITING_STREAMS * HEADERS_BYTES + INCOMPLETE_HEAD_BYTES;
        assert_eq!(fixture.readable().await, PREFACE.len() + passed);
        let served = fixture.pre_auth.serve_stream();
        assert_eq!(fixture.readable().await, HEADERS_BYTES);
        drop(served);
        let reset = frame(kind::RST_STREAM, 0, 7, 4);
        fixture.client.write_all(&reset).await.expect("the pipe is larger");
        assert_eq!(fixture.readable().await, 0, "the reset is behind a held stream");
        for stream in [1, 3] {
            let trailers = frame(kind::HEADERS, END_HEADERS | END_STREAM, stream, 5);
            fixture.server.write_all(&trailers).await.expect("the pipe is larger");
        }
        assert_eq!(fixture.readable().await, HEADERS_BYTES);
    }

    #[tokio::test]
    async fn r20_floods_of_control_frames_end_the_connection() {
        for kind in [SETTINGS, PING, 2, 8, 0x77] {
            let mut fixture = Fixture::sent(&vec![frame(kind, 0, 0, 8); 5000]).await;
            fixture.pre_auth.admit();
            fixture.pre_auth.lift_read_limit();
            let mut read = Vec::new();
            let flood = fixture.server.read_to_end(&mut read).await;
            assert!(flood.is_err(), "frames of type {kind}");
            assert!(read.len() < 3000 * 17, "{} bytes", read.len());
            drop(fixture.server);
            let mut goaway = Vec::new();
            fixture.client.read_to_end(&mut goaway).await.expect("a pipe");
            assert_eq!(goaway[3], kind::GOAWAY);
            assert_eq!(goaway[13..], ENHANCE_YOUR_CALM.to_be_bytes());
        }
    }

    /// Window updates and pings for each frame of a long response, as clients send them.
    #[tokio::test]
    async fn readers_of_long_responses_are_no_flood() {
        let mut fixture = Fixture::sent(&headers(0..1)).await;
        fixture.pre_auth.admit();
        fixture.pre_auth.lift_read_limit();
        fixture.readable().await;
        let response = frame(kind::DATA, 0, 1, 16 << 10);
        let mut sink = vec![0; response.len()];
        let replies = [frame(8, 0, 0, 4), frame(8, 0, 1, 4), frame(PING, 0, 0, 8)].concat();
        for _ in 0..2000 {
            fixture.server.write_all(&response).await.expect("the pipe is larger");
            fixture.client.read_exact(&mut sink).await.expect("a response");
            fixture.client.write_all(&replies).await.expect("the pipe is larger");
            assert_eq!(fixture.readable().await, replies.len());
        }
    }

    #[tokio::test]
    async fn r20_headers_are_read_at_a_bounded_rate() {
        let stream = |number: u32| {
            let open = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, 2000);
            [open, frame(kind::RST_STREAM, 0, 2 * number + 1, 4)].concat()
        };
        let mut fixture = Fixture::sent(&(0..1200).map(stream).collect::<Vec<_>>()).await;
        fixture.pre_auth.admit();
        fixture.pre_auth.lift_read_limit();
        let (started, all) = (Instant::now(), 1200 * stream(0).len() + PREFACE.len());
        let mut read = vec![0; all];
        fixture.server.read_exact(&mut read).await.expect("slow, but no flood");
        assert!(started.elapsed() > std::time::Duration::from_millis(300));
    }
}
