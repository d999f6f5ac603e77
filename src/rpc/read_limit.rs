//! A read limit for unauthenticated connections. Whatever flow-control windows a client has, no more memory can be used
//! for it than was read.
//!
//! Note: few bytes can be many headers, since HPACK refers to earlier headers by index. So the streams that an
//! unauthenticated client opens are counted here, before they are decoded.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::pre_auth::UnauthenticatedConnection;

/// The total number of bytes read from an unauthenticated client: the headers of some streams and the start of a
/// request.
const UNAUTHENTICATED_BYTES: usize = 16 << 10;
/// The number of unconsumed bytes of a client with accepted credentials, until its first configuration is sent. It must
/// have room for all headers and one frame of the maximum size (16 KiB), since a frame is only consumed as a whole.
const UNCONSUMED_BYTES: usize = 32 << 10;
/// The number of bytes of an unauthenticated client that are read in one poll.
const BYTES_PER_READ: usize = 4 << 10;
/// The number of unanswered streams of an unauthenticated client that reach the HTTP/2 server. Each has credentials in
/// its headers, so none depends on another.
const UNAUTHENTICATED_STREAMS: usize = 3;

/// A transport with a read limit until its client is authenticated.
pub(super) struct PreAuthReadLimit<I> {
    io: I,
    pre_auth: Arc<UnauthenticatedConnection>,
    left: usize,
    /// The bytes that were read between accepted credentials and the end of the limit.
    passed: usize,
    /// True if the last poll has read; the next one yields.
    yields: bool,
    streams: Streams,
    /// Bytes that were read and not passed on yet.
    held: Vec<u8>,
}

impl<I: AsyncRead + Unpin> PreAuthReadLimit<I> {
    pub(super) fn new(io: I, pre_auth: Arc<UnauthenticatedConnection>) -> Self {
        Self {
            io,
            pre_auth,
            left: UNAUTHENTICATED_BYTES,
            passed: 0,
            yields: false,
            streams: Streams::default(),
            held: Vec::new(),
        }
    }

    /// Passes on the bytes that were held back, as many as fit.
    fn release(&mut self, buffer: &mut ReadBuf<'_>) {
        self.let_through(self.held.len().min(buffer.remaining()), buffer);
    }

    /// Passes on this many bytes. An empty buffer is freed, since thousands of connections are idle.
    fn let_through(&mut self, len: usize, buffer: &mut ReadBuf<'_>) {
        buffer.put_slice(&self.held[..len]);
        self.held.drain(..len);
        if self.held.is_empty() {
            self.held = Vec::new();
        }
    }

    /// Reads as much as may be unconsumed until the limit is lifted; then everything.
    fn read_on(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.pre_auth.is_read_unlimited() {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let len = (self.pre_auth.consumed() + UNCONSUMED_BYTES).saturating_sub(self.passed);
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

    /// Passes on bytes up to the stream that exceeds the limit. An empty read would mean the end of the stream, so the
    /// reader waits instead. It is woken when a stream is answered or the credentials are accepted.
    fn pass(&mut self, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let len = self.held.len().min(buffer.remaining());
        let most = UNAUTHENTICATED_STREAMS + self.pre_auth.answered();
        let passing = self.streams.before_too_many(&self.held[..len], most);
        if passing == 0 {
            return Poll::Pending;
        }
        self.let_through(passing, buffer);
        Poll::Ready(Ok(()))
    }
}

/// A minimal parser of HTTP/2 frames that counts opened streams.
struct Streams {
    /// The number of bytes until the next frame.
    skip: usize,
    /// The number of bytes of the frame header that were seen, and the frame length so far.
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
    /// The length of the connection preface (RFC 9113, section 3.4).
    const PREFACE: usize = 24;
    /// The length of a frame header (RFC 9113, section 4.1): length (3 bytes), type, flags, stream (4 bytes).
    const HEAD: usize = 9;
    const HEADERS: u8 = 1;

    /// Returns the number of bytes before the header that opens stream number `most + 1`.
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

impl<I: AsyncRead + Unpin> AsyncRead for PreAuthReadLimit<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.pre_auth.has_accepted_credentials(cx) {
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
        self.pass(buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for PreAuthReadLimit<I> {
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
    use crate::rpc::pre_auth::PreAuthLimiter;

    #[tokio::test]
    async fn unauthenticated_clients_are_read_up_to_a_limit() {
        let pre_auth = PreAuthLimiter::new(1)
            .register(Ipv4Addr::LOCALHOST.into())
            .expect("an empty limiter");
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client
            .write_all(&vec![0_u8; 100_000])
            .await
            .expect("the pipe is larger");
        let mut limited = PreAuthReadLimit::new(server, pre_auth.clone());
        let mut few = vec![0; UNAUTHENTICATED_BYTES];
        limited.read_exact(&mut few).await.expect("bytes within the limit");
        let mut rest = vec![0; 100_000 - UNAUTHENTICATED_BYTES];
        let mut reading = std::pin::pin!(limited.read_exact(&mut rest));
        assert!(futures::poll!(reading.as_mut()).is_pending());
        pre_auth.accept_credentials();
        assert!(futures::poll!(reading.as_mut()).is_pending(), "not consumed");
        pre_auth.record_consumed(UNCONSUMED_BYTES);
        assert!(futures::poll!(reading.as_mut()).is_pending(), "not consumed completely");
        pre_auth.lift_read_limit();
        reading.await.expect("all bytes");
        assert!(few.iter().chain(&rest).all(|byte| *byte == 0));
    }

    /// Returns a short HEADERS frame, which refers to earlier headers.
    fn headers() -> Vec<u8> {
        let mut frame = vec![0, 0, 5, Streams::HEADERS, 4, 0, 0, 0, 1];
        frame.extend([0x82; 5]);
        frame
    }

    #[tokio::test]
    async fn r3_unauthenticated_clients_open_few_streams() {
        let pre_auth = PreAuthLimiter::new(1)
            .register(Ipv4Addr::LOCALHOST.into())
            .expect("an empty limiter");
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        sent.extend(settings);
        let head = sent.len();
        sent.extend(headers().repeat(90));
        client.write_all(&sent).await.expect("the pipe is larger");
        let mut limited = PreAuthReadLimit::new(server, pre_auth.clone());
        // The length field of the frame that is held back has passed; the reader cannot tell its type.
        let mut first = vec![0; head + UNAUTHENTICATED_STREAMS * headers().len() + 3];
        limited.read_exact(&mut first).await.expect("bytes within the limit");
        let mut rest = vec![0; sent.len() - first.len()];
        {
            let mut reading = std::pin::pin!(limited.read(&mut rest));
            assert!(futures::poll!(reading.as_mut()).is_pending());
            assert!(futures::poll!(reading.as_mut()).is_pending());
        }
        // An answered stream makes room for another.
        pre_auth.open_stream().answered();
        let mut next = vec![0; headers().len()];
        limited.read_exact(&mut next).await.expect("the next request");
        first.extend(next);
        rest.truncate(sent.len() - first.len());
        pre_auth.accept_credentials();
        pre_auth.lift_read_limit();
        limited.read_exact(&mut rest).await.expect("all bytes");
        first.extend(rest);
        assert_eq!(first, sent);
    }

    #[test]
    fn frames_are_parsed_in_parts_of_any_size() {
        let mut sent = vec![b'x'; Streams::PREFACE];
        sent.extend(headers().repeat(UNAUTHENTICATED_STREAMS + 2));
        let expected = Streams::PREFACE + UNAUTHENTICATED_STREAMS * headers().len() + 3;
        for size in 1..40 {
            let mut streams = Streams::default();
            let mut passed = 0;
            for part in sent.chunks(size) {
                let passing = streams.before_too_many(part, UNAUTHENTICATED_STREAMS);
                passed += passing;
                if passing < part.len() {
                    break;
                }
            }
            assert_eq!(passed, expected, "in parts of {size}");
        }
    }
}
