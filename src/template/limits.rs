//! Limits of a template, and what it may ask of the world.

/// The limits of parsing and rendering. Each bound is inclusive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the text of one template.
    pub source_bytes: usize,
    /// Nesting of actions and parentheses in a text.
    pub parse_depth: usize,
    /// Steps of one rendering: actions, arguments, iterations, and elements that functions visit.
    pub steps: u64,
    /// Bytes that one rendering writes.
    pub output_bytes: usize,
    /// Bytes of all strings, lists and maps that functions build in one rendering, including those that were dropped.
    pub value_bytes: usize,
    /// Nesting of `template` actions.
    pub call_depth: usize,
    /// Nesting of actions and pipelines in one rendering, over all templates that call each other.
    pub nesting: usize,
    /// Nesting of values that functions walk: formatting, JSON, comparisons, copies.
    pub value_depth: usize,
    /// Steps between two checks of the deadline.
    pub steps_per_check: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            source_bytes: 1 << 20,
            parse_depth: 100,
            steps: 10_000_000,
            output_bytes: 16 << 20,
            value_bytes: 64 << 20,
            call_depth: 100,
            nesting: 300,
            value_depth: 200,
            steps_per_check: 1024,
        }
    }
}

/// A limit that a template exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// [`Limits::source_bytes`].
    #[error("the template has more than {0} bytes")]
    Source(usize),
    /// [`Limits::parse_depth`].
    #[error("actions are nested more than {0} deep")]
    ParseDepth(usize),
    /// [`Limits::steps`].
    #[error("rendering takes more than {0} steps")]
    Steps(u64),
    /// [`Limits::output_bytes`].
    #[error("the output has more than {0} bytes")]
    Output(usize),
    /// [`Limits::value_bytes`].
    #[error("values take more than {0} bytes")]
    Values(usize),
    /// [`Limits::call_depth`].
    #[error("exceeded maximum template depth ({0})")]
    CallDepth(usize),
    /// [`Limits::nesting`].
    #[error("actions and calls of templates are nested more than {0} deep")]
    Nesting(usize),
    /// [`Limits::value_depth`].
    #[error("a value is nested more than {0} deep")]
    ValueDepth(usize),
    /// The deadline of the [`Host`].
    #[error("rendering takes too long")]
    Deadline,
}

/// The reason why a function failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// An error of the function itself.
    #[error("{0}")]
    Message(String),
    /// An exceeded limit. Functions must pass it on.
    #[error(transparent)]
    Limit(#[from] Exceeded),
}

impl Failure {
    /// Returns an error of a function.
    pub fn message(text: impl Into<String>) -> Self {
        Self::Message(text.into())
    }
}

/// Access of templates to the world, which the caller grants. The defaults grant nothing.
pub trait Host {
    /// Returns true once rendering has to end.
    fn is_expired(&self) -> bool {
        false
    }

    /// Returns the time, in nanoseconds since 1970.
    fn now(&self) -> i128 {
        0
    }

    /// Fills a buffer with random bytes; false if there are none.
    fn fill_random(&self, _buffer: &mut [u8]) -> bool {
        false
    }

    /// Returns a variable of the environment.
    fn variable(&self, _name: &str) -> Option<String> {
        None
    }
}

/// A host that grants nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHost;

impl Host for NoHost {}
