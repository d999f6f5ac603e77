//! Durations with their methods in Go.

use std::sync::Arc;

use crate::template::{Function, Object, Type, Value, duration_text};

const SECOND: i64 = 1_000_000_000;

/// A `time.Duration`, in nanoseconds.
struct Duration(i64);

/// Returns the duration of a protobuf message, or the nearest one that Go has.
pub(super) fn duration(seconds: i64, nanos: i64) -> Value {
    let total = seconds.saturating_mul(SECOND).saturating_add(nanos);
    Value::object(Duration(total))
}

impl Duration {
    fn count(&self, unit: i64) -> Value {
        Value::int64(self.0 / unit)
    }

    fn fraction(&self, unit: i64) -> Value {
        Value::Float((self.0 / unit) as f64 + (self.0 % unit) as f64 / unit as f64)
    }
}

impl Object for Duration {
    fn type_of(&self) -> Type {
        Type::named("time.Duration")
    }

    fn basic(&self) -> Option<Value> {
        Some(Value::int64(self.0))
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let value = match name {
            "String" => duration_text(self.0).into(),
            "Hours" => self.fraction(3600 * SECOND),
            "Minutes" => self.fraction(60 * SECOND),
            "Seconds" => self.fraction(SECOND),
            "Milliseconds" => self.count(1_000_000),
            "Microseconds" => self.count(1_000),
            "Nanoseconds" => self.count(1),
            _ => return None,
        };
        Some(Arc::new(Function::getter(name, value)))
    }

    fn to_text(&self) -> Option<String> {
        Some(duration_text(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_print_as_in_go() {
        for (seconds, nanos, expected) in [
            (0, 0, "0s"),
            (45, 0, "45s"),
            (3600, 0, "1h0m0s"),
            (90, 500_000_000, "1m30.5s"),
            (0, 1_500_000, "1.5ms"),
            (-5, 0, "-5s"),
            (315_576_000_000, 0, "2562047h47m16.854775807s"),
        ] {
            let Value::Object(duration) = duration(seconds, nanos) else {
                panic!("a duration is an object");
            };
            assert_eq!(duration.to_text().as_deref(), Some(expected));
        }
    }
}
