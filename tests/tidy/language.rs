//! Wording and width of comments, and references in them.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};

use super::verdict;
use crate::support::project;

/// The widest line.
const COLUMNS: usize = 120;

/// First words of noun clauses, with which doc comments must not begin.
const CLAUSES: &[&str] = &["What ", "Who ", "How ", "Whether "];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("tidy::language::doc_comments_begin_plainly", doc_comments_begin_plainly),
        Trial::test("tidy::language::lines_are_narrow", lines_are_narrow),
        Trial::test(
            "tidy::language::parity_notes_have_references",
            parity_notes_have_references,
        ),
        Trial::test("tidy::language::documents_exist", documents_exist),
    ]
}

/// A line of a Rust file.
struct Line<'a> {
    /// `path:line`.
    place: String,
    text: &'a str,
}

/// A Rust file below `src/`, `tests/` or `benches/`.
struct File {
    /// Path relative to the project.
    path: String,
    text: String,
}

impl File {
    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.text.lines().enumerate().map(|(index, text)| Line {
            place: format!("{}:{}", self.path, index + 1),
            text,
        })
    }

    /// Returns the comments, each as its first line and its joined text. Adjacent lines with the same marker are one.
    fn comments(&self) -> Vec<(Line<'_>, String)> {
        let mut comments: Vec<(Line<'_>, String)> = Vec::new();
        let mut marker_before = None;
        for line in self.lines() {
            let trimmed = line.text.trim_start();
            let marker = ["///", "//!", "//"]
                .into_iter()
                .find(|marker| trimmed.starts_with(marker));
            if let Some(marker) = marker {
                let text = trimmed[marker.len()..].trim();
                match comments.last_mut() {
                    Some((_, joined)) if marker_before == Some(marker) => {
                        joined.push(' ');
                        joined.push_str(text);
                    }
                    _ => comments.push((line, text.to_owned())),
                }
            }
            marker_before = marker;
        }
        comments
    }
}

fn files() -> Vec<File> {
    let mut paths = Vec::new();
    for folder in ["src", "tests", "benches"] {
        collect(&project().join(folder), &mut paths);
    }
    paths.sort();
    let read = |path: PathBuf| File {
        text: std::fs::read_to_string(&path).expect("a source file is text"),
        path: path
            .strip_prefix(project())
            .expect("the file is in the project")
            .display()
            .to_string(),
    };
    paths.into_iter().map(read).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the folder is readable").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn doc_comments_begin_plainly() -> Result<(), Failed> {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.path.starts_with("src/")) {
        for (line, text) in file.comments() {
            let is_doc = ["///", "//!"]
                .iter()
                .any(|marker| line.text.trim_start().starts_with(marker));
            if is_doc && CLAUSES.iter().any(|clause| text.starts_with(clause)) {
                found.push(format!("{}: {}", line.place, line.text.trim()));
            }
        }
    }
    verdict("a doc comment begins with a noun or a verb", found)
}

fn lines_are_narrow() -> Result<(), Failed> {
    let mut found = Vec::new();
    for file in &files() {
        for line in file.lines() {
            // Literals and addresses cannot be broken everywhere.
            let is_literal = line.text.contains('"') || line.text.contains("://");
            let is_comment = line.text.trim_start().starts_with("//");
            let is_too_wide = line.text.chars().count() > COLUMNS;
            if is_too_wide && (is_comment || !is_literal) && !line.text.contains("://") && !is_in_literal(file, &line) {
                found.push(line.place);
            }
        }
    }
    verdict("lines have at most 120 columns", found)
}

/// True for lines that are neither code nor comments, such as those of a document in a raw string.
fn is_in_literal(file: &File, line: &Line) -> bool {
    let number: usize = line
        .place
        .rsplit(':')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or(0);
    let code = super::source::code_only(&file.text);
    let blank = code.lines().nth(number - 1).is_some_and(|code| code.trim().is_empty());
    blank && !line.text.trim_start().starts_with("//")
}

fn parity_notes_have_references() -> Result<(), Failed> {
    let mut found = Vec::new();
    for file in &files() {
        for (line, text) in file.comments() {
            for (position, word) in text.match_indices("Parity") {
                let rest = &text[position + word.len()..];
                let is_note = rest.starts_with(':') || rest.starts_with(" (");
                let end = rest.find("):").or_else(|| rest.find(").")).or_else(|| rest.find(");"));
                let is_referenced = rest.starts_with(" (") && end.is_some_and(|end| !rest[..end].contains(". "));
                if is_note && !is_referenced {
                    found.push(format!("{}: {}", line.place, line.text.trim()));
                }
            }
        }
    }
    let rule = "a note of parity names a file, scenario or issue: `Parity (reference): …`";
    verdict(rule, found)
}

/// Documents outside `docs/`.
const DOCUMENTS: [&str; 7] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benches/SCALE.md",
    "src/ARCHITECTURE.md",
    "tests/README.md",
];

/// Returns the documents of the repository.
fn texts() -> impl Iterator<Item = File> {
    let entries = std::fs::read_dir(project().join("docs")).expect("the folder is readable");
    let names = entries.map(|entry| entry.expect("the folder is readable").file_name());
    let pages = names.map(|name| format!("docs/{}", name.to_string_lossy()));
    let paths = DOCUMENTS.into_iter().map(str::to_owned).chain(pages);
    paths.map(|path| File {
        text: std::fs::read_to_string(project().join(&path)).expect("a document is text"),
        path,
    })
}

fn documents_exist() -> Result<(), Failed> {
    let mut found = Vec::new();
    for file in files().into_iter().chain(texts()) {
        let is_text = is_markdown(&file.path);
        for line in file
            .lines()
            .filter(|line| is_text || line.text.trim_start().starts_with("//"))
        {
            for name in documents(line.text) {
                let from = Path::new(&file.path).parent().unwrap_or(Path::new(""));
                let places = [Path::new(""), Path::new("src"), Path::new("docs"), from];
                if !places.iter().any(|place| project().join(place).join(name).exists()) {
                    found.push(format!("{}: {name}", line.place));
                }
            }
        }
    }
    verdict(
        "documents that comments and documents name are in the repository",
        found,
    )
}

/// Returns the names of documents in a line, except addresses.
fn documents(line: &str) -> impl Iterator<Item = &str> {
    let is_path = |character: char| character.is_alphanumeric() || "./_-:".contains(character);
    let words = line.split(move |character| !is_path(character));
    words
        .map(|word| word.trim_end_matches(['.', ':', '-']))
        .filter(|word| is_markdown(word) && !word.contains("//"))
}

fn is_markdown(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "md")
}
