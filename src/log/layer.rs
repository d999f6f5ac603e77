//! From events of `tracing` to lines.

use std::{
    backtrace::Backtrace,
    fmt::{Debug, Write as _},
    path::Path,
    sync::Arc,
    time::SystemTime,
};

use serde_json::Value;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    subscriber::Interest,
};
use tracing_subscriber::layer::{Context, Layer};

use super::{
    format::Record,
    levels::Level,
    scope::{SCOPES, Scopes},
    writer::Queue,
};

/// The longest text of a field, in bytes. Clients choose some texts, such as the ids of proxies.
pub(super) const MAX_TEXT: usize = 16 << 10;

/// The receiver of all events. Spans are off, and cost nothing.
pub(super) struct LogLayer {
    pub(super) scopes: Arc<Scopes>,
    pub(super) queue: Arc<Queue>,
    pub(super) clock: fn() -> SystemTime,
}

impl<S: Subscriber> Layer<S> for LogLayer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.scopes.writes(metadata) {
            Interest::always()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        self.scopes.writes(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.scopes.loudest() {
            Level::None | Level::Fatal => LevelFilter::OFF,
            Level::Error => LevelFilter::ERROR,
            Level::Warn => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
        })
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let Some(level) = Level::of(metadata) else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let target = fields.target.as_deref().unwrap_or(metadata.target());
        let scope = self.scopes.of_target(target);
        let state = self.scopes.state(scope);
        let record = Record {
            time: (self.clock)(),
            level,
            scope: SCOPES[scope].name,
            caller: state.callers.then(|| caller(metadata)).flatten(),
            message: fields.message.unwrap_or_default(),
            fields: fields.others,
            stack: (state.stack_trace >= level).then(|| Backtrace::force_capture().to_string()),
        };
        self.queue.push(metadata.callsite(), record);
    }
}

/// Returns the file, with its folder, and the line.
///
/// Parity (go.uber.org/zap ShortCallerEncoder): `folder/file:line`.
fn caller(metadata: &Metadata<'_>) -> Option<String> {
    let file = Path::new(metadata.file()?);
    let folder = file.parent().and_then(Path::file_name);
    let mut short = String::new();
    for part in folder.into_iter().chain(file.file_name()) {
        let separator = if short.is_empty() { "" } else { "/" };
        // Writing into a string does not fail.
        let _ = write!(short, "{separator}{}", part.display());
    }
    let _ = write!(short, ":{}", metadata.line()?);
    Some(short)
}

/// Returns at most [`MAX_TEXT`] bytes of a text, and a mark if there are more.
fn shortened(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
        text.push('…');
        // The line may wait for the writer for long.
        text.shrink_to_fit();
    }
    text
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: Option<String>,
    /// The module of an event that a library logged with the crate `log`.
    target: Option<String>,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        let name = field.name();
        match name.strip_prefix("log.") {
            Some("target") => self.target = value.as_str().map(str::to_owned),
            // File, line and module of such an event.
            Some(_) => {}
            None => self.others.push((name.strip_prefix("r#").unwrap_or(name), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = shortened(format!("{value:?}"));
        if field.name() == "message" && self.message.is_none() {
            self.message = Some(text);
        } else {
            self.add(field, text.into());
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, shortened(value.to_owned()).into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
}
