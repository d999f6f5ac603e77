//! Attribution of a NACK: the resources of a response that the client refused, with the reason of each.
//!
//! A NACK names no resource in a field. Envoy's text does for clusters and listeners
//! (`Error adding/updating listener(s) NAME: REASON, NAME: REASON`, source/common/upstream/cds_api_helper.cc and
//! source/common/listener_manager/lds_api.cc); other types mention names somewhere, or not at all.

use std::collections::BTreeMap;

use smol_str::SmolStr;

/// Shorter names occur in texts by chance: route configurations are named `80`.
const DISTINCTIVE: usize = 6;
/// The longest reason that is kept, in bytes.
const MAX_REASON: usize = 1024;
/// The part of a text that is read, in bytes.
const MAX_TEXT: usize = 64 << 10;
/// The number of resources that one NACK refuses at most. The client refuses the others when they are sent again.
const MAX_REFUSED: usize = 64;

/// A refused resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RefusedName {
    /// The name.
    pub(super) name: SmolStr,
    /// The reason, in Envoy's words.
    pub(super) reason: String,
}

/// Returns the refused resources among the names of a response, in the order of the text. `changed` are those that the
/// client does not hold already: if the text names none and only one changed, it is that one. Empty if the text does
/// not say.
pub(super) fn refused<'a>(
    error: &str,
    names: impl Iterator<Item = &'a SmolStr>,
    changed: impl FnOnce() -> Vec<SmolStr>,
) -> Vec<RefusedName> {
    let error = beginning(error, MAX_TEXT);
    let words = Words::of(error);
    let (mut labels, mut mentions) = (Vec::new(), Vec::new());
    for name in names {
        match words.by_text.get(name.as_str()) {
            Some(word) if word.is_label => labels.push((*word, name)),
            Some(word) if name.len() >= DISTINCTIVE => mentions.push((*word, name)),
            _ => {}
        }
    }
    if !labels.is_empty() {
        labels.sort_unstable_by_key(|(word, _)| word.begin);
        let ends = labels.iter().skip(1).map(|(word, _)| word.begin).chain([error.len()]);
        let reasons = labels.iter().zip(ends).map(|((word, name), end)| RefusedName {
            name: (*name).clone(),
            reason: trimmed(&error[word.end..end]),
        });
        return reasons.take(MAX_REFUSED).collect();
    }
    let whole = |name: SmolStr| RefusedName {
        name,
        reason: trimmed(error),
    };
    if !mentions.is_empty() {
        mentions.sort_unstable_by_key(|(word, _)| word.begin);
        let mentions = mentions.into_iter().take(MAX_REFUSED);
        return mentions.map(|(_, name)| whole(name.clone())).collect();
    }
    match changed().as_slice() {
        [only] => vec![whole(only.clone())],
        _ => Vec::new(),
    }
}

/// Returns all these resources as refused, for a text that does not say which of them are.
pub(super) fn all<'a>(error: &str, names: impl Iterator<Item = &'a SmolStr>) -> Vec<RefusedName> {
    let all = names.take(MAX_REFUSED).map(|name| RefusedName {
        name: name.clone(),
        reason: trimmed(error),
    });
    all.collect()
}

#[derive(Clone, Copy)]
struct Word {
    begin: usize,
    /// The position behind the word and its colon.
    end: usize,
    /// True if a colon follows.
    is_label: bool,
}

struct Words<'a> {
    by_text: BTreeMap<&'a str, Word>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Self {
        let mut by_text = BTreeMap::new();
        for word in text.split_whitespace() {
            let begin = word.as_ptr() as usize - text.as_ptr() as usize;
            let bare = word.trim_matches(|c| matches!(c, '\'' | '"' | '`' | ',' | ';' | '(' | ')' | ':'));
            if bare.is_empty() {
                continue;
            }
            let is_label = word.ends_with(':');
            let found = Word {
                begin,
                end: begin + word.len(),
                is_label,
            };
            let held = by_text.entry(bare).or_insert(found);
            // The first label counts, or else the first mention.
            if is_label && !held.is_label {
                *held = found;
            }
        }
        Self { by_text }
    }
}

fn trimmed(reason: &str) -> String {
    let reason = reason.trim_matches(|c: char| c.is_whitespace() || c == ',');
    beginning(reason, MAX_REASON).to_owned()
}

/// Returns a text of at most this many bytes, cut between characters.
fn beginning(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: &str, names: &[&str], changed: &[&str]) -> Vec<(String, String)> {
        let names: Vec<SmolStr> = names.iter().map(SmolStr::new).collect();
        let found = refused(error, names.iter(), || changed.iter().map(SmolStr::new).collect());
        found
            .into_iter()
            .map(|refused| (refused.name.to_string(), refused.reason))
            .collect()
    }

    #[test]
    fn labels_name_resources_with_their_reasons() {
        let error = "Error adding/updating listener(s) 0.0.0.0_80: Didn't find a registered implementation for 'x', \
                     10.0.0.1_443: no filter chain";
        let expected = [
            (
                "0.0.0.0_80".to_owned(),
                "Didn't find a registered implementation for 'x'".to_owned(),
            ),
            ("10.0.0.1_443".to_owned(), "no filter chain".to_owned()),
        ];
        assert_eq!(
            of(error, &["10.0.0.1_443", "virtualInbound", "0.0.0.0_80"], &[]),
            expected
        );
    }

    #[test]
    fn names_of_clusters_may_contain_bars() {
        let error = "Error adding/updating cluster(s) outbound|80|v1|a.b.svc.cluster.local: bad TLS context";
        let names = [
            "outbound|80||a.b.svc.cluster.local",
            "outbound|80|v1|a.b.svc.cluster.local",
        ];
        assert_eq!(
            of(error, &names, &[]),
            [(names[1].to_owned(), "bad TLS context".to_owned())]
        );
    }

    #[test]
    fn short_names_are_no_mentions() {
        let error = "Duplicate entry of domain a.b on port 80";
        assert!(of(error, &["80", "8080"], &["80", "8080"]).is_empty());
        assert_eq!(
            of(error, &["80", "8080"], &["8080"]),
            [("8080".to_owned(), error.to_owned())]
        );
    }

    #[test]
    fn mentions_count_if_they_are_distinctive() {
        let error = "route: unknown cluster in 'http.8080'";
        assert_eq!(
            of(error, &["http.8080", "http.80"], &[]),
            [("http.8080".to_owned(), error.to_owned())]
        );
    }

    #[test]
    fn one_nack_refuses_a_limited_number_of_resources() {
        let names: Vec<String> = (0..2 * MAX_REFUSED).map(|number| format!("listener{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let labels: Vec<String> = names.iter().map(|name| format!("{name}: bad, ")).collect();
        for error in [labels.concat(), names.join(" ")] {
            let found = of(&error, &names, &[]);
            assert_eq!((found.len(), &*found[0].0), (MAX_REFUSED, "listener0"));
        }
    }

    #[test]
    fn long_reasons_are_cut_at_a_character() {
        let reason = "ä".repeat(MAX_REASON);
        let error = format!("listener1: {reason}");
        let found = of(&error, &["listener1"], &[]);
        assert_eq!(found[0].1.len(), MAX_REASON);
    }
}
