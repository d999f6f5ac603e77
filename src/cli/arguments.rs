//! The arguments of the command line, read as cobra and pflag do, and rewritten for clap.
//!
//! Parity (pilot/cmd/pilot-discovery/app/cmd.go): the root command and `discovery` accept unknown flags, so that flags
//! of other releases do not end the start. An unknown flag takes the next argument as its value unless that begins
//! with `-` or the flag was written `--flag=value`. Flags may precede the subcommand.

use std::collections::VecDeque;

use clap::{Arg, ArgAction, Command};

/// The arguments for clap, and the unknown flags that were left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// Arguments for clap.
    pub kept: Vec<String>,
    /// Unknown flags.
    pub unknown: Vec<String>,
}

/// Rewrites the arguments after the program's name. Flags before the subcommand move behind it.
pub fn rewrite(root: &Command, mut arguments: Vec<String>) -> Arguments {
    let Some(index) = subcommand_index(root, &arguments) else {
        return Flags::of(root).read(arguments);
    };
    let name = arguments.remove(index);
    let lenient = root
        .find_subcommand(&name)
        .filter(|subcommand| subcommand.get_name() == "discovery");
    let rest = match lenient {
        Some(subcommand) => Flags::of(subcommand).read(arguments),
        None => Arguments {
            kept: arguments,
            unknown: Vec::new(),
        },
    };
    Arguments {
        kept: std::iter::once(name).chain(rest.kept).collect(),
        unknown: rest.unknown,
    }
}

/// Returns the index of the subcommand: the first argument that is neither a flag nor the value of one.
fn subcommand_index(root: &Command, arguments: &[String]) -> Option<usize> {
    let flags = Flags::of(root);
    let mut index = 0;
    while let Some(argument) = arguments.get(index) {
        let is_known = match argument.strip_prefix("--") {
            Some("") => return None,
            Some(long) => flags.long(long).is_some(),
            None => argument
                .strip_prefix('-')
                .and_then(|short| flags.short(short))
                .is_some(),
        };
        let takes_value = !is_known && !argument.contains('=') && (argument.starts_with("--") || is_short(argument));
        if takes_value {
            // The last argument of the line is the value of the flag before it, even if it is a subcommand's name.
            index += if arguments.len() - index <= 2 {
                arguments.len()
            } else {
                2
            };
        } else if argument.is_empty() || argument.starts_with('-') {
            index += 1;
        } else {
            return Some(index);
        }
    }
    None
}

/// Returns true for a short flag alone, such as `-n`.
fn is_short(argument: &str) -> bool {
    argument.starts_with('-') && argument.chars().count() == 2
}

/// The flags of one command.
struct Flags<'a>(&'a Command);

/// The form of a known flag.
struct Flag {
    long: String,
    takes_next_argument: bool,
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
        let flag = |long: &str, takes_next_argument| Flag {
            long: long.to_owned(),
            takes_next_argument,
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

    /// Returns the known flags in the form `--flag=value`, and the other arguments as they are.
    fn read(&self, arguments: Vec<String>) -> Arguments {
        let mut read = Arguments::default();
        let mut arguments = VecDeque::from(arguments);
        while let Some(argument) = arguments.pop_front() {
            if argument == "--" {
                read.kept.push(argument);
                read.kept.extend(arguments);
                break;
            }
            if let Some(flag) = argument.strip_prefix("--") {
                self.read_long(flag, &mut arguments, &mut read);
            } else if let Some(letters) = argument.strip_prefix('-').filter(|letters| !letters.is_empty()) {
                self.read_short(letters, &mut arguments, &mut read);
            } else {
                read.kept.push(argument);
            }
        }
        read
    }

    fn read_long(&self, flag: &str, rest: &mut VecDeque<String>, read: &mut Arguments) {
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

    /// Reads letters behind one `-`: flags without a value may share an argument with others.
    fn read_short(&self, letters: &str, rest: &mut VecDeque<String>, read: &mut Arguments) {
        let mut left = letters;
        while let Some(letter) = left.chars().next() {
            let after = &left[letter.len_utf8()..];
            let value = after.strip_prefix('=').filter(|value| !value.is_empty());
            match self.short(&left[..letter.len_utf8()]) {
                Some(known) if known.takes_next_argument => {
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

impl Arguments {
    fn keep(&mut self, flag: Flag, value: Option<String>, rest: &mut VecDeque<String>) {
        let value = value.or_else(|| {
            if flag.takes_next_argument {
                rest.pop_front()
            } else {
                None
            }
        });
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
    use crate::cli::CommandLine;

    fn rewritten(line: &str) -> (String, String) {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        let arguments = rewrite(&CommandLine::command(), arguments);
        (arguments.kept.join(" "), arguments.unknown.join(" "))
    }

    /// The expected arguments are those that pflag 1.0.10 and cobra 1.10 read.
    #[test]
    fn arguments_are_read_as_cobra_and_pflag_do() {
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
