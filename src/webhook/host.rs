//! The host of injection's templates: the clock, randomness and variables of the process.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Instant, UNIX_EPOCH},
};

use crate::{environment, template::Host};

/// The access of templates to the process, until a deadline.
pub struct ProcessHost {
    variables: Arc<BTreeMap<String, String>>,
    deadline: Option<Instant>,
}

impl ProcessHost {
    /// Creates a host with the environment variables of the process.
    pub fn new(variables: Arc<BTreeMap<String, String>>, deadline: Option<Instant>) -> Self {
        Self { variables, deadline }
    }
}

impl Host for ProcessHost {
    fn is_expired(&self) -> bool {
        self.deadline.is_some_and(|deadline| environment::now() >= deadline)
    }

    fn now(&self) -> i128 {
        let since = environment::wall_clock().duration_since(UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos().cast_signed())
    }

    fn fill_random(&self, buffer: &mut [u8]) -> bool {
        aws_lc_rs::rand::fill(buffer).is_ok()
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }
}
