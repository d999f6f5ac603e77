//! Regular expressions of RE2, whose time is linear in the text.

use std::sync::Arc;

use regex::bytes::{Regex, RegexBuilder};

use crate::base::re2::{self, from_re2};

use super::{
    super::{
        limits::Failure,
        text::Text,
        types::Type,
        value::{Context, Function, List, Value},
    },
    bytes, int, of_strings, text,
};

/// The maximum length of an expression in bytes.
const MAX_EXPRESSION: usize = 4096;
/// The maximum size of the compiled form in bytes.
const MAX_COMPILED: usize = 512 << 10;
/// The maximum length of a text in bytes. One search is not interrupted.
const MAX_TEXT: usize = 1 << 20;
/// The number of compiled expressions that one rendering keeps.
const MAX_KEPT: usize = 32;
/// The steps of a compilation.
const COMPILATION: usize = 2000;

pub(super) fn functions() -> Vec<Function> {
    use Type::{Bool, String};
    let mut functions = vec![
        of_strings("regexMatch", 2, Bool, |context, arguments| {
            let matched = search(context, arguments, Regex::is_match);
            match matched {
                Err(Failure::Message(_)) => Ok(false.into()),
                matched => Ok(matched?.into()),
            }
        }),
        of_strings("mustRegexMatch", 2, Bool, |context, arguments| {
            Ok(search(context, arguments, Regex::is_match)?.into())
        }),
        of_strings("regexQuoteMeta", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            context.allocate(whole.len().saturating_mul(2))?;
            let mut out = Vec::with_capacity(whole.len());
            for byte in whole {
                if b"\\.+*?()|[]{}^$".contains(byte) {
                    out.push(b'\\');
                }
                out.push(*byte);
            }
            Ok(out.into())
        }),
    ];
    for prefix in ["r", "mustR"] {
        let name = |rest: &str| format!("{prefix}{rest}");
        // Without "must", an invalid expression is a panic with another text.
        let is_must = prefix != "r";
        let compiled = move |context: &mut Context<'_>, arguments: &[&Value]| {
            compile(context, bytes(arguments, 0)).map_err(|failure| match failure {
                Failure::Message(message) if !is_must => {
                    let shown = std::string::String::from_utf8_lossy(bytes(arguments, 0));
                    Failure::Message(format!("regexp: Compile(`{shown}`): {message}"))
                }
                failure => failure,
            })
        };
        functions.push(Function::new(
            &name("egexFind"),
            &[String, String],
            String,
            move |context, arguments| {
                let regex = compiled(context, arguments)?;
                let whole = subject(context, bytes(arguments, 1))?;
                let found = regex.find(whole).map_or(&b""[..], |found| found.as_bytes());
                text(context, found)
            },
        ));
        functions.push(Function::new(
            &name("egexFindAll"),
            &[String, String, Type::INT],
            String.list(),
            move |context, arguments| {
                let regex = compiled(context, arguments)?;
                let whole = subject(context, bytes(arguments, 1))?;
                let most = usize::try_from(int(arguments, 2)).unwrap_or(usize::MAX);
                let mut found: Vec<Text> = Vec::new();
                for part in regex.find_iter(whole).take(most) {
                    context.allocate_elements(1)?;
                    context.allocate(part.len())?;
                    found.push(part.as_bytes().into());
                }
                if found.is_empty() {
                    return Ok(List::nil(Type::String).into());
                }
                Ok(List::of_strings(found).into())
            },
        ));
        functions.push(Function::new(
            &name("egexSplit"),
            &[String, String, Type::INT],
            String.list(),
            move |context, arguments| {
                let regex = compiled(context, arguments)?;
                split(
                    context,
                    &regex,
                    bytes(arguments, 0),
                    bytes(arguments, 1),
                    int(arguments, 2),
                )
            },
        ));
        for (rest, is_literal) in [("egexReplaceAll", false), ("egexReplaceAllLiteral", true)] {
            functions.push(Function::new(
                &name(rest),
                &[String, String, String],
                String,
                move |context, arguments| {
                    let regex = compiled(context, arguments)?;
                    let whole = subject(context, bytes(arguments, 1))?;
                    replace(context, &regex, whole, bytes(arguments, 2), is_literal)
                },
            ));
        }
    }
    functions
}

fn search<T>(context: &mut Context<'_>, arguments: &[&Value], action: fn(&Regex, &[u8]) -> T) -> Result<T, Failure> {
    let regex = compile(context, bytes(arguments, 0))?;
    let whole = subject(context, bytes(arguments, 1))?;
    Ok(action(&regex, whole))
}

/// Returns a text to search in, whose search the budget pays.
fn subject<'a>(context: &mut Context<'_>, whole: &'a [u8]) -> Result<&'a [u8], Failure> {
    if whole.len() > MAX_TEXT {
        let length = whole.len();
        return Err(Failure::Message(format!(
            "the text has {length} bytes, the most for a regular expression is {MAX_TEXT}"
        )));
    }
    context.step(whole.len())?;
    Ok(whole)
}

fn compile(context: &mut Context<'_>, expression: &[u8]) -> Result<Arc<Regex>, Failure> {
    let invalid = |reason: &str| Failure::Message(format!("error parsing regexp: {reason}"));
    let expression = std::str::from_utf8(expression).map_err(|_| invalid("invalid UTF-8"))?;
    if let Some(regex) = context.regexes.get(expression) {
        return Ok(regex.clone());
    }
    if expression.len() > MAX_EXPRESSION {
        let length = expression.len();
        return Err(invalid(&format!(
            "the expression has {length} bytes, the most is {MAX_EXPRESSION}"
        )));
    }
    context.step(COMPILATION)?;
    let rewritten = from_re2(expression).map_err(|error| invalid(&error.to_string()))?;
    let regex = RegexBuilder::new(&with_ascii_classes(&rewritten))
        .size_limit(MAX_COMPILED)
        .dfa_size_limit(MAX_COMPILED)
        .nest_limit(100)
        .build()
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => invalid("expression too large"),
            error => invalid(&re2::reason(&error)),
        })?;
    let regex = Arc::new(regex);
    if context.regexes.len() < MAX_KEPT {
        context.regexes.insert(expression.to_owned(), regex.clone());
    }
    Ok(regex)
}

/// Replaces the classes that mean ASCII in RE2 and Unicode in the library.
fn with_ascii_classes(expression: &str) -> String {
    let mut out = String::with_capacity(expression.len());
    let mut characters = expression.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            out.push(character);
            continue;
        }
        match characters.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('s') => out.push_str(r"[\t\n\f\r ]"),
            Some('S') => out.push_str(r"[^\t\n\f\r ]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some('b') => out.push_str(r"(?-u:\b)"),
            Some('B') => out.push_str(r"(?-u:\B)"),
            escaped => {
                out.push('\\');
                out.extend(escaped);
            }
        }
    }
    out
}

fn replace(
    context: &mut Context<'_>,
    regex: &Regex,
    whole: &[u8],
    replacement: &[u8],
    is_literal: bool,
) -> Result<Value, Failure> {
    let mut out = Vec::new();
    let mut end = 0;
    for captures in regex.captures_iter(whole) {
        let Some(found) = captures.get(0) else { continue };
        let before = out.len();
        out.extend_from_slice(&whole[end..found.start()]);
        if is_literal {
            out.extend_from_slice(replacement);
        } else {
            // A group may be inserted several times.
            context.allocate(replacement.len() / 2 * found.len())?;
            captures.expand(replacement, &mut out);
        }
        context.allocate(out.len() - before + 1)?;
        context.step(1)?;
        end = found.end();
    }
    out.extend_from_slice(&whole[end..]);
    context.allocate(whole.len())?;
    Ok(out.into())
}

/// Splits a text at the matches, as Go does: at most into a number of parts, and not at an empty match at the start.
fn split(
    context: &mut Context<'_>,
    regex: &Regex,
    expression: &[u8],
    whole: &[u8],
    most: i64,
) -> Result<Value, Failure> {
    if most == 0 {
        return Ok(List::nil(Type::String).into());
    }
    let whole = subject(context, whole)?;
    if !expression.is_empty() && whole.is_empty() {
        return Ok(List::of_strings([""]).into());
    }
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut parts: Vec<Text> = Vec::new();
    let (mut begin, mut end) = (0, 0);
    for found in regex.find_iter(whole).take(most) {
        if parts.len() + 1 == most {
            break;
        }
        end = found.start();
        if found.end() != 0 {
            context.allocate_elements(1)?;
            context.allocate(end - begin)?;
            parts.push(whole[begin..end].into());
        }
        begin = found.end();
    }
    if end != whole.len() {
        parts.push(whole[begin..].into());
    }
    context.allocate(whole.len())?;
    Ok(List::of_strings(parts).into())
}
