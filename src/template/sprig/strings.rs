//! Strings: cutting, joining, padding and searching.

use super::{
    super::{
        format,
        limits::{Exceeded, Failure},
        number::parse_decimal,
        quote::{Charset, append_quoted},
        text::{Text, chars, count, find, is_space, split, trim, trim_matches},
        types::Type,
        value::{Context, Function, List, Map, Value},
    },
    bytes,
    convert::{to_text, to_texts},
    int, of_strings, text,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Bool, String};
    let texts = String.list();
    let int_type = Type::INT;
    vec![
        Function::new("hello", &[], String, |_, _| Ok("Hello!".into())),
        of_strings("trim", 1, String, |context, arguments| {
            text(context, trim(bytes(arguments, 0)))
        }),
        of_strings("trimAll", 2, String, |context, arguments| {
            let set = bytes(arguments, 0);
            let is_member = |character| chars(set).any(|(member, _)| member == character);
            context.step(bytes(arguments, 1).len().saturating_mul(set.len()) / 16)?;
            text(context, trim_matches(bytes(arguments, 1), is_member))
        }),
        of_strings("trimSuffix", 2, String, |context, arguments| {
            let whole = bytes(arguments, 1);
            text(context, whole.strip_suffix(bytes(arguments, 0)).unwrap_or(whole))
        }),
        of_strings("trimPrefix", 2, String, |context, arguments| {
            let whole = bytes(arguments, 1);
            text(context, whole.strip_prefix(bytes(arguments, 0)).unwrap_or(whole))
        }),
        of_strings("nospace", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            context.allocate(whole.len().saturating_mul(2))?;
            // Each byte counts as a character, also that of a longer one.
            let kept = whole.iter().map(|byte| char::from(*byte));
            Ok(kept
                .filter(|character| !is_space(*character))
                .collect::<std::string::String>()
                .into())
        }),
        of_strings("contains", 2, Bool, |context, arguments| {
            let (part, whole) = (bytes(arguments, 0), bytes(arguments, 1));
            search_steps(context, whole, part)?;
            Ok(find(whole, part).is_some().into())
        }),
        of_strings("hasPrefix", 2, Bool, |_, arguments| {
            Ok(bytes(arguments, 1).starts_with(bytes(arguments, 0)).into())
        }),
        of_strings("hasSuffix", 2, Bool, |_, arguments| {
            Ok(bytes(arguments, 1).ends_with(bytes(arguments, 0)).into())
        }),
        of_strings("replace", 3, String, replace),
        Function::new("trunc", &[int_type.clone(), String], String, trunc),
        Function::new("substr", &[int_type.clone(), int_type.clone(), String], String, substr),
        Function::new("repeat", &[int_type.clone(), String], String, |context, arguments| {
            Ok(repeat(context, bytes(arguments, 1), int(arguments, 0))?.into())
        }),
        Function::new("indent", &[int_type.clone(), String], String, |context, arguments| {
            Ok(indent(context, bytes(arguments, 1), int(arguments, 0))?.into())
        }),
        Function::new("nindent", &[int_type.clone(), String], String, |context, arguments| {
            let mut out = indent(context, bytes(arguments, 1), int(arguments, 0))?;
            out.insert(0, b'\n');
            Ok(out.into())
        }),
        Function::new("plural", &[String, String, int_type.clone()], String, |_, arguments| {
            Ok(arguments[usize::from(int(arguments, 2) != 1)].clone())
        }),
        Function::variadic("quote", &[Any], String, |context, arguments| {
            joined(context, arguments, |context, out, value| {
                let shown;
                let text = match value {
                    Value::String(text) => text,
                    value => {
                        shown = to_text(context, value)?;
                        &shown
                    }
                };
                context.allocate(text.len().saturating_mul(4))?;
                append_quoted(out, text.bytes(), Charset::Unicode);
                Ok(())
            })
        }),
        Function::variadic("squote", &[Any], String, |context, arguments| {
            joined(context, arguments, |context, out, value| {
                out.push(b'\'');
                out.extend(format::display(context, value)?);
                out.push(b'\'');
                Ok(())
            })
        }),
        Function::variadic("cat", &[Any], String, |context, arguments| {
            joined(context, arguments, |context, out, value| {
                out.extend(format::display(context, value)?);
                Ok(())
            })
        }),
        Function::new("toString", &[Any], String, |context, arguments| {
            Ok(to_text(context, arguments[0])?.into())
        }),
        Function::new(
            "toStrings",
            &[Any],
            texts.clone(),
            |context, arguments| match arguments[0] {
                Value::List(list) if *list.element() == Type::String => Ok(list.clone().into()),
                value => Ok(List::of_strings(to_texts(context, value)?).into()),
            },
        ),
        Function::new("join", &[String, Any], String, |context, arguments| {
            let texts = to_texts(context, arguments[1])?;
            let parts: Vec<&[u8]> = texts.iter().map(Text::bytes).collect();
            Ok(join(context, &parts, bytes(arguments, 0))?.into())
        }),
        Function::new("sortAlpha", &[Any], texts.clone(), |context, arguments| {
            let mut texts = to_texts(context, arguments[0])?;
            context.step(texts.len().saturating_mul(16))?;
            texts.sort();
            if matches!(arguments[0], Value::Nil) {
                // Go prints nil here.
                texts = vec!["<nil>".into()];
            }
            Ok(List::of_strings(texts).into())
        }),
        of_strings("splitList", 2, texts, |context, arguments| {
            let parts = parts(context, bytes(arguments, 1), bytes(arguments, 0), usize::MAX)?;
            Ok(List::of_strings(parts).into())
        }),
        of_strings("split", 2, String.map(), |context, arguments| {
            let parts = parts(context, bytes(arguments, 1), bytes(arguments, 0), usize::MAX)?;
            Ok(numbered(parts))
        }),
        Function::new(
            "splitn",
            &[String, int_type.clone(), String],
            String.map(),
            |context, arguments| {
                let most = int(arguments, 1);
                if most == 0 {
                    return Ok(numbered(Vec::new()));
                }
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                Ok(numbered(parts(
                    context,
                    bytes(arguments, 2),
                    bytes(arguments, 0),
                    most,
                )?))
            },
        ),
        of_strings("atoi", 1, int_type, |_, arguments| {
            let text = std::string::String::from_utf8_lossy(bytes(arguments, 0));
            Ok(Value::int(atoi(&text)))
        }),
        of_strings("fail", 1, String, |_, arguments| {
            let message = std::string::String::from_utf8_lossy(bytes(arguments, 0));
            Err(Failure::message(message))
        }),
    ]
}

/// Reads a decimal integer; 0 for other texts, and the nearest one for numbers that are too large.
fn atoi(text: &str) -> i64 {
    if let Some(number) = parse_decimal(text) {
        return number;
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return 0;
    }
    if text.starts_with('-') { i64::MIN } else { i64::MAX }
}

/// Joins the arguments that are not nil by spaces.
fn joined(
    context: &mut Context<'_>,
    arguments: &[&Value],
    append: fn(&mut Context<'_>, &mut Vec<u8>, &Value) -> Result<(), Failure>,
) -> Result<Value, Failure> {
    let mut out = Vec::new();
    let shown = arguments
        .iter()
        .filter(|value| !matches!(value, Value::Nil | Value::Missing));
    for (position, value) in shown.enumerate() {
        if position > 0 {
            out.push(b' ');
        }
        let before = out.len();
        append(context, &mut out, value)?;
        context.allocate(out.len() - before)?;
    }
    Ok(out.into())
}

/// Takes the steps of a search, whose time is linear.
fn search_steps(context: &mut Context<'_>, whole: &[u8], part: &[u8]) -> Result<(), Exceeded> {
    context.step(whole.len().saturating_add(part.len()) / 64)
}

fn parts<'a>(context: &mut Context<'_>, whole: &'a [u8], by: &[u8], most: usize) -> Result<Vec<&'a [u8]>, Exceeded> {
    search_steps(context, whole, by)?;
    context.allocate(whole.len())?;
    let count = if by.is_empty() { whole.len() } else { count(whole, by) };
    context.allocate_elements(count.min(most) + 1)?;
    Ok(split(whole, by, most))
}

fn numbered(parts: Vec<&[u8]>) -> Value {
    let parts = parts.into_iter().enumerate();
    Map::of_strings(parts.map(|(position, part)| (format!("_{position}"), part))).into()
}

fn join(context: &mut Context<'_>, parts: &[&[u8]], by: &[u8]) -> Result<Vec<u8>, Exceeded> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    context.allocate(length.saturating_add(by.len().saturating_mul(parts.len())))?;
    Ok(parts.join(by))
}

fn repeat(context: &mut Context<'_>, part: &[u8], count: i64) -> Result<Vec<u8>, Failure> {
    let count = usize::try_from(count).map_err(|_| Failure::message("strings: negative Repeat count"))?;
    context.allocate(part.len().saturating_mul(count))?;
    Ok(if part.is_empty() {
        Vec::new()
    } else {
        part.repeat(count)
    })
}

fn indent(context: &mut Context<'_>, whole: &[u8], spaces: i64) -> Result<Vec<u8>, Failure> {
    let pad = repeat(context, b" ", spaces)?;
    let lines = whole.split(|byte| *byte == b'\n');
    let length = pad
        .len()
        .saturating_mul(lines.clone().count())
        .saturating_add(whole.len());
    context.allocate(length)?;
    let mut out = Vec::with_capacity(length);
    for (position, line) in lines.enumerate() {
        if position > 0 {
            out.push(b'\n');
        }
        out.extend_from_slice(&pad);
        out.extend_from_slice(line);
    }
    Ok(out)
}

fn replace(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let (old, new, whole) = (bytes(arguments, 0), bytes(arguments, 1), bytes(arguments, 2));
    if old.is_empty() {
        let mut parts: Vec<&[u8]> = vec![b""];
        parts.extend(parts_of(context, whole)?);
        parts.push(b"");
        return Ok(join(context, &parts, new)?.into());
    }
    let parts = parts(context, whole, old, usize::MAX)?;
    Ok(join(context, &parts, new)?.into())
}

/// Returns the characters of a text.
fn parts_of<'a>(context: &mut Context<'_>, whole: &'a [u8]) -> Result<Vec<&'a [u8]>, Exceeded> {
    parts(context, whole, b"", usize::MAX)
}

fn trunc(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let whole = bytes(arguments, 1);
    let count = int(arguments, 0);
    let size = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
    let cut = if count < 0 && size < whole.len() {
        &whole[whole.len() - size..]
    } else if count >= 0 && size < whole.len() {
        &whole[..size]
    } else {
        return Ok(arguments[1].clone());
    };
    text(context, cut)
}

fn substr(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let whole = bytes(arguments, 2);
    let length = whole.len() as i64;
    let (start, end) = (int(arguments, 0), int(arguments, 1));
    let outside = |bounds: String| Failure::Message(format!("runtime error: slice bounds out of range {bounds}"));
    let (start, end) = if start < 0 {
        if end < 0 {
            return Err(outside(format!("[:{end}]")));
        }
        if end > length {
            return Err(outside(format!("[:{end}] with length {length}")));
        }
        (0, end)
    } else if end < 0 || end > length {
        (start, length)
    } else {
        (start, end)
    };
    if start > end {
        return Err(outside(format!("[{start}:{end}]")));
    }
    text(context, &whole[start as usize..end as usize])
}
