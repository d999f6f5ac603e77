//! `Gate`: a transport of which little is read until its other side is trusted. What was read is all that can be held for
//! a stranger, whatever windows it was granted.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::lobby::Guest;

/// What is read of a stranger: the headers of some streams, and the first part of a request.
const STRANGERS_BYTES: usize = 24 << 10;
/// What is read of a stranger in one turn: few streams can be opened by it.
const STRANGERS_TURN: usize = 4 << 10;

/// See the module's text.
pub(super) struct Gate<I> {
    io: I,
    guest: Arc<Guest>,
    left: usize,
    /// It has had its turn.
    rests: bool,
}

impl<I> Gate<I> {
    pub(super) fn new(io: I, guest: Arc<Guest>) -> Self {
        Self {
            io,
            guest,
            left: STRANGERS_BYTES,
            rests: false,
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Gate<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.guest.is_trusted(cx) {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
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
        buffer.put_slice(part.filled());
        self.left -= part.filled().len();
        self.rests = true;
        Poll::Ready(Ok(()))
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
            .write_all(&vec![7_u8; 100_000])
            .await
            .expect("the pipe is larger");
        let mut gate = Gate::new(server, guest.clone());
        let mut few = vec![0; STRANGERS_BYTES];
        gate.read_exact(&mut few).await.expect("as much as this");
        let mut rest = vec![0; 100_000 - STRANGERS_BYTES];
        let mut reading = std::pin::pin!(gate.read_exact(&mut rest));
        assert!(futures::poll!(reading.as_mut()).is_pending());
        guest.trust();
        reading.await.expect("all of it");
        assert!(few.iter().chain(&rest).all(|byte| *byte == 7));
    }
}
