//! Syntax of format strings, which values of headers are: text with commands such as `%REQ(NAME)%`.
//!
//! Parity (pkg/config/validation/header_value_validator.go, after Envoy's source/common/router/header_parser.cc).

/// Checks a format string. A literal percent sign is `%%`.
///
/// # Errors
/// The first syntax error, for the user.
pub(super) fn check(text: &str) -> Result<(), &'static str> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('%') {
        rest = match after.strip_prefix('%') {
            Some(rest) => rest,
            None => command(after)?,
        };
    }
    Ok(())
}

/// Reads a command behind its first percent sign. Returns the text behind the last one.
fn command(text: &str) -> Result<&str, &'static str> {
    const ENDLESS: &str = "has a % that no other % ends; write %% for a percent sign";
    let end = text.find(['%', '(']).ok_or(ENDLESS)?;
    let (name, rest) = text.split_at(end + 1);
    if name.ends_with('%') {
        return Ok(rest);
    }
    let rest = arguments(rest)?.trim_start_matches(' ');
    if rest.is_empty() {
        return Err(ENDLESS);
    }
    rest.strip_prefix('%').ok_or("has text between ) and %")
}

/// Reads an argument, or a list of them in brackets. Returns the text behind the closing parenthesis.
fn arguments(text: &str) -> Result<&str, &'static str> {
    let text = text.trim_start_matches(' ');
    let mut rest = match text.strip_prefix('[') {
        Some(list) => quoted(list)?,
        None => text
            .get(text.chars().next().map_or(0, char::len_utf8)..)
            .unwrap_or_default(),
    };
    loop {
        let (end, behind) = argument(rest)?;
        if end == ')' {
            return Ok(behind);
        }
        let behind = behind.trim_start_matches(' ');
        let Some(next) = behind.strip_prefix(',') else {
            let behind = behind.strip_prefix(']').ok_or("needs , or ] after an argument")?;
            let behind = behind.trim_start_matches(' ').strip_prefix(')');
            return behind.ok_or("needs ) after the arguments");
        };
        rest = quoted(next)?;
    }
}

/// Reads the quote before an item of a list.
fn quoted(text: &str) -> Result<&str, &'static str> {
    let item = text.trim_start_matches(' ').strip_prefix('"');
    item.ok_or("has a list of arguments without quotes")
}

/// Reads the rest of an argument. Returns the parenthesis or quote that ends it, and the text behind that.
fn argument(text: &str) -> Result<(char, &str), &'static str> {
    let mut characters = text.char_indices();
    while let Some((position, character)) = characters.next() {
        match character {
            '\\' => {
                characters.next().ok_or("ends with a backslash in an argument")?;
            }
            ')' | '"' => return Ok((character, &text[position + 1..])),
            _ => {}
        }
    }
    Err("has an argument without end; write %% for a percent sign")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_strings_are_distinguished_from_others() {
        for text in [
            "",
            "plain",
            "100%%",
            "%START_TIME%",
            "a %REQ(x-id)% b %PROTOCOL%",
            "%REQ( x )%",
            "%DYNAMIC_METADATA([\"a\", \"b\"])%",
            "%DYNAMIC_METADATA( [ \"a\" , \"b\\\"c\" ] ) %",
            "%START_TIME(%Y/%m)%",
            "ü%REQ(ü)%ü",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        for text in [
            "50%",
            "50% of",
            "%REQ(x)",
            "%REQ(x",
            "%REQ(",
            "%REQ(x) y%",
            "%A([x])%",
            "%A([\"x\"%",
            "%A([\"x\" \"y\"])%",
            "%A([\"x\"]x%",
            "%A(\\",
            "%REQ(\"x\")%",
        ] {
            assert!(check(text).is_err(), "{text}");
        }
    }

    /// The depth of the stack does not grow with the list.
    #[test]
    fn long_lists_are_read() {
        let text = format!("%A([{}\"x\"])%", "\"x\",".repeat(1_000_000));
        assert_eq!(check(&text), Ok(()));
    }
}
