//! Strings of Go: immutable bytes, usually UTF-8, and Go's classes of characters.

use std::{borrow::Borrow, borrow::Cow, fmt, sync::Arc, sync::LazyLock};

use regex::Regex;

/// An immutable string of bytes. Functions of Go cut strings at any byte, so it need not be UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(Arc<[u8]>);

impl Text {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the text; bytes that are not UTF-8 become U+FFFD.
    pub fn to_str(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true for the empty string.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().into())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text.into_bytes().into())
    }
}

impl From<Cow<'_, str>> for Text {
    fn from(text: Cow<'_, str>) -> Self {
        Self(text.as_bytes().into())
    }
}

impl From<&[u8]> for Text {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl Borrow<[u8]> for Text {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_str(), formatter)
    }
}

/// Returns the first character and its length. An invalid byte is U+FFFD of length 1, and `None` is the end.
pub(super) fn first_char(bytes: &[u8]) -> Option<(char, usize)> {
    let first = *bytes.first()?;
    if first.is_ascii() {
        return Some((char::from(first), 1));
    }
    let head = &bytes[..bytes.len().min(4)];
    let valid = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&head[..error.valid_up_to()]).unwrap_or_default(),
    };
    let character = valid.chars().next();
    Some(character.map_or((char::REPLACEMENT_CHARACTER, 1), |character| {
        (character, character.len_utf8())
    }))
}

/// The characters of a string, each with its length in bytes; see [`first_char`].
pub(super) fn chars(mut bytes: &[u8]) -> impl Iterator<Item = (char, usize)> {
    std::iter::from_fn(move || {
        let (character, length) = first_char(bytes)?;
        bytes = &bytes[length..];
        Some((character, length))
    })
}

/// Appends a character as UTF-8.
pub(super) fn push_char(bytes: &mut Vec<u8>, character: char) {
    bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
}

/// Returns the position of a substring.
pub(super) fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    if part.is_empty() {
        return Some(0);
    }
    bytes.windows(part.len()).position(|window| window == part)
}

/// Returns the parts between separators, at most `most` of them. An empty separator splits into characters.
pub(super) fn split<'a>(bytes: &'a [u8], separator: &[u8], most: usize) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    let mut rest = bytes;
    while parts.len() + 1 < most {
        let cut = if separator.is_empty() {
            match first_char(rest) {
                Some((_, length)) if length < rest.len() => Some((length, length)),
                _ => None,
            }
        } else {
            find(rest, separator).map(|position| (position, position + separator.len()))
        };
        let Some((end, next)) = cut else { break };
        parts.push(&rest[..end]);
        rest = &rest[next..];
    }
    if !(separator.is_empty() && bytes.is_empty()) {
        parts.push(rest);
    }
    parts
}

/// Classes of Unicode by general category. `char`'s own predicates are wider than Go's.
macro_rules! class {
    ($name:ident, $ascii:expr, $pattern:literal, $doc:literal) => {
        #[doc = $doc]
        pub(super) fn $name(character: char) -> bool {
            static CLASS: LazyLock<Regex> =
                LazyLock::new(|| Regex::new($pattern).expect("because the pattern is constant"));
            let ascii: fn(&char) -> bool = $ascii;
            if character.is_ascii() {
                return ascii(&character);
            }
            CLASS.is_match(character.encode_utf8(&mut [0; 4]))
        }
    };
}

class!(is_letter, char::is_ascii_alphabetic, r"^\p{L}$", "True for letters.");
class!(is_digit, char::is_ascii_digit, r"^\p{Nd}$", "True for decimal digits.");
class!(is_number, char::is_ascii_digit, r"^\p{N}$", "True for numbers.");
class!(
    is_upper,
    char::is_ascii_uppercase,
    r"^\p{Lu}$",
    "True for upper case letters."
);
class!(
    is_lower,
    char::is_ascii_lowercase,
    r"^\p{Ll}$",
    "True for lower case letters."
);
class!(is_title, |_| false, r"^\p{Lt}$", "True for title case letters.");
class!(
    is_punctuation,
    |character| character.is_ascii_punctuation() && !"$+<=>^`|~".contains(*character),
    r"^\p{P}$",
    "True for punctuation."
);
class!(
    is_printable,
    |character| matches!(character, ' '..='~'),
    r"^[\p{L}\p{M}\p{N}\p{P}\p{S}]$",
    "True for characters that quoting keeps."
);

/// True for letters, digits and underscores, of which names consist.
pub(super) fn is_name(character: char) -> bool {
    character == '_' || is_letter(character) || is_digit(character)
}

/// True for white space.
pub(super) fn is_space(character: char) -> bool {
    matches!(
        character,
        '\t'..='\r' | ' ' | '\u{85}' | '\u{a0}' | '\u{1680}' | '\u{2000}'..='\u{200a}' | '\u{2028}' | '\u{2029}'
            | '\u{202f}' | '\u{205f}' | '\u{3000}'
    )
}

/// Returns the upper case form, if it is one character.
pub(super) fn to_upper(character: char) -> char {
    single(character, character.to_uppercase())
}

/// Returns the lower case form, if it is one character.
pub(super) fn to_lower(character: char) -> char {
    match character {
        'İ' => 'i',
        character => single(character, character.to_lowercase()),
    }
}

/// Returns the title case form, which differs from the upper case form in a few digraphs.
pub(super) fn to_title(character: char) -> char {
    match character {
        'Ǆ' | 'ǅ' | 'ǆ' => 'ǅ',
        'Ǉ' | 'ǈ' | 'ǉ' => 'ǈ',
        'Ǌ' | 'ǋ' | 'ǌ' => 'ǋ',
        'Ǳ' | 'ǲ' | 'ǳ' => 'ǲ',
        'ა'..='ჿ' => character,
        character => to_upper(character),
    }
}

fn single(character: char, mut mapped: impl Iterator<Item = char>) -> char {
    match (mapped.next(), mapped.next()) {
        (Some(mapped), None) => mapped,
        _ => character,
    }
}

/// Returns the text without white space at its ends.
pub(super) fn trim(bytes: &[u8]) -> &[u8] {
    trim_matches(bytes, is_space)
}

/// Returns the text without characters of a set at its ends.
pub(super) fn trim_matches(bytes: &[u8], is_member: impl Fn(char) -> bool) -> &[u8] {
    let mut begin = 0;
    while let Some((character, length)) = first_char(&bytes[begin..]) {
        if !is_member(character) {
            break;
        }
        begin += length;
    }
    let mut end = bytes.len();
    while end > begin {
        let (character, length) = last_char(&bytes[begin..end]);
        if !is_member(character) {
            break;
        }
        end -= length;
    }
    &bytes[begin..end]
}

/// Returns the last character of a string that is not empty, and its length.
fn last_char(bytes: &[u8]) -> (char, usize) {
    for length in 1..=bytes.len().min(4) {
        if let Ok(text) = std::str::from_utf8(&bytes[bytes.len() - length..])
            && let Some(character) = text.chars().next()
        {
            return (character, length);
        }
    }
    (char::REPLACEMENT_CHARACTER, 1)
}
