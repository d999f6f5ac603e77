//! Functions that templates call. Their signatures decide which arguments they get, and the texts of errors.

use std::{collections::BTreeMap, sync::Arc};

use crate::template::{limits::Failure, types::Type};

use super::{Context, Value};

/// The body of a function.
type Body = dyn Fn(&mut Context<'_>, &[&Value]) -> Result<Value, Failure> + Send + Sync;

/// A function with its signature.
///
/// Arguments have the types of the parameters. A parameter of type [`Type::Any`] gets [`Value::Nil`] for a missing
/// value; only [`Type::Reflect`] gets [`Value::Missing`].
pub struct Function {
    pub(in crate::template) name: Arc<str>,
    pub(in crate::template) parameters: Vec<Type>,
    /// True if the last parameter takes any number of arguments.
    pub(in crate::template) is_variadic: bool,
    pub(in crate::template) result: Type,
    pub(in crate::template) evaluation: Evaluation,
    body: Box<Body>,
}

/// Functions whose arguments are evaluated in a special way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::template) enum Evaluation {
    /// All arguments before the call.
    Eager,
    /// Arguments until the first one that is false.
    And,
    /// Arguments until the first one that is true.
    Or,
    /// The first argument is the function.
    Call,
}

impl Function {
    /// Creates a function with a fixed number of parameters.
    pub fn new<F>(name: &str, parameters: &[Type], result: Type, body: F) -> Self
    where
        F: Fn(&mut Context<'_>, &[&Value]) -> Result<Value, Failure> + Send + Sync + 'static,
    {
        Self {
            name: name.into(),
            parameters: parameters.to_vec(),
            is_variadic: false,
            result,
            evaluation: Evaluation::Eager,
            body: Box::new(body),
        }
    }

    /// Creates a function whose last parameter takes any number of arguments.
    pub fn variadic<F>(name: &str, parameters: &[Type], result: Type, body: F) -> Self
    where
        F: Fn(&mut Context<'_>, &[&Value]) -> Result<Value, Failure> + Send + Sync + 'static,
    {
        Self {
            is_variadic: true,
            ..Self::new(name, parameters, result, body)
        }
    }

    /// Creates a method without parameters that returns a value.
    pub fn getter(name: &str, value: Value) -> Self {
        Self::new(name, &[], value.type_of(), move |_, _| Ok(value.clone()))
    }

    pub(in crate::template) fn with_evaluation(mut self, evaluation: Evaluation) -> Self {
        self.evaluation = evaluation;
        self
    }

    /// Returns the name in templates.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Calls the function with arguments of the types of its parameters.
    pub fn call(&self, context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
        (self.body)(context, arguments)
    }

    /// Returns the type of the argument at a position.
    pub(in crate::template) fn parameter(&self, position: usize) -> &Type {
        let last = self.parameters.len().saturating_sub(1);
        &self.parameters[position.min(last)]
    }

    /// Returns the number of arguments that the function needs at least.
    pub(in crate::template) fn fixed(&self) -> usize {
        self.parameters.len() - usize::from(self.is_variadic)
    }

    /// Returns the type in Go's notation.
    pub(in crate::template) fn signature(&self) -> String {
        let mut parameters: Vec<String> = self.parameters.iter().map(ToString::to_string).collect();
        if let Some(last) = parameters.last_mut().filter(|_| self.is_variadic) {
            last.insert_str(0, "...");
        }
        format!("func({}) {}", parameters.join(", "), self.result)
    }
}

/// Functions by their names in templates.
#[derive(Clone, Default)]
pub struct Functions(BTreeMap<Arc<str>, Arc<Function>>);

impl Functions {
    /// Adds a function, in place of one of the same name.
    pub fn add(&mut self, function: Function) {
        self.0.insert(function.name.clone(), Arc::new(function));
    }

    /// Adds functions, in place of those of the same names.
    pub fn extend(&mut self, functions: impl IntoIterator<Item = Function>) {
        for function in functions {
            self.add(function);
        }
    }

    /// Adds a second name of a function, if there is such a function.
    pub fn alias(&mut self, alias: &str, name: &str) {
        if let Some(function) = self.0.get(name).cloned() {
            self.0.insert(alias.into(), function);
        }
    }

    /// Returns a function by its name.
    pub fn get(&self, name: &str) -> Option<&Arc<Function>> {
        self.0.get(name)
    }

    /// Returns the names of all functions.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(|name| &**name)
    }
}
