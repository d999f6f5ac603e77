//! Lines in Istio's two forms.

use std::{
    fmt::{self, Write as _},
    time::SystemTime,
};

use serde_json::Value;
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::levels::Level;

/// Microseconds in UTC.
///
/// Parity (pkg/log/config.go): formatDate.
const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// Keys that are not those of fields.
const RESERVED: [&str; 6] = ["level", "time", "scope", "caller", "msg", "stack"];

/// A line before it is encoded.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Record {
    pub(super) time: SystemTime,
    pub(super) level: Level,
    /// Name of the scope.
    pub(super) scope: &'static str,
    /// The file and line of the code, if the scope has callers.
    pub(super) caller: Option<String>,
    pub(super) message: String,
    pub(super) fields: Vec<(&'static str, Value)>,
    /// The stack, if the level of the scope asks for it.
    pub(super) stack: Option<String>,
}

/// A form of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Columns that are separated by tabs, then fields as `key=value`.
    Text,
    /// An object.
    Json,
}

impl Encoding {
    /// Appends a line.
    pub(super) fn write(self, record: &Record, out: &mut String) {
        match self {
            Self::Text => text(record, out),
            Self::Json => json(record, out),
        }
        out.push('\n');
    }
}

fn time(of: SystemTime) -> String {
    // Fails only for a form with parts that a date lacks.
    OffsetDateTime::from(of).format(TIME).unwrap_or_default()
}

/// Parity (go.uber.org/zap console encoder, pkg/log/scope.go): the scope `default` has no column.
fn text(record: &Record, out: &mut String) {
    let Record {
        level, scope, caller, ..
    } = record;
    out.push_str(&time(record.time));
    out.push('\t');
    out.push_str(level.name());
    let columns = Some(*scope).filter(|scope| *scope != "default");
    for column in columns.into_iter().chain(caller.as_deref()) {
        out.push('\t');
        out.push_str(column);
    }
    out.push('\t');
    let mut line = Escaped(out);
    // Writing into a string does not fail.
    let _ = line.write_str(&record.message);
    for (index, (name, value)) in record.fields.iter().enumerate() {
        line.0.push(if index == 0 { '\t' } else { ' ' });
        let _ = match value {
            Value::String(value) => write!(line, "{name}={value}"),
            value => write!(line, "{name}={value}"),
        };
    }
    if let Some(stack) = &record.stack {
        out.push('\n');
        out.push_str(stack.trim_end());
    }
}

/// Parity (go.uber.org/zap JSON encoder): the order of keys.
fn json(record: &Record, out: &mut String) {
    out.push_str("{\"level\":\"");
    out.push_str(record.level.name());
    out.push_str("\",\"time\":\"");
    out.push_str(&time(record.time));
    out.push('"');
    let mut member = |name: &str, value: &Value| {
        out.push(',');
        // A value prints as JSON.
        let _ = write!(out, "{}:{value}", Value::from(name));
    };
    if record.scope != "default" {
        member("scope", &Value::from(record.scope));
    }
    if let Some(caller) = &record.caller {
        member("caller", &Value::from(caller.as_str()));
    }
    member("msg", &Value::from(record.message.as_str()));
    for (name, value) in &record.fields {
        if RESERVED.contains(name) {
            member(&format!("field.{name}"), value);
        } else {
            member(name, value);
        }
    }
    if let Some(stack) = &record.stack {
        member("stack", &Value::from(stack.as_str()));
    }
    out.push('}');
}

/// Text on one line: a peer whose name contains a line break cannot forge lines.
struct Escaped<'a>(&'a mut String);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            if character.is_control() {
                self.0.extend(character.escape_default());
            } else {
                self.0.push(character);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record() -> Record {
        Record {
            time: SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789),
            level: Level::Warn,
            scope: "ads",
            caller: None,
            message: "proxy rejected its configuration".into(),
            fields: vec![
                ("node", "web-1.app".into()),
                ("code", 13.into()),
                ("level", true.into()),
            ],
            stack: None,
        }
    }

    fn line(encoding: Encoding, record: &Record) -> String {
        let mut line = String::new();
        encoding.write(record, &mut line);
        line
    }

    #[test]
    fn text_has_columns() {
        assert_eq!(
            line(Encoding::Text, &record()),
            "2023-11-14T22:13:20.123456Z\twarn\tads\tproxy rejected its configuration\tnode=web-1.app code=13 level=true\n"
        );
        let plain = Record {
            scope: "default",
            fields: Vec::new(),
            caller: Some("app/listen.rs:7".into()),
            stack: Some("0: main\n".into()),
            ..record()
        };
        assert_eq!(
            line(Encoding::Text, &plain),
            "2023-11-14T22:13:20.123456Z\twarn\tapp/listen.rs:7\tproxy rejected its configuration\n0: main\n"
        );
    }

    #[test]
    fn line_breaks_are_escaped() {
        let forged = Record {
            message: "a\nb\tc\u{1b}".into(),
            fields: vec![("peer", "x\r\n2023\tinfo".into())],
            ..record()
        };
        assert_eq!(line(Encoding::Text, &forged).matches('\n').count(), 1);
        assert!(line(Encoding::Text, &forged).ends_with("\ta\\nb\\tc\\u{1b}\tpeer=x\\r\\n2023\\tinfo\n"));
        assert_eq!(line(Encoding::Json, &forged).matches('\n').count(), 1);
    }

    #[test]
    fn json_has_istios_keys() {
        assert_eq!(
            line(Encoding::Json, &record()),
            concat!(
                r#"{"level":"warn","time":"2023-11-14T22:13:20.123456Z","scope":"ads","#,
                r#""msg":"proxy rejected its configuration","node":"web-1.app","code":13,"field.level":true}"#,
                "\n"
            )
        );
        let full = Record {
            scope: "default",
            caller: Some("app/listen.rs:7".into()),
            stack: Some("0: main".into()),
            fields: Vec::new(),
            message: "a \"b\"".into(),
            ..record()
        };
        assert_eq!(
            line(Encoding::Json, &full),
            concat!(
                r#"{"level":"warn","time":"2023-11-14T22:13:20.123456Z","caller":"app/listen.rs:7","#,
                r#""msg":"a \"b\"","stack":"0: main"}"#,
                "\n"
            )
        );
    }
}
