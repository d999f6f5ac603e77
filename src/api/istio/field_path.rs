//! A cursor for validation: [`FieldPath`] walks a message, knows the path of the current field and records problems
//! there.

use std::{cell::RefCell, fmt};

use super::{ErrorPolicy, RegexUsage, Validation};
use crate::api::regex::RegexError;

/// A field of the object that is validated. It formats its path only when it records a problem.
#[doc(alias = "field.Path")]
#[derive(Clone, Copy)]
pub struct FieldPath<'a> {
    parent: Option<&'a FieldPath<'a>>,
    element: PathElement<'a>,
    error_policy: ErrorPolicy,
    validation: &'a RefCell<Validation>,
}

#[derive(Clone, Copy)]
enum PathElement<'a> {
    Name(&'a str),
    Index(usize),
}

impl<'a> FieldPath<'a> {
    /// Returns the path of the whole message. `name` may be empty.
    pub fn root(name: &'a str, error_policy: ErrorPolicy, validation: &'a RefCell<Validation>) -> Self {
        FieldPath {
            parent: None,
            element: PathElement::Name(name),
            error_policy,
            validation,
        }
    }

    /// Returns the path of a field, or of the entry of a map, in the message at this path.
    pub fn field<'s>(&'s self, name: &'s str) -> FieldPath<'s> {
        self.child(PathElement::Name(name))
    }

    /// Returns this path for checks whose refusals are errors.
    pub fn strict(&self) -> Self {
        FieldPath {
            error_policy: ErrorPolicy::Tolerate,
            ..*self
        }
    }

    /// Returns the path of an item of the list at this path.
    pub fn item(&self, position: usize) -> FieldPath<'_> {
        self.child(PathElement::Index(position))
    }

    fn child<'s>(&'s self, element: PathElement<'s>) -> FieldPath<'s> {
        FieldPath {
            parent: Some(self),
            element,
            error_policy: self.error_policy,
            validation: self.validation,
        }
    }

    /// Checks every item of a list field.
    pub fn each<T>(&self, name: &str, items: impl IntoIterator<Item = T>, mut check: impl FnMut(&FieldPath<'_>, T)) {
        let list = self.field(name);
        for (position, item) in items.into_iter().enumerate() {
            check(&list.item(position), item);
        }
    }

    /// Records an error.
    pub fn error(&self, message: impl Into<String>) {
        self.validation.borrow_mut().error(self.to_string(), message);
    }

    /// Records a warning: the object is valid, but likely not what the user meant.
    pub fn warning(&self, message: impl Into<String>) {
        self.validation.borrow_mut().warning(self.to_string(), message);
    }

    /// Records a warning with a code of its own.
    pub fn warning_with_code(&self, code: &'static str, message: impl Into<String>) {
        let mut validation = self.validation.borrow_mut();
        validation.warning_with_code(code, self.to_string(), message);
    }

    /// Checks the regular expression in this field.
    pub fn regex(&self, expression: &str, usage: RegexUsage) {
        let checked = self.validation.borrow_mut().regex(expression, usage);
        if let Err(error) = checked {
            self.error(error.to_string());
        }
    }

    /// Warns of a regular expression in this field whose syntax is invalid.
    pub fn warn_of_regex(&self, expression: &str) {
        let checked = self.validation.borrow_mut().regex(expression, RegexUsage::Proxy);
        if let Err(error @ RegexError::Syntax(_)) = checked {
            self.warning(error.to_string());
        }
    }

    /// Records a violation that only admission refuses, because serving the object is safe. For kinds with
    /// [`ErrorPolicy::Tolerate`] it is an error.
    pub fn refuse(&self, message: impl Into<String>) {
        match self.error_policy {
            ErrorPolicy::Reject => self.validation.borrow_mut().refusal(self.to_string(), message),
            ErrorPolicy::Tolerate => self.error(message),
        }
    }

    /// Calls [`Self::refuse`] unless the condition holds.
    pub fn require_on_admission(&self, condition: bool, message: &str) {
        if !condition {
            self.refuse(message);
        }
    }

    /// Returns true if the object has no error so far.
    pub fn is_valid(&self) -> bool {
        self.validation.borrow().errors.is_empty()
    }

    /// Records an error unless the condition holds.
    pub fn require(&self, condition: bool, message: &str) {
        if !condition {
            self.error(message);
        }
    }
}

impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(f)?;
        }
        match self.element {
            PathElement::Name("") => Ok(()),
            PathElement::Name(name) if self.parent.is_none_or(FieldPath::is_nameless_root) => f.write_str(name),
            PathElement::Name(name) => write!(f, ".{name}"),
            PathElement::Index(position) => write!(f, "[{position}]"),
        }
    }
}

impl FieldPath<'_> {
    fn is_nameless_root(&self) -> bool {
        self.parent.is_none() && matches!(self.element, PathElement::Name(""))
    }
}
