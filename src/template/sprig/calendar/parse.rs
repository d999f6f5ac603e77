//! Texts in a layout to times.

use crate::template::quote::{Charset, quote};

use super::{
    DAYS, MONTHS, Time, days_in, days_of,
    layout::{Element, first},
};

/// The fields that a text sets.
struct Fields {
    year: i64,
    month: Option<i64>,
    day: Option<i64>,
    year_day: Option<i64>,
    hour: i64,
    minute: i64,
    second: i64,
    nanoseconds: u32,
    is_afternoon: Option<bool>,
    offset: i32,
}

/// Returns the time of a text in a layout; in UTC unless the text has an offset. The error is Go's.
pub(in crate::template::sprig) fn parse(layout: &[u8], text: &[u8]) -> Result<Time, String> {
    let shown = quote(text, Charset::Unicode);
    let mut fields = Fields {
        year: 0,
        month: None,
        day: None,
        year_day: None,
        hour: 0,
        minute: 0,
        second: 0,
        nanoseconds: 0,
        is_afternoon: None,
        offset: 0,
    };
    let (mut layout_rest, mut rest) = (layout, text);
    let cannot = |rest: &[u8], element: &[u8]| {
        let (layout, rest) = (quote(layout, Charset::Unicode), quote(rest, Charset::Unicode));
        let element = quote(element, Charset::Unicode);
        format!("parsing time {shown} as {layout}: cannot parse {rest} as {element}")
    };
    loop {
        let found = first(layout_rest);
        let (prefix, element) = match found {
            Some((position, length, _)) => (&layout_rest[..position], &layout_rest[position..position + length]),
            None => (layout_rest, &b""[..]),
        };
        rest = skip(rest, prefix).map_err(|rest| cannot(rest, prefix))?;
        let Some((position, length, kind)) = found else {
            if rest.is_empty() {
                break;
            }
            return Err(format!(
                "parsing time {shown}: extra text: {}",
                quote(rest, Charset::Unicode)
            ));
        };
        let next = &layout_rest[position + length..];
        match fields.read(kind, rest, next) {
            Ok(after) => rest = after,
            Err(Wrong::Syntax) => return Err(cannot(rest, element)),
            Err(Wrong::Range(name)) => return Err(format!("parsing time {shown}: {name} out of range")),
        }
        layout_rest = next;
    }
    fields
        .time()
        .map_err(|name| format!("parsing time {shown}: {name} out of range"))
}

/// Skips the literal text of a layout. Spaces in the layout match any number of spaces.
fn skip<'a>(mut text: &'a [u8], mut prefix: &[u8]) -> Result<&'a [u8], &'a [u8]> {
    while let Some(&byte) = prefix.first() {
        if byte == b' ' {
            if text.first().is_some_and(|first| *first != b' ') {
                return Err(text);
            }
            prefix = prefix.trim_ascii_start();
            text = text.trim_ascii_start();
            continue;
        }
        if text.first() != Some(&byte) {
            return Err(text);
        }
        prefix = &prefix[1..];
        text = &text[1..];
    }
    Ok(text)
}

enum Wrong {
    Syntax,
    Range(&'static str),
}

/// The number of digits of a number.
#[derive(Clone, Copy)]
enum Digits {
    Exactly(usize),
    AtMost(usize),
}

/// Returns the digits of a number up to 99, which has two with leading zeros.
fn two_digits(element: Element) -> Digits {
    let has_zeros = matches!(
        element,
        Element::ZeroMonth | Element::ZeroDay | Element::ZeroHour12 | Element::ZeroMinute | Element::ZeroSecond
    );
    if has_zeros {
        Digits::Exactly(2)
    } else {
        Digits::AtMost(2)
    }
}

/// Reads a number of so many digits, of one at least.
fn number(text: &[u8], digits: Digits) -> Result<(i64, &[u8]), Wrong> {
    let (Digits::Exactly(most) | Digits::AtMost(most)) = digits;
    let count = text.iter().take(most).take_while(|byte| byte.is_ascii_digit()).count();
    if count == 0 || matches!(digits, Digits::Exactly(exact) if count < exact) {
        return Err(Wrong::Syntax);
    }
    let number = text[..count]
        .iter()
        .fold(0, |number, byte| number * 10 + i64::from(byte - b'0'));
    Ok((number, &text[count..]))
}

fn name<'a>(text: &'a [u8], names: &[&str], length: usize) -> Result<(i64, &'a [u8]), Wrong> {
    for (position, name) in names.iter().enumerate() {
        let name = &name.as_bytes()[..name.len().min(length)];
        if text.len() >= name.len() && text[..name.len()].eq_ignore_ascii_case(name) {
            return Ok((position as i64, &text[name.len()..]));
        }
    }
    Err(Wrong::Syntax)
}

fn within(number: i64, range: std::ops::Range<i64>, name: &'static str) -> Result<i64, Wrong> {
    if range.contains(&number) {
        Ok(number)
    } else {
        Err(Wrong::Range(name))
    }
}

impl Fields {
    fn read<'a>(&mut self, element: Element, text: &'a [u8], next: &[u8]) -> Result<&'a [u8], Wrong> {
        let rest;
        match element {
            Element::LongYear => (self.year, rest) = number(text, Digits::Exactly(4))?,
            Element::Year => {
                (self.year, rest) = number(text, Digits::Exactly(2))?;
                self.year += if self.year >= 69 { 1900 } else { 2000 };
            }
            Element::LongMonth | Element::Month => {
                let length = if element == Element::Month { 3 } else { 9 };
                let (month, after) = name(text, &MONTHS, length)?;
                (self.month, rest) = (Some(month + 1), after);
            }
            Element::NumericMonth | Element::ZeroMonth => {
                let (month, after) = number(text, two_digits(element))?;
                (self.month, rest) = (Some(within(month, 1..13, "month")?), after);
            }
            Element::LongWeekday => (_, rest) = name(text, &DAYS, 9)?,
            Element::Weekday => (_, rest) = name(text, &DAYS, 3)?,
            Element::Day | Element::SpaceDay | Element::ZeroDay => {
                let text = match text {
                    [b' ', rest @ ..] if element == Element::SpaceDay => rest,
                    text => text,
                };
                let (day, after) = number(text, two_digits(element))?;
                (self.day, rest) = (Some(day), after);
            }
            Element::SpaceYearDay | Element::ZeroYearDay => {
                let spaces = text.iter().take(2).take_while(|byte| **byte == b' ').count();
                let (day, after) = number(&text[spaces..], Digits::Exactly(3 - spaces))?;
                (self.year_day, rest) = (Some(day), after);
            }
            Element::Hour => {
                (self.hour, rest) = number(text, Digits::AtMost(2))?;
                within(self.hour, 0..24, "hour")?;
            }
            Element::Hour12 | Element::ZeroHour12 => {
                (self.hour, rest) = number(text, two_digits(element))?;
                within(self.hour, 0..13, "hour")?;
            }
            Element::Minute | Element::ZeroMinute => {
                (self.minute, rest) = number(text, two_digits(element))?;
                within(self.minute, 0..60, "minute")?;
            }
            Element::Second | Element::ZeroSecond => {
                let (second, after) = number(text, two_digits(element))?;
                self.second = within(second, 0..60, "second")?;
                let has_fraction = matches!(first(next), Some((0, _, Element::Fraction { .. })));
                rest = if has_fraction { after } else { self.fraction(after) };
            }
            Element::Noon | Element::SmallNoon => {
                let names: [&[u8]; 2] = if element == Element::Noon {
                    [b"AM", b"PM"]
                } else {
                    [b"am", b"pm"]
                };
                let found = names.iter().position(|name| text.starts_with(name));
                self.is_afternoon = Some(found.ok_or(Wrong::Syntax)? == 1);
                rest = &text[2..];
            }
            Element::ZoneName => {
                let length = text.iter().take_while(|byte| byte.is_ascii_uppercase()).count();
                if !(3..=5).contains(&length) {
                    return Err(Wrong::Syntax);
                }
                rest = &text[length..];
            }
            Element::Offset { has_z: true, .. } if text.starts_with(b"Z") => rest = &text[1..],
            Element::Offset { has_colons, parts, .. } => rest = self.zone(text, has_colons, parts)?,
            Element::Fraction { digits, keeps_zeros } => {
                if keeps_zeros && (text.len() <= digits || !text[1..=digits].iter().all(u8::is_ascii_digit)) {
                    return Err(Wrong::Syntax);
                }
                rest = self.fraction(text);
            }
        }
        Ok(rest)
    }

    /// Reads a fraction of the second, if there is one.
    fn fraction<'a>(&mut self, text: &'a [u8]) -> &'a [u8] {
        let [b'.' | b',', digits @ ..] = text else { return text };
        let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return text;
        }
        let nine = digits[..count].iter().copied().chain(std::iter::repeat(b'0')).take(9);
        self.nanoseconds = nine.fold(0, |number, byte| number * 10 + u32::from(byte - b'0'));
        &digits[count..]
    }

    fn zone<'a>(&mut self, text: &'a [u8], has_colons: bool, parts: u8) -> Result<&'a [u8], Wrong> {
        let sign = match text.first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Err(Wrong::Syntax),
        };
        let mut rest = &text[1..];
        let mut offset = 0;
        for part in 0..parts {
            if has_colons && part > 0 {
                rest = rest.strip_prefix(b":").ok_or(Wrong::Syntax)?;
            }
            let (number, after) = number(rest, Digits::Exactly(2))?;
            let (limit, name, unit) = [
                (25, "time zone offset hour", 3600),
                (60, "time zone offset minute", 60),
                (60, "time zone offset second", 1),
            ][usize::from(part)];
            offset += within(number, 0..limit, name)? * unit;
            rest = after;
        }
        self.offset = sign * i32::try_from(offset).unwrap_or(0);
        Ok(rest)
    }

    fn time(&self) -> Result<Time, &'static str> {
        let hour = match self.is_afternoon {
            Some(true) if self.hour < 12 => self.hour + 12,
            Some(false) if self.hour == 12 => 0,
            _ => self.hour,
        };
        let days = match self.year_day {
            Some(day) if self.month.is_none() => {
                let days = days_of(self.year + 1, 1, 1) - days_of(self.year, 1, 1);
                if !(1..=days).contains(&day) {
                    return Err("day-of-year");
                }
                days_of(self.year, 1, 1) + day - 1
            }
            _ => {
                let (month, day) = (self.month.unwrap_or(1), self.day.unwrap_or(1));
                if !(1..=days_in(self.year, month)).contains(&day) {
                    return Err("day");
                }
                days_of(self.year, month, day)
            }
        };
        let seconds = days * 86400 + hour * 3600 + self.minute * 60 + self.second;
        Ok(Time {
            seconds: seconds - i64::from(self.offset),
            nanoseconds: self.nanoseconds,
            offset: self.offset,
        })
    }
}
