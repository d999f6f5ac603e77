//! The elements of layouts. A layout shows how the time Mon Jan 2 15:04:05 MST 2006 would be written.

use super::{DAYS, MONTHS, Time};

/// An element of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    LongMonth,
    Month,
    NumericMonth,
    ZeroMonth,
    LongWeekday,
    Weekday,
    Day,
    SpaceDay,
    ZeroDay,
    SpaceYearDay,
    ZeroYearDay,
    Hour,
    Hour12,
    ZeroHour12,
    Minute,
    ZeroMinute,
    Second,
    ZeroSecond,
    LongYear,
    Year,
    Noon,
    SmallNoon,
    ZoneName,
    /// An offset: with `Z` for UTC, with colons, and the number of its parts.
    Offset {
        has_z: bool,
        has_colons: bool,
        parts: u8,
    },
    /// A fraction of the second with a number of digits.
    Fraction {
        digits: usize,
        keeps_zeros: bool,
    },
}

const fn offset(has_z: bool, has_colons: bool, parts: u8) -> Element {
    Element::Offset {
        has_z,
        has_colons,
        parts,
    }
}

/// The texts of elements; of two that fit, the first one counts.
const ELEMENTS: &[(&str, Element)] = &[
    ("January", Element::LongMonth),
    ("Monday", Element::LongWeekday),
    ("MST", Element::ZoneName),
    ("002", Element::ZeroYearDay),
    ("01", Element::ZeroMonth),
    ("02", Element::ZeroDay),
    ("03", Element::ZeroHour12),
    ("04", Element::ZeroMinute),
    ("05", Element::ZeroSecond),
    ("06", Element::Year),
    ("15", Element::Hour),
    ("1", Element::NumericMonth),
    ("2006", Element::LongYear),
    ("2", Element::Day),
    ("__2", Element::SpaceYearDay),
    ("_2", Element::SpaceDay),
    ("3", Element::Hour12),
    ("4", Element::Minute),
    ("5", Element::Second),
    ("PM", Element::Noon),
    ("pm", Element::SmallNoon),
    ("-070000", offset(false, false, 3)),
    ("-07:00:00", offset(false, true, 3)),
    ("-0700", offset(false, false, 2)),
    ("-07:00", offset(false, true, 2)),
    ("-07", offset(false, false, 1)),
    ("Z070000", offset(true, false, 3)),
    ("Z07:00:00", offset(true, true, 3)),
    ("Z0700", offset(true, false, 2)),
    ("Z07:00", offset(true, true, 2)),
    ("Z07", offset(true, false, 1)),
];

/// Returns the position, the length and the kind of the first element.
pub(super) fn first(layout: &[u8]) -> Option<(usize, usize, Element)> {
    (0..layout.len()).find_map(|position| {
        let (length, element) = element_at(&layout[position..])?;
        Some((position, length, element))
    })
}

fn element_at(rest: &[u8]) -> Option<(usize, Element)> {
    for (text, element) in ELEMENTS {
        if rest.starts_with(text.as_bytes()) {
            // "_2006" is a year behind an underscore.
            if *element == Element::SpaceDay && rest.starts_with(b"_2006") {
                return None;
            }
            return Some((text.len(), *element));
        }
    }
    let is_small = rest.get(3).is_some_and(u8::is_ascii_lowercase);
    if rest.starts_with(b"Jan") && !is_small {
        return Some((3, Element::Month));
    }
    if rest.starts_with(b"Mon") && !is_small {
        return Some((3, Element::Weekday));
    }
    if matches!(rest[0], b'.' | b',') {
        let digit = *rest.get(1).filter(|digit| matches!(digit, b'0' | b'9'))?;
        let digits = rest[1..].iter().take_while(|byte| **byte == digit).count();
        let is_alone = !rest.get(1 + digits).is_some_and(u8::is_ascii_digit);
        let keeps_zeros = digit == b'0';
        return is_alone.then_some((digits + 1, Element::Fraction { digits, keeps_zeros }));
    }
    None
}

pub(super) fn format(time: Time, layout: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = layout;
    while let Some((position, length, element)) = first(rest) {
        out.extend_from_slice(&rest[..position]);
        let separator = char::from(rest[position]);
        out.extend_from_slice(shown(time, element, separator).as_bytes());
        rest = &rest[position + length..];
    }
    out.extend_from_slice(rest);
    out
}

fn shown(time: Time, element: Element, separator: char) -> String {
    let civil = time.civil();
    let month = MONTHS[civil.month as usize - 1];
    let weekday = DAYS[civil.weekday as usize];
    let hour12 = (civil.hour + 11) % 12 + 1;
    match element {
        Element::LongMonth => month.to_owned(),
        Element::Month => month[..3].to_owned(),
        Element::NumericMonth => civil.month.to_string(),
        Element::ZeroMonth => format!("{:02}", civil.month),
        Element::LongWeekday => weekday.to_owned(),
        Element::Weekday => weekday[..3].to_owned(),
        Element::Day => civil.day.to_string(),
        Element::SpaceDay => format!("{:2}", civil.day),
        Element::ZeroDay => format!("{:02}", civil.day),
        Element::SpaceYearDay => format!("{:3}", civil.year_day),
        Element::ZeroYearDay => format!("{:03}", civil.year_day),
        Element::Hour => format!("{:02}", civil.hour),
        Element::Hour12 => hour12.to_string(),
        Element::ZeroHour12 => format!("{hour12:02}"),
        Element::Minute => civil.minute.to_string(),
        Element::ZeroMinute => format!("{:02}", civil.minute),
        Element::Second => civil.second.to_string(),
        Element::ZeroSecond => format!("{:02}", civil.second),
        Element::LongYear if civil.year < 0 => format!("-{:04}", -civil.year),
        Element::LongYear => format!("{:04}", civil.year),
        Element::Year => format!("{:02}", civil.year.rem_euclid(100)),
        Element::Noon => if civil.hour >= 12 { "PM" } else { "AM" }.to_owned(),
        Element::SmallNoon => if civil.hour >= 12 { "pm" } else { "am" }.to_owned(),
        Element::ZoneName if time.offset == 0 => "UTC".to_owned(),
        Element::ZoneName => shown_offset(time.offset, false, 2),
        Element::Offset { has_z: true, .. } if time.offset == 0 => "Z".to_owned(),
        Element::Offset { has_colons, parts, .. } => shown_offset(time.offset, has_colons, parts),
        Element::Fraction { digits, keeps_zeros } => {
            let all = format!("{:09}", time.nanoseconds);
            let cut = &all[..digits.min(9)];
            let cut = if keeps_zeros { cut } else { cut.trim_end_matches('0') };
            if cut.is_empty() {
                String::new()
            } else {
                format!("{separator}{cut}")
            }
        }
    }
}

fn shown_offset(offset: i32, has_colons: bool, parts: u8) -> String {
    let sign = if offset < 0 { '-' } else { '+' };
    let offset = offset.abs();
    let numbers = [offset / 3600, offset / 60 % 60, offset % 60];
    let texts: Vec<String> = numbers[..usize::from(parts)]
        .iter()
        .map(|number| format!("{number:02}"))
        .collect();
    format!("{sign}{}", texts.join(if has_colons { ":" } else { "" }))
}
