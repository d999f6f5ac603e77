//! A transport that passes large DATA frames of the client on in parts.
//!
//! The HTTP/2 server keeps a read buffer for each connection as long as it lives. It has 8 KiB at first and doubles for
//! a frame that does not fit, up to 32 KiB for a frame of 16 KiB. A sidecar sends such frames when it connects, and
//! then few bytes for hours. Where one DATA frame ends and the next begins has no meaning (RFC 9113, section 6.1).

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::frame::{HEAD_BYTES, Head, PREFACE_BYTES};

/// The maximum size of a part: half of the first read buffer, which therefore seldom has to grow. A frame of this size
/// is a part of a larger one, or as large.
pub(super) const PART_BYTES: usize = 4 << 10;
/// The number of bytes that are read at once, at most as many as the HTTP/2 server has room for.
const BYTES_PER_READ: usize = 8 << 10;

/// See the module's documentation.
pub(super) struct DataParts<I> {
    io: I,
    divider: Divider,
    /// Bytes for which the reader had no room: inserted heads are not part of what was read.
    ready: Vec<u8>,
}

impl<I> DataParts<I> {
    pub(super) fn new(io: I) -> Self {
        Self {
            io,
            divider: Divider::after(PREFACE_BYTES),
            ready: Vec::new(),
        }
    }
}

/// The position in a sequence of frames, and what is left of a frame that is divided.
#[derive(Debug)]
struct Divider {
    /// The number of bytes until the next head.
    skip: usize,
    /// The start of the next head.
    head: [u8; HEAD_BYTES],
    seen: usize,
    /// The rest of the payload of a frame whose part is being passed on.
    rest: Option<Head>,
}

impl Divider {
    fn after(skip: usize) -> Self {
        Self {
            skip,
            head: [0; HEAD_BYTES],
            seen: 0,
            rest: None,
        }
    }

    /// Passes bytes to `emit`. An incomplete head is kept until the rest of it arrives.
    fn divide(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        loop {
            if self.skip == 0
                && let Some(rest) = self.rest.take()
            {
                self.begin(rest, &mut emit);
            }
            if bytes.is_empty() {
                return;
            }
            if self.skip > 0 {
                let (passing, others) = bytes.split_at(self.skip.min(bytes.len()));
                emit(passing);
                self.skip -= passing.len();
                bytes = others;
                continue;
            }
            let (start, others) = bytes.split_at((HEAD_BYTES - self.seen).min(bytes.len()));
            self.head[self.seen..][..start.len()].copy_from_slice(start);
            self.seen += start.len();
            bytes = others;
            if self.seen == HEAD_BYTES {
                self.seen = 0;
                self.begin(Head::read(self.head), &mut emit);
            }
        }
    }

    /// Begins a frame, or the next part of one.
    fn begin(&mut self, head: Head, emit: &mut impl FnMut(&[u8])) {
        let (part, rest) = head.divided(PART_BYTES);
        emit(&part.write());
        (self.skip, self.rest) = (part.len, rest);
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for DataParts<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        // An empty read would mean the end of the stream.
        while buffer.filled().len() == before {
            if !this.ready.is_empty() {
                let len = this.ready.len().min(buffer.remaining());
                buffer.put_slice(&this.ready[..len]);
                this.ready.drain(..len);
                if this.ready.is_empty() {
                    // Thousands of connections are idle.
                    this.ready = Vec::new();
                }
                break;
            }
            let mut read = [MaybeUninit::uninit(); BYTES_PER_READ];
            let mut read = ReadBuf::uninit(&mut read[..buffer.remaining().min(BYTES_PER_READ)]);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                break;
            }
            let ready = &mut this.ready;
            this.divider.divide(read.filled(), |bytes| {
                let room = if ready.is_empty() { buffer.remaining() } else { 0 };
                let (fitting, others) = bytes.split_at(bytes.len().min(room));
                buffer.put_slice(fitting);
                ready.extend_from_slice(others);
            });
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for DataParts<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
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
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::rpc::frame::{kind, tests::frame};

    const END_STREAM: u8 = 1;
    const PADDED: u8 = 8;

    /// Returns the heads and payloads of frames after the preface.
    fn frames(mut bytes: &[u8]) -> Vec<(Head, Vec<u8>)> {
        bytes = &bytes[PREFACE_BYTES..];
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let (head, rest) = bytes.split_first_chunk().expect("a whole head");
            let head = Head::read(*head);
            let (payload, rest) = rest.split_at(head.len);
            frames.push((head, payload.to_vec()));
            bytes = rest;
        }
        frames
    }

    fn numbered(kind: u8, flags: u8, stream: u32, len: usize) -> Vec<u8> {
        let mut frame = frame(kind, flags, stream, len);
        for (number, byte) in frame[HEAD_BYTES..].iter_mut().enumerate() {
            *byte = (number % 251) as u8;
        }
        frame
    }

    #[tokio::test]
    async fn large_data_frames_arrive_in_parts() {
        let sent = [
            vec![b'x'; PREFACE_BYTES],
            numbered(kind::HEADERS, 4, 1, 9000),
            numbered(kind::DATA, 0, 1, 16 << 10),
            numbered(kind::DATA, END_STREAM, 1, 16_383),
            numbered(kind::DATA, 0, 3, PART_BYTES),
            numbered(kind::DATA, PADDED, 3, 2 * PART_BYTES),
            numbered(kind::DATA, END_STREAM, 3, 0),
            numbered(kind::DATA, END_STREAM, 5, PART_BYTES + 1),
        ]
        .concat();
        // As they are written, and as there is room for them.
        for (written, room) in [
            (1, 1),
            (7, 3),
            (13, 8 << 10),
            (5000, 1),
            (5000, 4099),
            (1 << 20, 1 << 20),
        ] {
            let (server, mut client) = tokio::io::duplex(written);
            let mut server = DataParts::new(server);
            let sending = async {
                tokio::io::AsyncWriteExt::write_all(&mut client, &sent)
                    .await
                    .expect("a pipe");
                drop(client);
            };
            let receiving = async {
                let (mut received, mut buffer) = (Vec::new(), vec![0; room]);
                loop {
                    let len = server.read(&mut buffer).await.expect("a pipe");
                    if len == 0 {
                        return received;
                    }
                    received.extend_from_slice(&buffer[..len]);
                }
            };
            let ((), received) = futures::join!(sending, receiving);
            let (sent, mut whole) = (frames(&sent), Vec::<(Head, Vec<u8>)>::new());
            let mut is_part = false;
            for (head, payload) in frames(&received) {
                assert_eq!(head, Head::read(head.write()));
                match whole.last_mut() {
                    Some((begun, before)) if is_part => {
                        assert_eq!((begun.kind, begun.stream), (head.kind, head.stream));
                        assert!(!begun.ends_stream(), "only the last part ends the stream");
                        before.extend(payload);
                        let len = before.len();
                        *begun = Head { len, ..head };
                    }
                    _ => whole.push((head, payload)),
                }
                let (expected, _) = &sent[whole.len() - 1];
                is_part = whole.last().is_some_and(|(head, _)| head.len < expected.len);
                if head.kind == kind::DATA && head.len > PART_BYTES {
                    assert_eq!(head.len, 2 * PART_BYTES, "only padded frames are passed on whole");
                }
            }
            assert_eq!(whole, sent, "written in parts of {written}, read in parts of {room}");
        }
    }
}
