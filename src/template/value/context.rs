//! The state of one rendering. Every loop and every function that builds values takes from the budget first, so a
//! template can neither hang nor exhaust the process.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use regex::bytes::Regex;

use crate::template::limits::{Exceeded, Host, Limits};

use super::{Entries, Map, Value};

/// The state of one rendering: its budget, the maps that it changed, and its access to the world.
pub struct Context<'a> {
    /// The limits of the rendering.
    pub limits: &'a Limits,
    /// The world.
    pub host: &'a dyn Host,
    steps: u64,
    next_check: u64,
    value_bytes: usize,
    /// The entries of changed maps by the address of the map, which is kept so that no other map gets the address.
    changed: BTreeMap<usize, (Map, Entries)>,
    /// Compiled regular expressions of this rendering.
    pub(in crate::template) regexes: BTreeMap<String, Arc<Regex>>,
}

impl<'a> Context<'a> {
    /// Creates a budget.
    pub fn new(limits: &'a Limits, host: &'a dyn Host) -> Self {
        Self {
            limits,
            host,
            steps: 0,
            next_check: limits.steps_per_check,
            value_bytes: 0,
            changed: BTreeMap::new(),
            regexes: BTreeMap::new(),
        }
    }

    /// Takes steps.
    pub fn step(&mut self, count: usize) -> Result<(), Exceeded> {
        self.steps = self.steps.saturating_add(count as u64);
        if self.steps > self.limits.steps {
            return Err(Exceeded::Steps(self.limits.steps));
        }
        if self.steps >= self.next_check {
            self.next_check = self.steps.saturating_add(self.limits.steps_per_check);
            if self.host.is_expired() {
                return Err(Exceeded::Deadline);
            }
        }
        Ok(())
    }

    /// Takes memory for a value that a function is about to build, and the steps to fill it.
    pub fn allocate(&mut self, bytes: usize) -> Result<(), Exceeded> {
        self.value_bytes = self.value_bytes.saturating_add(bytes);
        if self.value_bytes > self.limits.value_bytes {
            return Err(Exceeded::Values(self.limits.value_bytes));
        }
        self.step(bytes / 256)
    }

    /// Takes memory for a list or map of a number of elements.
    pub fn allocate_elements(&mut self, count: usize) -> Result<(), Exceeded> {
        self.step(count)?;
        self.allocate(count.saturating_mul(ELEMENT_BYTES))
    }

    /// Returns the entries of a map at present.
    pub fn entries<'m>(&'m self, map: &'m Map) -> &'m Entries {
        self.unchanged(map)
            .or_else(|| self.changed.get(&map.address()).map(|(_, entries)| entries))
            .unwrap_or_else(|| map.initial_entries())
    }

    /// Returns the entries of a map at present for a walk that changes the context.
    pub fn snapshot<'m>(&self, map: &'m Map) -> Cow<'m, Entries> {
        match self.unchanged(map) {
            Some(entries) => Cow::Borrowed(entries),
            None => Cow::Owned(self.entries(map).clone()),
        }
    }

    /// Returns the entries of a map that the rendering did not change.
    pub(in crate::template) fn unchanged<'m>(&self, map: &'m Map) -> Option<&'m Entries> {
        let is_unchanged = self.changed.is_empty() || !self.changed.contains_key(&map.address());
        is_unchanged.then(|| map.initial_entries())
    }

    /// Returns the entries of a map for a change that all its holders in this rendering see.
    pub(in crate::template) fn entries_mut(&mut self, map: &Map) -> Result<&mut Entries, Exceeded> {
        if self.unchanged(map).is_some() {
            self.allocate_elements(map.initial_entries().len())?;
        }
        let changed = self.changed.entry(map.address());
        let (_, entries) = changed.or_insert_with(|| (map.clone(), map.initial_entries().clone()));
        Ok(entries)
    }

    /// Returns the value of a key.
    pub fn entry(&self, map: &Map, key: &[u8]) -> Option<Value> {
        self.entries(map).get(key).cloned()
    }

    /// Returns true if a value is not the zero value of its kind: `if` takes its first branch.
    pub fn is_true(&self, value: &Value) -> bool {
        match value {
            Value::Missing | Value::Nil | Value::NilPointer(_) => false,
            Value::Bool(value) => *value,
            Value::Int(_, number) => *number != 0,
            Value::Uint(_, number) => *number != 0,
            Value::Float32(number) => *number != 0.0,
            Value::Float(number) => *number != 0.0,
            Value::Complex(real, imaginary) => *real != 0.0 || *imaginary != 0.0,
            Value::String(text) => !text.is_empty(),
            Value::List(list) => !list.items().is_empty(),
            Value::Map(map) => !self.entries(map).is_empty(),
            Value::Pointer(_) | Value::Function(_) => true,
            Value::Object(object) => object.basic().map_or(!object.is_nil(), |value| self.is_true(&value)),
        }
    }

    /// Returns the depth of the next level of a walk.
    pub fn deeper(&self, depth: usize) -> Result<usize, Exceeded> {
        if depth >= self.limits.value_depth {
            return Err(Exceeded::ValueDepth(self.limits.value_depth));
        }
        Ok(depth + 1)
    }
}

/// The bytes that one element of a list or map takes, roughly.
const ELEMENT_BYTES: usize = 48;
