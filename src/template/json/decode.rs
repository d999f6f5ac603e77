//! JSON documents to values: all numbers become `float64`. Errors are those of Go.

use crate::template::{
    limits::Failure,
    text::{Text, push_char},
    value::{Context, Entries, Map, Value},
};

/// Returns the value of a document.
pub fn decode(context: &mut Context<'_>, document: &[u8]) -> Result<Value, Failure> {
    context.step(document.len() / 16)?;
    let mut decoder = Decoder {
        context,
        document,
        position: 0,
        depth: 0,
    };
    let value = decoder.value()?;
    match decoder.after_space() {
        None => Ok(value),
        Some(byte) => Err(invalid(byte, "after top-level value")),
    }
}

struct Decoder<'a, 'b> {
    context: &'a mut Context<'b>,
    document: &'a [u8],
    position: usize,
    depth: usize,
}

fn ended() -> Failure {
    Failure::message("unexpected end of JSON input")
}

fn invalid(byte: u8, place: &str) -> Failure {
    let shown = match byte {
        b'\'' => "'\\''".to_owned(),
        b'"' => "'\"'".to_owned(),
        byte => super::super::quote::quote_char(i64::from(byte), super::super::quote::Charset::Unicode),
    };
    Failure::Message(format!("invalid character {shown} {place}"))
}

impl Decoder<'_, '_> {
    fn peek(&self) -> Option<u8> {
        self.document.get(self.position).copied()
    }

    fn after_space(&mut self) -> Option<u8> {
        while self.peek().is_some_and(|byte| b" \t\r\n".contains(&byte)) {
            self.position += 1;
        }
        self.peek()
    }

    fn value(&mut self) -> Result<Value, Failure> {
        self.context.allocate_elements(1)?;
        match self.after_space().ok_or_else(ended)? {
            b'{' => self.container(Self::object),
            b'[' => self.container(Self::array),
            b'"' => Ok(Value::String(self.string()?)),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            b'n' => self.word("null", Value::Nil),
            byte => Err(invalid(byte, "looking for beginning of value")),
        }
    }

    fn container(&mut self, read: fn(&mut Self) -> Result<Value, Failure>) -> Result<Value, Failure> {
        let outside = self.depth;
        self.depth = self.context.deeper(outside)?;
        self.position += 1;
        let value = read(self)?;
        self.depth = outside;
        Ok(value)
    }

    fn object(&mut self) -> Result<Value, Failure> {
        let mut entries = Entries::new();
        if self.after_space() == Some(b'}') {
            self.position += 1;
            return Ok(Value::Map(Map::new(entries)));
        }
        loop {
            match self.after_space().ok_or_else(ended)? {
                b'"' => {}
                byte => return Err(invalid(byte, "looking for beginning of object key string")),
            }
            let key = self.string()?;
            match self.after_space().ok_or_else(ended)? {
                b':' => self.position += 1,
                byte => return Err(invalid(byte, "after object key")),
            }
            let value = self.value()?;
            entries.insert(key, value);
            match self.after_space().ok_or_else(ended)? {
                b',' => self.position += 1,
                b'}' => break,
                byte => return Err(invalid(byte, "after object key:value pair")),
            }
        }
        self.position += 1;
        Ok(Value::Map(Map::new(entries)))
    }

    fn array(&mut self) -> Result<Value, Failure> {
        let mut items = Vec::new();
        if self.after_space() == Some(b']') {
            self.position += 1;
            return Ok(Value::list(items));
        }
        loop {
            items.push(self.value()?);
            match self.after_space().ok_or_else(ended)? {
                b',' => self.position += 1,
                b']' => break,
                byte => return Err(invalid(byte, "after array element")),
            }
        }
        self.position += 1;
        Ok(Value::list(items))
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, Failure> {
        for expected in word.bytes() {
            match self.peek().ok_or_else(ended)? {
                byte if byte == expected => self.position += 1,
                byte => {
                    let expected = char::from(expected);
                    return Err(invalid(byte, &format!("in literal {word} (expecting '{expected}')")));
                }
            }
        }
        Ok(value)
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.position += 1;
        }
    }

    /// Reads digits of which at least one is needed.
    fn some_digits(&mut self, place: &str) -> Result<(), Failure> {
        match self.peek().ok_or_else(ended)? {
            b'0'..=b'9' => {
                self.digits();
                Ok(())
            }
            byte => Err(invalid(byte, place)),
        }
    }

    fn number(&mut self) -> Result<Value, Failure> {
        let start = self.position;
        if self.peek() == Some(b'-') {
            self.position += 1;
        }
        if self.peek() == Some(b'0') {
            self.position += 1;
        } else {
            self.some_digits("in numeric literal")?;
        }
        if self.peek() == Some(b'.') {
            self.position += 1;
            self.some_digits("after decimal point in numeric literal")?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.position += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.position += 1;
            }
            self.some_digits("in exponent of numeric literal")?;
        }
        let text = std::str::from_utf8(&self.document[start..self.position]).unwrap_or_default();
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(Value::Float(number)),
            _ => Err(Failure::Message(format!(
                "json: cannot unmarshal number {text} into Go value of type float64"
            ))),
        }
    }

    fn string(&mut self) -> Result<Text, Failure> {
        let mut out = Vec::new();
        self.position += 1;
        loop {
            let byte = self.peek().ok_or_else(ended)?;
            self.position += 1;
            match byte {
                b'"' => break,
                b'\\' => self.escape(&mut out)?,
                ..b' ' => return Err(invalid(byte, "in string literal")),
                byte => out.push(byte),
            }
        }
        self.context.allocate(out.len())?;
        Ok(match String::from_utf8(out) {
            Ok(text) => text.into(),
            // Each invalid byte becomes U+FFFD.
            Err(error) => {
                let chars = super::super::text::chars(error.as_bytes());
                chars.map(|(character, _)| character).collect::<String>().into()
            }
        })
    }

    fn escape(&mut self, out: &mut Vec<u8>) -> Result<(), Failure> {
        let byte = self.peek().ok_or_else(ended)?;
        self.position += 1;
        let plain = match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let code = self.code()?;
                push_char(out, self.with_surrogate(code));
                return Ok(());
            }
            byte => return Err(invalid(byte, "in string escape code")),
        };
        out.push(plain);
        Ok(())
    }

    fn code(&mut self) -> Result<u32, Failure> {
        let mut code = 0;
        for _ in 0..4 {
            let byte = self.peek().ok_or_else(ended)?;
            let digit = char::from(byte).to_digit(16);
            let digit = digit.ok_or_else(|| invalid(byte, "in \\u hexadecimal character escape"))?;
            code = code * 16 + digit;
            self.position += 1;
        }
        Ok(code)
    }

    /// Returns the character of a code, which may be the first half of a pair.
    fn with_surrogate(&mut self, code: u32) -> char {
        if (0xd800..0xdc00).contains(&code) && self.document[self.position..].starts_with(b"\\u") {
            let start = self.position;
            self.position += 2;
            if let Ok(low @ 0xdc00..0xe000) = self.code() {
                let joined = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                return char::from_u32(joined).unwrap_or(char::REPLACEMENT_CHARACTER);
            }
            self.position = start;
        }
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    }
}
