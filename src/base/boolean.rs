//! Booleans as Go reads them (`strconv.ParseBool`).

/// Parses a boolean; `None` if it is not one.
pub fn parse(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_spellings_of_go_are_booleans() {
        for text in ["1", "t", "T", "TRUE", "true", "True"] {
            assert_eq!(parse(text), Some(true), "{text}");
        }
        for text in ["0", "f", "F", "FALSE", "false", "False"] {
            assert_eq!(parse(text), Some(false), "{text}");
        }
        for text in ["", "yes", "on", "tRUE", " true", "2"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
