//! The HTTP body of a gRPC response: messages written from bytes that all streams share.
//!
//! Nothing is copied for a stream, and DATA frames are made only when the transport asks for them. So a slow reader
//! costs a list of references. A frame tells when the transport has released it, which is when it was written.

use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt,
    io::IoSlice,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::Stream;
use http::HeaderMap;
use http_body::Frame;
use tokio::sync::{mpsc, oneshot};

/// A list of shared buffers, read one after the other: the payload of a DATA frame.
#[derive(Debug, Default)]
pub struct BufList {
    bufs: VecDeque<Bytes>,
    remaining: usize,
    /// Dropped with the last byte. The message was written when all clones of it are dropped.
    written: Option<Arc<oneshot::Sender<()>>>,
}

impl BufList {
    /// Returns the buffers that are left.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.bufs.iter()
    }

    /// Returns the number of buffers.
    pub fn len(&self) -> usize {
        self.bufs.len()
    }

    /// Returns true without buffers.
    pub fn is_empty(&self) -> bool {
        self.bufs.is_empty()
    }

    /// Appends a buffer, unless it is empty.
    pub fn push(&mut self, buf: Bytes) {
        if buf.is_empty() {
            return;
        }
        self.remaining += buf.len();
        self.bufs.push_back(buf);
    }

    /// Keeps this sender until the last byte of the list was read.
    pub fn hold_until_written(&mut self, written: Option<Arc<oneshot::Sender<()>>>) {
        self.written = written;
    }

    fn consume(&mut self, count: usize) {
        self.remaining -= count;
        if self.remaining == 0 {
            self.written = None;
        }
    }
}

impl Buf for BufList {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.bufs.front().map_or(&[], |buf| buf)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for (slice, buf) in slices.iter_mut().zip(&self.bufs) {
            *slice = IoSlice::new(buf);
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "cannot advance past the end");
        self.consume(count);
        while let Some(front) = self.bufs.front_mut() {
            if count < front.len() {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.bufs.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        match self.bufs.front_mut() {
            // The common case of adapters that take one buffer at a time: no copy.
            Some(front) if len <= front.len() => {
                let bytes = front.split_to(len);
                if front.is_empty() {
                    self.bufs.pop_front();
                }
                self.consume(len);
                bytes
            }
            _ => {
                assert!(len <= self.remaining, "cannot advance past the end");
                let mut bytes = BytesMut::with_capacity(len);
                bytes.put(self.take(len));
                bytes.freeze()
            }
        }
    }
}

/// A message that is written as a series of DATA frames.
pub trait Message: Send + Unpin + 'static {
    /// Returns the payload of the next frame; `None` after the last.
    fn next_data(&mut self) -> Option<BufList>;
}

/// An item of a [`Body`]. Boxed, since a channel has room for 32 items from the start: 0.5 instead of 3.3 KiB for each
/// stream.
#[derive(Debug)]
enum Item<M> {
    Message(Box<M>),
    Trailers(Box<HeaderMap>),
}

/// The response of a unary call.
#[derive(Debug)]
struct Whole {
    message: Option<Bytes>,
    trailers: HeaderMap,
}

/// Framed messages, then trailers.
type AnswerStream = Pin<Box<dyn Stream<Item = Result<Bytes, HeaderMap>> + Send>>;

/// Answers that are made one by one.
struct Answers(AnswerStream);

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Answers")
    }
}

/// The sending half of a [`Body`].
#[derive(Debug)]
pub struct ResponseSender<M> {
    items: mpsc::Sender<Item<M>>,
}

impl<M> Clone for ResponseSender<M> {
    fn clone(&self) -> Self {
        Self {
            items: self.items.clone(),
        }
    }
}

/// The client has closed the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client closed the stream")]
pub struct Disconnected;

impl<M> ResponseSender<M> {
    /// Sends a message; waits while an earlier one is being written.
    pub async fn send(&self, message: M) -> Result<(), Disconnected> {
        self.items
            .send(Item::Message(Box::new(message)))
            .await
            .map_err(|_| Disconnected)
    }

    /// Ends the body with trailers.
    pub async fn end(self, trailers: HeaderMap) -> Result<(), Disconnected> {
        self.items
            .send(Item::Trailers(Box::new(trailers)))
            .await
            .map_err(|_| Disconnected)
    }

    /// Waits until the client closes the stream.
    pub async fn closed(&self) {
        self.items.closed().await;
    }
}

/// The body of a response. It ends with trailers, unless it is empty from the start.
#[derive(Debug)]
pub struct Body<M> {
    items: Option<mpsc::Receiver<Item<M>>>,
    current: Option<M>,
    whole: Option<Whole>,
    answers: Option<Answers>,
}

impl<M> Default for Body<M> {
    fn default() -> Self {
        Self {
            items: None,
            current: None,
            whole: None,
            answers: None,
        }
    }
}

impl<M> Body<M> {
    /// Creates a body of one framed message and its trailers.
    pub fn whole(message: Bytes, trailers: HeaderMap) -> Self {
        let message = Some(message);
        Self {
            whole: Some(Whole { message, trailers }),
            ..Self::default()
        }
    }

    /// Creates a body of answers, each made when there is room for it.
    pub(super) fn of_answers(answers: AnswerStream) -> Self {
        Self {
            answers: Some(Answers(answers)),
            ..Self::default()
        }
    }

    /// Creates a body and its sender. One message may wait behind the one that is being written.
    pub fn channel() -> (Self, ResponseSender<M>) {
        let (items, receiver) = mpsc::channel(1);
        let body = Self {
            items: Some(receiver),
            ..Self::default()
        };
        (body, ResponseSender { items })
    }
}

impl<M: Message> http_body::Body for Body<M> {
    type Data = BufList;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<BufList>, Infallible>>> {
        if let Some(mut whole) = self.whole.take() {
            let Some(message) = whole.message.take() else {
                return Poll::Ready(Some(Ok(Frame::trailers(whole.trailers))));
            };
            self.whole = Some(whole);
            let mut data = BufList::default();
            data.push(message);
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(answers) = &mut self.answers {
            let answer = ready!(answers.0.as_mut().poll_next(cx));
            if !matches!(answer, Some(Ok(_))) {
                self.answers = None;
            }
            return Poll::Ready(answer.map(|answer| {
                Ok(match answer {
                    Ok(message) => {
                        let mut data = BufList::default();
                        data.push(message);
                        Frame::data(data)
                    }
                    Err(trailers) => Frame::trailers(trailers),
                })
            }));
        }
        loop {
            if let Some(data) = self.current.as_mut().and_then(Message::next_data) {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            self.current = None;
            let Some(items) = &mut self.items else {
                return Poll::Ready(None);
            };
            match ready!(items.poll_recv(cx)) {
                Some(Item::Message(message)) => self.current = Some(*message),
                Some(Item::Trailers(trailers)) => {
                    self.items = None;
                    return Poll::Ready(Some(Ok(Frame::trailers(*trailers))));
                }
                None => self.items = None,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.items.is_none() && self.current.is_none() && self.whole.is_none() && self.answers.is_none()
    }
}

/// A [`Body`] that yields one buffer at a time, for servers that need plain `Bytes`.
#[derive(Debug)]
pub struct FlatBody<M> {
    body: Body<M>,
    data: BufList,
}

impl<M> From<Body<M>> for FlatBody<M> {
    fn from(body: Body<M>) -> Self {
        Self {
            body,
            data: BufList::default(),
        }
    }
}

impl<M: Message> http_body::Body for FlatBody<M> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            let len = self.data.chunk().len();
            if len > 0 {
                let buf = self.data.copy_to_bytes(len);
                return Poll::Ready(Some(Ok(Frame::data(buf))));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => return Poll::Ready(None),
                Some(Err(never)) => match never {},
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.data = data,
                    Err(frame) => {
                        return Poll::Ready(frame.into_trailers().ok().map(|trailers| Ok(Frame::trailers(trailers))));
                    }
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !self.data.has_remaining()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_lists_advance_across_buffers() {
        let mut list = BufList::default();
        for text in ["ab", "cde", "f"] {
            list.push(Bytes::from_static(text.as_bytes()));
        }
        list.advance(1);
        let mut slices = [IoSlice::new(&[]); 8];
        assert_eq!(list.chunks_vectored(&mut slices), 3);
        assert_eq!(list.copy_to_bytes(3), "bcd");
        assert_eq!(list.chunk(), b"e");
        list.advance(2);
        assert!(!list.has_remaining());
    }
}
