//! Points in time, and Go's layouts of dates.

use super::super::value::Function;

mod layout;
mod parse;

use std::sync::Arc;

use super::super::{
    limits::Failure,
    types::{IntType, Type},
    value::{Object, Value},
};

pub(super) use parse::parse;

pub(super) const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
pub(super) const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A point in time with the offset of its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time {
    /// Seconds since 1970.
    pub(super) seconds: i64,
    pub(super) nanoseconds: u32,
    /// Seconds east of Greenwich; 0 is UTC.
    pub(super) offset: i32,
}

/// The fields of a calendar.
#[derive(Clone, Copy, Debug)]
pub(super) struct Civil {
    pub(super) year: i64,
    /// From 1.
    pub(super) month: i64,
    pub(super) day: i64,
    pub(super) hour: i64,
    pub(super) minute: i64,
    pub(super) second: i64,
    /// From 0, which is Sunday.
    pub(super) weekday: i64,
    /// From 1.
    pub(super) year_day: i64,
}

/// The first second of the year 1, which is Go's zero time.
const ZERO: i64 = -62_135_596_800;
/// Times further away are cut, so that the calendar does not overflow.
const FARTHEST: i64 = 1 << 55;

impl Time {
    pub(super) const ZERO: Self = Self::utc(ZERO);

    pub(super) const fn utc(seconds: i64) -> Self {
        Self {
            seconds,
            nanoseconds: 0,
            offset: 0,
        }
    }

    /// Returns the time of nanoseconds since 1970.
    pub(super) fn of_nanoseconds(nanoseconds: i128) -> Self {
        let second = 1_000_000_000;
        Self {
            seconds: i64::try_from(nanoseconds.div_euclid(second)).unwrap_or(0),
            nanoseconds: u32::try_from(nanoseconds.rem_euclid(second)).unwrap_or(0),
            offset: 0,
        }
    }

    pub(super) fn nanoseconds_since_1970(self) -> i128 {
        i128::from(self.seconds) * 1_000_000_000 + i128::from(self.nanoseconds)
    }

    /// Returns the same point in time in UTC.
    pub(super) fn in_utc(self) -> Self {
        Self { offset: 0, ..self }
    }

    /// Adds nanoseconds.
    pub(super) fn plus(self, nanoseconds: i64) -> Self {
        let sum = Self::of_nanoseconds(self.nanoseconds_since_1970() + i128::from(nanoseconds));
        Self {
            offset: self.offset,
            ..sum
        }
    }

    pub(super) fn civil(self) -> Civil {
        let local = self.seconds.clamp(-FARTHEST, FARTHEST) + i64::from(self.offset);
        let (days, rest) = (local.div_euclid(86400), local.rem_euclid(86400));
        // Years begin in March here, so that the leap day is the last one; eras have 400 years.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Civil {
            year,
            month,
            day: day_of_year - (153 * month_from_march + 2) / 5 + 1,
            hour: rest / 3600,
            minute: rest / 60 % 60,
            second: rest % 60,
            weekday: (days + 4).rem_euclid(7),
            year_day: days - days_of(year, 1, 1) + 1,
        }
    }

    /// Returns the time in a layout.
    pub(super) fn format(self, layout: &[u8]) -> Vec<u8> {
        layout::format(self, layout)
    }
}

/// Returns the days from 1970 to a date.
pub(super) fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Returns the number of days of a month.
pub(super) fn days_in(year: i64, month: i64) -> i64 {
    let (next_year, next) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days_of(next_year, next, 1) - days_of(year, month, 1)
}

/// A month or a day of the week: a number with a name.
struct Named {
    of: &'static str,
    number: i64,
    name: &'static str,
}

impl Object for Named {
    fn type_of(&self) -> Type {
        Type::named(self.of)
    }

    fn basic(&self) -> Option<Value> {
        Some(Value::int(self.number))
    }

    fn to_text(&self) -> Option<String> {
        Some(self.name.to_owned())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        (name == "String").then(|| Arc::new(Function::getter(name, self.name.into())))
    }
}

impl Object for Time {
    fn type_of(&self) -> Type {
        Type::named("time.Time")
    }

    fn to_text(&self) -> Option<String> {
        let text = self.format(b"2006-01-02 15:04:05.999999999 -0700 MST");
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn to_json(&self) -> Option<Value> {
        Some(self.format(b"2006-01-02T15:04:05.999999999Z07:00").into())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let time = *self;
        let civil = self.civil();
        let month = || Named {
            of: "time.Month",
            number: civil.month,
            name: MONTHS[civil.month as usize - 1],
        };
        let weekday = || Named {
            of: "time.Weekday",
            number: civil.weekday,
            name: DAYS[civil.weekday as usize],
        };
        let value = match name {
            "Year" => Value::int(civil.year),
            "Month" => Value::object(month()),
            "Day" => Value::int(civil.day),
            "Hour" => Value::int(civil.hour),
            "Minute" => Value::int(civil.minute),
            "Second" => Value::int(civil.second),
            "Nanosecond" => Value::int(i64::from(self.nanoseconds)),
            "Weekday" => Value::object(weekday()),
            "YearDay" => Value::int(civil.year_day),
            "Unix" => Value::int64(self.seconds),
            "UnixMilli" => Value::int64((self.nanoseconds_since_1970() / 1_000_000) as i64),
            "UnixNano" => Value::int64(self.nanoseconds_since_1970() as i64),
            "UTC" | "Local" => Value::object(self.in_utc()),
            "IsZero" => Value::Bool(self.seconds == ZERO && self.nanoseconds == 0),
            "String" => self.to_text().unwrap_or_default().into(),
            _ => return with_arguments(time, name),
        };
        Some(Arc::new(Function::getter(name, value)))
    }
}

/// Returns a method with parameters.
fn with_arguments(time: Time, name: &str) -> Option<Arc<Function>> {
    let of_time = [Type::named("time.Time")];
    let compare = |is: fn(i128, i128) -> bool| {
        Function::new(name, &of_time, Type::Bool, move |_, arguments| {
            let other = of_value(arguments[0]).unwrap_or(Time::ZERO);
            Ok(is(time.nanoseconds_since_1970(), other.nanoseconds_since_1970()).into())
        })
    };
    Some(Arc::new(match name {
        "Format" => Function::new(name, &[Type::String], Type::String, move |context, arguments| {
            formatted(context, time, super::bytes(arguments, 0))
        }),
        "AddDate" => Function::new(
            name,
            &[Type::INT, Type::INT, Type::INT],
            time.type_of(),
            move |_, arguments| {
                let [years, months, days] = [0, 1, 2].map(|position| super::int(arguments, position));
                Ok(Value::object(add_date(time, years, months, days)))
            },
        ),
        "After" => compare(|left, right| left > right),
        "Before" => compare(|left, right| left < right),
        "Equal" => compare(|left, right| left == right),
        _ => return None,
    }))
}

/// Returns a time in a layout that a template chose.
pub(super) fn formatted(
    context: &mut super::super::value::Context<'_>,
    time: Time,
    layout: &[u8],
) -> Result<Value, Failure> {
    // A layout of one character is a month of nine.
    context.allocate(layout.len().saturating_mul(12))?;
    Ok(time.format(layout).into())
}

fn add_date(time: Time, years: i64, months: i64, days: i64) -> Time {
    const MOST: i64 = 1_000_000_000;
    let civil = time.civil();
    let [years, months, days] = [years, months, days].map(|count| count.clamp(-MOST, MOST));
    let month = civil.month - 1 + months;
    let year = civil.year.clamp(-MOST, MOST) + years + month.div_euclid(12);
    let day = days_of(year, month.rem_euclid(12) + 1, 1) + civil.day - 1 + days;
    let seconds = day * 86400 + civil.hour * 3600 + civil.minute * 60 + civil.second;
    Time {
        seconds: seconds - i64::from(time.offset),
        ..time
    }
}

/// Returns the time that a value is.
pub(super) fn of_value(value: &Value) -> Option<Time> {
    let Value::Object(object) = value else { return None };
    if object.type_of() != Type::named("time.Time") {
        return None;
    }
    let part = |name: &str| {
        let method = object.method(name)?;
        let host = super::super::limits::NoHost;
        let limits = super::super::limits::Limits::default();
        let mut context = super::super::value::Context::new(&limits, &host);
        match method.call(&mut context, &[]) {
            Ok(Value::Int(IntType::Int | IntType::Int64, number)) => Some(number),
            _ => None,
        }
    };
    Some(Time {
        seconds: part("Unix")?,
        nanoseconds: u32::try_from(part("Nanosecond")?).ok()?,
        offset: 0,
    })
}
