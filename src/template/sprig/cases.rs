//! Upper and lower case, words, and line wrapping.

use super::{
    super::{
        limits::{Exceeded, Failure},
        text::{
            Text, chars, is_digit, is_letter, is_lower, is_number, is_punctuation, is_space, is_title, is_upper,
            push_char, to_lower, to_title, to_upper,
        },
        types::Type,
        value::{Context, Function, Value},
    },
    bytes, int, of_strings, text,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::String;
    let mapper = |name: &str, map: fn(&[char]) -> Vec<char>| {
        Function::new(name, &[String], String, move |context, arguments| {
            let whole = bytes(arguments, 0);
            // A character may grow, and some functions add connectors.
            context.allocate(whole.len().saturating_mul(6))?;
            let characters: Vec<char> = chars(whole).map(|(character, _)| character).collect();
            let mapped: std::string::String = map(&characters).into_iter().collect();
            Ok(mapped.into())
        })
    };
    let int_type = Type::INT;
    vec![
        of_strings("upper", 1, String, |context, arguments| {
            recased(context, bytes(arguments, 0), <[u8]>::to_ascii_uppercase, to_upper)
        }),
        of_strings("lower", 1, String, |context, arguments| {
            recased(context, bytes(arguments, 0), <[u8]>::to_ascii_lowercase, to_lower)
        }),
        mapper("title", title),
        mapper("untitle", untitle),
        mapper("swapcase", swap),
        mapper("camelcase", camel),
        mapper("snakecase", |characters| words(characters, '_')),
        mapper("kebabcase", |characters| words(characters, '-')),
        of_strings("initials", 1, String, |context, arguments| {
            let whole = bytes(arguments, 0);
            context.allocate(whole.len())?;
            // Each byte counts as a character.
            let mut after_gap = true;
            let mut out = Vec::new();
            for byte in whole {
                let character = char::from(*byte);
                if is_space(character) {
                    after_gap = true;
                } else if std::mem::take(&mut after_gap) {
                    push_char(&mut out, character);
                }
            }
            Ok(out.into())
        }),
        Function::new("abbrev", &[int_type.clone(), String], String, |context, arguments| {
            if int(arguments, 0) < 4 {
                return Ok(arguments[1].clone());
            }
            abbreviated(context, bytes(arguments, 1), 0, int(arguments, 0))
        }),
        Function::new(
            "abbrevboth",
            &[int_type.clone(), int_type.clone(), String],
            String,
            |context, arguments| {
                let (left, right) = (int(arguments, 0), int(arguments, 1));
                if right < 4 || left > 0 && right < 7 {
                    return Ok(arguments[2].clone());
                }
                abbreviated(context, bytes(arguments, 2), left, right)
            },
        ),
        Function::new("wrap", &[int_type.clone(), String], String, |context, arguments| {
            wrap(context, bytes(arguments, 1), int(arguments, 0), b"\n", false)
        }),
        Function::new("wrapWith", &[int_type, String, String], String, |context, arguments| {
            let line_break = match bytes(arguments, 1) {
                b"" => b"\n",
                line_break => line_break,
            };
            wrap(context, bytes(arguments, 2), int(arguments, 0), line_break, true)
        }),
    ]
}

/// Returns a text in another case. Names are ASCII as a rule, which needs no table of characters.
fn recased(
    context: &mut Context<'_>,
    whole: &[u8],
    of_ascii: fn(&[u8]) -> Vec<u8>,
    of_character: fn(char) -> char,
) -> Result<Value, Failure> {
    // A character may grow.
    context.allocate(whole.len().saturating_mul(6))?;
    if whole.is_ascii() {
        return Ok(of_ascii(whole).into());
    }
    let mapped: String = chars(whole).map(|(character, _)| of_character(character)).collect();
    Ok(mapped.into())
}

/// Makes letters behind separators title case.
fn title(characters: &[char]) -> Vec<char> {
    let mut before = ' ';
    let titled = characters.iter().map(|&character| {
        let is_start = is_separator(before);
        before = character;
        if is_start { to_title(character) } else { character }
    });
    titled.collect()
}

fn is_separator(character: char) -> bool {
    if character.is_ascii() {
        return !(character.is_ascii_alphanumeric() || character == '_');
    }
    !is_letter(character) && !is_digit(character) && is_space(character)
}

fn untitle(characters: &[char]) -> Vec<char> {
    let mut at_start = true;
    let mapped = characters.iter().map(|&character| {
        if is_space(character) {
            at_start = true;
            character
        } else if std::mem::take(&mut at_start) {
            to_lower(character)
        } else {
            character
        }
    });
    mapped.collect()
}

fn swap(characters: &[char]) -> Vec<char> {
    let mut after_space = true;
    let swapped = characters.iter().map(|&character| {
        if is_upper(character) || is_title(character) {
            after_space = false;
            to_lower(character)
        } else if is_lower(character) {
            if std::mem::take(&mut after_space) {
                to_title(character)
            } else {
                to_upper(character)
            }
        } else {
            after_space = is_space(character);
            character
        }
    });
    swapped.collect()
}

fn is_connector(character: char) -> bool {
    character == '-' || character == '_' || is_space(character)
}

/// Joins words with upper case initials. Connectors at the start stay, and a word in upper case becomes lower case.
fn camel(characters: &[char]) -> Vec<char> {
    let start = characters.iter().position(|&character| !is_connector(character));
    let Some(start) = start else {
        // Without letters, the last connector is doubled.
        return [characters, &characters[characters.len().saturating_sub(1)..]].concat();
    };
    let mut out = characters[..start].to_vec();
    let mut pending = to_upper(characters[start]);
    let mut in_upper = is_upper(characters[start]);
    if start + 1 == characters.len() {
        out.push(pending);
        return out;
    }
    for &character in &characters[start + 1..] {
        let last = std::mem::replace(&mut pending, character);
        if is_connector(character) && is_connector(last) {
            out.push(last);
            continue;
        }
        if is_connector(last) {
            in_upper = is_upper(character);
            pending = to_upper(character);
        } else {
            if in_upper {
                if is_upper(character) {
                    pending = to_lower(character);
                } else {
                    in_upper = false;
                }
            }
            out.push(last);
        }
    }
    out.push(pending);
    out
}

/// The kinds of words between which snake case and kebab case set connectors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    End,
    Number,
    Upper,
    Alphabet,
    Connector,
    Punctuation,
    Other,
}

fn is_alphabet(character: char) -> bool {
    is_letter(character)
}

/// Returns the first word, and its length.
fn first_word(rest: &[char]) -> (Word, usize) {
    let Some(&first) = rest.first() else {
        return (Word::End, 0);
    };
    let run = |is_member: &dyn Fn(char) -> bool| {
        let members = rest.iter().skip(1).take_while(|character| is_member(**character));
        1 + members.count()
    };
    let is_small = |character: char| is_alphabet(character) && !is_upper(character);
    if is_connector(first) {
        (Word::Connector, run(&is_connector))
    } else if is_punctuation(first) {
        (Word::Punctuation, run(&is_punctuation))
    } else if is_upper(first) {
        match rest.get(1) {
            Some(&second) if is_upper(second) => {
                let length = run(&is_upper);
                // The last letter of "HTTPStatus" in upper case begins the next word.
                let splits = rest.get(length).is_some_and(|&next| is_alphabet(next));
                (Word::Upper, length - usize::from(splits))
            }
            Some(&second) if is_alphabet(second) => (Word::Upper, run(&is_small)),
            _ => (Word::Upper, 1),
        }
    } else if is_alphabet(first) {
        (Word::Alphabet, run(&is_small))
    } else if is_number(first) {
        (Word::Number, run(&is_number))
    } else {
        let is_other = |character: char| {
            !is_connector(character) && !is_alphabet(character) && !is_number(character) && !is_punctuation(character)
        };
        (Word::Other, run(&is_other))
    }
}

/// Splits a text into words. `next` moves to the next one.
struct Words<'a> {
    kind: Word,
    word: &'a [char],
    rest: &'a [char],
    connector: char,
    out: Vec<char>,
}

impl<'a> Words<'a> {
    fn next(&mut self) {
        let (kind, length) = first_word(self.rest);
        self.kind = kind;
        (self.word, self.rest) = self.rest.split_at(length);
    }

    fn write(&mut self, kind: Word, word: &'a [char]) {
        if !matches!(kind, Word::Upper | Word::Connector) {
            self.out.extend_from_slice(word);
            return;
        }
        let connector = self.connector;
        self.out.extend(word.iter().map(|&character| match character {
            character if is_connector(character) => connector,
            character if is_upper(character) => to_lower(character),
            character => character,
        }));
    }

    /// Writes words of letters and digits that belong together.
    fn write_run(&mut self) {
        while matches!(self.kind, Word::Alphabet | Word::Number) {
            self.write(self.kind, self.word);
            self.next();
        }
    }
}

/// Joins words in lower case by connectors, as sprig's library does.
fn words(characters: &[char], connector: char) -> Vec<char> {
    let mut words = Words {
        kind: Word::End,
        word: &[],
        rest: characters,
        connector,
        out: Vec::new(),
    };
    words.next();
    while !words.rest.is_empty() {
        if words.kind != Word::Connector {
            words.write(words.kind, words.word);
        }
        let (before, last) = (words.kind, words.word);
        words.next();
        match before {
            Word::Number => {
                words.write_run();
                if !matches!(words.kind, Word::End | Word::Punctuation | Word::Connector) {
                    words.out.push(connector);
                }
            }
            Word::Connector => words.write(before, last),
            Word::Punctuation => {}
            _ if words.kind != Word::Number => {
                if !matches!(words.kind, Word::Connector | Word::Punctuation) {
                    words.out.push(connector);
                }
            }
            _ => number_behind_letters(&mut words),
        }
    }
    words.write(words.kind, words.word);
    words.out
}

/// Sets a number behind letters: "Bld4Floor" is "bld4_floor", and "HTTP2xx" is "http_2xx".
fn number_behind_letters(words: &mut Words<'_>) {
    if words.rest.is_empty() {
        return;
    }
    let number = words.word;
    words.next();
    if words.kind != Word::Alphabet {
        words.write(Word::Number, number);
        if !matches!(words.kind, Word::Connector | Word::Punctuation) {
            words.out.push(words.connector);
        }
        return;
    }
    words.out.push(words.connector);
    words.write(Word::Number, number);
    words.write_run();
    if !matches!(words.kind, Word::End | Word::Connector | Word::Punctuation) {
        words.out.push(words.connector);
    }
}

/// Shortens a text to a width, of which dots take three bytes at each end that is cut.
fn abbreviated(context: &mut Context<'_>, whole: &[u8], left: i64, width: i64) -> Result<Value, Failure> {
    let length = whole.len() as i64;
    if whole.is_empty() || length <= width {
        return text(context, whole);
    }
    let mut offset = left.min(length);
    if length - offset < width - 3 {
        offset = length - (width - 3);
    }
    let end = |from: &[u8], count: i64| from[..count as usize].to_vec();
    let out = if offset <= 4 {
        [end(whole, width - 3), b"...".to_vec()].concat()
    } else if width < 7 {
        Vec::new()
    } else if offset.saturating_add(width - 3) < length {
        let rest = &whole[offset as usize..];
        let inner = if width - 3 < 4 {
            Vec::new()
        } else if rest.len() as i64 <= width - 3 {
            rest.to_vec()
        } else {
            [end(rest, width - 6), b"...".to_vec()].concat()
        };
        [b"...".to_vec(), inner].concat()
    } else {
        [b"...".to_vec(), whole[(length - (width - 3)) as usize..].to_vec()].concat()
    };
    text(context, &out)
}

/// Breaks lines at spaces. Words that are longer than a line are broken on demand.
fn wrap(
    context: &mut Context<'_>,
    whole: &[u8],
    length: i64,
    line_break: &[u8],
    breaks_words: bool,
) -> Result<Value, Failure> {
    let length = usize::try_from(length.max(1)).unwrap_or(usize::MAX);
    let mut out = Vec::new();
    let mut rest = whole;
    while rest.len() > length {
        context.step(1)?;
        if rest[0] == b' ' {
            rest = &rest[1..];
            continue;
        }
        context.step(length / 64)?;
        let space = rest[..=length].iter().rposition(|byte| *byte == b' ');
        let (end, next) = match space {
            Some(space) => (space, space + 1),
            None if breaks_words => (length, length),
            None => match rest[length..].iter().position(|byte| *byte == b' ') {
                Some(space) => (length + space, length + space + 1),
                None => break,
            },
        };
        line(context, &mut out, &rest[..end], line_break)?;
        rest = &rest[next..];
    }
    line(context, &mut out, rest, b"")?;
    Ok(Value::String(Text::from(out)))
}

fn line(context: &mut Context<'_>, out: &mut Vec<u8>, line: &[u8], line_break: &[u8]) -> Result<(), Exceeded> {
    context.allocate(line.len() + line_break.len())?;
    out.extend_from_slice(line);
    out.extend_from_slice(line_break);
    Ok(())
}
