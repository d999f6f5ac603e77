//! `Gate`: a transport of which little is read until its other side is trusted. What was read is all that can be held for
//! a stranger, whatever windows it was granted.
//!
//! What a reader would get wrong: few bytes can be many headers, since HTTP/2 lets a header be said again by its number. So
//! the streams that a stranger opens are counted here, where they are still bytes.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::lobby::Guest;

/// What is read of a stranger: the headers of some streams, and the first part of a request.
const STRANGERS_BYTES: usize = 16 << 10;
/// What is read of somebody who has a stream but was not served yet, beyond what was taken of it. There has to be room for all
/// headers and one frame of the largest size (16 KiB): nothing of a frame is taken before all of it is there.
const UNTAKEN_BYTES: usize = 32 << 10;
/// What is read of a stranger in one turn.
const STRANGERS_TURN: usize = 4 << 10;
/// Streams of a stranger that are let through before they are answered. Each has its credentials in its headers, so none waits
/// for another.
const STRANGERS_STREAMS: usize = 3;

/// See the module's text.
pub(super) struct Gate<I> {
    io: I,
    guest: Arc<Guest>,
    left: usize,
    /// What was read since there was trust, and before it was served.
    passed: usize,
    /// It has had its turn.
    rests: bool,
    streams: Streams,
    /// What was read and is not let through yet.
    held: Vec<u8>,
}

impl<I: AsyncRead + Unpin> Gate<I> {
    pub(super) fn new(io: I, guest: Arc<Guest>) -> Self {
        Self {
            io,
            guest,
            left: STRANGERS_BYTES,
            passed: 0,
            rests: false,
            streams: Streams::default(),
            held: Vec::new(),
        }
    }

    /// Lets through what was held, as much as there is room for.
    fn release(&mut self, buffer: &mut ReadBuf<'_>) {
        self.let_through(self.held.len().min(buffer.remaining()), buffer);
    }

    /// Lets so much of it through. Room for what is held is not kept: thousands rest with nothing in it.
    fn let_through(&mut self, len: usize, buffer: &mut ReadBuf<'_>) {
        buffer.put_slice(&self.held[..len]);
        self.held.drain(..len);
        if self.held.is_empty() {
            self.held = Vec::new();
        }
    }

    /// Reads as much as may wait to be taken until it is served; then whatever comes.
    fn read_on(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.guest.is_served() {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let len = (self.guest.taken() + UNTAKEN_BYTES).saturating_sub(self.passed);
        if len == 0 {
            return Poll::Pending;
        }
        let len = len.min(buffer.remaining());
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(len));
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        self.passed += read;
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }

    /// Lets through what was held up to the next stream too many. An empty read would be the end, so where nothing passes
    /// the reader waits: it is woken when a stream is answered, or the guest trusted.
    fn pass(&mut self, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let len = self.held.len().min(buffer.remaining());
        let most = STRANGERS_STREAMS + self.guest.answered();
        let passing = self.streams.before_too_many(&self.held[..len], most);
        if passing == 0 {
            return Poll::Pending;
        }
        self.let_through(passing, buffer);
        Poll::Ready(Ok(()))
    }
}

/// Where in a connection of HTTP/2 its bytes are, as far as it takes to see streams being opened.
struct Streams {
    /// Bytes until the next frame begins.
    skip: usize,
    /// How much of the head of a frame has been seen, and its length so far.
    head: usize,
    len: usize,
    opened: usize,
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            skip: Self::PREFACE,
            head: 0,
            len: 0,
            opened: 0,
        }
    }
}

impl Streams {
    /// What a client sends before its first frame (RFC 9113, 3.4).
    const PREFACE: usize = 24;
    /// The head of a frame (RFC 9113, 4.1): three bytes of length, the type, flags, four bytes of stream.
    const HEAD: usize = 9;
    const HEADERS: u8 = 1;

    /// How many of these bytes come before a stream is opened that is one more than `most`.
    fn before_too_many(&mut self, bytes: &[u8], most: usize) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            if self.skip > 0 {
                let step = self.skip.min(bytes.len() - at);
                self.skip -= step;
                at += step;
                continue;
            }
            let byte = bytes[at];
            match self.head {
                0..3 => self.len = self.len << 8 | usize::from(byte),
                3 if byte == Self::HEADERS && self.opened >= most => return at,
                3 if byte == Self::HEADERS => self.opened += 1,
                _ => {}
            }
            at += 1;
            self.head += 1;
            if self.head == Self::HEAD {
                self.skip = std::mem::take(&mut self.len);
                self.head = 0;
            }
        }
        at
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Gate<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.guest.is_trusted(cx) {
            if self.held.is_empty() {
                return self.read_on(cx, buffer);
            }
            self.release(buffer);
            return Poll::Ready(Ok(()));
        }
        if !self.held.is_empty() {
            return self.pass(buffer);
        }
        if self.left == 0 {
            return Poll::Pending;
        }
        if std::mem::take(&mut self.rests) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut few = [0; STRANGERS_TURN];
        let len = self.left.min(buffer.remaining()).min(STRANGERS_TURN);
        let mut part = ReadBuf::new(&mut few[..len]);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
        let part = part.filled();
        self.left -= part.len();
        self.rests = true;
        if part.is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.held.extend_from_slice(part);
        self.pass(buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Gate<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, buffers)
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

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::rpc::lobby::Lobby;

    #[tokio::test]
    async fn little_is_read_of_a_stranger() {
        let guest = Lobby::new(1).enter(Ipv4Addr::LOCALHOST.into()).expect("empty");
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client
            .write_all(&vec![0_u8; 100_000])
            .await
            .expect("the pipe is larger");
        let mut gate = Gate::new(server, guest.clone());
        let mut few = vec![0; STRANGERS_BYTES];
        gate.read_exact(&mut few).await.expect("as much as this");
        let mut rest = vec![0; 100_000 - STRANGERS_BYTES];
        let mut reading = std::pin::pin!(gate.read_exact(&mut rest));
        assert!(futures::poll!(reading.as_mut()).is_pending());
        guest.trust();
        assert!(futures::poll!(reading.as_mut()).is_pending(), "nobody takes it");
        guest.took(UNTAKEN_BYTES);
        assert!(futures::poll!(reading.as_mut()).is_pending(), "most of it");
        guest.serve();
        reading.await.expect("all of it");
        assert!(few.iter().chain(&rest).all(|byte| *byte == 0));
    }

    /// A frame of HEADERS of a few bytes, as one that says again what was said before.
    fn headers() -> Vec<u8> {
        let mut frame = vec![0, 0, 5, Streams::HEADERS, 4, 0, 0, 0, 1];
        frame.extend([0x82; 5]);
        frame
    }

    #[tokio::test]
    async fn r3_few_streams_of_a_stranger_are_let_through() {
        let guest = Lobby::new(1).enter(Ipv4Addr::LOCALHOST.into()).expect("empty");
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        sent.extend(settings);
        let head = sent.len();
        sent.extend(headers().repeat(90));
        client.write_all(&sent).await.expect("the pipe is larger");
        let mut gate = Gate::new(server, guest.clone());
        // The length of the frame that is held back has passed: who reads does not see what it is the length of.
        let mut first = vec![0; head + STRANGERS_STREAMS * headers().len() + 3];
        gate.read_exact(&mut first).await.expect("as much as this");
        let mut rest = vec![0; sent.len() - first.len()];
        {
            let mut reading = std::pin::pin!(gate.read(&mut rest));
            assert!(futures::poll!(reading.as_mut()).is_pending());
            assert!(futures::poll!(reading.as_mut()).is_pending());
        }
        // One that is answered makes room for another.
        guest.stream().answered();
        let mut next = vec![0; headers().len()];
        gate.read_exact(&mut next).await.expect("one more");
        first.extend(next);
        rest.truncate(sent.len() - first.len());
        guest.trust();
        guest.serve();
        gate.read_exact(&mut rest).await.expect("all of it");
        first.extend(rest);
        assert_eq!(first, sent);
    }

    #[test]
    fn frames_are_seen_however_they_are_cut() {
        let mut sent = vec![b'x'; Streams::PREFACE];
        sent.extend(headers().repeat(STRANGERS_STREAMS + 2));
        let expected = Streams::PREFACE + STRANGERS_STREAMS * headers().len() + 3;
        for size in 1..40 {
            let mut streams = Streams::default();
            let mut passed = 0;
            for part in sent.chunks(size) {
                let passing = streams.before_too_many(part, STRANGERS_STREAMS);
                passed += passing;
                if passing < part.len() {
                    break;
                }
            }
            assert_eq!(passed, expected, "in parts of {size}");
        }
    }
}
