//! Messages of pprof's format (`profile.proto`), as far as profiles here have them.

use std::{collections::BTreeMap, time::Duration};

use pprof::Symbol;
use prost::Message;

/// A profile. Strings are indexes of `string_table`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

/// The kind and unit of a value.
#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

/// A stack, the leaf first, with a value of each type.
#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

/// A label of a sample.
#[derive(Clone, Copy, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
}

/// The program. Its functions are known, so that pprof does not look for them.
#[derive(Clone, Copy, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

/// A place in the program: a function and those that are inlined into it, the innermost first.
#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

/// A line of a function.
#[derive(Clone, Copy, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

/// The kinds of values in a profile, each with its unit.
pub(super) struct Kinds {
    /// The values of each sample.
    pub(super) values: &'static [(&'static str, &'static str)],
    /// The kind whose amount is the interval between samples.
    pub(super) period: (&'static str, &'static str),
    /// The values that pprof shows first.
    pub(super) default: &'static str,
}

/// A profile while it is built. Ids begin with 1.
pub(super) struct Builder {
    strings: BTreeMap<String, i64>,
    string_table: Vec<String>,
    functions: BTreeMap<(i64, i64), u64>,
    locations: BTreeMap<Vec<(u64, i64)>, u64>,
    samples: Vec<Sample>,
}

impl Default for Builder {
    fn default() -> Self {
        let mut builder = Self {
            strings: BTreeMap::new(),
            string_table: Vec::new(),
            functions: BTreeMap::new(),
            locations: BTreeMap::new(),
            samples: Vec::new(),
        };
        // The first string is empty.
        builder.string("");
        builder
    }
}

impl Builder {
    fn string(&mut self, text: &str) -> i64 {
        if let Some(index) = self.strings.get(text) {
            return *index;
        }
        let index = self.string_table.len() as i64;
        self.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn line(&mut self, symbol: &Symbol) -> (u64, i64) {
        let names = (self.string(&symbol.name()), self.string(&symbol.filename()));
        let next = self.functions.len() as u64 + 1;
        let function = *self.functions.entry(names).or_insert(next);
        (function, i64::from(symbol.lineno()))
    }

    /// Returns the id of a place in the program, from a function and those that are inlined into it, the innermost
    /// first.
    pub(super) fn location(&mut self, symbols: &[Symbol]) -> u64 {
        let lines: Vec<(u64, i64)> = symbols.iter().map(|symbol| self.line(symbol)).collect();
        let next = self.locations.len() as u64 + 1;
        *self.locations.entry(lines).or_insert(next)
    }

    /// Adds a stack, the leaf first, with a value of each kind and labels.
    pub(super) fn sample(&mut self, location_id: Vec<u64>, value: Vec<i64>, labels: &[(&str, &str)]) {
        let label = labels.iter().map(|(key, text)| Label {
            key: self.string(key),
            str: self.string(text),
        });
        let label = label.collect();
        self.samples.push(Sample {
            location_id,
            value,
            label,
        });
    }

    fn value_type(&mut self, (name, unit): (&str, &str)) -> ValueType {
        ValueType {
            r#type: self.string(name),
            unit: self.string(unit),
        }
    }

    /// Returns the profile. Values belong to the time `duration` from `since`, which counts from 1970.
    pub(super) fn finish(mut self, kinds: &Kinds, period: i64, since: Duration, duration: Duration) -> Profile {
        let sample_type = kinds.values.iter().map(|kind| self.value_type(*kind)).collect();
        let (period_type, default_sample_type) = (self.value_type(kinds.period), self.string(kinds.default));
        let filename = self.string("istiod");
        let functions = self.functions.iter();
        let functions = functions.map(|(&(name, filename), &id)| Function { id, name, filename });
        let mut function: Vec<Function> = functions.collect();
        function.sort_unstable_by_key(|function| function.id);
        let of_lines = |(lines, &id): (&Vec<(u64, i64)>, &u64)| Location {
            id,
            mapping_id: 1,
            line: lines
                .iter()
                .map(|&(function_id, line)| Line { function_id, line })
                .collect(),
        };
        let mut location: Vec<Location> = self.locations.iter().map(of_lines).collect();
        location.sort_unstable_by_key(|location| location.id);
        Profile {
            sample_type,
            sample: self.samples,
            mapping: vec![Mapping {
                id: 1,
                filename,
                has_functions: true,
            }],
            location,
            function,
            string_table: self.string_table,
            time_nanos: since.as_nanos() as i64,
            duration_nanos: duration.as_nanos() as i64,
            period_type: Some(period_type),
            period,
            default_sample_type,
        }
    }
}

#[cfg(test)]
impl Profile {
    /// Checks that every reference in the profile exists.
    pub(super) fn check(&self) {
        let strings = self.string_table.len() as i64;
        assert_eq!(self.string_table.first().map(String::as_str), Some(""));
        assert!(self.period > 0 && self.time_nanos > 0 && self.default_sample_type < strings);
        for function in &self.function {
            assert!(function.name < strings && function.filename < strings);
        }
        for location in &self.location {
            assert!(
                location
                    .line
                    .iter()
                    .all(|line| line.function_id <= self.function.len() as u64)
            );
        }
        for sample in &self.sample {
            assert!(
                sample
                    .location_id
                    .iter()
                    .all(|id| *id >= 1 && *id <= self.location.len() as u64)
            );
            assert_eq!(sample.value.len(), self.sample_type.len());
        }
    }

    /// Returns the time that the profile is about.
    pub(super) fn duration(&self) -> Duration {
        Duration::from_nanos(u64::try_from(self.duration_nanos).unwrap_or_default())
    }

    /// Returns the sum of the values of a kind over the stacks with this function, or over all stacks.
    pub(super) fn sum(&self, kind: &str, function: Option<&str>) -> i64 {
        let text = |index: i64| self.string_table[index as usize].as_str();
        let position = self
            .sample_type
            .iter()
            .position(|value_type| text(value_type.r#type) == kind);
        let position = position.expect("a kind of the profile");
        let names = |id: &u64| {
            let lines = self.location[*id as usize - 1].line.iter();
            lines.map(|line| text(self.function[line.function_id as usize - 1].name))
        };
        let has = |sample: &&Sample| {
            function.is_none_or(|wanted| {
                sample
                    .location_id
                    .iter()
                    .flat_map(names)
                    .any(|name| name.contains(wanted))
            })
        };
        self.sample
            .iter()
            .filter(has)
            .map(|sample| sample.value[position])
            .sum()
    }
}
