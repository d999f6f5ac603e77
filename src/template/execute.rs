//! Rendering: walks a tree with data. Errors name the place that Go names.

use std::borrow::Cow;

use super::{
    Error, ErrorKind, Templates, Tree, format,
    limits::{Exceeded, Failure},
    node::{Branch, Command, Invocation, Node, Operand, Pipe, Place, Term},
    text::Text,
    value::{Context, Function, Value},
};

mod argument;
mod field;

/// A value and the static type of the expression: `interface {}`, or that of the value.
///
/// Values are borrowed from the data or the template where possible. Copies count references by atomic operations, with
/// which a rendering takes 12 % longer (bench `template`).
#[derive(Clone)]
pub(super) struct Slot<'a> {
    value: Cow<'a, Value>,
    is_interface: bool,
}

impl<'a> Slot<'a> {
    fn concrete(value: Cow<'a, Value>) -> Self {
        Self {
            is_interface: matches!(*value, Value::Nil),
            value,
        }
    }

    fn interface(value: Cow<'a, Value>) -> Self {
        Self {
            is_interface: !matches!(*value, Value::Missing),
            value,
        }
    }

    /// Returns a new value with its own type.
    fn owned(value: Value) -> Self {
        Self::concrete(Cow::Owned(value))
    }

    /// Returns the value without the interface around it: nil becomes no value.
    fn unwrapped(mut self) -> Self {
        self.unwrap_interface();
        self
    }

    /// Does the same in place.
    fn unwrap_interface(&mut self) {
        if self.is_interface && matches!(*self.value, Value::Nil) {
            self.value = Cow::Owned(Value::Missing);
        }
        self.is_interface = false;
    }

    /// Takes the value out of its place.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::owned(Value::Missing))
    }

    /// Returns the name of the static type.
    fn type_name(&self) -> String {
        if self.is_interface {
            "interface {}".to_owned()
        } else {
            self.value.type_of().to_string()
        }
    }
}

/// The action of a branch.
#[derive(Clone, Copy)]
enum Condition {
    If,
    /// The value of the condition is the dot of its list.
    With,
}

/// The reason to leave a list.
enum Exit {
    Break,
    Continue,
    Error(Fault),
}

/// An error. It is boxed, because results are moved often.
struct Fault(Box<Error>);

impl From<Fault> for Exit {
    fn from(error: Fault) -> Self {
        Self::Error(error)
    }
}

/// Renders a template of a group.
pub(super) fn render<'a>(
    templates: &'a Templates,
    tree: &'a Tree,
    data: &'a Value,
    context: &mut Context<'_>,
) -> Result<Vec<u8>, Error> {
    let mut state = State {
        templates,
        tree,
        place: None,
        variables: vec![(&templates.root, Slot::concrete(Cow::Borrowed(data)).unwrapped())],
        context,
        arguments: Vec::new(),
        // Most of a template is text, so one allocation is enough as a rule.
        out: Vec::with_capacity(tree.source.text.len().min(MAX_RESERVED)),
        calls: 0,
        depth: 0,
    };
    let dot = state.variables[0].1.clone();
    match state.list(&dot, &tree.list) {
        Err(Exit::Error(error)) => Err(*error.0),
        // The parser permits `break` and `continue` inside `range` only.
        Ok(()) | Err(Exit::Break | Exit::Continue) => Ok(state.out),
    }
}

struct State<'a, 'b, 'c> {
    templates: &'a Templates,
    tree: &'a Tree,
    /// The node that an error names.
    place: Option<Place<'a>>,
    variables: Vec<(&'a Text, Slot<'a>)>,
    context: &'b mut Context<'c>,
    /// The arguments of all calls whose arguments are being evaluated.
    arguments: Vec<Cow<'a, Value>>,
    out: Vec<u8>,
    /// The number of templates that are being called.
    calls: usize,
    depth: usize,
}

impl<'a> State<'a, '_, '_> {
    fn at(&mut self, place: Place<'a>) {
        self.place = Some(place);
    }

    fn error<T>(&self, message: impl std::fmt::Display) -> Result<T, Fault> {
        Err(self.error_of(ErrorKind::Execute, &message))
    }

    fn error_of(&self, kind: ErrorKind, message: &dyn std::fmt::Display) -> Fault {
        let name = self.tree.name.to_str();
        let Some(place) = self.place else {
            return Fault(Box::new(Error {
                kind,
                message: format!("template: {name}: {message}"),
                template: name.into_owned(),
                line: 0,
                column: 0,
            }));
        };
        let source = &self.tree.source;
        let (line, column) = source.place(place.position());
        let executing = super::quote::quote(self.tree.name.bytes(), super::quote::Charset::Unicode);
        let shown = shortened(place.to_string());
        let message = shortened(message.to_string());
        Fault(Box::new(Error {
            kind,
            message: format!(
                "template: {}:{line}:{column}: executing {executing} at <{shown}>: {message}",
                source.name
            ),
            template: source.name.to_string(),
            line,
            column,
        }))
    }

    fn limit(&self, limit: Exceeded) -> Fault {
        self.error_of(ErrorKind::Limit(limit), &limit)
    }

    fn step(&mut self) -> Result<(), Fault> {
        self.steps(1)
    }

    fn steps(&mut self, count: usize) -> Result<(), Fault> {
        self.context.step(count).map_err(|limit| self.limit(limit))
    }

    /// Runs a part one level deeper.
    fn nested<T, E: From<Fault>>(&mut self, part: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let most = self.context.limits.nesting;
        if self.depth >= most {
            return Err(self.limit(Exceeded::Nesting(most)).into());
        }
        self.depth += 1;
        let result = part(self);
        self.depth -= 1;
        result
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        append(&mut self.out, self.context.limits.output_bytes, bytes).map_err(|limit| self.limit(limit))
    }

    fn list(&mut self, dot: &Slot<'a>, list: &'a [Node]) -> Result<(), Exit> {
        for node in list {
            self.step()?;
            self.node(dot, node)?;
        }
        Ok(())
    }

    fn node(&mut self, dot: &Slot<'a>, node: &'a Node) -> Result<(), Exit> {
        self.at(Place::Node(node));
        match node {
            Node::Text(text) => Ok(self.write(text.bytes())?),
            Node::Action(pipe) => {
                if let Some((Value::String(text), steps)) = borrowed_value(&self.variables, self.context, dot, pipe) {
                    append(&mut self.out, self.context.limits.output_bytes, text.bytes())
                        .map_err(|limit| self.limit(limit))?;
                    return Ok(self.steps(steps)?);
                }
                let value = self.pipeline(dot, pipe)?;
                if pipe.variables.is_empty() {
                    self.print(node, &value)?;
                }
                Ok(())
            }
            Node::Break(_) => Err(Exit::Break),
            Node::Continue(_) => Err(Exit::Continue),
            Node::If(branch) => self.branch(dot, branch, Condition::If),
            Node::With(branch) => self.branch(dot, branch, Condition::With),
            Node::Range(branch) => {
                let variables = self.variables.len();
                let result = self.range(dot, branch);
                self.variables.truncate(variables);
                result
            }
            Node::Template(invocation) => self.call_template(dot, invocation),
        }
    }

    fn print(&mut self, node: &'a Node, slot: &Slot) -> Result<(), Fault> {
        self.at(Place::Node(node));
        if let Value::String(text) = &*slot.value {
            return self.write(text.bytes());
        }
        let value = format::printable(&slot.value);
        if matches!(*value, Value::Function(_)) {
            return self.error(format!(
                "can't print {} of type {}",
                Place::Node(node),
                slot.type_name()
            ));
        }
        match format::display(self.context, &value) {
            Ok(bytes) => self.write(&bytes),
            Err(Failure::Limit(limit)) => Err(self.limit(limit)),
            Err(Failure::Message(message)) => self.error(message),
        }
    }

    fn branch(&mut self, dot: &Slot<'a>, branch: &'a Branch, condition: Condition) -> Result<(), Exit> {
        let variables = self.variables.len();
        let read = match condition {
            Condition::If => borrowed_value(&self.variables, self.context, dot, &branch.pipe),
            Condition::With => None,
        };
        let (is_true, value) = if let Some((value, steps)) = read {
            let is_true = self.context.is_true(value);
            self.steps(steps)?;
            (is_true, None)
        } else {
            let value = self.pipeline(dot, &branch.pipe)?;
            (self.context.is_true(&value.value), Some(value))
        };
        let result = if is_true {
            let dot = match condition {
                Condition::If => dot,
                Condition::With => value.as_ref().unwrap_or(dot),
            };
            self.nested(|state| state.list(dot, &branch.list))
        } else if let Some(otherwise) = &branch.otherwise {
            self.nested(|state| state.list(dot, otherwise))
        } else {
            Ok(())
        };
        self.variables.truncate(variables);
        result
    }

    fn range(&mut self, dot: &Slot<'a>, branch: &'a Branch) -> Result<(), Exit> {
        let mut over = self.pipeline(dot, &branch.pipe)?.value;
        if matches!(*over, Value::Pointer(_) | Value::Object(_)) {
            let target = over.indirect();
            over = Cow::Owned(target.as_ref().unwrap_or(&over).to_basic());
        }
        let mut ran = false;
        let result = match over {
            Cow::Borrowed(over) => self.iterate(over, Cow::Borrowed, branch, &mut ran),
            Cow::Owned(over) => self.iterate(&over, |element| Cow::Owned(element.clone()), branch, &mut ran),
        };
        match result {
            Err(Exit::Break) => return Ok(()),
            Err(exit) => return Err(exit),
            Ok(()) if ran => return Ok(()),
            Ok(()) => {}
        }
        match &branch.otherwise {
            Some(otherwise) => self.nested(|state| state.list(dot, otherwise)),
            None => Ok(()),
        }
    }

    /// Runs the body for each element. `hold` returns an element for as long as the rendering takes.
    fn iterate<'v>(
        &mut self,
        over: &'v Value,
        hold: fn(&'v Value) -> Cow<'a, Value>,
        branch: &'a Branch,
        ran: &mut bool,
    ) -> Result<(), Exit> {
        match over {
            Value::Int(..) | Value::Uint(..) if branch.pipe.variables.len() > 1 => {
                let shown = self.shown(over)?;
                Ok(self.error(format!("can't use {shown} to iterate over more than one variable"))?)
            }
            Value::Int(size, number) => {
                for index in 0..*number {
                    *ran = true;
                    let element = Slot::owned(Value::Int(*size, index));
                    self.iteration(branch, Slot::owned(Value::Missing), element)?;
                }
                Ok(())
            }
            Value::Uint(size, number) => {
                for index in 0..*number {
                    *ran = true;
                    let element = Slot::owned(Value::Uint(*size, index));
                    self.iteration(branch, Slot::owned(Value::Missing), element)?;
                }
                Ok(())
            }
            Value::List(list) => {
                for (index, item) in list.items().iter().enumerate() {
                    *ran = true;
                    let element = field::element(list.element(), hold(item));
                    self.iteration(branch, Slot::owned(Value::int(index as i64)), element)?;
                }
                Ok(())
            }
            Value::Map(map) => {
                if let Some(entries) = self.context.unchanged(map) {
                    for (key, item) in entries {
                        *ran = true;
                        let element = field::element(map.element(), hold(item));
                        self.iteration(branch, Slot::owned(Value::String(key.clone())), element)?;
                    }
                    return Ok(());
                }
                for (key, item) in self.context.entries(map).clone() {
                    *ran = true;
                    let element = field::element(map.element(), Cow::Owned(item));
                    self.iteration(branch, Slot::owned(Value::String(key)), element)?;
                }
                Ok(())
            }
            Value::Missing => Ok(()),
            value => {
                let shown = self.shown(value)?;
                Ok(self.error(format!("range can't iterate over {shown}"))?)
            }
        }
    }

    /// Returns a value as errors show it.
    fn shown(&mut self, value: &Value) -> Result<String, Fault> {
        match format::display(self.context, value) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(Failure::Limit(limit)) => Err(self.limit(limit)),
            Err(Failure::Message(message)) => self.error(message),
        }
    }

    fn iteration(&mut self, branch: &'a Branch, index: Slot<'a>, element: Slot<'a>) -> Result<(), Exit> {
        self.step()?;
        let variables = &branch.pipe.variables;
        let pair = match variables.as_slice() {
            [] => None,
            [only] => Some((only, None)),
            [first, second, ..] => Some((second, Some(first))),
        };
        if let Some((of_element, of_index)) = pair {
            if branch.pipe.is_assignment {
                if let Some(name) = of_index {
                    self.assign(name, index)?;
                }
                self.assign(of_element, element.clone())?;
            } else {
                self.set_top(1, element.clone());
                if of_index.is_some() {
                    self.set_top(2, index);
                }
            }
        }
        let mark = self.variables.len();
        let result = self.nested(|state| state.list(&element, &branch.list));
        self.variables.truncate(mark);
        match result {
            Err(Exit::Continue) => Ok(()),
            result => result,
        }
    }

    fn set_top(&mut self, below: usize, slot: Slot<'a>) {
        let position = self.variables.len().checked_sub(below);
        if let Some((_, variable)) = position.and_then(|position| self.variables.get_mut(position)) {
            *variable = slot;
        }
    }

    fn assign(&mut self, name: &Text, slot: Slot<'a>) -> Result<(), Fault> {
        match self.variables.iter_mut().rev().find(|(other, _)| *other == name) {
            Some((_, variable)) => {
                *variable = slot;
                Ok(())
            }
            None => self.undefined(name),
        }
    }

    fn undefined<T>(&self, name: &Text) -> Result<T, Fault> {
        self.error(format!("undefined variable: {}", name.to_str()))
    }

    fn call_template(&mut self, dot: &Slot<'a>, invocation: &'a Invocation) -> Result<(), Exit> {
        let Some(tree) = self.templates.tree(&invocation.name) else {
            let name = super::quote::quote(invocation.name.bytes(), super::quote::Charset::Unicode);
            return Ok(self.error(format!("template {name} not defined"))?);
        };
        let most = self.context.limits.call_depth;
        if self.calls >= most {
            return Err(self.limit(Exceeded::CallDepth(most)).into());
        }
        let dot = match &invocation.pipe {
            Some(pipe) => self.pipeline(dot, pipe)?,
            None => Slot::owned(Value::Missing),
        };
        let outer_tree = std::mem::replace(&mut self.tree, tree);
        let outer_place = self.place;
        let outer_variables = std::mem::replace(&mut self.variables, vec![(&self.templates.root, dot.clone())]);
        self.calls += 1;
        let result = self.nested(|state| state.list(&dot, &tree.list));
        self.calls -= 1;
        self.tree = outer_tree;
        self.place = outer_place;
        self.variables = outer_variables;
        result
    }

    fn pipeline(&mut self, dot: &Slot<'a>, pipe: &'a Pipe) -> Result<Slot<'a>, Fault> {
        self.at(Place::Pipe(pipe));
        let Some((first, rest)) = pipe.commands.split_first() else {
            return Ok(Slot::owned(Value::Missing));
        };
        self.step()?;
        // The result stays where the command wrote it: a move waits for the stores before it, and most pipelines have
        // one command.
        let mut result = self.command(dot, first, None);
        if let Ok(value) = &mut result {
            value.unwrap_interface();
        }
        if rest.is_empty() && pipe.variables.is_empty() {
            return result;
        }
        let mut value = result?;
        for command in rest {
            self.step()?;
            value = self.command(dot, command, Some(&mut value))?;
            value.unwrap_interface();
        }
        for name in &pipe.variables {
            if pipe.is_assignment {
                self.assign(name, value.clone())?;
            } else {
                self.variables.push((name, value.clone()));
            }
        }
        Ok(value)
    }

    fn no_arguments(&self, operands: &'a [Operand], last: Option<&mut Slot<'a>>) -> Result<(), Fault> {
        match operands.first() {
            Some(first) if operands.len() > 1 || last.is_some() => {
                self.error(format!("can't give argument to non-function {first}"))
            }
            _ => Ok(()),
        }
    }

    fn command(
        &mut self,
        dot: &Slot<'a>,
        command: &'a Command,
        last: Option<&mut Slot<'a>>,
    ) -> Result<Slot<'a>, Fault> {
        let operands = command.operands.as_slice();
        let Some(first) = operands.first() else {
            return Ok(Slot::owned(Value::Missing));
        };
        match &first.term {
            Term::Field(names) => {
                self.at(Place::Operand(first));
                let call = Arguments::of(operands, last);
                return self.fields(dot, dot, first, names, call);
            }
            Term::Chain(inner, names) => {
                let call = Arguments::of(operands, last);
                return self.chain(dot, first, inner, names, call);
            }
            Term::Function(name, function) => {
                self.at(Place::Operand(first));
                let call = Arguments::of(operands, last);
                return self.call(dot, function, Place::Command(command), name, call);
            }
            Term::Pipe(pipe) => {
                self.no_arguments(operands, last)?;
                return self.nested(|state| state.pipeline(dot, pipe));
            }
            Term::Variable(name, names) => {
                self.at(Place::Operand(first));
                let call = Arguments::of(operands, last);
                if names.is_empty() && !call.is_empty() {
                    return self.error(format!("can't give argument to non-function {first}"));
                }
                return self.variable(dot, name, first, names, call);
            }
            _ => {}
        }
        self.at(Place::Operand(first));
        self.no_arguments(operands, last)?;
        match &first.term {
            Term::Bool(value) => Ok(Slot::owned(Value::Bool(*value))),
            Term::Dot => Ok(dot.clone()),
            Term::Number(number) => self.constant(number).map(Slot::concrete),
            Term::String(literal) => Ok(Slot::concrete(Cow::Borrowed(&literal.value))),
            _ => self.error("nil is not a command"),
        }
    }

    /// Reads a variable or a chain of fields behind it.
    fn variable(
        &mut self,
        dot: &Slot<'a>,
        name: &Text,
        operand: &'a Operand,
        names: &'a [Text],
        call: Arguments<'a, '_>,
    ) -> Result<Slot<'a>, Fault> {
        let Some(slot) = find(&self.variables, name) else {
            return self.undefined(name);
        };
        if names.is_empty() {
            return Ok(slot.clone());
        }
        if call.is_empty()
            && let Some(found) = field::read(self.context, slot, names)
        {
            self.steps(names.len())?;
            return Ok(found);
        }
        let slot = slot.clone();
        self.fields(dot, &slot, operand, names, call)
    }

    /// Returns the value that an operand reads from the data or the template, and the steps of that. Such a value stays
    /// in registers. A slot is written to memory and then moved, which waits for the writes: with slots for all
    /// arguments, a rendering takes 7 % longer (bench `template`). `None` stands for everything else, and for nil.
    fn shared(&self, dot: &Slot<'a>, operand: &'a Operand) -> Option<(&'a Value, usize)> {
        if let Term::String(literal) = &operand.term {
            return Some((&literal.value, 0));
        }
        let (receiver, names) = receiver(&self.variables, dot, operand)?;
        let Cow::Borrowed(receiver) = receiver.value else {
            return None;
        };
        let value = match names {
            [] => receiver,
            names => field::entry(self.context, receiver, names)?.1,
        };
        (!matches!(value, Value::Missing | Value::Nil)).then_some((value, names.len()))
    }

    fn chain(
        &mut self,
        dot: &Slot<'a>,
        operand: &'a Operand,
        inner: &'a Operand,
        names: &'a [Text],
        call: Arguments<'a, '_>,
    ) -> Result<Slot<'a>, Fault> {
        self.at(Place::Operand(operand));
        let receiver = self.expression(dot, inner)?;
        self.fields(dot, &receiver, operand, names, call)
    }
}

/// Returns the value that a pipeline reads and the steps of that, if the pipeline is dot, a variable, or keys of nested
/// maps behind one of them, and all are there. Nothing is copied, which saves a twentieth of a rendering (bench
/// `template`).
fn borrowed_value<'s>(
    variables: &'s [(&Text, Slot<'_>)],
    context: &Context<'_>,
    dot: &'s Slot<'_>,
    pipe: &Pipe,
) -> Option<(&'s Value, usize)> {
    let [command] = pipe.commands.as_slice() else {
        return None;
    };
    let [operand] = command.operands.as_slice() else {
        return None;
    };
    if !pipe.variables.is_empty() {
        return None;
    }
    let (receiver, names) = receiver(variables, dot, operand)?;
    let value = if names.is_empty() {
        &receiver.value
    } else {
        field::entry(context, &receiver.value, names)?.1
    };
    Some((value, 1 + names.len()))
}

/// Returns the value and the fields behind it that an operand reads, if it is dot, a variable, or fields behind one of
/// them.
fn receiver<'s, 'a, 'o>(
    variables: &'s [(&Text, Slot<'a>)],
    dot: &'s Slot<'a>,
    operand: &'o Operand,
) -> Option<(&'s Slot<'a>, &'o [Text])> {
    match &operand.term {
        Term::Dot => Some((dot, &[])),
        Term::Field(names) => Some((dot, names)),
        Term::Variable(name, names) => Some((find(variables, name)?, names)),
        _ => None,
    }
}

/// Returns the innermost variable of a name.
fn find<'s, 'a>(variables: &'s [(&Text, Slot<'a>)], name: &Text) -> Option<&'s Slot<'a>> {
    let (_, slot) = variables.iter().rev().find(|(other, _)| *other == name)?;
    Some(slot)
}

/// Appends to the output, up to its limit.
fn append(out: &mut Vec<u8>, most: usize, bytes: &[u8]) -> Result<(), Exceeded> {
    if out.len().saturating_add(bytes.len()) > most {
        return Err(Exceeded::Output(most));
    }
    out.extend_from_slice(bytes);
    Ok(())
}

/// The maximum size of the buffer that a rendering begins with.
const MAX_RESERVED: usize = 64 << 10;

/// The maximum length of the node, and of the reason, in an error.
const MAX_SHOWN: usize = 4096;

/// Cuts a part of an error: a node may be as long as its text, and a value as the budget permits.
fn shortened(mut text: String) -> String {
    if text.len() > MAX_SHOWN {
        text.truncate(text.floor_char_boundary(MAX_SHOWN));
        text.push('…');
    }
    text
}

/// The arguments of a call: operands, and the result of the command before.
struct Arguments<'a, 's> {
    operands: &'a [Operand],
    /// The result of the command before, which the call takes out of its place.
    last: Option<&'s mut Slot<'a>>,
}

impl<'a, 's> Arguments<'a, 's> {
    const NONE: Self = Self {
        operands: &[],
        last: None,
    };

    /// Returns the operands behind the first one, which is called.
    fn of(operands: &'a [Operand], last: Option<&'s mut Slot<'a>>) -> Self {
        Self {
            operands: operands.get(1..).unwrap_or_default(),
            last,
        }
    }

    fn is_empty(&self) -> bool {
        self.operands.is_empty() && self.last.is_none()
    }
}

/// Returns the result of a function with its static type.
fn result<'a>(function: &Function, value: Value) -> Slot<'a> {
    field::element(&function.result, Cow::Owned(value))
}
