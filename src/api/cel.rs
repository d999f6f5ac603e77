//! Syntax of CEL, the language of expressions that proxies evaluate.

use cel::{
    IdedExpr,
    common::ast::{CallExpr, EntryExpr, Expr, IdedEntryExpr, LiteralValue},
};

use super::regex::{self, RegexError};

/// The functions that some release of Envoy may have: those of CEL's standard, and of its extensions for texts.
/// `string` is none of them: Envoy has it only where a filter enables it (`enable_string_conversion`).
const FUNCTIONS: [&str; 41] = [
    "bool",
    "bytes",
    "capture",
    "captureN",
    "charAt",
    "contains",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "extract",
    "format",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
    "indexOf",
    "int",
    "join",
    "lastIndexOf",
    "lowerAscii",
    "matches",
    "quote",
    "replace",
    "reverse",
    "size",
    "split",
    "startsWith",
    "substring",
    "timestamp",
    "trim",
    "type",
    "uint",
    "upperAscii",
    "url",
];

/// Stack for parsing, in bytes; only pages that are touched take memory. The parser ends at 96 levels of nesting, each
/// of which takes 160 KiB in builds without optimisation: 15 MiB, and less than 1 MiB more for the text of an error.
const STACK: usize = 64 << 20;

/// The first mistake of an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CelError {
    /// Its syntax is invalid, at this line and column.
    #[error("line {line}, column {column}: {reason}")]
    Syntax {
        /// The line; the first one is 1.
        line: isize,
        /// The column; the first one is 1.
        column: isize,
        /// The reason.
        reason: String,
    },
    /// Its syntax is invalid; the parser does not say where.
    #[error("it has a mistake")]
    Invalid,
    /// It has a macro with an iteration.
    #[error("proxies have no macros for lists and maps, such as all")]
    Comprehension,
    /// Proxies do not have this function.
    #[error("{0} is not a function of proxies")]
    Function(String),
    /// One of its regular expressions is refused.
    #[error(transparent)]
    Regex(#[from] RegexError),
}

/// Checks the syntax of an expression, and that it has no macro or function that all proxies refuse. Names and types
/// are not checked, since they depend on the proxy.
pub fn check(expression: &str) -> Result<(), CelError> {
    // The tree is as deep as the expression has operators, so it is also dropped on the large stack.
    stacker::grow(STACK, || parse(expression))
}

fn parse(expression: &str) -> Result<(), CelError> {
    let errors = match cel::parser::Parser::new().parse(expression) {
        Ok(tree) => return supported(&tree),
        Err(errors) => errors,
    };
    let Some(error) = errors.errors.first() else {
        return Err(CelError::Invalid);
    };
    let (line, column) = error.pos;
    let reason = if error.msg.contains("Recursion limit") {
        "it is nested too deeply"
    } else {
        // A list of all tokens that may stand there follows.
        error.msg.split(" expecting {").next().unwrap_or_default()
    };
    Err(CelError::Syntax {
        line,
        column,
        reason: reason.to_owned(),
    })
}

/// Checks that proxies may compile an expression. Envoy refuses a listener with one that it cannot compile, and it has
/// no comprehensions (source/extensions/filters/common/expr/evaluator.cc).
fn supported(tree: &IdedExpr) -> Result<(), CelError> {
    let mut open = vec![tree];
    while let Some(next) = open.pop() {
        match &next.expr {
            Expr::Comprehension(_) => return Err(CelError::Comprehension),
            Expr::Call(call) => {
                let name = call.func_name.as_str();
                // The names of operators have signs.
                if name.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !FUNCTIONS.contains(&name) {
                    return Err(CelError::Function(name.to_owned()));
                }
                if let Some(Err(error)) = pattern(call).map(regex::check_syntax) {
                    return Err(error.into());
                }
                open.extend(call.target.as_deref());
                open.extend(&call.args);
            }
            Expr::List(list) => open.extend(&list.elements),
            Expr::Map(map) => map.entries.iter().for_each(|entry| open_entry(entry, &mut open)),
            Expr::Struct(message) => message.entries.iter().for_each(|entry| open_entry(entry, &mut open)),
            Expr::Select(select) => open.push(&select.operand),
            Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => {}
        }
    }
    Ok(())
}

/// Returns the regular expression of `text.matches(pattern)` or `matches(text, pattern)`, if it is a literal.
fn pattern(call: &CallExpr) -> Option<&str> {
    match &call.args.last().filter(|_| call.func_name == "matches")?.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

fn open_entry<'t>(entry: &'t IdedEntryExpr, open: &mut Vec<&'t IdedExpr>) {
    match &entry.expr {
        EntryExpr::StructField(field) => open.push(&field.value),
        EntryExpr::MapEntry(pair) => open.extend([&pair.key, &pair.value]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_parsed() {
        for expression in [
            "response.code >= 400",
            "request.headers['x'] == \"y\" && has(request.headers.z)",
            "size([1, 2]) > 0u || !(xds.cluster_name in {'a': -1})",
            "connection.mtls ? r'\\d' : b'\\x01'",
            r"request.path.matches('^/a/\\d+$') && matches(request.path, request.headers['('])",
        ] {
            assert_eq!(check(expression), Ok(()), "{expression}");
        }
        for (expression, at) in [
            ("", "line 1, column 1: "),
            ("a b", "line 1, column 3: "),
            ("response.code >=", "line 1, column 17: "),
            ("(a", "line 1, column 3: "),
            ("'a", "line 1, column 1: "),
            ("has(a)", "line 1, column 5: "),
        ] {
            let error = check(expression).expect_err(expression).to_string();
            assert!(error.starts_with(at), "{expression}: {error}");
        }
    }

    /// Envoy refuses the listener of a waypoint with one of these, and so the services of others.
    #[test]
    fn expressions_that_no_proxy_compiles_are_refused() {
        for (expression, name) in [
            ("[1, 2].all(x, x > 0u)", "all"),
            ("request.headers.exists(name, name == 'x')", "all"),
            ("has(request.headers.x) && other(1)", "other"),
            ("{'a': [request.path.other()]}['a'][0]", "other"),
            ("string(response.code) == '200'", "string"),
            ("request.path.matches('(')", "regular expression"),
            (
                "has(request.path) && !matches(request.path, 'a[')",
                "regular expression",
            ),
        ] {
            let error = check(expression).expect_err(expression).to_string();
            assert!(error.contains(name), "{expression}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        for unit in ["(", "[", "a?b:", "f("] {
            let error = check(&unit.repeat(2000)).expect_err(unit).to_string();
            assert!(error.ends_with("nested too deeply"), "{unit}: {error}");
        }
        for unit in ["!!a||", "a+", "a.", "a&&"] {
            assert_eq!(
                check(&format!("{}a", unit.repeat((8 << 10) / unit.len()))),
                Ok(()),
                "{unit}"
            );
        }
    }
}
