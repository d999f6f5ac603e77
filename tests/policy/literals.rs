//! R8: values without a star match literally, even if they look like a regular expression.

use std::collections::BTreeMap;

use istiod::model::Installation;
use libtest_mimic::Failed;
use proptest::{collection::vec, prelude::*, sample::select};
use serde_json::json;

use super::{
    differential::{mesh, runner},
    evaluator::{self, Request, Traffic},
    fixture::Fixture,
    oracle::{Action, Attribute, Item, Policy, Rule},
};

/// Number of random literals.
const CASES: u32 = 500;

/// Regular expression metacharacters, and letters that occur in identities (`/ns/`, `/sa/`).
const ALPHABET: &[char] = &[
    'a', 's', 'n', 'x', '.', '-', '+', '(', ')', '[', ']', '|', '^', '$', '\\', '}', '{',
];

/// The attribute that holds a literal, and the traffic attribute that it matches.
#[derive(Clone, Copy, Debug)]
enum LiteralField {
    Account,
    NamespaceOfAccount,
    Namespace,
    Principal,
    TrustDomain,
    Subject,
    Claim,
    Host,
    Path,
    Header,
    ServerName,
}

const LITERAL_FIELDS: [LiteralField; 11] = [
    LiteralField::Account,
    LiteralField::NamespaceOfAccount,
    LiteralField::Namespace,
    LiteralField::Principal,
    LiteralField::TrustDomain,
    LiteralField::Subject,
    LiteralField::Claim,
    LiteralField::Host,
    LiteralField::Path,
    LiteralField::Header,
    LiteralField::ServerName,
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum MatchForm {
    Exact,
    Beginning,
    End,
}

impl LiteralField {
    /// Returns the attribute and its value; `None` where stars are not supported.
    fn value(self, form: MatchForm, literal: &str) -> Option<(Attribute, String)> {
        let starred = |before: &str| match form {
            MatchForm::Exact => format!("{before}{literal}"),
            MatchForm::Beginning => format!("{before}{literal}*"),
            MatchForm::End => format!("*{literal}"),
        };
        let exact = form == MatchForm::Exact;
        Some(match self {
            Self::Account => (Attribute::ServiceAccount, exact.then(|| format!("foo/{literal}"))?),
            Self::NamespaceOfAccount => (Attribute::ServiceAccount, exact.then(|| format!("{literal}/a"))?),
            Self::Namespace => (Attribute::Namespace, starred("")),
            Self::Principal => (Attribute::Principal, starred("td1/ns/foo/sa/")),
            Self::TrustDomain => (Attribute::TrustDomain, starred("")),
            Self::Subject => (Attribute::RequestPrincipal, starred("https://i/")),
            Self::Claim => (Attribute::Claim, starred("")),
            Self::Host => (Attribute::Host, starred("")),
            Self::Path => (Attribute::Path, starred("/")),
            Self::Header => (Attribute::Header, starred("")),
            Self::ServerName => (Attribute::ServerName, starred("")),
        })
    }

    /// Returns traffic with this text in the attribute.
    fn traffic(self, text: &str) -> Traffic {
        let or = |is_field: bool, other: &str| if is_field { text.to_owned() } else { other.to_owned() };
        let namespace = or(matches!(self, Self::Namespace | Self::NamespaceOfAccount), "foo");
        let account = or(matches!(self, Self::Account | Self::Principal), "a");
        let domain = or(matches!(self, Self::TrustDomain), "td1");
        let claims = json!({
            "iss": "https://i", "sub": or(matches!(self, Self::Subject), "me"),
            "role": or(matches!(self, Self::Claim), "no"),
        });
        let payload = json!({"payload": claims});
        let own = "10.0.0.1".parse().expect("the address is valid");
        Traffic {
            peer: Some(format!("spiffe://{domain}/ns/{namespace}/sa/{account}")),
            direct_ip: own,
            remote_ip: own,
            destination: (own, 80),
            server_name: or(matches!(self, Self::ServerName), ""),
            metadata: BTreeMap::from([("envoy.filters.http.jwt_authn".to_owned(), payload)]),
            request: Some(Request {
                method: "GET".to_owned(),
                host: or(matches!(self, Self::Host), "host"),
                path: format!("/{}", or(matches!(self, Self::Path), "")),
                headers: BTreeMap::from([("x-team".to_owned(), or(matches!(self, Self::Header), "no"))]),
            }),
        }
    }
}

/// Returns a text similar to the literal: (position, letter, kind of change).
fn neighbour(literal: &str, (position, letter, change): (usize, char, u8)) -> String {
    let mut letters: Vec<char> = literal.chars().collect();
    let position = position % letters.len();
    match change {
        0 => letters[position] = letter,
        1 => letters.insert(position, letter),
        2 => letters.push(letter),
        3 => letters.extend(literal.chars()),
        _ => {
            letters.remove(position);
        }
    }
    letters.into_iter().collect()
}

/// The test of R8.
pub(super) fn r8_literals_are_not_expressions() -> Result<(), Failed> {
    let fixture = std::cell::RefCell::new(Fixture::new(Installation::default(), &mesh(), "")?);
    let literal = vec(select(ALPHABET), 1..6).prop_map(|letters| letters.into_iter().collect::<String>());
    let form = select([MatchForm::Exact, MatchForm::Beginning, MatchForm::End].as_slice());
    let edits = vec((0..6_usize, select(ALPHABET), 0..5_u8), 12);
    let cases = (select(LITERAL_FIELDS.as_slice()), form, literal, edits);
    let result = runner(CASES).run(&cases, |(field, form, literal, edits)| {
        let Some((attribute, value)) = field.value(form, &literal) else {
            return Ok(());
        };
        let item = Item {
            attribute,
            values: vec![value],
            not_values: Vec::new(),
        };
        let rule = match attribute {
            Attribute::Host | Attribute::Path => Rule {
                to: vec![vec![item]],
                ..Rule::default()
            },
            _ if attribute.field().is_some() => Rule {
                from: vec![vec![item]],
                ..Rule::default()
            },
            _ => Rule {
                when: vec![item],
                ..Rule::default()
            },
        };
        let policy = Policy {
            action: Action::Allow,
            dry_run: false,
            rules: vec![rule],
        };
        let mut fixture = fixture.borrow_mut();
        let failed = |failed: Failed| TestCaseError::fail(failed.message().unwrap_or_default().to_owned());
        fixture.declare(vec![policy.object(0)]).map_err(failed)?;
        let filters = fixture.http_filters().map_err(failed)?;
        let texts = edits.iter().map(|edit| neighbour(&literal, *edit));
        for text in texts.chain([literal.clone()]).filter(|text| !text.is_empty()) {
            let expected = match form {
                MatchForm::Exact => text == literal,
                MatchForm::Beginning => text.starts_with(&literal),
                MatchForm::End => text.ends_with(&literal),
            };
            let denied = evaluator::http(&filters, &field.traffic(&text)).denied;
            prop_assert_eq!(
                !denied,
                expected,
                "{:?} {:?} {:?} against {:?}",
                field,
                form,
                &literal,
                text
            );
        }
        Ok(())
    });
    Ok(result.map_err(|failed| format!("{failed}"))?)
}
