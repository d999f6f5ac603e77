//! Wording and width of comments, and references in them.
//!
//! Folders that may break a rule are listed with it. The list may only shrink: remove a folder when a test says that it
//! is clean.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use libtest_mimic::{Failed, Trial};

use super::verdict;
use crate::support::project;

/// The widest line.
const COLUMNS: usize = 120;

/// First words of noun clauses, with which doc comments must not begin.
const CLAUSES: &[&str] = &["What ", "Who ", "How ", "Whether "];

/// Folders with lines that are too wide: mostly rows of macro tables, which rustfmt does not break.
const NOT_YET_NARROW: &[&str] = &[
    "src/admin",
    "src/api",
    "src/ingest",
    "src/model",
    "src/status",
    "tests/support",
];

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
    /// The folder of the file, at most two levels deep: `src/generate/cluster` has its own entries in the lists.
    fn folder(&self) -> String {
        let module = self.path.trim_end_matches(".rs");
        let depth = if module.starts_with("src/generate/") { 3 } else { 2 };
        module.split('/').take(depth).collect::<Vec<_>>().join("/")
    }

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

/// Checks breaches by folder against the list of folders that are not clean yet.
fn check(rule: &str, found: Vec<(String, String)>, not_yet: &[&str]) -> Result<(), Failed> {
    let folders: BTreeSet<&str> = found.iter().map(|(folder, _)| folder.as_str()).collect();
    let clean = not_yet.iter().filter(|folder| !folders.contains(**folder));
    let clean = clean.map(|folder| format!("{folder} is clean, remove it from the list in tests/tidy/language.rs"));
    let breaches = found.iter().filter(|(folder, _)| !not_yet.contains(&folder.as_str()));
    verdict(rule, breaches.map(|(_, breach)| breach.clone()).chain(clean).collect())
}

fn doc_comments_begin_plainly() -> Result<(), Failed> {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.path.starts_with("src/")) {
        for (line, text) in file.comments() {
            let is_doc = ["///", "//!"]
                .iter()
                .any(|marker| line.text.trim_start().starts_with(marker));
            if is_doc && CLAUSES.iter().any(|clause| text.starts_with(clause)) {
                found.push((file.folder(), format!("{}: {}", line.place, line.text.trim())));
            }
        }
    }
    check("a doc comment begins with a noun or a verb", found, &[])
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
                found.push((file.folder(), line.place));
            }
        }
    }
    check("lines have at most 120 columns", found, NOT_YET_NARROW)
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
                    found.push((file.folder(), format!("{}: {}", line.place, line.text.trim())));
                }
            }
        }
    }
    let rule = "a note of parity names a file, scenario or issue: `Parity (reference): …`";
    check(rule, found, &[])
}

fn documents_exist() -> Result<(), Failed> {
    let readme = |path: &str| File {
        text: std::fs::read_to_string(project().join(path)).unwrap_or_default(),
        path: path.to_owned(),
    };
    let mut found = Vec::new();
    for file in files()
        .into_iter()
        .chain(["README.md", "src/ARCHITECTURE.md", "tests/README.md"].map(readme))
    {
        let is_text = is_markdown(&file.path);
        for line in file
            .lines()
            .filter(|line| is_text || line.text.trim_start().starts_with("//"))
        {
            for name in documents(line.text) {
                let from = Path::new(&file.path).parent().unwrap_or(Path::new(""));
                let places = [Path::new(""), Path::new("src"), Path::new("docs"), from];
                if !places.iter().any(|place| project().join(place).join(name).exists()) {
                    found.push((file.folder(), format!("{}: {name}", line.place)));
                }
            }
        }
    }
    check("documents that comments name are in the repository", found, &[])
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
