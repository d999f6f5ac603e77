//! Syntax of CEL, the language of expressions that proxies evaluate.

/// Stack for parsing, in bytes; only pages that are touched take memory. The parser ends at 96 levels of nesting, each
/// of which takes 160 KiB in builds without optimisation: 15 MiB, and less than 1 MiB more for the text of an error.
const STACK: usize = 64 << 20;

/// Checks the syntax of an expression. Names and types are not checked, since they depend on the proxy.
///
/// # Errors
/// The first mistake with its line and column.
pub fn check(expression: &str) -> Result<(), String> {
    // The tree is as deep as the expression has operators, so it is also dropped on the large stack.
    stacker::grow(STACK, || parse(expression))
}

fn parse(expression: &str) -> Result<(), String> {
    let Err(errors) = cel::parser::Parser::new().parse(expression) else {
        return Ok(());
    };
    let Some(error) = errors.errors.first() else {
        return Err("it has a mistake".to_owned());
    };
    let (line, column) = error.pos;
    let message = if error.msg.contains("Recursion limit") {
        "it is nested too deeply"
    } else {
        // A list of all tokens that may stand there follows.
        error.msg.split(" expecting {").next().unwrap_or_default()
    };
    Err(format!("line {line}, column {column}: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_parsed() {
        for expression in [
            "response.code >= 400",
            "request.headers['x'] == \"y\" && has(request.headers.z)",
            "[1, 2].all(x, x > 0u) || xds.cluster_name in {'a': 1}",
            "connection.mtls ? r'\\d' : b'\\x01'",
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
            let error = check(expression).expect_err(expression);
            assert!(error.starts_with(at), "{expression}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        for unit in ["(", "[", "a?b:", "f("] {
            let error = check(&unit.repeat(2000)).expect_err(unit);
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
