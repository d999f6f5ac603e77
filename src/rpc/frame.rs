//! A minimal parser of HTTP/2 frames (RFC 9113, section 4.1). It reads the heads of frames and skips their payloads, so
//! that limits can be enforced before the HTTP/2 server uses memory or CPU for a frame.

/// The types of frames.
pub(super) mod kind {
    pub(in crate::rpc) const DATA: u8 = 0;
    pub(in crate::rpc) const HEADERS: u8 = 1;
    pub(in crate::rpc) const RST_STREAM: u8 = 3;
    pub(in crate::rpc) const GOAWAY: u8 = 7;
    pub(in crate::rpc) const CONTINUATION: u8 = 9;
}

/// The flag of the last frame of a stream, in DATA and HEADERS frames.
const END_STREAM: u8 = 1;
/// The flag of DATA frames whose payload begins with the length of the padding at its end.
const PADDED: u8 = 8;
/// The length of a frame's head: length (3 bytes), type, flags, stream (4 bytes).
pub(super) const HEAD_BYTES: usize = 9;
/// The length of the connection preface of clients (RFC 9113, section 3.4).
pub(super) const PREFACE_BYTES: usize = 24;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The length of the payload.
    pub(super) len: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl Head {
    pub(super) fn read(bytes: [u8; HEAD_BYTES]) -> Self {
        let [a, b, c, kind, flags, stream @ ..] = bytes;
        Self {
            len: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            // The highest bit is reserved.
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
        }
    }

    pub(super) fn write(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..3].copy_from_slice(&(self.len as u32).to_be_bytes()[1..]);
        (bytes[3], bytes[4]) = (self.kind, self.flags);
        bytes[5..].copy_from_slice(&self.stream.to_be_bytes());
        bytes
    }

    /// Returns the heads of a part of at most this many bytes, and of the rest, which may be divided again. Only DATA
    /// frames without padding have more than one part.
    pub(super) fn divided(self, most: usize) -> (Self, Option<Self>) {
        if self.kind != kind::DATA || self.flags & PADDED != 0 || self.len <= most {
            return (self, None);
        }
        let (mut part, mut rest) = (self, self);
        part.len = most;
        part.flags &= !END_STREAM;
        rest.len -= most;
        (part, Some(rest))
    }

    /// Returns true if the sender sends nothing more on the stream.
    pub(super) fn ends_stream(self) -> bool {
        match self.kind {
            kind::RST_STREAM => true,
            kind::DATA | kind::HEADERS => self.flags & END_STREAM != 0,
            _ => false,
        }
    }
}

/// The decision about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Pass,
    /// The frame must wait. It is presented again.
    Hold,
}

/// The position in a sequence of frames that arrives in parts.
#[derive(Debug)]
pub(super) struct FrameParser {
    /// The number of bytes until the next frame.
    skip: usize,
    /// The part of the next head that was seen.
    head: [u8; HEAD_BYTES],
    seen: usize,
}

impl FrameParser {
    /// Creates a parser of frames that follow `skip` other bytes.
    pub(super) fn after(skip: usize) -> Self {
        Self {
            skip,
            head: [0; HEAD_BYTES],
            seen: 0,
        }
    }

    /// Returns the number of bytes of the present frame's payload that have not arrived.
    pub(super) fn missing_bytes(&self) -> usize {
        self.skip
    }

    /// Returns true between two frames.
    pub(super) fn is_between_frames(&self) -> bool {
        self.skip == 0 && self.seen == 0
    }

    /// Parses bytes and presents each head. Returns the number of bytes before the last byte of the head that is held,
    /// or the number of all bytes. A reader cannot act on an incomplete head.
    pub(super) fn parse(&mut self, bytes: &[u8], mut present: impl FnMut(Head) -> Verdict) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let step = self.skip.min(bytes.len() - at);
            if step > 0 {
                self.skip -= step;
                at += step;
                continue;
            }
            self.head[self.seen] = bytes[at];
            if self.seen + 1 == HEAD_BYTES {
                let head = Head::read(self.head);
                if present(head) == Verdict::Hold {
                    return at;
                }
                self.skip = head.len;
                self.seen = 0;
            } else {
                self.seen += 1;
            }
            at += 1;
        }
        at
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a frame with a payload of zeros.
    pub(in crate::rpc) fn frame(kind: u8, flags: u8, stream: u32, len: usize) -> Vec<u8> {
        let [_, a, b, c] = u32::try_from(len).expect("a short frame").to_be_bytes();
        let mut frame = vec![a, b, c, kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.resize(HEAD_BYTES + len, 0);
        frame
    }

    #[test]
    fn frames_are_parsed_in_parts_of_any_size() {
        let mut sent = vec![b'x'; PREFACE_BYTES];
        let frames = [
            (kind::HEADERS, 4, 1, 5),
            (kind::DATA, 1, 1, 300),
            (kind::RST_STREAM, 0, 3, 4),
        ];
        for (kind, flags, stream, len) in frames {
            sent.extend(frame(kind, flags, stream, len));
        }
        sent.extend(frame(kind::HEADERS, 4, 5, 5));
        for size in 1..40 {
            let mut parser = FrameParser::after(PREFACE_BYTES);
            let (mut heads, mut passed) = (Vec::new(), 0);
            for part in sent.chunks(size) {
                let passing = parser.parse(part, |head| {
                    if head.stream == 5 {
                        return Verdict::Hold;
                    }
                    heads.push((head.kind, head.ends_stream(), head.stream, head.len));
                    Verdict::Pass
                });
                passed += passing;
                if passing < part.len() {
                    break;
                }
            }
            let expected = frames.map(|(kind, _, stream, len)| (kind, kind != kind::HEADERS, stream, len));
            assert_eq!(heads, expected, "in parts of {size}");
            assert_eq!(passed, sent.len() - 6, "in parts of {size}");
        }
    }
}
