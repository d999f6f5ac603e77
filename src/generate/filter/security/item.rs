//! Items of rules: an attribute with the values that it must and must not have, and how they combine.

use std::borrow::Cow;

use super::Traffic;
use crate::base::Namespace;

/// Where a rule is to be enforced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// What the chain carries.
    pub(crate) traffic: Traffic,
    /// The peer is known from an HBONE tunnel, not from TLS.
    pub(crate) tunneled: bool,
    /// The namespace of the policy.
    pub(crate) namespace: &'a Namespace,
    /// What becomes of items that cannot be expressed.
    pub(crate) leniency: Leniency,
}

/// What becomes of an item that cannot be expressed at a place, such as a path in a TCP chain. Either way less is let
/// through than is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leniency {
    /// The rule is left out: what would be allowed is not.
    SkipRule,
    /// The item is left out: more is denied.
    DropItem,
}

/// A condition of an Envoy policy, on one of its two sides.
pub(crate) trait Expression: Sized {
    /// All of them hold.
    fn all(parts: Vec<Self>) -> Self;
    /// One of them holds.
    fn one_of(parts: Vec<Self>) -> Self;
    /// It does not hold.
    fn negated(self) -> Self;
    /// It always holds.
    fn always() -> Self;
}

/// What the values of an attribute become at a place.
pub(crate) struct Rendered<E> {
    /// What could be expressed, if anything.
    pub(crate) expression: Option<E>,
    /// Nothing was left out.
    pub(crate) complete: bool,
}

impl<E: Expression> Rendered<E> {
    /// Each value has a matcher of its own, `None` where it cannot be expressed.
    pub(crate) fn each(matchers: impl Iterator<Item = Option<E>>) -> Self {
        let mut parts = Vec::new();
        let mut complete = true;
        for matcher in matchers {
            complete &= matcher.is_some();
            parts.extend(matcher);
        }
        Self {
            expression: (!parts.is_empty()).then(|| E::one_of(parts)),
            complete,
        }
    }

    /// One matcher stands for all values.
    pub(crate) fn together(expression: Option<E>) -> Self {
        Self {
            complete: expression.is_some(),
            expression,
        }
    }
}

/// What an item is about.
pub(crate) trait Attribute {
    /// The side of Envoy's policy where it stands.
    type Expression: Expression;
    /// What it takes to have one of the values.
    fn render(&self, values: &[String], place: &Place) -> Rendered<Self::Expression>;
}

/// An attribute with its values.
#[derive(Clone, Debug)]
pub(crate) struct Item<'r, A> {
    /// The attribute.
    pub(crate) attribute: A,
    /// It must have one of these, if there are any.
    pub(crate) values: Cow<'r, [String]>,
    /// It must have none of these.
    pub(crate) not_values: Cow<'r, [String]>,
}

impl<'r, A> Item<'r, A> {
    /// An item; `None` if it says nothing.
    pub(crate) fn new(attribute: A, values: &'r [String], not_values: &'r [String]) -> Option<Self> {
        (!values.is_empty() || !not_values.is_empty()).then_some(Self {
            attribute,
            values: Cow::Borrowed(values),
            not_values: Cow::Borrowed(not_values),
        })
    }
}

/// All items hold; `None` if the rule is to be left out.
pub(crate) fn conjunction<A: Attribute>(items: &[Item<A>], place: &Place) -> Option<A::Expression> {
    let mut parts = Vec::new();
    for item in items {
        let positive = rendered(&item.attribute, &item.values, place)?;
        let negative = rendered(&item.attribute, &item.not_values, place)?;
        parts.extend(positive);
        parts.extend(negative.map(Expression::negated));
    }
    if parts.is_empty() {
        parts.push(A::Expression::always());
    }
    Some(A::Expression::all(parts))
}

/// `None`: the rule is to be left out; `Some(None)`: the item says nothing.
#[expect(clippy::option_option, reason = "the two say different things")]
fn rendered<A: Attribute>(attribute: &A, values: &[String], place: &Place) -> Option<Option<A::Expression>> {
    if values.is_empty() {
        return Some(None);
    }
    let rendered = attribute.render(values, place);
    let counts = rendered.complete || place.leniency == Leniency::DropItem;
    counts.then_some(rendered.expression)
}
