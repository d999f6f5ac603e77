//! The words of the command line, read as cobra and pflag do, and rewritten for clap.
//!
//! Parity (pilot/cmd/pilot-discovery/app/cmd.go): the root command and `discovery` accept unknown flags, so that flags
//! of other releases do not end the start. An unknown flag takes the next word as its value unless that begins with
//! `-` or the flag was written `--flag=value`. Flags may precede the subcommand.

use std::collections::VecDeque;

use clap::{Arg, ArgAction, Command};

/// The words for clap, and the unknown flags that were left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Words for clap.
    pub kept: Vec<String>,
    /// Unknown flags.
    pub unknown: Vec<String>,
}

/// Rewrites the words after the program's name. Flags before the subcommand move behind it.
pub fn rewrite(root: &Command, mut words: Vec<String>) -> Words {
    let Some(index) = subcommand_index(root, &words) else {
        return Flags::of(root).read(words);
    };
    let name = words.remove(index);
    let lenient = root
        .find_subcommand(&name)
        .filter(|subcommand| subcommand.get_name() == "discovery");
    let rest = match lenient {
        Some(subcommand) => Flags::of(subcommand).read(words),
        None => Words {
            kept: words,
            unknown: Vec::new(),
        },
    };
    Words {
        kept: std::iter::once(name).chain(rest.kept).collect(),
        unknown: rest.unknown,
    }
}

/// Returns the index of the subcommand: the first word that is neither a flag nor the value of one.
fn subcommand_index(root: &Command, words: &[String]) -> Option<usize> {
    let flags = Flags::of(root);
    let mut index = 0;
    while let Some(word) = words.get(index) {
        let is_known = match word.strip_prefix("--") {
            Some("") => return None,
            Some(long) => flags.long(long).is_some(),
            None => word.strip_prefix('-').and_then(|short| flags.short(short)).is_some(),
        };
        let takes_value = !is_known && !word.contains('=') && (word.starts_with("--") || is_short(word));
        if takes_value {
            // The last word of the line is the value of the flag before it, even if it is a subcommand's name.
            index += if words.len() - index <= 2 { words.len() } else { 2 };
        } else if word.is_empty() || word.starts_with('-') {
            index += 1;
        } else {
            return Some(index);
        }
    }
    None
}

/// Returns true for a short flag alone, such as `-n`.
fn is_short(word: &str) -> bool {
    word.starts_with('-') && word.chars().count() == 2
}

/// The flags of one command.
struct Flags<'a>(&'a Command);

/// The form of a known flag.
struct Flag {
    long: String,
    takes_next_word: bool,
}

impl<'a> Flags<'a> {
    fn of(command: &'a Command) -> Self {
        Self(command)
    }

    fn long(&self, name: &str) -> Option<Flag> {
        let named = |arg: &&Arg| {
            arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
        };
        self.found(name, "help", named)
    }

    fn short(&self, letter: &str) -> Option<Flag> {
        let mut letters = letter.chars();
        let (Some(only), None) = (letters.next(), letters.next()) else {
            return None;
        };
        self.found(letter, "h", |arg| arg.get_short() == Some(only))
    }

    fn found(&self, name: &str, help: &str, is: impl Fn(&&Arg) -> bool) -> Option<Flag> {
        let flag = |long: &str, takes_next_word| Flag {
            long: long.to_owned(),
            takes_next_word,
        };
        if name == help {
            return Some(flag("help", false));
        }
        // clap adds the flags of the version only when it parses.
        if self.0.get_version().is_some() && matches!(name, "version" | "V") {
            return Some(flag("version", false));
        }
        let arg = self.0.get_arguments().find(is)?;
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        Some(flag(arg.get_long()?, takes_value && !arg.is_require_equals_set()))
    }

    /// Returns the known flags in the form `--flag=value`, and the other words as they are.
    fn read(&self, words: Vec<String>) -> Words {
        let mut read = Words::default();
        let mut words = VecDeque::from(words);
        while let Some(word) = words.pop_front() {
            if word == "--" {
                read.kept.push(word);
                read.kept.extend(words);
                break;
            }
            if let Some(flag) = word.strip_prefix("--") {
                self.read_long(flag, &mut words, &mut read);
            } else if let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) {
                self.read_short(letters, &mut words, &mut read);
            } else {
                read.kept.push(word);
            }
        }
        read
    }

    fn read_long(&self, flag: &str, rest: &mut VecDeque<String>, read: &mut Words) {
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        match self.long(name) {
            Some(known) => read.keep(known, value, rest),
            // Bad syntax; clap reports it.
            None if name.is_empty() || name.starts_with('-') => read.kept.push(format!("--{flag}")),
            None => {
                read.unknown.push(format!("--{flag}"));
                if value.is_none() {
                    drop_value(rest);
                }
            }
        }
    }

    /// Reads letters behind one `-`: flags without a value may share a word with others.
    fn read_short(&self, letters: &str, rest: &mut VecDeque<String>, read: &mut Words) {
        let mut left = letters;
        while let Some(letter) = left.chars().next() {
            let after = &left[letter.len_utf8()..];
            let value = after.strip_prefix('=').filter(|value| !value.is_empty());
            match self.short(&left[..letter.len_utf8()]) {
                Some(known) if known.takes_next_word => {
                    let value = value.or_else(|| Some(after).filter(|value| !value.is_empty()));
                    return read.keep(known, value.map(str::to_owned), rest);
                }
                Some(known) => read.keep(known, value.map(str::to_owned), rest),
                None => {
                    read.unknown.push(format!("-{letter}"));
                    if value.is_none() {
                        drop_value(rest);
                    }
                }
            }
            if value.is_some() {
                return;
            }
            left = after;
        }
    }
}

impl Words {
    fn keep(&mut self, flag: Flag, value: Option<String>, rest: &mut VecDeque<String>) {
        let value = value.or_else(|| if flag.takes_next_word { rest.pop_front() } else { None });
        self.kept.push(match value {
            Some(value) => format!("--{}={value}", flag.long),
            None => format!("--{}", flag.long),
        });
    }
}

/// Drops the value of an unknown flag.
fn drop_value(rest: &mut VecDeque<String>) {
    if rest.front().is_some_and(|next| !next.starts_with('-')) {
        rest.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Line;

    fn rewritten(line: &str) -> (String, String) {
        let words = line.split_whitespace().map(str::to_owned).collect();
        let words = rewrite(&Line::command(), words);
        (words.kept.join(" "), words.unknown.join(" "))
    }

    /// The expected words are those that pflag 1.0.10 and cobra 1.10 read.
    #[test]
    fn words_are_read_as_cobra_and_pflag_do() {
        for (line, kept, unknown) in [
            (
                "discovery --resync 60s --domain a.b",
                "discovery --domain=a.b",
                "--resync",
            ),
            ("discovery --odd --log_as_json", "discovery --log_as_json", "--odd"),
            ("discovery --odd=x -n ns", "discovery --namespace=ns", "--odd=x"),
            ("discovery -a ns -z", "discovery --appNamespace=ns", "-z"),
            ("discovery -y=ns --domain d", "discovery --domain=d", "-y"),
            ("discovery -nns", "discovery --namespace=ns", ""),
            ("discovery -n=ns", "discovery --namespace=ns", ""),
            ("discovery -xn a b", "discovery --namespace=b", "-x"),
            ("discovery --domain -n", "discovery --domain=-n", ""),
            ("discovery --profile false", "discovery --profile false", ""),
            ("discovery -h", "discovery --help", ""),
            ("--domain=d discovery", "discovery --domain=d", ""),
            ("--x y -n ns discovery", "discovery --namespace=ns", "--x"),
            ("--x version", "", "--x"),
            ("-z discovery", "", "-z"),
            ("version -o json", "version -o json", ""),
            ("--help", "--help", ""),
            ("--version", "--version", ""),
            ("discovery -- --domain d", "discovery -- --domain d", ""),
        ] {
            assert_eq!(rewritten(line), (kept.to_owned(), unknown.to_owned()), "{line}");
        }
    }
}
