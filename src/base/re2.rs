//! The syntax of RE2, which Envoy and Go share, in that of the library.

/// The reason why an expression is invalid in RE2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SyntaxError(pub String);

/// The maximum count of a repetition in RE2.
const MAX_REPEAT: u32 = 1000;

/// The Unicode classes of RE2: general categories, and the scripts of Unicode 15, which all its releases in use know.
const UNICODE_CLASSES: &str = "\
    Any C Cc Cf Co Cs L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs \
    Adlam Ahom Anatolian_Hieroglyphs Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak Bengali Bhaiksuki \
    Bopomofo Brahmi Braille Buginese Buhid Canadian_Aboriginal Carian Caucasian_Albanian Chakma Cham Cherokee \
    Chorasmian Common Coptic Cuneiform Cypriot Cypro_Minoan Cyrillic Deseret Devanagari Dives_Akuru Dogra Duployan \
    Egyptian_Hieroglyphs Elbasan Elymaic Ethiopic Georgian Glagolitic Gothic Grantha Greek Gujarati Gunjala_Gondi \
    Gurmukhi Han Hangul Hanifi_Rohingya Hanunoo Hatran Hebrew Hiragana Imperial_Aramaic Inherited \
    Inscriptional_Pahlavi Inscriptional_Parthian Javanese Kaithi Kannada Katakana Kawi Kayah_Li Kharoshthi \
    Khitan_Small_Script Khmer Khojki Khudawadi Lao Latin Lepcha Limbu Linear_A Linear_B Lisu Lycian Lydian Mahajani \
    Makasar Malayalam Mandaic Manichaean Marchen Masaram_Gondi Medefaidrin Meetei_Mayek Mende_Kikakui \
    Meroitic_Cursive Meroitic_Hieroglyphs Miao Modi Mongolian Mro Multani Myanmar Nabataean Nag_Mundari Nandinagari \
    New_Tai_Lue Newa Nko Nushu Nyiakeng_Puachue_Hmong Ogham Ol_Chiki Old_Hungarian Old_Italic Old_North_Arabian \
    Old_Permic Old_Persian Old_Sogdian Old_South_Arabian Old_Turkic Old_Uyghur Oriya Osage Osmanya Pahawh_Hmong \
    Palmyrene Pau_Cin_Hau Phags_Pa Phoenician Psalter_Pahlavi Rejang Runic Samaritan Saurashtra Sharada Shavian \
    Siddham SignWriting Sinhala Sogdian Sora_Sompeng Soyombo Sundanese Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le \
    Tai_Tham Tai_Viet Takri Tamil Tangsa Tangut Telugu Thaana Thai Tibetan Tifinagh Tirhuta Toto Ugaritic Vai \
    Vithkuqi Wancho Warang_Citi Yezidi Yi Zanabazar_Square";

/// The classes between `[:` and `:]`.
const POSIX_CLASSES: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper", "word",
    "xdigit",
];

/// Rewrites syntax that the library does not accept or understands differently: `\Q…\E`, `\C`, octal codes, `\<`, `\>`,
/// `\p{^…}`, literal braces, and literal brackets and operators in classes. Syntax that only the library accepts is an
/// error: nested repetitions and counts above [`MAX_REPEAT`], other flags, escapes and Unicode classes.
pub fn from_re2(expression: &str) -> Result<String, SyntaxError> {
    let mut rewriter = Rewriter {
        out: String::with_capacity(expression.len()),
        rest: expression,
        repeated: false,
    };
    while let Some(first) = rewriter.rest.chars().next() {
        rewriter.step(first)?;
    }
    Ok(rewriter.out)
}

/// Returns the reason why the library does not compile an expression: the last line of its message, which also draws
/// the expression.
pub fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let line = text.lines().last().unwrap_or_default().trim();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// Returns an expression that matches exactly this text, escaped as Go's `regexp.QuoteMeta` does.
pub fn quoted(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$".contains(c) {
            result.push('\\');
        }
        result.push(c);
    }
    result
}

struct Rewriter<'a> {
    out: String,
    rest: &'a str,
    /// True if the last element was a repetition.
    repeated: bool,
}

impl Rewriter<'_> {
    fn step(&mut self, first: char) -> Result<(), SyntaxError> {
        let repeated = std::mem::take(&mut self.repeated);
        match first {
            '\\' => self.escape_or_quote()?,
            '[' => self.class()?,
            '(' if self.rest.starts_with("(?") => self.group()?,
            '*' | '+' | '?' => self.repetition(1, repeated)?,
            '{' => match repetition_length(self.rest)? {
                Some(length) => self.repetition(length, repeated)?,
                None => self.replace("\\{", 1),
            },
            _ => self.keep(first.len_utf8()),
        }
        Ok(())
    }

    fn keep(&mut self, length: usize) {
        self.out.push_str(&self.rest[..length]);
        self.rest = &self.rest[length..];
    }

    fn replace(&mut self, text: &str, length: usize) {
        self.out.push_str(text);
        self.rest = &self.rest[length..];
    }

    /// Rewrites an escape outside of a class.
    fn escape_or_quote(&mut self) -> Result<(), SyntaxError> {
        if let Some(quoted) = self.rest.strip_prefix("\\Q") {
            let (literal, after) = quoted.split_once("\\E").unwrap_or((quoted, ""));
            self.out.push_str(&regex::escape(literal));
            self.rest = after;
        } else if self.rest.starts_with("\\C") {
            self.replace("(?s:.)", 2);
        } else {
            self.escape()?;
        }
        Ok(())
    }

    /// Rewrites an escape that classes have too.
    fn escape(&mut self) -> Result<(), SyntaxError> {
        let escaped = self.rest[1..].chars().next();
        match escaped {
            Some('p' | 'P') => return self.unicode_class(),
            Some(letter @ ('C' | 'Q' | 'u' | 'U')) => return Err(SyntaxError(format!("unknown escape \\{letter}"))),
            // Literal in RE2, ends of words in the library.
            Some('<') => self.replace("<", 2),
            Some('>') => self.replace(">", 2),
            _ => {
                let octal = octal_length(&self.rest[1..]);
                if let Some(code) = self
                    .rest
                    .get(1..=octal)
                    .and_then(|digits| u8::from_str_radix(digits, 8).ok())
                {
                    let hexadecimal = format!("\\x{code:02x}");
                    self.replace(&hexadecimal, 1 + octal);
                    return Ok(());
                }
                let is_braced = self.rest.starts_with("\\x{");
                let end = self.rest.find('}').filter(|_| is_braced);
                self.keep(end.map_or(1 + escaped.map_or(0, char::len_utf8), |end| end + 1));
            }
        }
        Ok(())
    }

    /// Rewrites `\pL`, `\p{Greek}` or `\p{^Greek}`. RE2 knows neither other properties nor other spellings.
    fn unicode_class(&mut self) -> Result<(), SyntaxError> {
        let text = &self.rest[2..];
        let (name, length) = match text.strip_prefix('{').and_then(|braced| braced.split_once('}')) {
            Some((name, _)) => (name, name.len() + 2),
            None => {
                let length = text.chars().next().map_or(0, char::len_utf8);
                (&text[..length], length)
            }
        };
        let inverted = name.strip_prefix('^');
        let class = inverted.unwrap_or(name);
        if !UNICODE_CLASSES.split(' ').any(|known| known == class) {
            return Err(SyntaxError(format!("unknown Unicode class {class:?}")));
        }
        let is_negated = self.rest.starts_with("\\P") != inverted.is_some();
        let letter = if is_negated { 'P' } else { 'p' };
        self.replace(&format!("\\{letter}{{{class}}}"), 2 + length);
        Ok(())
    }

    /// Keeps the start of a group without a number: flags, or a name.
    fn group(&mut self) -> Result<(), SyntaxError> {
        let inner = &self.rest[2..];
        let length = match inner.strip_prefix("P<").or_else(|| inner.strip_prefix('<')) {
            Some(named) => {
                let is_word = |character: char| character == '_' || character.is_alphanumeric();
                let name = named.split_once('>').map(|(name, _)| name);
                let name = name.filter(|name| name.chars().all(is_word));
                name.map(|name| inner.len() - named.len() + name.len() + 1)
            }
            None => {
                let end = inner.find(|character: char| !"imsU-".contains(character));
                end.filter(|end| inner[*end..].starts_with([':', ')']))
                    .map(|end| end + 1)
            }
        };
        let length = length.ok_or_else(|| SyntaxError("unknown flags or an invalid name after (?".to_owned()))?;
        self.keep(2 + length);
        Ok(())
    }

    /// Rewrites a class, up to its closing bracket.
    fn class(&mut self) -> Result<(), SyntaxError> {
        self.keep(1);
        if self.rest.starts_with('^') {
            self.keep(1);
        }
        // A bracket that comes first is literal.
        let mut is_first = true;
        while !self.rest.is_empty() && (is_first || !self.rest.starts_with(']')) {
            is_first = false;
            let escape = self.rest.strip_prefix('\\');
            if let Some(length) = posix_class_length(self.rest)? {
                self.keep(length);
            } else if escape.is_some_and(|name| name.starts_with(['d', 'D', 's', 'S', 'w', 'W', 'p', 'P'])) {
                self.escape()?;
            } else {
                self.class_character()?;
                let is_range = self.rest.starts_with('-') && self.rest.len() > 1 && !self.rest.starts_with("-]");
                if is_range {
                    self.keep(1);
                    self.class_character()?;
                }
            }
        }
        // The library reports a missing bracket.
        self.keep(self.rest.len().min(1));
        Ok(())
    }

    /// Rewrites one character of a class: alone, or an end of a range.
    fn class_character(&mut self) -> Result<(), SyntaxError> {
        match self.rest.chars().next() {
            Some('\\') => return self.escape(),
            // Brackets nest in the library, and these operators are set operations if doubled.
            Some('[' | ']' | '&' | '~' | '-') => {
                self.out.push('\\');
                self.keep(1);
            }
            character => self.keep(character.map_or(0, char::len_utf8)),
        }
        Ok(())
    }

    fn repetition(&mut self, length: usize, repeated: bool) -> Result<(), SyntaxError> {
        if repeated {
            return Err(SyntaxError("a repetition of a repetition".to_owned()));
        }
        self.keep(length);
        // The mark of a lazy repetition belongs to the repetition.
        if self.rest.starts_with('?') {
            self.keep(1);
        }
        self.repeated = true;
        Ok(())
    }
}

/// Returns the length of an octal character code; 0 if there is none. A single digit is a reference to a group, except
/// for `0`.
fn octal_length(text: &str) -> usize {
    let digits = text
        .bytes()
        .take(3)
        .take_while(|byte| matches!(byte, b'0'..=b'7'))
        .count();
    if digits == 1 && !text.starts_with('0') {
        0
    } else {
        digits
    }
}

/// Returns the length of `[:alpha:]` or `[:^alpha:]`. A bracket and a colon without their counterparts are literal.
fn posix_class_length(text: &str) -> Result<Option<usize>, SyntaxError> {
    let Some((name, _)) = text.strip_prefix("[:").and_then(|text| text.split_once(":]")) else {
        return Ok(None);
    };
    if !POSIX_CLASSES.contains(&name.strip_prefix('^').unwrap_or(name)) {
        return Err(SyntaxError(format!("unknown class [:{name}:]")));
    }
    Ok(Some(name.len() + 4))
}

/// Returns the length of `{2}`, `{2,}` or `{2,3}`. Other braces are literal.
fn repetition_length(text: &str) -> Result<Option<usize>, SyntaxError> {
    let Some((inner, _)) = text[1..].split_once('}') else {
        return Ok(None);
    };
    let (least, most) = inner.split_once(',').unwrap_or((inner, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if least.is_empty() || !digits(least) || !digits(most) {
        return Ok(None);
    }
    let counts = [least, most].into_iter().filter(|count| !count.is_empty());
    if counts
        .into_iter()
        .any(|count| count.parse::<u32>().map_or(true, |count| count > MAX_REPEAT))
    {
        return Err(SyntaxError(format!("a repetition of more than {MAX_REPEAT}")));
    }
    Ok(Some(inner.len() + 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_quoted_as_in_go() {
        assert_eq!(quoted("/a.b-c+"), r"/a\.b-c\+");
    }
}
