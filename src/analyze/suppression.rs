//! Messages that users do not want to see.

use super::message::Message;

/// A code and a pattern of objects: `IST0102=Namespace foo`, with `*` for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suppression {
    /// The code.
    pub code: String,
    resource: String,
}

/// Reason why a text is not a suppression.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a suppression; want CODE=KIND NAME, such as \"IST0103=Pod default/*\"")]
pub struct SuppressionError(String);

impl Suppression {
    /// Parses `CODE=PATTERN`.
    pub fn parse(text: &str) -> Result<Self, SuppressionError> {
        match text.split('=').collect::<Vec<_>>()[..] {
            [code, resource] => Ok(Self {
                code: code.to_owned(),
                resource: resource.to_owned(),
            }),
            _ => Err(SuppressionError(text.to_owned())),
        }
    }

    /// Returns true if the message is suppressed. The pattern is for `Kind namespace/name`, or for
    /// `Kind name.namespace`, which the help of istioctl shows.
    pub(super) fn covers(&self, message: &Message) -> bool {
        let resource = &message.resource;
        self.code == message.code
            && (matches(&self.resource, &resource.to_string())
                || matches(
                    &self.resource,
                    &format!("{} {}.{}", resource.kind, resource.name, resource.namespace),
                ))
    }
}

/// Returns true if an annotation's value (`*`, or codes joined by commas) suppresses a code.
pub(super) fn annotation_covers(annotation: &str, code: &str) -> bool {
    !annotation.is_empty() && annotation.split(',').any(|listed| listed == "*" || listed == code)
}

/// Matches a pattern in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, text, want) in [
            ("Pod a/b", "Pod a/b", true),
            ("Pod a/b", "Pod a/bc", false),
            ("Pod *", "Pod a/b", true),
            ("Pod */b", "Pod a/c", false),
            ("*a*b*", "xaxbx", true),
            ("a*a", "a", false),
            ("", "", true),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern, text), want, "{pattern} {text}");
        }
        assert!(Suppression::parse("IST0102").is_err() && Suppression::parse("a=b=c").is_err());
    }
}
