//! Fields of structs, keys of maps, and methods.

use std::borrow::Cow;

use crate::template::{
    MissingKey,
    node::{Operand, Place},
    quote::{Charset, quote},
    text::Text,
    types::Type,
    value::{Context, Value},
};

use super::{Arguments, Fault, Slot, State};

/// Returns a value of a static type, such as an element of a list or map.
pub(super) fn element<'a>(of: &Type, value: Cow<'a, Value>) -> Slot<'a> {
    match of {
        Type::Any => Slot::interface(value),
        _ => Slot::concrete(value),
    }
}

/// Returns the value of keys of nested maps and the type of the innermost map's values, if all are maps that the
/// rendering did not change, and have their keys. Nothing is copied.
pub(super) fn entry<'m>(context: &Context<'_>, receiver: &'m Value, names: &[Text]) -> Option<(&'m Type, &'m Value)> {
    let (last, before) = names.split_last()?;
    let mut value = receiver;
    for name in before {
        let Value::Map(map) = value else { return None };
        value = context.unchanged(map)?.get(name)?;
    }
    let Value::Map(map) = value else { return None };
    let value = context.unchanged(map)?.get(last)?;
    Some((map.element(), value))
}

/// Returns the same with its static type. It is borrowed if the receiver is.
pub(super) fn read<'a>(context: &Context<'_>, receiver: &Slot<'a>, names: &[Text]) -> Option<Slot<'a>> {
    match &receiver.value {
        Cow::Borrowed(receiver) => {
            let (element_type, value) = entry(context, receiver, names)?;
            Some(element(element_type, Cow::Borrowed(value)))
        }
        Cow::Owned(receiver) => {
            let (element_type, value) = entry(context, receiver, names)?;
            Some(element(element_type, Cow::Owned(value.clone())))
        }
    }
}

impl<'a> State<'a, '_, '_> {
    /// Reads a chain of fields. The last one may be a method with arguments.
    pub(super) fn fields(
        &mut self,
        dot: &Slot<'a>,
        receiver: &Slot<'a>,
        operand: &'a Operand,
        names: &'a [Text],
        call: Arguments<'a, '_>,
    ) -> Result<Slot<'a>, Fault> {
        if call.is_empty()
            && let Some(found) = read(self.context, receiver, names)
        {
            self.steps(names.len())?;
            return Ok(found);
        }
        let Some((last, before)) = names.split_last() else {
            return Ok(receiver.clone());
        };
        let Some((first, between)) = before.split_first() else {
            return self.field(dot, last, operand, call, receiver);
        };
        let mut inner = self.field(dot, first, operand, Arguments::NONE, receiver)?;
        for name in between {
            inner = self.field(dot, name, operand, Arguments::NONE, &inner)?;
        }
        self.field(dot, last, operand, call, &inner)
    }

    fn field(
        &mut self,
        dot: &Slot<'a>,
        name: &'a Text,
        operand: &'a Operand,
        call: Arguments<'a, '_>,
        receiver: &Slot<'a>,
    ) -> Result<Slot<'a>, Fault> {
        self.step()?;
        if matches!(*receiver.value, Value::Missing) {
            if self.templates.missing_key == MissingKey::Error {
                let key = quote(name.bytes(), Charset::Unicode);
                return self.error(format!("nil data; no entry for key {key}"));
            }
            return Ok(Slot::owned(Value::Missing));
        }
        if let Value::Object(object) = &*receiver.value {
            let shown = name.to_str();
            if let Some(method) = object.method(&shown) {
                return self.call(dot, &method, Place::Operand(operand), name, call);
            }
            // A nil pointer knows its fields as well, so that other names have another error.
            let field = object.field(&shown);
            if object.is_nil() && (field.is_some() || object.field_names().is_empty()) {
                return self.nil_pointer(receiver, name);
            }
            return match field {
                Some(_) if !call.is_empty() => {
                    self.error(format!("{shown} has arguments but cannot be invoked as function"))
                }
                Some(field) => Ok(Slot::owned(field)),
                None => self.no_field(receiver, name),
            };
        }
        let behind;
        let map = match &*receiver.value {
            Value::Map(map) => map,
            value => {
                behind = value.indirect();
                match &behind {
                    Some(Value::Map(map)) => map,
                    Some(_) => return self.no_field(receiver, name),
                    None => return self.nil_pointer(receiver, name),
                }
            }
        };
        if !call.is_empty() {
            return self.error(format!("{} is not a method but has arguments", name.to_str()));
        }
        match self.context.entries(map).get(name) {
            Some(value) => Ok(element(map.element(), Cow::Owned(value.clone()))),
            None => match self.templates.missing_key {
                MissingKey::Invalid => Ok(Slot::owned(Value::Missing)),
                MissingKey::Zero => Ok(element(map.element(), Cow::Owned(Value::zero(map.element())))),
                MissingKey::Error => {
                    let key = quote(name.bytes(), Charset::Unicode);
                    self.error(format!("map has no entry for key {key}"))
                }
            },
        }
    }

    fn nil_pointer(&self, receiver: &Slot<'_>, name: &Text) -> Result<Slot<'a>, Fault> {
        let (type_name, name) = (receiver.type_name(), name.to_str());
        self.error(format!("nil pointer evaluating {type_name}.{name}"))
    }

    fn no_field(&self, receiver: &Slot<'_>, name: &Text) -> Result<Slot<'a>, Fault> {
        let (type_name, name) = (receiver.type_name(), name.to_str());
        self.error(format!("can't evaluate field {name} in type {type_name}"))
    }
}
