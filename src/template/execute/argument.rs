//! Arguments: constants take the type of the parameter, other values must have it.

use std::{borrow::Cow, sync::Arc};

use crate::template::{
    limits::Failure,
    node::{Number, Operand, Place, Term},
    text::Text,
    types::Type,
    value::{Evaluation, Function, Value},
};

use super::{Arguments, ErrorKind, Fault, Slot, State, result};

/// The number of arguments whose references are on the stack, which saves an allocation for a call.
const FEW: usize = 6;

impl<'a> State<'a, '_, '_> {
    /// Calls a function. `place` is the node of errors that the function returns.
    pub(super) fn call(
        &mut self,
        dot: &Slot<'a>,
        function: &Arc<Function>,
        place: Place<'a>,
        name: &Text,
        call: Arguments<'a, '_>,
    ) -> Result<Slot<'a>, Fault> {
        self.check_count(function, name, &call)?;
        match function.evaluation {
            Evaluation::And => return self.short_circuit(dot, call, false),
            Evaluation::Or => return self.short_circuit(dot, call, true),
            Evaluation::Eager | Evaluation::Call => {}
        }
        let (start, operands) = (self.arguments.len(), call.operands);
        self.push_arguments(dot, function, call)?;
        let failure = if function.evaluation == Evaluation::Call {
            let callee = operands.first().map(ToString::to_string);
            let arguments = self.arguments.split_off(start);
            match self.call_value(callee.as_deref(), &arguments) {
                Ok(slot) => return Ok(slot),
                Err(failure) => failure,
            }
        } else {
            let arguments = &self.arguments[start..];
            let mut few = [&Value::Missing; FEW];
            let many: Vec<&Value>;
            let references: &[&Value] = if let Some(references) = few.get_mut(..arguments.len()) {
                for (reference, argument) in references.iter_mut().zip(arguments) {
                    *reference = argument;
                }
                references
            } else {
                many = arguments.iter().map(AsRef::as_ref).collect();
                many.as_slice()
            };
            let called = function.call(self.context, references);
            // The arguments are dropped before the result is moved, which waits for the writes of the function: in the
            // other order, a rendering takes 5 % longer (bench `template`).
            self.arguments.truncate(start);
            match called {
                Ok(value) => return Ok(result(function, value)),
                Err(failure) => failure,
            }
        };
        self.at(place);
        let name = name.to_str();
        match failure {
            Failure::Message(message) => self.error(format!("error calling {name}: {message}")),
            Failure::Limit(limit) => {
                let message = format!("error calling {name}: {limit}");
                Err(self.error_of(ErrorKind::Limit(limit), &message))
            }
        }
    }

    /// Checks the number of arguments.
    fn check_count(&self, function: &Function, name: &Text, call: &Arguments<'a, '_>) -> Result<(), Fault> {
        let given = call.operands.len() + usize::from(call.last.is_some());
        let fixed = function.fixed();
        if function.is_variadic && given < fixed {
            let (name, count) = (name.to_str(), call.operands.len());
            return self.error(format!(
                "wrong number of args for {name}: want at least {fixed} got {count}"
            ));
        }
        if !function.is_variadic && given != fixed {
            let name = name.to_str();
            return self.error(format!("wrong number of args for {name}: want {fixed} got {given}"));
        }
        Ok(())
    }

    /// Evaluates the arguments of a call. They are kept on one stack, which saves an allocation for each call.
    fn push_arguments(&mut self, dot: &Slot<'a>, function: &Function, call: Arguments<'a, '_>) -> Result<(), Fault> {
        for (position, operand) in call.operands.iter().enumerate() {
            let parameter = function.parameter(position);
            if let Some((value, steps)) = self.shared(dot, operand)
                && fits(value, parameter)
            {
                self.at(Place::Operand(operand));
                self.steps(1 + steps)?;
                self.arguments.push(Cow::Borrowed(value));
                continue;
            }
            self.step()?;
            let argument = self.typed(dot, parameter, operand)?;
            self.arguments.push(argument.value);
        }
        if let Some(last) = call.last {
            self.fit(&mut last.value, function.parameter(call.operands.len()))?;
            self.arguments.push(last.take().value);
        }
        Ok(())
    }

    fn short_circuit(&mut self, dot: &Slot<'a>, call: Arguments<'a, '_>, until: bool) -> Result<Slot<'a>, Fault> {
        let mut value = Slot::owned(Value::Missing);
        for operand in call.operands {
            self.step()?;
            value = self.typed(dot, &Type::Reflect, operand)?;
            if self.context.is_true(&value.value) == until {
                return Ok(value);
            }
        }
        Ok(call.last.map_or(value, Slot::take))
    }

    /// Calls the function that is the first argument.
    fn call_value(&mut self, callee: Option<&str>, arguments: &[Cow<'_, Value>]) -> Result<Slot<'a>, Failure> {
        let name = callee.unwrap_or("<reflect.Value Value>");
        let function = match arguments.first().map(AsRef::as_ref) {
            None | Some(Value::Missing | Value::Nil) => return Err(Failure::message("call of nil")),
            Some(Value::Function(function)) => function,
            Some(value) => {
                let message = format!("non-function {name} of type {}", value.type_of());
                return Err(Failure::Message(message));
            }
        };
        let given = arguments.len() - 1;
        let fixed = function.fixed();
        if function.is_variadic && given < fixed {
            let message = format!("wrong number of args for {name}: got {given} want at least {fixed}");
            return Err(Failure::Message(message));
        }
        if !function.is_variadic && given != fixed {
            let message = format!("wrong number of args for {name}: got {given} want {fixed}");
            return Err(Failure::Message(message));
        }
        let mut prepared = Vec::with_capacity(given);
        for (position, value) in arguments[1..].iter().enumerate() {
            let value = prepare(value, function.parameter(position));
            prepared.push(value.map_err(|message| Failure::Message(format!("arg {position}: {message}")))?);
        }
        let prepared: Vec<&Value> = prepared.iter().collect();
        Ok(result(function, function.call(self.context, &prepared)?))
    }

    /// Evaluates an operand for a parameter.
    fn typed(&mut self, dot: &Slot<'a>, parameter: &Type, operand: &'a Operand) -> Result<Slot<'a>, Fault> {
        self.at(Place::Operand(operand));
        match &operand.term {
            Term::Nil => {
                if !parameter.can_be_nil() {
                    return self.error(format!("cannot assign nil to {parameter}"));
                }
                return Ok(Slot::owned(match parameter {
                    Type::Reflect => Value::Missing,
                    parameter => Value::zero(parameter),
                }));
            }
            Term::Bool(_) | Term::Number(_) | Term::String(_) => {
                return self.literal(parameter, operand).map(Slot::concrete);
            }
            _ => {}
        }
        let mut result = self.expression(dot, operand);
        if let Ok(slot) = &mut result {
            self.fit(&mut slot.value, parameter)?;
        }
        result
    }

    /// Evaluates an operand of any type.
    pub(super) fn expression(&mut self, dot: &Slot<'a>, operand: &'a Operand) -> Result<Slot<'a>, Fault> {
        self.at(Place::Operand(operand));
        match &operand.term {
            Term::Field(names) => self.fields(dot, dot, operand, names, Arguments::NONE),
            Term::Variable(name, names) => self.variable(dot, name, operand, names, Arguments::NONE),
            Term::Pipe(pipe) => self.nested(|state| state.pipeline(dot, pipe)),
            Term::Function(name, function) => self.call(dot, function, Place::Operand(operand), name, Arguments::NONE),
            Term::Chain(inner, names) => self.nested(|state| state.chain(dot, operand, inner, names, Arguments::NONE)),
            _ => Ok(dot.clone()),
        }
    }

    /// Returns a constant as a value of a type.
    fn literal(&self, parameter: &Type, operand: &'a Operand) -> Result<Cow<'a, Value>, Fault> {
        let expected = match (parameter, &operand.term) {
            (Type::Any | Type::Reflect | Type::Bool, Term::Bool(value)) => {
                return Ok(Cow::Owned(Value::Bool(*value)));
            }
            (Type::Any | Type::Reflect | Type::String, Term::String(literal)) => {
                return Ok(Cow::Borrowed(&literal.value));
            }
            (Type::Any | Type::Reflect, Term::Number(number)) => return self.constant(number),
            (_, Term::Number(number)) if number.fits(parameter).is_some() => {
                return Ok(Cow::Owned(number.fits(parameter).unwrap_or(Value::Nil)));
            }
            (Type::Bool, _) => "bool",
            (Type::String, _) => "string",
            (Type::Int(_), _) => "integer",
            (Type::Uint(_), _) => "unsigned integer",
            (Type::Float32 | Type::Float64, _) => "float",
            (Type::Complex, _) => "complex",
            _ => return self.error(format!("can't handle {operand} for arg of type {parameter}")),
        };
        self.error(format!("expected {expected}; found {operand}"))
    }

    /// Returns a number constant where nothing asks for a type.
    pub(super) fn constant(&self, number: &'a Number) -> Result<Cow<'a, Value>, Fault> {
        match &number.constant {
            Some(value) => Ok(Cow::Borrowed(value)),
            None => self.error(format!("{} overflows int", number.text)),
        }
    }

    /// Makes a value one of a parameter, if it has the type. Most values stay as they are, and are not moved for it.
    fn fit(&self, value: &mut Cow<'a, Value>, parameter: &Type) -> Result<(), Fault> {
        if fits(value, parameter) {
            return Ok(());
        }
        match (&**value, parameter) {
            (Value::Missing, Type::Any) => {
                *value = Cow::Owned(Value::Nil);
                return Ok(());
            }
            (Value::Missing, parameter) if parameter.can_be_nil() => {
                *value = Cow::Owned(Value::zero(parameter));
                return Ok(());
            }
            (Value::Missing, parameter) => return self.error(format!("invalid value; expected {parameter}")),
            _ => {}
        }
        let own = value.type_of();
        if own.assignable_to(parameter) {
            return Ok(());
        }
        let target = match &**value {
            Value::Pointer(target) if target.type_of().assignable_to(parameter) => target.as_ref().clone(),
            Value::NilPointer(target) if target.assignable_to(parameter) => {
                return self.error(format!("dereference of nil pointer of type {parameter}"));
            }
            _ => return self.error(format!("wrong type for value; expected {parameter}; got {own}")),
        };
        *value = Cow::Owned(target);
        Ok(())
    }
}

impl Number {
    /// Returns the literal as a value of a type, if it fits.
    fn fits(&self, parameter: &Type) -> Option<Value> {
        match parameter {
            Type::Int(size) => self.int.map(|number| Value::Int(*size, size.wrap(number))),
            Type::Uint(size) => self.uint.map(|number| Value::Uint(*size, size.wrap(number))),
            Type::Float32 => self.float.map(|number| Value::Float32(number as f32)),
            Type::Float64 => self.float.map(Value::Float),
            Type::Complex => self.complex.map(|(real, imaginary)| Value::Complex(real, imaginary)),
            _ => None,
        }
    }
}

/// Returns true for most values that a parameter takes as they are.
fn fits(value: &Value, parameter: &Type) -> bool {
    match parameter {
        Type::Reflect => true,
        Type::Any => !matches!(value, Value::Missing),
        Type::String => matches!(value, Value::String(_)),
        _ => false,
    }
}

/// Returns an argument of `call`, whose integers are converted.
fn prepare(value: &Value, parameter: &Type) -> Result<Value, String> {
    if matches!(value, Value::Missing | Value::Nil) {
        if !parameter.can_be_nil() {
            return Err(format!("value is nil; should be of type {parameter}"));
        }
        return Ok(Value::zero(parameter));
    }
    let own = value.type_of();
    if own.assignable_to(parameter) {
        return Ok(value.clone());
    }
    match (value.to_basic(), parameter) {
        (Value::Int(_, number), Type::Int(size)) => Ok(Value::Int(*size, size.wrap(number))),
        (Value::Int(_, number), Type::Uint(size)) => Ok(Value::Uint(*size, size.wrap(number as u64))),
        (Value::Uint(_, number), Type::Int(size)) => Ok(Value::Int(*size, size.wrap(number as i64))),
        (Value::Uint(_, number), Type::Uint(size)) => Ok(Value::Uint(*size, size.wrap(number))),
        _ => Err(format!("value has type {own}; should be {parameter}")),
    }
}
