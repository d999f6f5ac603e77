//! The syntax of RE2, which Envoy and Go share, in that of the library.

/// The reason why an expression is invalid in RE2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SyntaxError(pub String);

/// The maximum count of a repetition in RE2.
const MAX_REPEAT: u32 = 1000;

/// Rewrites syntax that RE2 accepts and the library does not: `\Q…\E`, `\C`, literal brackets and braces. Syntax that
/// only the library accepts is an error: nested repetitions and counts above [`MAX_REPEAT`].
pub fn from_re2(expression: &str) -> Result<String, SyntaxError> {
    let mut rewriter = Rewriter {
        out: String::with_capacity(expression.len()),
        rest: expression,
        in_class: false,
        repeated: false,
    };
    while let Some(first) = rewriter.rest.chars().next() {
        rewriter.step(first)?;
    }
    Ok(rewriter.out)
}

struct Rewriter<'a> {
    out: String,
    rest: &'a str,
    in_class: bool,
    /// The last element was a repetition.
    repeated: bool,
}

impl Rewriter<'_> {
    fn step(&mut self, first: char) -> Result<(), SyntaxError> {
        let repeated = std::mem::take(&mut self.repeated);
        match first {
            '\\' => self.escape(),
            '[' if self.in_class && !self.rest.starts_with("[:") => self.replace("\\[", 1),
            '[' if !self.in_class => self.open_class(),
            ']' => {
                self.in_class = false;
                self.keep(1);
            }
            // Doubled, these are set operations of the library in a class.
            '&' | '~' if self.in_class => self.replace(if first == '&' { "\\&" } else { "\\~" }, 1),
            '*' | '+' | '?' if !self.in_class => self.repetition(1, repeated)?,
            '{' if !self.in_class => match repetition_length(self.rest)? {
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

    fn escape(&mut self) {
        if let Some(quoted) = self.rest.strip_prefix("\\Q") {
            let (literal, after) = quoted.split_once("\\E").unwrap_or((quoted, ""));
            self.out.push_str(&regex::escape(literal));
            self.rest = after;
        } else if self.rest.starts_with("\\C") {
            self.replace("(?s:.)", 2);
        } else {
            let named = ["\\p{", "\\P{", "\\x{"]
                .iter()
                .any(|start| self.rest.starts_with(start));
            let escaped = 1 + self.rest[1..].chars().next().map_or(0, char::len_utf8);
            let octal = octal_length(&self.rest[1..]);
            if let Some(code) = self
                .rest
                .get(1..=octal)
                .and_then(|digits| u8::from_str_radix(digits, 8).ok())
            {
                let hexadecimal = format!("\\x{code:02x}");
                self.out.push_str(&hexadecimal);
                self.rest = &self.rest[1 + octal..];
                return;
            }
            let end = self.rest.find('}').filter(|_| named).map_or(escaped, |end| end + 1);
            self.keep(end);
        }
    }

    fn open_class(&mut self) {
        self.in_class = true;
        self.keep(1);
        if self.rest.starts_with('^') {
            self.keep(1);
        }
        // A bracket that comes first in a class is literal.
        if self.rest.starts_with(']') {
            self.replace("\\]", 1);
        }
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
