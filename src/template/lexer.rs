//! The tokens of a template.

use std::collections::VecDeque;

use super::{
    quote::{Charset, char_of, quote},
    text::{chars, first_char, is_name, is_printable},
};

/// The kinds of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Error,
    Bool,
    /// A character without a meaning of its own, such as a comma.
    Char,
    CharConstant,
    Complex,
    Assign,
    Declare,
    End,
    Field,
    Identifier,
    LeftDelimiter,
    LeftParenthesis,
    Number,
    Pipe,
    RawString,
    RightDelimiter,
    RightParenthesis,
    Space,
    String,
    Text,
    Variable,
    Dot,
    Nil,
    Keyword(Keyword),
}

/// The words that begin or end actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keyword {
    Block,
    Break,
    Continue,
    Define,
    Else,
    End,
    If,
    Range,
    Template,
    With,
}

/// A token: its kind, its text (of an error: the message), and its place.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) text: String,
    pub(super) position: usize,
    pub(super) line: usize,
}

impl Token {
    /// Returns the token as errors show it.
    pub(super) fn shown(&self) -> String {
        match self.kind {
            Kind::End => "EOF".to_owned(),
            Kind::Error => self.text.clone(),
            Kind::Keyword(_) | Kind::Dot | Kind::Nil => format!("<{}>", self.text),
            _ if self.text.len() > 10 => {
                let start: usize = chars(self.text.as_bytes()).take(10).map(|(_, length)| length).sum();
                format!("{}...", quote(&self.text.as_bytes()[..start], Charset::Unicode))
            }
            _ => quote(self.text.as_bytes(), Charset::Unicode),
        }
    }
}

/// Words that are keywords unless functions have their names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) has_break: bool,
    pub(super) has_continue: bool,
}

const LEFT: &str = "{{";
const RIGHT: &str = "}}";
const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];

/// An error that has been added to the tokens.
struct Stop;

/// Reads the tokens of a text one by one.
pub(super) struct Lexer<'a> {
    text: &'a str,
    words: Words,
    /// The next character.
    position: usize,
    /// The start of the current token, and its line.
    start: usize,
    line: usize,
    /// The open parentheses of the current action; `None` outside actions.
    parentheses: Option<usize>,
    tokens: VecDeque<Token>,
    has_ended: bool,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str, words: Words) -> Self {
        Self {
            text,
            words,
            position: 0,
            start: 0,
            line: 1,
            parentheses: None,
            tokens: VecDeque::new(),
            has_ended: false,
        }
    }

    /// Returns the next token. Behind an error, and behind the end, there are only ends.
    pub(super) fn next(&mut self) -> Token {
        while self.tokens.is_empty() && !self.has_ended {
            let read = match self.parentheses {
                Some(depth) => self.action(depth),
                None => self.outside(),
            };
            self.has_ended |= read.is_err();
        }
        self.tokens.pop_front().unwrap_or_else(|| Token {
            kind: Kind::End,
            text: String::new(),
            position: self.start,
            line: self.line,
        })
    }

    fn rest(&self) -> &str {
        &self.text[self.position..]
    }

    fn peek(&self) -> Option<char> {
        first_char(self.rest().as_bytes()).map(|(character, _)| character)
    }

    fn advance(&mut self, character: char) {
        self.position += character.len_utf8();
    }

    /// Adds the text since the start of the token.
    fn emit(&mut self, kind: Kind) {
        let text = self.text[self.start..self.position].to_owned();
        self.tokens.push_back(Token {
            kind,
            text,
            position: self.start,
            line: self.line,
        });
        self.skip();
    }

    /// Begins the next token at the position.
    fn skip(&mut self) {
        let passed = &self.text[self.start..self.position];
        self.line += passed.bytes().filter(|byte| *byte == b'\n').count();
        self.start = self.position;
    }

    fn error(&mut self, message: impl Into<String>) -> Result<(), Stop> {
        self.tokens.push_back(Token {
            kind: Kind::Error,
            text: message.into(),
            position: self.start,
            line: self.line,
        });
        Err(Stop)
    }

    /// Reads the text up to an action, and its left delimiter.
    fn outside(&mut self) -> Result<(), Stop> {
        let Some(length) = self.rest().find(LEFT) else {
            self.position = self.text.len();
            if self.position > self.start {
                self.emit(Kind::Text);
            }
            return Err(Stop);
        };
        self.position += length;
        let after = self.position + LEFT.len();
        let trims = has_left_trim(&self.text[after..]);
        let delimiter = self.position;
        if trims {
            let kept = self.text[self.start..delimiter].trim_end_matches(SPACES).len();
            self.position = self.start + kept;
        }
        if self.position > self.start {
            self.emit(Kind::Text);
        }
        self.position = delimiter;
        self.skip();
        let inner = after + if trims { 2 } else { 0 };
        if self.text[inner..].starts_with("/*") {
            return self.comment(inner);
        }
        self.position = after;
        self.emit(Kind::LeftDelimiter);
        self.position = inner;
        self.skip();
        self.parentheses = Some(0);
        Ok(())
    }

    /// Skips a comment, of which the opening delimiter has been read.
    fn comment(&mut self, inner: usize) -> Result<(), Stop> {
        self.position = inner;
        self.skip();
        let Some(length) = self.text[inner + 2..].find("*/") else {
            return self.error("unclosed comment");
        };
        self.position = inner + 2 + length + 2;
        let Some(trims) = self.right_delimiter() else {
            return self.error("comment ends before closing delimiter");
        };
        self.close(trims);
        self.skip();
        Ok(())
    }

    /// Moves behind the right delimiter and the space that it trims.
    fn close(&mut self, trims: bool) {
        if trims {
            self.position += 2;
        }
        self.position += RIGHT.len();
        if trims {
            let rest = self.rest();
            self.position += rest.len() - rest.trim_start_matches(SPACES).len();
        }
    }

    /// Returns true if the right delimiter that follows trims space, and `None` if none follows.
    fn right_delimiter(&self) -> Option<bool> {
        let rest = self.rest();
        if has_right_trim(rest) && rest[2..].starts_with(RIGHT) {
            return Some(true);
        }
        rest.starts_with(RIGHT).then_some(false)
    }

    /// Reads a token of an action, or its right delimiter.
    fn action(&mut self, depth: usize) -> Result<(), Stop> {
        if let Some(trims) = self.right_delimiter() {
            if depth > 0 {
                return self.error("unclosed left paren");
            }
            if trims {
                self.position += 2;
                self.skip();
            }
            self.position += RIGHT.len();
            self.emit(Kind::RightDelimiter);
            if trims {
                let rest = self.rest();
                self.position += rest.len() - rest.trim_start_matches(SPACES).len();
                self.skip();
            }
            self.parentheses = None;
            return Ok(());
        }
        let Some(character) = self.peek() else {
            return self.error("unclosed action");
        };
        match character {
            '(' => self.parentheses = Some(depth + 1),
            ')' if depth == 0 => {
                self.advance(character);
                return self.error("unexpected right paren");
            }
            ')' => self.parentheses = Some(depth - 1),
            _ => {}
        }
        self.inside(character)
    }

    fn inside(&mut self, character: char) -> Result<(), Stop> {
        match character {
            _ if SPACES.contains(&character) => {
                self.space();
                return Ok(());
            }
            '"' => return self.quoted('"', Kind::String, "unterminated quoted string"),
            '\'' => return self.quoted('\'', Kind::CharConstant, "unterminated character constant"),
            '`' => return self.raw(),
            '$' => return self.field(Kind::Variable),
            '.' if !self.rest()[1..].starts_with(|next: char| next.is_ascii_digit()) => {
                let at_end = self.position + 1 == self.text.len();
                return if at_end { self.number() } else { self.field(Kind::Dot) };
            }
            '.' | '+' | '-' | '0'..='9' => return self.number(),
            _ if is_name(character) => return self.identifier(),
            _ => self.advance(character),
        }
        match character {
            '=' => self.emit(Kind::Assign),
            ':' => {
                let next = self.peek();
                if next != Some('=') {
                    return self.error("expected :=");
                }
                self.advance('=');
                self.emit(Kind::Declare);
            }
            '|' => self.emit(Kind::Pipe),
            '(' => self.emit(Kind::LeftParenthesis),
            ')' => self.emit(Kind::RightParenthesis),
            _ if character.is_ascii() && is_printable(character) => self.emit(Kind::Char),
            _ => {
                return self.error(format!(
                    "unrecognized character in action: {}",
                    code_point(Some(character))
                ));
            }
        }
        Ok(())
    }

    /// Reads spaces, except one that belongs to a right delimiter that trims.
    fn space(&mut self) {
        let rest = self.rest();
        let mut length = rest.len() - rest.trim_start_matches(SPACES).len();
        let last = &rest[length - 1..];
        if has_right_trim(last) && last[2..].starts_with(RIGHT) {
            length -= 1;
        }
        self.position += length;
        if length > 0 {
            self.emit(Kind::Space);
        }
    }

    fn quoted(&mut self, delimiter: char, kind: Kind, unterminated: &str) -> Result<(), Stop> {
        self.advance(delimiter);
        loop {
            match self.peek() {
                Some('\\') => {
                    self.advance('\\');
                    match self.peek() {
                        Some('\n') | None => return self.error(unterminated),
                        Some(escaped) => self.advance(escaped),
                    }
                }
                Some('\n') | None => return self.error(unterminated),
                Some(character) => {
                    self.advance(character);
                    if character == delimiter {
                        break;
                    }
                }
            }
        }
        self.emit(kind);
        Ok(())
    }

    fn raw(&mut self) -> Result<(), Stop> {
        match self.rest()[1..].find('`') {
            Some(length) => {
                self.position += length + 2;
                self.emit(Kind::RawString);
                Ok(())
            }
            None => self.error("unterminated raw quoted string"),
        }
    }

    /// Returns true in front of a character that may follow a name.
    fn at_terminator(&self) -> bool {
        match self.peek() {
            None | Some(' ' | '\t' | '\r' | '\n' | '.' | ',' | '|' | ':' | ')' | '(') => true,
            _ => self.rest().starts_with(RIGHT),
        }
    }

    fn name(&mut self) -> Result<(), Stop> {
        while let Some(character) = self.peek().filter(|character| is_name(*character)) {
            self.advance(character);
        }
        if self.at_terminator() {
            return Ok(());
        }
        let message = format!("bad character {}", code_point(self.peek()));
        self.error(message)
    }

    /// Reads `.name`, `$name`, `.` or `$`.
    fn field(&mut self, kind: Kind) -> Result<(), Stop> {
        self.position += 1;
        if self.at_terminator() {
            self.emit(kind);
            return Ok(());
        }
        self.name()?;
        self.emit(if kind == Kind::Dot { Kind::Field } else { kind });
        Ok(())
    }

    fn identifier(&mut self) -> Result<(), Stop> {
        self.name()?;
        let kind = match &self.text[self.start..self.position] {
            "true" | "false" => Kind::Bool,
            "nil" => Kind::Nil,
            "block" => Kind::Keyword(Keyword::Block),
            "break" if !self.words.has_break => Kind::Keyword(Keyword::Break),
            "continue" if !self.words.has_continue => Kind::Keyword(Keyword::Continue),
            "define" => Kind::Keyword(Keyword::Define),
            "else" => Kind::Keyword(Keyword::Else),
            "end" => Kind::Keyword(Keyword::End),
            "if" => Kind::Keyword(Keyword::If),
            "range" => Kind::Keyword(Keyword::Range),
            "template" => Kind::Keyword(Keyword::Template),
            "with" => Kind::Keyword(Keyword::With),
            _ => Kind::Identifier,
        };
        self.emit(kind);
        Ok(())
    }

    fn number(&mut self) -> Result<(), Stop> {
        let mut kind = Kind::Number;
        let mut fits = self.scan_number();
        if fits && matches!(self.peek(), Some('+' | '-')) {
            kind = Kind::Complex;
            fits = self.scan_number() && self.text[..self.position].ends_with('i');
        }
        if !fits {
            let text = &self.text[self.start..self.position];
            let message = format!("bad number syntax: {}", quote(text.as_bytes(), Charset::Unicode));
            return self.error(message);
        }
        self.emit(kind);
        Ok(())
    }

    fn accept(&mut self, set: &str) -> bool {
        let accepted = self.peek().filter(|character| set.contains(*character));
        if let Some(character) = accepted {
            self.advance(character);
        }
        accepted.is_some()
    }

    fn accept_run(&mut self, set: &str) {
        while self.accept(set) {}
    }

    /// Reads a number roughly; false if a letter follows it. Converting the number finds other errors.
    fn scan_number(&mut self) -> bool {
        const DECIMAL: &str = "0123456789_";
        self.accept("+-");
        let mut digits = DECIMAL;
        let mut exponent = "eE";
        if self.accept("0") {
            if self.accept("xX") {
                digits = "0123456789abcdefABCDEF_";
                exponent = "pP";
            } else if self.accept("oO") {
                digits = "01234567_";
                exponent = "";
            } else if self.accept("bB") {
                digits = "01_";
                exponent = "";
            }
        }
        self.accept_run(digits);
        if self.accept(".") {
            self.accept_run(digits);
        }
        if self.accept(exponent) {
            self.accept("+-");
            self.accept_run(DECIMAL);
        }
        self.accept("i");
        match self.peek().filter(|character| is_name(*character)) {
            Some(character) => {
                self.advance(character);
                false
            }
            None => true,
        }
    }
}

fn has_left_trim(text: &str) -> bool {
    text.starts_with('-') && text[1..].starts_with(SPACES)
}

fn has_right_trim(text: &str) -> bool {
    text.starts_with(SPACES) && text[1..].starts_with('-')
}

/// Returns a character as `U+0061 'a'`. The end of the text is the code -1, which Go prints as this number.
fn code_point(character: Option<char>) -> String {
    let Some(character) = character else {
        return "U+FFFFFFFFFFFFFFFF".to_owned();
    };
    let code = u32::from(character);
    if is_printable(char_of(i64::from(code))) {
        format!("U+{code:04X} '{character}'")
    } else {
        format!("U+{code:04X}")
    }
}
