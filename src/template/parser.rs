//! Texts to trees. Errors are those of Go's package `text/template/parse`.

use std::{collections::VecDeque, sync::Arc};

use super::{
    lexer::{Keyword, Kind, Lexer, Token, Words},
    limits::{Exceeded, Limits},
    node::{Branch, Command, Invocation, List, Literal, Node, Number, Operand, Pipe, Source, Term},
    quote::{Charset, quote, unquote},
    text::{Text, trim},
    value::{Functions, Value},
};

mod number;

/// The reason why a text is no template.
#[derive(Debug)]
pub(super) struct ParseError {
    pub(super) message: String,
    pub(super) line: usize,
    pub(super) limit: Option<Exceeded>,
}

/// A template that a text defines.
pub(super) struct Definition {
    pub(super) name: Text,
    pub(super) list: List,
}

impl Definition {
    /// Returns true for a template of nothing but space, which does not replace another one.
    pub(super) fn is_empty(&self) -> bool {
        let is_space = |node: &Node| matches!(node, Node::Text(text) if trim(text.bytes()).is_empty());
        self.list.iter().all(is_space)
    }
}

/// Returns the templates that a text defines. The last one is the text itself, unless a definition of the same name
/// takes its place.
pub(super) fn parse(source: &Source, functions: &Functions, limits: &Limits) -> Result<Vec<Definition>, ParseError> {
    if source.text.len() > limits.source_bytes {
        let limit = Exceeded::Source(limits.source_bytes);
        return Err(ParseError {
            message: format!("template: {}: {limit}", source.name),
            line: 0,
            limit: Some(limit),
        });
    }
    let words = Words {
        has_break: functions.get("break").is_some(),
        has_continue: functions.get("continue").is_some(),
    };
    let mut parser = Parser {
        name: source.name.clone(),
        lexer: Lexer::new(&source.text, words),
        window: VecDeque::new(),
        position: 0,
        functions,
        limits,
        depth: 0,
        definitions: Vec::new(),
        tree: Tree::new(),
    };
    let list = parser.top()?;
    let name = source.name.as_bytes().into();
    parser.define(name, list)?;
    Ok(parser.definitions)
}

/// The state of one definition. Variables of the text around it are not visible.
struct Tree {
    variables: Vec<Text>,
    /// The line of the last token that was read for this tree, which errors name.
    line: usize,
    /// The line of the current action; 0 outside.
    action_line: usize,
    ranges: usize,
}

impl Tree {
    fn new() -> Self {
        Self {
            variables: vec!["$".into()],
            line: 0,
            action_line: 0,
            ranges: 0,
        }
    }
}

/// A part of a list, or the action that ends it.
enum Item {
    Node(Node),
    End,
    Else,
}

struct Parser<'a> {
    name: Arc<str>,
    lexer: Lexer<'a>,
    /// The last tokens, for stepping back, and those ahead.
    window: VecDeque<Token>,
    /// The next token in the window.
    position: usize,
    functions: &'a Functions,
    limits: &'a Limits,
    depth: usize,
    definitions: Vec<Definition>,
    tree: Tree,
}

/// The number of tokens that the parser steps back at most.
const BACK: usize = 4;

impl Parser<'_> {
    fn fill(&mut self) {
        if self.position == self.window.len() {
            let token = self.lexer.next();
            self.tree.line = token.line;
            self.window.push_back(token);
        }
        while self.position > BACK {
            self.window.pop_front();
            self.position -= 1;
        }
    }

    fn next(&mut self) -> Token {
        self.fill();
        self.position += 1;
        self.window[self.position - 1].clone()
    }

    fn peek(&mut self) -> Kind {
        self.fill();
        self.window[self.position].kind
    }

    fn next_after_space(&mut self) -> Token {
        self.skip_space();
        self.next()
    }

    fn skip_space(&mut self) {
        while self.peek() == Kind::Space {
            self.position += 1;
        }
    }

    fn peek_after_space(&mut self) -> Kind {
        self.skip_space();
        self.peek()
    }

    /// Returns the place of the next token that is not space.
    fn place_after_space(&mut self) -> usize {
        self.skip_space();
        self.fill();
        self.window[self.position].position
    }

    fn error<T>(&self, message: impl std::fmt::Display) -> Result<T, ParseError> {
        let line = self.tree.line;
        Err(ParseError {
            message: format!("template: {}:{line}: {message}", self.name),
            line,
            limit: None,
        })
    }

    fn unexpected<T>(&self, token: &Token, context: &str) -> Result<T, ParseError> {
        if token.kind != Kind::Error {
            return self.error(format!("unexpected {} in {context}", token.shown()));
        }
        let action = self.tree.action_line;
        if action == 0 || action == token.line {
            return self.error(&token.text);
        }
        let place = format!("{}:{action}", self.name);
        // Not "action in action".
        let inside = if token.text.ends_with(" action") {
            ""
        } else {
            " in action"
        };
        self.error(format!("{}{inside} started at {place}", token.text))
    }

    fn expect(&mut self, kind: Kind, context: &str) -> Result<Token, ParseError> {
        let token = self.next_after_space();
        if token.kind == kind {
            return Ok(token);
        }
        self.unexpected(&token, context)
    }

    /// Runs a part one level deeper.
    fn nested<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T, ParseError>) -> Result<T, ParseError> {
        if self.depth >= self.limits.parse_depth {
            let limit = Exceeded::ParseDepth(self.limits.parse_depth);
            return self.error::<T>(limit).map_err(|error| ParseError {
                limit: Some(limit),
                ..error
            });
        }
        self.depth += 1;
        let result = part(self);
        self.depth -= 1;
        result
    }

    fn define(&mut self, name: Text, list: List) -> Result<(), ParseError> {
        let definition = Definition { name, list };
        let other = self.definitions.iter().position(|other| other.name == definition.name);
        match other {
            None => self.definitions.push(definition),
            Some(other) if self.definitions[other].is_empty() => self.definitions[other] = definition,
            Some(_) if definition.is_empty() => {}
            Some(_) => {
                let name = quote(definition.name.bytes(), Charset::Unicode);
                return self.error(format!("template: multiple definition of template {name}"));
            }
        }
        Ok(())
    }

    fn top(&mut self) -> Result<List, ParseError> {
        let mut list = List::new();
        while self.peek() != Kind::End {
            if self.peek() == Kind::LeftDelimiter {
                let delimiter = self.next();
                if self.next_after_space().kind == Kind::Keyword(Keyword::Define) {
                    self.definition()?;
                    continue;
                }
                self.step_back_to(&delimiter);
            }
            match self.item()? {
                Item::Node(node) => list.push(node),
                Item::End => return self.error("unexpected {{end}}"),
                Item::Else => return self.error("unexpected {{else}}"),
            }
        }
        Ok(list)
    }

    /// Steps back to one of the last tokens.
    fn step_back_to(&mut self, token: &Token) {
        let is_it = |other: &Token| other.kind == token.kind && other.position == token.position;
        self.position = self.window.iter().position(is_it).unwrap_or(self.position);
    }

    /// Reads the body of a definition in a tree of its own.
    fn body(&mut self) -> Result<(List, Item, Tree), ParseError> {
        let outer = std::mem::replace(&mut self.tree, Tree::new());
        let (list, end) = self.nested(Self::list)?;
        Ok((list, end, outer))
    }

    fn definition(&mut self) -> Result<(), ParseError> {
        const CONTEXT: &str = "define clause";
        let outer = std::mem::replace(&mut self.tree, Tree::new());
        let token = self.next_after_space();
        if !matches!(token.kind, Kind::String | Kind::RawString) {
            return self.unexpected(&token, CONTEXT);
        }
        let name = self.unquoted(&token.text)?;
        self.expect(Kind::RightDelimiter, CONTEXT)?;
        let (list, end) = self.nested(Self::list)?;
        if matches!(end, Item::Else) {
            return self.error(format!("unexpected {{{{else}}}} in {CONTEXT}"));
        }
        self.define(name.into(), list)?;
        self.tree = outer;
        Ok(())
    }

    fn unquoted(&self, literal: &str) -> Result<Vec<u8>, ParseError> {
        match unquote(literal) {
            Some(text) => Ok(text),
            None => self.error("invalid syntax"),
        }
    }

    /// Reads a list up to the action that ends it.
    fn list(&mut self) -> Result<(List, Item), ParseError> {
        let mut list = List::new();
        while self.peek_after_space() != Kind::End {
            match self.item()? {
                Item::Node(node) => list.push(node),
                end => return Ok((list, end)),
            }
        }
        self.error("unexpected EOF")
    }

    fn item(&mut self) -> Result<Item, ParseError> {
        let token = self.next_after_space();
        match token.kind {
            Kind::Text => Ok(Item::Node(Node::Text(token.text.into()))),
            Kind::LeftDelimiter => {
                self.tree.action_line = token.line;
                let item = self.action();
                if item.is_ok() {
                    self.tree.action_line = 0;
                }
                item
            }
            _ => self.unexpected(&token, "input"),
        }
    }

    fn action(&mut self) -> Result<Item, ParseError> {
        let token = self.next_after_space();
        let Kind::Keyword(keyword) = token.kind else {
            self.position -= 1;
            let pipe = self.pipeline("command", Kind::RightDelimiter)?;
            return Ok(Item::Node(Node::Action(pipe)));
        };
        let node = match keyword {
            Keyword::Block => self.block()?,
            Keyword::Break => {
                self.leave("{{break}}")?;
                Node::Break(token.position)
            }
            Keyword::Continue => {
                self.leave("{{continue}}")?;
                Node::Continue(token.position)
            }
            Keyword::Else => {
                let next = self.peek_after_space();
                if !matches!(next, Kind::Keyword(Keyword::If | Keyword::With)) {
                    self.expect(Kind::RightDelimiter, "else")?;
                }
                return Ok(Item::Else);
            }
            Keyword::End => {
                self.expect(Kind::RightDelimiter, "end")?;
                return Ok(Item::End);
            }
            Keyword::If => Node::If(self.branch(Keyword::If)?),
            Keyword::Range => Node::Range(self.branch(Keyword::Range)?),
            Keyword::With => Node::With(self.branch(Keyword::With)?),
            Keyword::Template => self.template()?,
            Keyword::Define => return self.unexpected(&token, "command"),
        };
        Ok(Item::Node(node))
    }

    /// Reads the rest of `break` or `continue`.
    fn leave(&mut self, name: &str) -> Result<(), ParseError> {
        self.expect(Kind::RightDelimiter, name)?;
        if self.tree.ranges == 0 {
            return self.error(format!("{name} outside {{{{range}}}}"));
        }
        Ok(())
    }

    fn branch(&mut self, keyword: Keyword) -> Result<Box<Branch>, ParseError> {
        let variables = self.tree.variables.len();
        let branch = self.nested(|parser| parser.branch_inner(keyword))?;
        self.tree.variables.truncate(variables);
        Ok(branch)
    }

    fn branch_inner(&mut self, keyword: Keyword) -> Result<Box<Branch>, ParseError> {
        let context = match keyword {
            Keyword::If => "if",
            Keyword::Range => "range",
            _ => "with",
        };
        let pipe = self.pipeline(context, Kind::RightDelimiter)?;
        let is_range = usize::from(keyword == Keyword::Range);
        self.tree.ranges += is_range;
        let (list, end) = self.list()?;
        self.tree.ranges -= is_range;
        let mut otherwise = None;
        if matches!(end, Item::Else) {
            let chains = matches!(keyword, Keyword::If | Keyword::With) && self.peek() == Kind::Keyword(keyword);
            otherwise = Some(if chains {
                self.next();
                let inner = self.branch(keyword)?;
                vec![match keyword {
                    Keyword::If => Node::If(inner),
                    _ => Node::With(inner),
                }]
            } else {
                let (list, end) = self.list()?;
                if matches!(end, Item::Else) {
                    return self.error("expected end; found {{else}}");
                }
                list
            });
        }
        Ok(Box::new(Branch {
            position: pipe.position,
            pipe,
            list,
            otherwise,
        }))
    }

    fn template_name(&mut self, context: &str) -> Result<(usize, Text), ParseError> {
        let token = self.next_after_space();
        if !matches!(token.kind, Kind::String | Kind::RawString) {
            return self.unexpected(&token, context);
        }
        Ok((token.position, self.unquoted(&token.text)?.into()))
    }

    fn block(&mut self) -> Result<Node, ParseError> {
        const CONTEXT: &str = "block clause";
        let (position, name) = self.template_name(CONTEXT)?;
        let pipe = self.pipeline(CONTEXT, Kind::RightDelimiter)?;
        let (list, end, outer) = self.body()?;
        if matches!(end, Item::Else) {
            self.tree = outer;
            return self.error(format!("unexpected {{{{else}}}} in {CONTEXT}"));
        }
        self.define(name.clone(), list)?;
        self.tree = outer;
        Ok(Node::Template(Box::new(Invocation {
            position,
            name,
            pipe: Some(pipe),
        })))
    }

    fn template(&mut self) -> Result<Node, ParseError> {
        const CONTEXT: &str = "template clause";
        let (position, name) = self.template_name(CONTEXT)?;
        let mut pipe = None;
        if self.next_after_space().kind != Kind::RightDelimiter {
            self.position -= 1;
            pipe = Some(self.pipeline(CONTEXT, Kind::RightDelimiter)?);
        }
        Ok(Node::Template(Box::new(Invocation { position, name, pipe })))
    }

    fn pipeline(&mut self, context: &str, end: Kind) -> Result<Pipe, ParseError> {
        let mut pipe = Pipe {
            position: self.place_after_space(),
            is_assignment: false,
            variables: Vec::new(),
            commands: Vec::with_capacity(1),
        };
        while self.peek_after_space() == Kind::Variable && self.declaration(&mut pipe, context)? {}
        loop {
            let token = self.next_after_space();
            match token.kind {
                kind if kind == end => break,
                Kind::Bool
                | Kind::CharConstant
                | Kind::Complex
                | Kind::Dot
                | Kind::Field
                | Kind::Identifier
                | Kind::Number
                | Kind::Nil
                | Kind::RawString
                | Kind::String
                | Kind::Variable
                | Kind::LeftParenthesis => {
                    self.position -= 1;
                    let command = self.command()?;
                    pipe.commands.push(command);
                }
                _ => return self.unexpected(&token, context),
            }
        }
        if pipe.commands.is_empty() {
            return self.error(format!("missing value for {context}"));
        }
        let is_constant = |command: &Command| {
            let first = command.operands.first().map(|operand| &operand.term);
            matches!(
                first,
                Some(Term::Bool(_) | Term::Dot | Term::Nil | Term::Number(_) | Term::String(_))
            )
        };
        match pipe.commands.iter().skip(1).position(is_constant) {
            Some(stage) => self.error(format!("non executable command in pipeline stage {}", stage + 2)),
            None => Ok(pipe),
        }
    }

    /// Reads a declared or assigned variable, if the next token is one. Returns true if another one follows.
    fn declaration(&mut self, pipe: &mut Pipe, context: &str) -> Result<bool, ParseError> {
        let token = self.next();
        let variable = Text::from(token.text.as_str());
        self.skip_space();
        let next = self.next();
        let declare = |parser: &mut Self, pipe: &mut Pipe| {
            pipe.variables.push(variable.clone());
            parser.tree.variables.push(variable.clone());
        };
        match next.kind {
            Kind::Assign | Kind::Declare => {
                pipe.is_assignment = next.kind == Kind::Assign;
                declare(self, pipe);
                Ok(false)
            }
            Kind::Char if next.text == "," => {
                declare(self, pipe);
                if context != "range" || pipe.variables.len() >= 2 {
                    return self.error(format!("too many declarations in {context}"));
                }
                let follows = self.peek_after_space();
                if !matches!(follows, Kind::Variable | Kind::RightDelimiter | Kind::RightParenthesis) {
                    return self.error("range can only initialize variables");
                }
                Ok(true)
            }
            _ => {
                self.step_back_to(&token);
                Ok(false)
            }
        }
    }

    fn command(&mut self) -> Result<Command, ParseError> {
        let mut operands = Vec::with_capacity(1);
        loop {
            self.skip_space();
            operands.extend(self.operand()?);
            let token = self.next();
            match token.kind {
                Kind::Space => {}
                Kind::RightDelimiter | Kind::RightParenthesis => {
                    self.position -= 1;
                    break;
                }
                Kind::Pipe => break,
                _ => return self.unexpected(&token, "operand"),
            }
        }
        if operands.is_empty() {
            return self.error("empty command");
        }
        Ok(Command { operands })
    }

    fn operand(&mut self) -> Result<Option<Operand>, ParseError> {
        let Some(operand) = self.term()? else { return Ok(None) };
        if self.peek() != Kind::Field {
            return Ok(Some(operand));
        }
        let first = self.next();
        let mut fields = vec![Text::from(&first.text[1..])];
        while self.peek() == Kind::Field {
            fields.push(Text::from(&self.next().text[1..]));
        }
        let term = match operand.term {
            Term::Field(mut names) => {
                names.append(&mut fields);
                Term::Field(names)
            }
            Term::Variable(name, mut names) => {
                names.append(&mut fields);
                Term::Variable(name, names)
            }
            Term::Bool(_) | Term::String(_) | Term::Number(_) | Term::Nil | Term::Dot => {
                let shown = quote(operand.to_string().as_bytes(), Charset::Unicode);
                return self.error(format!("unexpected . after term {shown}"));
            }
            _ => Term::Chain(Box::new(operand), fields),
        };
        Ok(Some(Operand {
            position: first.position,
            term,
        }))
    }

    fn term(&mut self) -> Result<Option<Operand>, ParseError> {
        let token = self.next_after_space();
        let mut position = token.position;
        let term = match token.kind {
            Kind::Identifier => match self.functions.get(&token.text) {
                Some(function) => Term::Function(token.text.into(), function.clone()),
                None => {
                    let name = quote(token.text.as_bytes(), Charset::Unicode);
                    return self.error(format!("function {name} not defined"));
                }
            },
            Kind::Dot => Term::Dot,
            Kind::Nil => Term::Nil,
            Kind::Variable => {
                if !self
                    .tree
                    .variables
                    .iter()
                    .any(|name| name.bytes() == token.text.as_bytes())
                {
                    let name = quote(token.text.as_bytes(), Charset::Unicode);
                    return self.error(format!("undefined variable {name}"));
                }
                Term::Variable(token.text.into(), Vec::new())
            }
            Kind::Field => Term::Field(vec![Text::from(&token.text[1..])]),
            Kind::Bool => Term::Bool(token.text == "true"),
            Kind::CharConstant | Kind::Complex | Kind::Number => match Number::parse(&token) {
                Ok(number) => Term::Number(Box::new(number)),
                Err(message) => return self.error(message),
            },
            Kind::LeftParenthesis => {
                let pipe = self.nested(|parser| parser.pipeline("parenthesized pipeline", Kind::RightParenthesis))?;
                position = pipe.position;
                Term::Pipe(Box::new(pipe))
            }
            Kind::String | Kind::RawString => Term::String(Box::new(Literal {
                value: Value::string(self.unquoted(&token.text)?),
                quoted: token.text,
            })),
            _ => {
                self.position -= 1;
                return Ok(None);
            }
        };
        Ok(Some(Operand { position, term }))
    }
}
