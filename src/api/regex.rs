//! Regular expressions in users' configuration.
//!
//! Envoy compiles them with RE2, so RE2's syntax is valid. They are also compiled here: EnvoyFilter's `proxyVersion` to
//! match it, the others to verify that Envoy can compile them. Limits of length and compiled size bound the memory that
//! one expression takes.

use regex::bytes::{Regex, RegexBuilder};
use regex_syntax::ast::{Ast, RepetitionKind, RepetitionRange, parse::ParserBuilder};

use crate::base::re2::{self, from_re2};

/// The maximum length of an expression in bytes. Istio has the same limit.
pub const MAX_LENGTH: usize = 1024;
/// The maximum size of the compiled form in bytes.
pub const MAX_COMPILED: usize = 512 << 10;
/// The maximum size in bytes of a compiled form that is kept.
pub const MAX_KEPT: usize = 64 << 10;
/// The maximum nesting of groups and repetitions.
const MAX_NESTING: u32 = 100;
/// The maximum product of the counts of nested repetitions. RE2 (re2/parse.cc, `RepetitionWalker`) and Go
/// (regexp/syntax/parse.go, `repeatIsValid`) have the same limit.
const MAX_COPIES: u64 = 1000;
/// The maximum number of instructions in the program that RE2 makes of an expression. Istio's proxies refuse larger
/// ones (pkg/bootstrap/config.go, `re2.max_program_size.error_level`).
const MAX_INSTRUCTIONS: u64 = 32_768;
/// The least number of instructions for a class of all characters but a few: one for those of ASCII, and six for the
/// encodings of others (re2/compile.cc, `Add_80_10ffff`).
const WIDE_CLASS: u64 = 7;

/// The reason to refuse an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegexError {
    /// It is longer than [`MAX_LENGTH`].
    #[error("the regular expression has {0} bytes, the most is {MAX_LENGTH}")]
    TooLong(usize),
    /// Its compiled form is too large.
    #[error("the regular expression is too costly: compiled it has more than {0} bytes")]
    TooLarge(usize),
    /// The program of RE2 is too large.
    #[error("the regular expression is too costly: its program has more than {0} instructions")]
    TooManyInstructions(u64),
    /// The object has too many different expressions.
    #[error("the object has more than {0} different regular expressions")]
    TooMany(usize),
    /// Its syntax is invalid.
    #[error("the regular expression is invalid: {0}")]
    Syntax(String),
}

/// Checks the syntax of an expression, within [`MAX_LENGTH`], [`MAX_COMPILED`] and the limit of [`check_program`].
pub fn check(expression: &str) -> Result<(), RegexError> {
    check_program(expression)?;
    within(expression, MAX_COMPILED).map(drop)
}

/// Checks the syntax of an expression within [`MAX_LENGTH`], at a cost in proportion to its length. The size of its
/// compiled form is not known then.
pub fn check_syntax(expression: &str) -> Result<(), RegexError> {
    translated(expression).map(drop)
}

/// Checks the syntax like [`check_syntax`], and that proxies do not refuse the expression because of the least size of
/// its program.
pub fn check_program(expression: &str) -> Result<(), RegexError> {
    let (_, tree) = translated(expression)?;
    if instructions(&tree) > MAX_INSTRUCTIONS {
        return Err(RegexError::TooManyInstructions(MAX_INSTRUCTIONS));
    }
    Ok(())
}

/// Returns an expression in the syntax of the library, and its tree.
fn translated(expression: &str) -> Result<(String, Ast), RegexError> {
    check_length(expression)?;
    let expression = from_re2(expression).map_err(|error| RegexError::Syntax(error.0))?;
    let parsed = ParserBuilder::new().nest_limit(MAX_NESTING).build().parse(&expression);
    let tree = parsed.map_err(|error| RegexError::Syntax(error.kind().to_string()))?;
    if nested_copies(&tree) > MAX_COPIES {
        let message = format!("nested repetitions of more than {MAX_COPIES} together");
        return Err(RegexError::Syntax(message));
    }
    Ok((expression, tree))
}

/// Returns the largest product of the counts of nested repetitions. Parsing limits the depth of the tree.
fn nested_copies(tree: &Ast) -> u64 {
    let most = |trees: &[Ast]| trees.iter().map(nested_copies).max().unwrap_or(1);
    match tree {
        Ast::Repetition(repetition) => {
            let count = copies(&repetition.op.kind).max(1);
            count.saturating_mul(nested_copies(&repetition.ast))
        }
        Ast::Group(group) => nested_copies(&group.ast),
        Ast::Alternation(alternation) => most(&alternation.asts),
        Ast::Concat(concat) => most(&concat.asts),
        _ => 1,
    }
}

/// Returns the least number of instructions in the program of RE2. The alternatives of an alternation may become one
/// class.
fn instructions(tree: &Ast) -> u64 {
    match tree {
        Ast::Empty(_) | Ast::Flags(_) | Ast::Assertion(_) => 0,
        Ast::Dot(_) => WIDE_CLASS,
        Ast::ClassPerl(class) if class.negated => WIDE_CLASS,
        Ast::ClassBracketed(class) if class.negated => WIDE_CLASS,
        Ast::Literal(_) | Ast::ClassUnicode(_) | Ast::ClassPerl(_) | Ast::ClassBracketed(_) => 1,
        Ast::Repetition(repetition) => copies(&repetition.op.kind).saturating_mul(instructions(&repetition.ast)),
        Ast::Group(group) => instructions(&group.ast),
        Ast::Alternation(alternation) => alternation.asts.iter().map(instructions).max().unwrap_or_default(),
        Ast::Concat(concat) => concat.asts.iter().map(instructions).sum(),
    }
}

/// Returns how often RE2 repeats what a repetition applies to.
fn copies(kind: &RepetitionKind) -> u64 {
    match kind {
        RepetitionKind::ZeroOrOne | RepetitionKind::ZeroOrMore | RepetitionKind::OneOrMore => 1,
        RepetitionKind::Range(RepetitionRange::AtLeast(count)) => u64::from(*count).max(1),
        RepetitionKind::Range(RepetitionRange::Exactly(count) | RepetitionRange::Bounded(_, count)) => {
            u64::from(*count)
        }
    }
}

/// Checks the length of an expression only.
pub fn check_length(expression: &str) -> Result<(), RegexError> {
    if expression.len() > MAX_LENGTH {
        return Err(RegexError::TooLong(expression.len()));
    }
    Ok(())
}

/// Compiles an expression to keep it, within [`MAX_LENGTH`] and [`MAX_KEPT`].
pub fn compile(expression: &str) -> Result<Regex, RegexError> {
    within(expression, MAX_KEPT)
}

fn within(expression: &str, max_compiled: usize) -> Result<Regex, RegexError> {
    let (expression, _) = translated(expression)?;
    // Classes such as `\w` mean ASCII in RE2. Only expressions with other characters need the Unicode tables.
    build(&expression, false, max_compiled).or_else(|error| match error {
        RegexError::Syntax(_) => build(&expression, true, max_compiled),
        error => Err(error),
    })
}

fn build(expression: &str, unicode: bool, max_compiled: usize) -> Result<Regex, RegexError> {
    RegexBuilder::new(expression)
        .unicode(unicode)
        .size_limit(max_compiled)
        .dfa_size_limit(max_compiled)
        .nest_limit(MAX_NESTING)
        .build()
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => RegexError::TooLarge(max_compiled),
            error => RegexError::Syntax(re2::reason(&error)),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_of_re2_compile() {
        let good = [
            r"^1\.2[0-9]*\.\d+$",
            "/api/v[12]/.*",
            r"\Qa.b{\E.*",
            "a{b}",
            "{id}",
            "[^]]+",
            "[[]",
            "[[:alpha:]]+",
            "(?i)abc",
            r"\p{L}+",
            "(?P<name>x)",
            "[a&&b]",
            "ü+",
            r"\w{1,100}",
            "a|b",
            "",
            r"\101[\102-\103]\0",
            "(?<name>x)",
            "(?i-s:x)",
            "(?P<a_1>x)",
            "[[:^alpha:][:]",
            "[]-a]",
            r"[\d-z]",
            r"\b{start}",
        ];
        for expression in good {
            assert!(compile(expression).is_ok(), "{expression}: {:?}", compile(expression));
        }
        assert!(compile("[a&&b]").unwrap().is_match(b"&"));
        assert!(compile(r"^\101[\102-\103]$").unwrap().is_match(b"AC"));
        for class in [r"\p{Any}", r"\p{Greek}", r"\p{^Lu}", r"\PN", r"[\p{Han}]"] {
            assert_eq!(check(class), Ok(()), "{class}");
        }
        assert!(compile(r"^\<a\>$").unwrap().is_match(b"<a>"));
        let matches = |class: &str| {
            let class = compile(&format!("^{class}$")).unwrap();
            ('!'..='~')
                .filter(|character| class.is_match(character.to_string().as_bytes()))
                .collect::<String>()
        };
        assert_eq!(matches("[+--]"), "+,-");
        assert_eq!(matches("[a-c--/~~x-]"), "-./abcx~");
        assert_eq!(matches("[]a[:]"), ":[]a");
        assert_eq!(matches(r"[\<\>]"), "<>");
        assert!(compile(r"\Qa.b\E").unwrap().is_match(b"a.b") && !compile(r"\Qa.b\E").unwrap().is_match(b"axb"));
    }

    #[test]
    fn r1_costly_or_invalid_expressions_are_refused() {
        for expression in [
            "(",
            "a**",
            "[z-a]",
            "(?=x)",
            r"(a)\1",
            "*",
            "x{1001}",
            "a*+",
            "a{2}{3}",
            r"(a)\8",
            "(a{100}){11}",
            "(?:x|(?:a{2,}b)*){501}",
            "((((a{1,100}){1,100}){1,100}){1,100})",
            "(?:(?:(?:x{999}){999}){999}){999}",
            "(\\pL{500}){500}",
        ] {
            assert!(
                matches!(compile(expression), Err(RegexError::Syntax(_))),
                "{expression}"
            );
            assert!(
                matches!(check_syntax(expression), Err(RegexError::Syntax(_))),
                "{expression}"
            );
        }
        assert_eq!(compile(&"a".repeat(1025)).unwrap_err(), RegexError::TooLong(1025));
        let bomb = r"\pL{500}";
        assert_eq!(compile(bomb).unwrap_err(), RegexError::TooLarge(MAX_KEPT));
        assert_eq!(check(bomb).unwrap_err(), RegexError::TooLarge(MAX_COMPILED));
        assert_eq!(check_syntax(bomb), Ok(()));
        assert_eq!(check("(a{10}){100}"), Ok(()));
        assert!(check(r"\pL{10}").is_ok() && compile(r"\pL{10}").is_err());
        assert!(compile(&"(".repeat(1000)).is_err());
    }

    /// Envoy refuses all routes of a port with one of these, although the compiled form of the library is small.
    #[test]
    fn programs_that_proxies_refuse_are_refused() {
        let refused: Result<(), RegexError> = Err(RegexError::TooManyInstructions(MAX_INSTRUCTIONS));
        for part in [".{1000}", "[^/]{1000}", r"(?:\W|x){900,1000}"] {
            let expression = part.repeat(5);
            assert_eq!(check(&expression), refused, "{expression}");
            assert_eq!(check_program(&expression), refused, "{expression}");
            assert_eq!(check_syntax(&expression), Ok(()), "{expression}");
            assert_eq!(check_program(&part.repeat(4)), Ok(()), "{part}");
            assert_eq!(check(part), Ok(()), "{part}");
        }
        assert_eq!(check_program(&"(?:a|b|[c-z]){1000}".repeat(20)), Ok(()));
    }

    /// Envoy refuses a whole resource with one of these.
    #[test]
    fn syntax_of_the_library_alone_is_refused() {
        for expression in [
            "(?x) a",
            "(?ix:a)",
            "(?R)a",
            "(?u:a)",
            "(?<a.b>x)",
            "(?<=x)",
            r"\u0041",
            r"\u{41}",
            r"\U00000041",
            r"[\u0041]",
            r"[\Qa\E]",
            r"[\C]",
            r"\p{Letter}",
            r"\p{Alphabetic}",
            r"\p{greek}",
            r"\p{Grek}",
            r"\p{sc=Greek}",
            r"\p{lu}",
            r"\pl",
            r"[\p{Letter}]",
            "[[:foo:]]",
            "[a--b]",
        ] {
            assert!(
                matches!(compile(expression), Err(RegexError::Syntax(_))),
                "{expression}"
            );
            // Expressions that are not compiled, because an object has many.
            assert!(
                matches!(check_syntax(expression), Err(RegexError::Syntax(_))),
                "{expression}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_an_expression_or_an_error(text in "[a-c0-9QECpLx\\\\(){}\\[\\]^$.*+?|&~:,\u{fc}-]{0,40}") {
            let _ = compile(&text);
            if check(&text).is_ok() {
                proptest::prop_assert_eq!(check_syntax(&text), Ok(()));
            }
        }
    }
}
