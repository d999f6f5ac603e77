//! Walking a message while checking it: [`At`] knows the path, so that a finding names its field, and builds its text
//! only for a finding.

use std::{cell::RefCell, fmt};

use super::{Findings, Usage};

/// A place in an object.
#[derive(Clone, Copy)]
pub struct At<'a> {
    parent: Option<&'a At<'a>>,
    step: Step<'a>,
    findings: &'a RefCell<Findings>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Name(&'a str),
    Index(usize),
}

impl<'a> At<'a> {
    /// The place where a walk begins.
    pub fn root(name: &'a str, findings: &'a RefCell<Findings>) -> Self {
        At {
            parent: None,
            step: Step::Name(name),
            findings,
        }
    }

    /// A field (or the entry of a map) of the message at this place.
    pub fn field<'s>(&'s self, name: &'s str) -> At<'s> {
        At {
            parent: Some(self),
            step: Step::Name(name),
            findings: self.findings,
        }
    }

    /// An item of the list at this place.
    pub fn item(&self, position: usize) -> At<'_> {
        At {
            parent: Some(self),
            step: Step::Index(position),
            findings: self.findings,
        }
    }

    /// Checks every item of a list field.
    pub fn each<T>(&self, name: &str, items: impl IntoIterator<Item = T>, mut check: impl FnMut(&At<'_>, T)) {
        let list = self.field(name);
        for (position, item) in items.into_iter().enumerate() {
            check(&list.item(position), item);
        }
    }

    /// Records why the object does not count.
    pub fn error(&self, message: impl Into<String>) {
        self.findings.borrow_mut().error(self.to_string(), message);
    }

    /// Records what is likely a mistake.
    pub fn warning(&self, message: impl Into<String>) {
        self.findings.borrow_mut().warning(self.to_string(), message);
    }

    /// Checks a regular expression of this place.
    pub fn expression(&self, expression: &str, usage: Usage) {
        let checked = self.findings.borrow_mut().expression(expression, usage);
        if let Err(error) = checked {
            self.error(error.to_string());
        }
    }

    /// Records a warning unless the condition holds. For what Istio's admission refuses but is safe to serve: an object
    /// that got past admission counts there too. Of objects that count in spite of errors it is one.
    pub fn expect(&self, condition: bool, message: &str) {
        if condition {
            return;
        }
        let counts_with_errors = self.findings.borrow().counts_with_errors;
        if counts_with_errors {
            self.error(message);
        } else {
            self.warning(message);
        }
    }

    /// Records an error unless the condition holds.
    pub fn require(&self, condition: bool, message: &str) {
        if !condition {
            self.error(message);
        }
    }
}

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(f)?;
        }
        match self.step {
            Step::Name("") => Ok(()),
            Step::Name(name) if self.parent.is_none_or(At::is_nameless_root) => f.write_str(name),
            Step::Name(name) => write!(f, ".{name}"),
            Step::Index(position) => write!(f, "[{position}]"),
        }
    }
}

impl At<'_> {
    fn is_nameless_root(&self) -> bool {
        self.parent.is_none() && matches!(self.step, Step::Name(""))
    }
}
