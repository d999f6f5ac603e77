//! Items of rules: an attribute with allowed and forbidden values, and their combination.

use std::borrow::Cow;

use super::Traffic;
use crate::{base::Namespace, generate::filter::PeerSource};

/// Context in which a rule is enforced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RuleContext<'a> {
    /// Traffic of the chain.
    pub(crate) traffic: Traffic,
    /// Source of the identity of the peer.
    pub(crate) peer_source: PeerSource,
    /// Namespace of the policy.
    pub(crate) namespace: &'a Namespace,
    /// Treatment of items that cannot be expressed.
    pub(super) leniency: Leniency,
}

/// Treatment of an item that cannot be expressed in a context, such as a path in a TCP chain. Both variants allow less
/// than the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leniency {
    /// The rule is skipped, so less is allowed.
    SkipRule,
    /// The item is dropped, so more is denied.
    DropItem,
}

/// A condition on one side of an Envoy policy.
pub(crate) trait Expression: Sized {
    /// Returns the conjunction.
    fn all(parts: Vec<Self>) -> Self;
    /// Returns the disjunction.
    fn one_of(parts: Vec<Self>) -> Self;
    /// Returns the negation.
    fn negated(self) -> Self;
    /// Returns a condition that always holds.
    fn always() -> Self;
}

/// Translation of an attribute's values in a context.
pub(crate) struct Rendered<E> {
    /// Condition, if any value could be expressed.
    pub(crate) expression: Option<E>,
    /// True if all values could be expressed.
    pub(crate) complete: bool,
}

impl<E: Expression> Rendered<E> {
    /// Combines matchers of single values, `None` for values that cannot be expressed.
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

    /// Wraps one matcher of all values.
    pub(crate) fn together(expression: Option<E>) -> Self {
        Self {
            complete: expression.is_some(),
            expression,
        }
    }
}

/// An attribute of an item.
pub(crate) trait Attribute {
    /// Side of the Envoy policy.
    type Expression: Expression;
    /// Returns the condition for having one of the values.
    fn render(&self, values: &[String], context: &RuleContext) -> Rendered<Self::Expression>;
}

/// An attribute with its values.
#[derive(Clone, Debug)]
pub(crate) struct Item<'r, A> {
    /// Attribute.
    pub(crate) attribute: A,
    /// Values of which it must have one, unless empty.
    pub(crate) values: Cow<'r, [String]>,
    /// Values that it must not have.
    pub(crate) not_values: Cow<'r, [String]>,
}

impl<'r, A> Item<'r, A> {
    /// Returns an item; `None` without values.
    pub(crate) fn new(attribute: A, values: &'r [String], not_values: &'r [String]) -> Option<Self> {
        (!values.is_empty() || !not_values.is_empty()).then_some(Self {
            attribute,
            values: Cow::Borrowed(values),
            not_values: Cow::Borrowed(not_values),
        })
    }
}

/// Returns the conjunction of all items; `None` if the rule must be skipped.
pub(super) fn conjunction<A: Attribute>(items: &[Item<A>], context: &RuleContext) -> Option<A::Expression> {
    let mut parts = Vec::new();
    for item in items {
        let positive = rendered(&item.attribute, &item.values, context)?;
        let negative = rendered(&item.attribute, &item.not_values, context)?;
        parts.extend(positive);
        parts.extend(negative.map(Expression::negated));
    }
    if parts.is_empty() {
        parts.push(A::Expression::always());
    }
    Some(A::Expression::all(parts))
}

/// Translates an item. `None` means that the rule must be skipped, `Some(None)` that the item has no condition.
#[expect(clippy::option_option, reason = "the two say different things")]
fn rendered<A: Attribute>(attribute: &A, values: &[String], context: &RuleContext) -> Option<Option<A::Expression>> {
    if values.is_empty() {
        return Some(None);
    }
    let rendered = attribute.render(values, context);
    let counts = rendered.complete || context.leniency == Leniency::DropItem;
    counts.then_some(rendered.expression)
}
