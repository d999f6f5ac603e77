//! The memory that the subscriptions of clients hold: their names, and resources that were made for one client. What is
//! shared counts once. The figures are estimates that include the overhead of allocations.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::generate::EncodedResource;

/// The overhead of a name in a set.
const NAME_BYTES: usize = 130;
/// The steps in which names are charged that are not part of a shared list. Few of them are not worth it.
const NAMES_STEP: usize = 32 << 10;
/// The overhead of a resource.
const RESOURCE_BYTES: usize = 400;

/// The sum of all charges.
#[derive(Debug, Default)]
pub(in crate::xds) struct HeldBytes(AtomicUsize);

impl HeldBytes {
    pub(in crate::xds) fn get(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Adds bytes until the charge is dropped.
    pub(in crate::xds) fn charge(self: &Arc<Self>, bytes: usize) -> Arc<Charge> {
        self.0.fetch_add(bytes, Ordering::AcqRel);
        let total = self.clone();
        Arc::new(Charge { total, bytes })
    }

    /// Charges this many names with this many bytes of text, unless they are few.
    pub(in crate::xds) fn charge_names(self: &Arc<Self>, count: usize, text_bytes: usize) -> Option<Arc<Charge>> {
        let bytes = size_of_names(count, text_bytes) / NAMES_STEP * NAMES_STEP;
        (bytes > 0).then(|| self.charge(bytes))
    }
}

/// Bytes that are held by all owners of the charge together.
#[derive(Debug)]
pub struct Charge {
    total: Arc<HeldBytes>,
    bytes: usize,
}

impl Charge {
    /// Returns the part of one owner.
    pub(in crate::xds) fn share(self: &Arc<Self>) -> usize {
        self.bytes / Arc::strong_count(self).max(1)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.total.0.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Returns the size of this many names with this many bytes of text.
pub(in crate::xds) fn size_of_names(count: usize, text_bytes: usize) -> usize {
    count * NAME_BYTES + text_bytes
}

/// Returns the size of the resources that nothing else holds: placeholders for names that do not exist.
pub(in crate::xds) fn size_of_private(resources: &[Arc<EncodedResource>]) -> usize {
    let private = resources.iter().filter(|resource| Arc::strong_count(resource) == 1);
    private
        .map(|resource| RESOURCE_BYTES + resource.name.len() + resource.delta_frame().size())
        .sum()
}
