//! Validation of Telemetry objects.

use super::{common, field_path::FieldPath, format_string};
use crate::{
    api::{Meta, cel},
    proto::istio::telemetry::v1alpha1::{
        AccessLogging, Metrics, ProviderRef, Telemetry, Tracing, metric_selector::MetricMatch,
        metrics_overrides::tag_override::Operation, tracing::custom_tag::Type,
    },
};

/// The maximum length of a CEL expression, in bytes. Proxies compile these expressions; the limit bounds their cost.
const MAX_EXPRESSION: usize = 8 << 10;

/// Checks a Telemetry.
pub fn check(at: &FieldPath<'_>, telemetry: &Telemetry, _meta: &Meta) {
    common::attachment(
        at,
        telemetry.selector.as_ref(),
        telemetry.target_ref.as_ref(),
        &telemetry.target_refs,
    );
    if telemetry.tracing.len() > 1 {
        at.field("tracing").warning("only one entry has an effect");
    }
    at.each("tracing", &telemetry.tracing, tracing);
    at.each("metrics", &telemetry.metrics, metrics);
    at.each("accessLogging", &telemetry.access_logging, access_logging);
}

fn providers(at: &FieldPath<'_>, providers: &[ProviderRef]) {
    at.each("providers", providers, |at, provider| {
        at.field("name").require(!provider.name.is_empty(), "is required");
    });
}

fn tracing(at: &FieldPath<'_>, tracing: &Tracing) {
    if tracing.providers.len() > 1 {
        at.field("providers").warning("only one provider has an effect");
    }
    providers(at, &tracing.providers);
    let percent = tracing.random_sampling_percentage.unwrap_or_default();
    at.field("randomSamplingPercentage")
        .require((0.0..=100.0).contains(&percent), "want 0 to 100");
    let tags = at.field("customTags");
    for (name, tag) in &tracing.custom_tags {
        let at = tags.field(name);
        at.require(!name.is_empty(), "the name of a tag is empty");
        let text = match &tag.r#type {
            Some(Type::Literal(literal)) => &literal.value,
            Some(Type::Environment(environment)) => &environment.name,
            Some(Type::Header(header)) => {
                if !common::is_header_text(&header.name) {
                    // Istio admits such an object. All of it applies, except for the tag.
                    at.warning("has no effect, because the name of its header has a line break or a NUL character");
                }
                &header.name
            }
            Some(Type::Formatter(formatter)) => {
                if !format_string::is_valid(&formatter.value) {
                    at.warning("is no format string of proxies, so its value is literal");
                }
                &formatter.value
            }
            // Istio admits such an object. All of it applies, except for the tag.
            None => {
                at.warning("has no effect without literal, environment, header or formatter");
                continue;
            }
        };
        at.require(
            !text.is_empty(),
            "needs literal, environment, header or formatter with a value",
        );
    }
}

fn metrics(at: &FieldPath<'_>, metrics: &Metrics) {
    providers(at, &metrics.providers);
    at.each("overrides", &metrics.overrides, |at, change| {
        if let Some(MetricMatch::CustomMetric(name)) =
            change.r#match.as_ref().and_then(|found| found.metric_match.as_ref())
        {
            at.field("match")
                .field("customMetric")
                .require_on_admission(!name.is_empty(), "is empty");
        }
        let tags = at.field("tagOverrides");
        for (name, tag) in &change.tag_overrides {
            let at = tags.field(name);
            if name.is_empty() {
                // Istio admits such an object. All of it applies, except for the tag.
                at.warning("has no effect without a name");
            }
            let removes = tag.operation == Operation::Remove as i32;
            at.field("value")
                .require(removes || !tag.value.is_empty(), "is required with UPSERT");
            at.field("value")
                .require(tag.value.len() <= MAX_EXPRESSION, "is longer than 8192 bytes");
            at.field("value")
                .require(!removes || tag.value.is_empty(), "cannot be combined with REMOVE");
        }
    });
}

fn access_logging(at: &FieldPath<'_>, logging: &AccessLogging) {
    providers(at, &logging.providers);
    let Some(filter) = &logging.filter else { return };
    let filter_at = at.field("filter");
    let at = filter_at.field("expression");
    if filter.expression.len() > MAX_EXPRESSION {
        at.error("is longer than 8192 bytes");
    } else if let Err(mistake) = cel::check(&filter.expression) {
        at.error(format!("is not a CEL expression of proxies: {mistake}"));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::{
        api::{
            FieldError,
            istio::{ErrorPolicy, Validation},
        },
        proto::istio::telemetry::v1alpha1::tracing::{CustomTag, Formatter, Literal, RequestHeader},
    };

    #[test]
    fn tags_that_do_not_count_as_written_are_warned_of() {
        let empty = Type::Literal(Literal::default());
        let header = Type::Header(RequestHeader {
            name: "x\n".to_owned(),
            ..Default::default()
        });
        let formatter = Type::Formatter(Formatter {
            value: "50%".to_owned(),
        });
        let tags = [
            ("empty", Some(empty)),
            ("format", Some(formatter)),
            ("header", Some(header)),
            ("todo", None),
        ];
        let tags = tags.map(|(name, r#type)| (name.to_owned(), CustomTag { r#type }));
        let declared = Tracing {
            custom_tags: tags.into(),
            ..Default::default()
        };
        let validation = RefCell::<Validation>::default();
        let at = FieldPath::root("tracing", ErrorPolicy::Reject, &validation);
        tracing(&at, &declared);
        let found = validation.into_inner();
        let fields = |found: &[FieldError]| found.iter().map(|found| found.field.clone()).collect::<Vec<_>>();
        let warned = ["format", "header", "todo"].map(|tag| format!("tracing.customTags.{tag}"));
        assert_eq!(fields(&found.warnings), warned);
        assert_eq!(fields(&found.errors), ["tracing.customTags.empty"]);
    }
}
