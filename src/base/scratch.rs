//! Scratch buffers: each thread keeps the allocation of a buffer for the next use.

use std::{cell::Cell, thread::LocalKey};

/// A thread's buffer for one purpose; empty between two uses.
///
/// Declared as `thread_local! { static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) }; }`. Each purpose has
/// its own, so that a nested use for another purpose finds its own allocation.
pub type Slot<B> = LocalKey<Cell<B>>;

/// A buffer that keeps its allocation when it is cleared.
pub trait Buffer: Default + 'static {
    /// Removes the content.
    fn clear(&mut self);
}

impl<T: 'static> Buffer for Vec<T> {
    fn clear(&mut self) {
        self.clear();
    }
}

impl Buffer for String {
    fn clear(&mut self) {
        self.clear();
    }
}

/// Calls a function with an empty buffer, and keeps the buffer's allocation for the next call.
///
/// A nested call for the same slot gets a buffer without an allocation.
pub fn with<B: Buffer, R>(slot: &'static Slot<B>, use_buffer: impl FnOnce(&mut B) -> R) -> R {
    let mut buffer = slot.take();
    let result = use_buffer(&mut buffer);
    put_back(slot, buffer);
    result
}

/// Clears a buffer taken from the slot, and keeps its allocation for the next use.
pub fn put_back<B: Buffer>(slot: &'static Slot<B>, mut buffer: B) {
    buffer.clear();
    slot.set(buffer);
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    }

    #[test]
    fn buffers_are_empty_and_keep_their_allocation() {
        let allocation = with(&SCRATCH, |buffer| {
            buffer.extend_from_slice(b"content");
            buffer.as_ptr()
        });
        with(&SCRATCH, |buffer| {
            assert!(buffer.is_empty());
            assert_eq!(buffer.as_ptr(), allocation);
        });
    }

    #[test]
    fn nested_uses_have_separate_buffers() {
        with(&SCRATCH, |outer| {
            outer.push(1);
            with(&SCRATCH, |inner| assert!(inner.is_empty()));
            assert_eq!(*outer, [1]);
        });
    }
}
