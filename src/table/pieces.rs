//! Evaluations in pieces: a large evaluation repeats only those pieces whose reads have changed since the last one.

use super::{ChangeSet, Cx, ReadKey};

/// The reads of each piece of an evaluation, in order.
///
/// Note: only those of the last evaluation may be used again. Pieces of an earlier one miss the changes in between.
#[derive(Debug)]
pub struct PieceReads {
    /// The reads that all pieces depend on.
    common: Box<[ReadKey]>,
    reads: Vec<ReadKey>,
    /// The end of each piece in `reads`.
    ends: Vec<usize>,
}

/// The pieces of the last evaluation, and the changes since then.
pub struct LastPieces<'a, P> {
    /// The pieces, if there was one.
    pub pieces: Option<&'a P>,
    /// The changes.
    pub changes: &'a ChangeSet,
}

impl PieceReads {
    /// Begins with the pieces of an evaluation. All of them depend on what it has read until now.
    pub fn begin(cx: &Cx) -> Self {
        Self {
            common: cx.reads(),
            reads: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Returns true if the changes do not touch what all pieces depend on. Otherwise none may be used again.
    pub fn are_usable(&self, changes: &ChangeSet) -> bool {
        !changes.touches(&self.common)
    }

    /// Evaluates the next piece and records its reads, also in `cx`.
    pub fn evaluate<R>(&mut self, cx: &Cx, function: impl FnOnce(&Cx) -> R) -> R {
        let (result, reads) = cx.nested(function);
        self.add(&reads);
        result
    }

    /// Takes over a piece of the last evaluation as the next one, unless the changes since then touch it. Returns true
    /// if its result is still valid.
    pub fn reuse(&mut self, cx: &Cx, last: &Self, piece: usize, changes: &ChangeSet) -> bool {
        let begin = if piece == 0 { 0 } else { last.ends[piece - 1] };
        let reads = &last.reads[begin..last.ends[piece]];
        let is_valid = !changes.touches(reads);
        if is_valid {
            cx.record_all(reads);
            self.add(reads);
        }
        is_valid
    }

    /// Ends with the last piece: gives back the room for more.
    pub fn finish(&mut self) {
        self.reads.shrink_to_fit();
        self.ends.shrink_to_fit();
    }

    fn add(&mut self, reads: &[ReadKey]) {
        self.reads.extend_from_slice(reads);
        self.ends.push(self.reads.len());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use super::*;
    use crate::table::{RelationId, Transaction};

    const RELATION: RelationId = RelationId(7);

    fn read(key: u8) -> ReadKey {
        ReadKey::of(RELATION, &key)
    }

    #[test]
    fn a_piece_is_valid_until_one_of_its_reads_changes() {
        let cx = Cx::recording();
        cx.record_all(&[read(0)]);
        let mut first = PieceReads::begin(&cx);
        for keys in [[1, 2], [3, 4]] {
            first.evaluate(&cx, |cx| cx.record_all(&keys.map(read)));
        }
        let mut tx = Transaction::default();
        tx.mark(RELATION, &4_u8);
        let (changes, again) = (tx.finish(), Cx::recording());
        let mut second = PieceReads::begin(&again);
        assert!(first.are_usable(&changes));
        assert!(second.reuse(&again, &first, 0, &changes));
        assert!(!second.reuse(&again, &first, 1, &changes));
        second.evaluate(&again, |cx| cx.record_all(&[read(5)]));
        let mut expected = [1, 2, 5].map(read);
        expected.sort_unstable();
        assert_eq!(*again.into_reads(), expected);

        let mut tx = Transaction::default();
        tx.mark(RELATION, &5_u8);
        let (changes, mut third) = (tx.finish(), PieceReads::begin(&cx));
        assert!(third.reuse(&cx, &second, 0, &changes));
        assert!(!third.reuse(&cx, &second, 1, &changes));

        let mut tx = Transaction::default();
        tx.mark(RELATION, &0_u8);
        assert!(!first.are_usable(&tx.finish()));
    }

    #[test]
    fn reads_of_a_piece_that_panics_are_recorded() {
        let cx = Cx::recording();
        let mut pieces = PieceReads::begin(&cx);
        let piece = |cx: &Cx| {
            cx.record_all(&[read(1)]);
            assert!(cx.reads().is_empty(), "a defect of the piece");
        };
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| pieces.evaluate(&cx, piece)));
        assert!(attempt.is_err());
        assert_eq!(*cx.into_reads(), [read(1)]);
    }
}
