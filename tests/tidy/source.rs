//! The sources as the rules read them: code only, with comments, literals and test modules blanked out. Line breaks
//! stay, so a position still tells its line.

use std::path::{Path, PathBuf};

use crate::support::project;

/// One file below `src/`.
pub(super) struct Source {
    /// Path relative to the project, as it is reported.
    pub(super) path: String,
    /// `["model", "service"]` for `src/model/service.rs`; empty for `lib.rs`.
    pub(super) module: Vec<String>,
    /// The file as it stands.
    pub(super) text: String,
    /// The file's code, of the same length.
    pub(super) code: String,
}

impl Source {
    /// The top-level module that the file belongs to; `None` for `lib.rs`.
    pub(super) fn layer(&self) -> Option<&str> {
        self.module.first().map(String::as_str)
    }

    /// `path:line` of a position in `code`.
    pub(super) fn place(&self, position: usize) -> String {
        format!("{}:{}", self.path, self.code[..position].matches('\n').count() + 1)
    }

    /// Positions at which `word` stands in the code and is not part of a longer name.
    pub(super) fn words<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        let is_name = |character: char| character.is_alphanumeric() || character == '_';
        self.code
            .match_indices(word)
            .map(|(position, _)| position)
            .filter(move |&position| {
                !self.code[..position].ends_with(is_name) && !self.code[position + word.len()..].starts_with(is_name)
            })
    }
}

/// All Rust files below `src/` that are not tests.
pub(super) fn sources() -> Vec<Source> {
    let root = project().join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    files.sort();
    files
        .into_iter()
        .filter(|path| !is_test(path))
        .map(|path| read(&root, &path))
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("src/ is readable") {
        let path = entry.expect("src/ is readable").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn is_test(path: &Path) -> bool {
    path.iter()
        .any(|part| part == "tests" || part == "tests.rs" || part == "testing.rs")
}

fn read(root: &Path, path: &Path) -> Source {
    let text = std::fs::read_to_string(path).expect("a source file is text");
    let inner = path
        .strip_prefix(root)
        .expect("the file was found below src/")
        .with_extension("");
    let mut module: Vec<String> = inner.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if module == ["lib"] {
        module.clear();
    }
    let code = without_test_modules(code_only(&text));
    Source {
        path: format!("src/{}.rs", inner.display()),
        module,
        text,
        code,
    }
}

/// Blanks comments and the content of string and character literals.
fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (length, keep) = token(rest, first, &code);
        let (taken, left) = rest.split_at(length);
        if keep {
            code.push_str(taken);
        } else {
            blank(taken, &mut code);
        }
        rest = left;
    }
    code
}

/// The length of the comment, literal or single character that `rest` begins with, and whether it is code.
fn token(rest: &str, first: char, before: &str) -> (usize, bool) {
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), false);
    }
    if rest.starts_with("/*") {
        return (block_comment(rest), false);
    }
    if first == '"' {
        return (quoted(rest, '"'), false);
    }
    let in_name = before.ends_with(|character: char| character.is_alphanumeric() || character == '_');
    if first == 'r' && !in_name {
        let hashes = rest[1..].bytes().take_while(|&byte| byte == b'#').count();
        if rest[1 + hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let begin = 2 + hashes;
            return (
                rest[begin..]
                    .find(&end)
                    .map_or(rest.len(), |position| begin + position + end.len()),
                false,
            );
        }
    }
    // A quote begins a character literal when another quote follows one character (or an escape); else it is a lifetime.
    if first == '\'' && (rest[1..].starts_with('\\') || rest.chars().nth(2) == Some('\'')) {
        return (quoted(rest, '\''), false);
    }
    (first.len_utf8(), true)
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut position = 0;
    while position < rest.len() {
        if rest[position..].starts_with("/*") {
            depth += 1;
            position += 2;
        } else if rest[position..].starts_with("*/") {
            depth -= 1;
            position += 2;
            if depth == 0 {
                break;
            }
        } else {
            position += rest[position..].chars().next().map_or(1, char::len_utf8);
        }
    }
    position
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (position, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return position + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Spaces instead of `text`, byte for byte, line breaks kept.
fn blank(text: &str, into: &mut String) {
    into.extend(text.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
}

/// Blanks what `#[cfg(test)]` stands before: tests may reach for more than the code they test.
fn without_test_modules(code: String) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut result = String::with_capacity(code.len());
    let mut rest = code.as_str();
    while let Some(begin) = rest.find(MARK) {
        let item = &rest[begin..];
        let length = match (item.find('{'), item.find(';')) {
            (Some(brace), semicolon) if semicolon.is_none_or(|position| brace < position) => {
                brace + braces(&item[brace..])
            }
            (_, semicolon) => semicolon.map_or(item.len(), |position| position + 1),
        };
        result.push_str(&rest[..begin]);
        blank(&item[..length], &mut result);
        rest = &item[length..];
    }
    result.push_str(rest);
    result
}

/// The length of the block that `code` begins with.
fn braces(code: &str) -> usize {
    let mut depth = 0_usize;
    for (position, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return position + 1;
        }
    }
    code.len()
}
