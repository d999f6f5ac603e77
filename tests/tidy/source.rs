//! Source files without comments, literals and test modules, and the paths that they import. Blanked text keeps its
//! line breaks, so that positions give line numbers.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::support::project;

/// One file below `src/`.
pub(super) struct Source {
    /// Path relative to the project.
    pub(super) path: String,
    /// `["model", "service"]` for `src/model/service.rs`; empty for `lib.rs`.
    pub(super) module: Vec<String>,
    /// The whole file.
    pub(super) text: String,
    /// The file with comments, literals and test modules blanked, of the same length.
    pub(super) code: String,
}

impl Source {
    /// Returns the top-level module that contains the file; `None` for `lib.rs`.
    pub(super) fn layer(&self) -> Option<&str> {
        self.module.first().map(String::as_str)
    }

    /// Returns `path:line` of a position in `code`.
    pub(super) fn place(&self, position: usize) -> String {
        format!("{}:{}", self.path, self.code[..position].matches('\n').count() + 1)
    }

    /// Returns the positions of `word` in the code, except inside longer names.
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

/// The module path of an item in the crate, such as `["model", "service", "Service"]`.
pub(super) type ItemPath = Vec<String>;

impl Source {
    /// Returns the paths in the crate that the file names by `crate`, `super` or `self`, with their positions.
    pub(super) fn imports(&self) -> Vec<(usize, ItemPath)> {
        let mut found = Vec::new();
        for position in self.words("crate") {
            if let Some(rest) = after_separator(&self.code[position + "crate".len()..]) {
                found.extend(paths(rest).into_iter().map(|path| (position, path)));
            }
        }
        for position in self.words("istiod_proto").filter(|_| self.layer() != Some("proto")) {
            found.push((position, vec!["proto".to_owned()]));
        }
        for position in self.words("super").chain(self.words("self")) {
            // The second and later `super` of a path, and `self` at the end of one.
            if self.code[..position].trim_end().ends_with("::") || self.is_alone(position) {
                continue;
            }
            let mut parent = self.module_at(position);
            let mut rest = &self.code[position..];
            if let Some(inner) = rest.strip_prefix("self").and_then(after_separator) {
                rest = inner;
            }
            while let Some(inner) = rest.trim_start().strip_prefix("super").and_then(after_separator) {
                parent.pop();
                rest = inner;
            }
            let absolute = |path: ItemPath| (position, parent.iter().cloned().chain(path).collect());
            found.extend(paths(rest).into_iter().map(absolute));
        }
        found
    }

    /// True for `self` as a receiver or in a list of imports.
    fn is_alone(&self, position: usize) -> bool {
        let rest = &self.code[position..];
        let word = rest.strip_prefix("super").or_else(|| rest.strip_prefix("self"));
        word.and_then(after_separator).is_none()
    }

    /// Returns the module at a position, which may be an inline module.
    fn module_at(&self, position: usize) -> Vec<String> {
        let mut module = self.module.clone();
        for begin in self.words("mod").filter(|begin| *begin < position) {
            let rest = self.code[begin + "mod".len()..].trim_start();
            let name = name_at(rest);
            if !rest[name.len()..].trim_start().starts_with('{') {
                continue;
            }
            let open = begin + self.code[begin..].find('{').expect("because a brace follows the name");
            if position < open + braces(&self.code[open..]) {
                module.push(name.to_owned());
            }
        }
        module
    }

    /// Returns the names that the file re-exports from its own modules, each with the module.
    pub(super) fn reexports(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for position in self.words("use") {
            let before = self.code[..position].trim_end();
            if !before.ends_with("pub") && !before.ends_with(')') {
                continue;
            }
            let statement = self.code[position + "use".len()..]
                .split(';')
                .next()
                .unwrap_or_default();
            for path in paths(statement) {
                let own: Vec<String> = path.into_iter().filter(|segment| segment != "self").collect();
                if let [module, .., item] = own.as_slice() {
                    found.insert(item.clone(), module.clone());
                }
            }
        }
        found
    }
}

fn after_separator(code: &str) -> Option<&str> {
    code.trim_start().strip_prefix("::")
}

fn name_at(code: &str) -> &str {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    &code[..code.find(|character| !is_name(character)).unwrap_or(code.len())]
}

/// Reads `a::b::c` or `{a::b, c::{d, e}}` and returns all paths. A trailing `as name` is ignored.
fn paths(code: &str) -> Vec<ItemPath> {
    let code = code.trim_start();
    if let Some(group) = code.strip_prefix('{') {
        return members(group).into_iter().flat_map(paths).collect();
    }
    let name = name_at(code);
    if name.is_empty() {
        return Vec::new();
    }
    let inner = after_separator(&code[name.len()..]).map(paths).unwrap_or_default();
    if inner.is_empty() {
        return vec![vec![name.to_owned()]];
    }
    let join = |path: ItemPath| std::iter::once(name.to_owned()).chain(path).collect();
    inner.into_iter().map(join).collect()
}

/// Returns the members of a `{...}` group, which begins after its opening brace.
fn members(group: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let mut begin = 0;
    let mut members = Vec::new();
    for (position, byte) in group.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => {
                members.push(&group[begin..position]);
                break;
            }
            b'}' => depth -= 1,
            b',' if depth == 0 => {
                members.push(&group[begin..position]);
                begin = position + 1;
            }
            _ => {}
        }
    }
    members
}

/// Reads all Rust files below `src/` except tests.
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
    path.iter().any(|part| {
        ["tests", "tests.rs", "testing.rs", "fixture.rs"]
            .iter()
            .any(|test| part == *test)
    })
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

/// Blanks comments and literals.
pub(super) fn code_only(text: &str) -> String {
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

/// Returns the length of the comment, literal or character at the start of `rest`, and true if it is code.
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
    // A quote begins a character literal if another quote follows one character or an escape. Otherwise it is a
    // lifetime.
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

/// Appends a space for each byte of `text`, and its line breaks.
fn blank(text: &str, into: &mut String) {
    into.extend(text.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
}

/// Blanks items after `#[cfg(test)]`: tests may import more than the code under test.
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

/// Returns the length of the block at the start of `code`.
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
