//! Messages of pprof's format (`profile.proto`), as far as profiles here have them.

use std::{collections::BTreeMap, time::UNIX_EPOCH};

use pprof::{Frames, Symbol, UnresolvedReport};
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

/// The tables of a profile while it is built. Ids begin with 1.
#[derive(Default)]
struct Tables {
    strings: BTreeMap<String, i64>,
    string_table: Vec<String>,
    functions: BTreeMap<(i64, i64), u64>,
    locations: BTreeMap<Vec<(u64, i64)>, u64>,
}

impl Tables {
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

    fn location(&mut self, symbols: &[Symbol]) -> u64 {
        let lines: Vec<(u64, i64)> = symbols.iter().map(|symbol| self.line(symbol)).collect();
        let next = self.locations.len() as u64 + 1;
        *self.locations.entry(lines).or_insert(next)
    }

    fn value_type(&mut self, of: &str, unit: &str) -> ValueType {
        ValueType {
            r#type: self.string(of),
            unit: self.string(unit),
        }
    }
}

/// Returns the profile of samples that were taken with this frequency.
pub(super) fn profile(samples: UnresolvedReport, frequency_hz: i32) -> Profile {
    let period = 1_000_000_000 / i64::from(frequency_hz.max(1));
    let mut tables = Tables::default();
    // The first string is empty.
    tables.string("");
    let sample_type = vec![
        tables.value_type("samples", "count"),
        tables.value_type("cpu", "nanoseconds"),
    ];
    let (program, thread) = (tables.string("istiod"), tables.string("thread"));
    let sample = |(frames, count)| {
        let frames = Frames::from(frames);
        let count = count as i64;
        let label = Label {
            key: thread,
            str: tables.string(&frames.thread_name_or_id()),
        };
        Sample {
            location_id: frames.frames.iter().map(|symbols| tables.location(symbols)).collect(),
            value: vec![count, count * period],
            label: vec![label],
        }
    };
    let sample = samples.data.into_iter().map(sample).collect();
    let since = samples.timing.start_time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut functions: Vec<Function> = Vec::with_capacity(tables.functions.len());
    functions.extend(
        tables
            .functions
            .iter()
            .map(|(&(name, filename), &id)| Function { id, name, filename }),
    );
    functions.sort_unstable_by_key(|function| function.id);
    let location = |(lines, &id): (&Vec<(u64, i64)>, &u64)| Location {
        id,
        mapping_id: 1,
        line: lines
            .iter()
            .map(|&(function_id, line)| Line { function_id, line })
            .collect(),
    };
    let mut locations: Vec<Location> = tables.locations.iter().map(location).collect();
    locations.sort_unstable_by_key(|location| location.id);
    Profile {
        period_type: Some(sample_type[1]),
        sample_type,
        sample,
        mapping: vec![Mapping {
            id: 1,
            filename: program,
            has_functions: true,
        }],
        location: locations,
        function: functions,
        string_table: tables.string_table,
        time_nanos: since.as_nanos() as i64,
        duration_nanos: samples.timing.duration.as_nanos() as i64,
        period,
    }
}

#[cfg(test)]
impl Profile {
    /// Checks that every reference in the profile exists.
    pub(super) fn check(&self) {
        let strings = self.string_table.len() as i64;
        assert_eq!(self.string_table.first().map(String::as_str), Some(""));
        assert!(self.duration_nanos >= 1_000_000_000 && self.period > 0);
        assert!(self.time_nanos > 0);
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
}
