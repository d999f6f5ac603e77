//! The syntax tree of a template.

use std::{fmt, sync::Arc};

use super::{
    quote::{Charset, quote},
    text::Text,
    value::{Function, Value},
};

/// The text that a tree was parsed from, for the places in errors.
pub(super) struct Source {
    /// The name of the template that was parsed; `define` inside it has other names.
    pub(super) name: Arc<str>,
    pub(super) text: Arc<str>,
}

impl Source {
    /// Returns the line, from 1, and the column in bytes, from 0, of a position.
    pub(super) fn place(&self, position: usize) -> (usize, usize) {
        let before = self.text.get(..position).unwrap_or_default();
        let line = 1 + before.matches('\n').count();
        let start = before.rfind('\n');
        (line, start.map_or(position, |newline| position - newline - 1))
    }
}

/// A list of actions and texts.
pub(super) type List = Vec<Node>;

/// An action or a text.
pub(super) enum Node {
    Text(Text),
    Action(Pipe),
    Break(usize),
    Continue(usize),
    If(Box<Branch>),
    Range(Box<Branch>),
    With(Box<Branch>),
    Template(Box<Invocation>),
}

/// `if`, `range` or `with`.
pub(super) struct Branch {
    pub(super) position: usize,
    pub(super) pipe: Pipe,
    pub(super) list: List,
    pub(super) otherwise: Option<List>,
}

/// `template`.
pub(super) struct Invocation {
    pub(super) position: usize,
    pub(super) name: Text,
    pub(super) pipe: Option<Pipe>,
}

/// Commands of which each gets the result of the one before, after declarations.
pub(super) struct Pipe {
    pub(super) position: usize,
    pub(super) is_assignment: bool,
    /// The declared or assigned variables, with `$`.
    pub(super) variables: Vec<Text>,
    pub(super) commands: Vec<Command>,
}

/// An operand with its arguments. It has at least one operand.
pub(super) struct Command {
    pub(super) operands: Vec<Operand>,
}

/// An operand and its place.
pub(super) struct Operand {
    pub(super) position: usize,
    pub(super) term: Term,
}

/// A term with its fields.
pub(super) enum Term {
    Dot,
    Nil,
    Bool(bool),
    Number(Box<Number>),
    String(Box<Literal>),
    /// `.a.b`.
    Field(Vec<Text>),
    /// `$a.b`.
    Variable(Text, Vec<Text>),
    Function(Text, Arc<Function>),
    Pipe(Box<Pipe>),
    /// A term other than a field or variable, with fields behind it.
    Chain(Box<Operand>, Vec<Text>),
}

/// A string literal.
pub(super) struct Literal {
    pub(super) quoted: String,
    pub(super) value: Value,
}

/// A number literal. Its type depends on the parameter that it is passed to.
pub(super) struct Number {
    pub(super) text: String,
    /// The value where nothing asks for a type; `None` if it overflows.
    pub(super) constant: Option<Value>,
    pub(super) int: Option<i64>,
    pub(super) uint: Option<u64>,
    pub(super) float: Option<f64>,
    pub(super) complex: Option<(f64, f64)>,
}

/// A node as errors show it.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    Node(&'a Node),
    Pipe(&'a Pipe),
    Command(&'a Command),
    Operand(&'a Operand),
}

impl Place<'_> {
    pub(super) fn position(self) -> usize {
        match self {
            Self::Node(Node::Action(pipe)) | Self::Pipe(pipe) => pipe.position,
            Self::Node(Node::Text(_)) => 0,
            Self::Node(Node::Break(position) | Node::Continue(position)) => *position,
            Self::Node(Node::If(branch) | Node::Range(branch) | Node::With(branch)) => branch.position,
            Self::Node(Node::Template(invocation)) => invocation.position,
            Self::Command(command) => command.operands.first().map_or(0, |operand| operand.position),
            Self::Operand(operand) => operand.position,
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(formatter, "{node}"),
            Self::Pipe(pipe) => pipe.fmt(formatter),
            Self::Command(command) => command.fmt(formatter),
            Self::Operand(operand) => operand.fmt(formatter),
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => formatter.write_str(&text.to_str()),
            Self::Action(pipe) => write!(formatter, "{{{{{pipe}}}}}"),
            Self::Break(_) => formatter.write_str("{{break}}"),
            Self::Continue(_) => formatter.write_str("{{continue}}"),
            Self::If(branch) => branch.write("if", formatter),
            Self::Range(branch) => branch.write("range", formatter),
            Self::With(branch) => branch.write("with", formatter),
            Self::Template(invocation) => {
                let name = quote(invocation.name.bytes(), Charset::Unicode);
                write!(formatter, "{{{{template {name}")?;
                if let Some(pipe) = &invocation.pipe {
                    write!(formatter, " {pipe}")?;
                }
                formatter.write_str("}}")
            }
        }
    }
}

impl Branch {
    fn write(&self, keyword: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{{{{{keyword} {}}}}}", self.pipe)?;
        for node in &self.list {
            write!(formatter, "{node}")?;
        }
        if let Some(otherwise) = &self.otherwise {
            formatter.write_str("{{else}}")?;
            for node in otherwise {
                write!(formatter, "{node}")?;
            }
        }
        formatter.write_str("{{end}}")
    }
}

impl fmt::Display for Pipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.variables.is_empty() {
            let operator = if self.is_assignment { "=" } else { ":=" };
            let names: Vec<_> = self.variables.iter().map(Text::to_str).collect();
            write!(formatter, "{} {operator} ", names.join(", "))?;
        }
        for (position, command) in self.commands.iter().enumerate() {
            if position > 0 {
                formatter.write_str(" | ")?;
            }
            command.fmt(formatter)?;
        }
        Ok(())
    }
}

impl fmt::Display for Command {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, operand) in self.operands.iter().enumerate() {
            if position > 0 {
                formatter.write_str(" ")?;
            }
            match &operand.term {
                Term::Pipe(pipe) => write!(formatter, "({pipe})")?,
                _ => operand.fmt(formatter)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = |names: &[Text], formatter: &mut fmt::Formatter<'_>| {
            names
                .iter()
                .try_for_each(|name| write!(formatter, ".{}", name.to_str()))
        };
        match &self.term {
            Term::Dot => formatter.write_str("."),
            Term::Nil => formatter.write_str("nil"),
            Term::Bool(value) => value.fmt(formatter),
            Term::Number(number) => formatter.write_str(&number.text),
            Term::String(literal) => formatter.write_str(&literal.quoted),
            Term::Field(names) => fields(names, formatter),
            Term::Variable(name, names) => {
                formatter.write_str(&name.to_str())?;
                fields(names, formatter)
            }
            Term::Function(name, _) => formatter.write_str(&name.to_str()),
            Term::Pipe(pipe) => pipe.fmt(formatter),
            Term::Chain(operand, names) => {
                match &operand.term {
                    Term::Pipe(pipe) => write!(formatter, "({pipe})")?,
                    _ => operand.fmt(formatter)?,
                }
                fields(names, formatter)
            }
        }
    }
}
