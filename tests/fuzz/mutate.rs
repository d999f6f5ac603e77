//! Mutation of inputs: the same seed and corpus give the same inputs.

use crate::support::random::Random;

/// The largest mutated input.
const MAX_BYTES: usize = 256 << 10;
/// Edge values of lengths and counts.
const EDGES: [u32; 10] = [0, 1, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x10000, 0x7fff_ffff, 0xffff_ffff];

/// Returns a random range within a length, mostly a short one.
fn range(random: &mut Random, length: usize) -> std::ops::Range<usize> {
    let start = random.below(length + 1);
    let longest = if random.one_in(4) { length } else { 16 };
    let size = random.below(longest.min(length - start) + 1);
    start..start + size
}

/// Makes a new input from an old one, with a few changes.
pub(super) fn mutate(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>], words: &[&[u8]]) {
    let most = 1 << random.below(4);
    for _ in 0..=random.below(most) {
        change(random, input, others, words);
        input.truncate(MAX_BYTES);
    }
}

fn change(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>], words: &[&[u8]]) {
    let position = random.below(input.len());
    match random.below(10) {
        0 if !input.is_empty() => input[position] ^= 1 << random.below(8),
        1 if !input.is_empty() => input[position] = random.next() as u8,
        2 => {
            let range = range(random, input.len());
            input.drain(range);
        }
        3 => insert(input, position, &[random.next() as u8]),
        4 if !words.is_empty() => {
            let word = words[random.below(words.len())];
            // Replace a range, or insert at its start.
            let end = if random.one_in(2) {
                (position + word.len()).min(input.len())
            } else {
                position
            };
            input.splice(position.min(end)..end, word.iter().copied());
        }
        5 => {
            // A length or a count, one to four bytes.
            let edge = EDGES[random.below(EDGES.len())].to_be_bytes();
            let number = &edge[random.below(4)..];
            let end = (position + number.len()).min(input.len());
            input.splice(position..end, number.iter().copied());
        }
        6 => {
            // Repeat a range: nesting, repetition.
            let range = range(random, input.len());
            let most = 1 << random.below(12);
            let times = (1 + random.below(most)).min(MAX_BYTES / range.len().max(1));
            let piece = input[range.clone()].repeat(times);
            insert(input, range.end, &piece);
        }
        7 if !others.is_empty() => {
            let other = &others[random.below(others.len())];
            let range = range(random, other.len());
            insert(input, position, &other[range]);
        }
        8 if !others.is_empty() => {
            // The head of this input with the tail of another.
            let other = &others[random.below(others.len())];
            input.truncate(position);
            input.extend_from_slice(&other[random.below(other.len())..]);
        }
        _ => {
            let from = range(random, input.len());
            let piece = input[from].to_vec();
            insert(input, position, &piece);
        }
    }
}

fn insert(input: &mut Vec<u8>, position: usize, piece: &[u8]) {
    let position = position.min(input.len());
    input.splice(position..position, piece.iter().copied());
}
