//! The text functions of sprig 3. Functions that make keys, certificates or slow hashes are refused: a template that is
//! rendered for every pod has no use for them, and one call costs more than a rendering may.

use super::{
    limits::Failure,
    text::Text,
    types::Type,
    value::{Context, Function, Functions, Map, Value},
};

mod calendar;
mod cases;
mod convert;
mod date;
mod decimal;
mod defaults;
mod dicts;
mod encoding;
mod lists;
mod math;
mod paths;
mod random;
mod regexes;
mod semver;
mod strings;
mod urls;

pub use date::duration_text;

/// Names of the same function.
const ALIASES: &[(&str, &str)] = &[
    ("trimall", "trimAll"),
    ("biggest", "max"),
    ("tuple", "list"),
    ("append", "push"),
    ("mustAppend", "push"),
    ("mustPush", "push"),
    ("mustPrepend", "prepend"),
    ("mustFirst", "first"),
    ("mustRest", "rest"),
    ("mustLast", "last"),
    ("mustInitial", "initial"),
    ("mustReverse", "reverse"),
    ("mustUniq", "uniq"),
    ("mustWithout", "without"),
    ("mustHas", "has"),
    ("mustSlice", "slice"),
    ("mustChunk", "chunk"),
    ("mustCompact", "compact"),
    ("mustDeepCopy", "deepCopy"),
    ("mustMerge", "merge"),
    ("mustMergeOverwrite", "mergeOverwrite"),
    ("mustToRawJson", "toRawJson"),
    ("mustDateModify", "must_date_modify"),
    ("dateInZone", "date_in_zone"),
    ("dateModify", "date_modify"),
    ("osBase", "base"),
    ("osDir", "dir"),
    ("osClean", "clean"),
    ("osExt", "ext"),
    ("osIsAbs", "isAbs"),
];

/// Functions that are refused.
const REFUSED: &[&str] = &[
    "bcrypt",
    "htpasswd",
    "genPrivateKey",
    "derivePassword",
    "buildCustomCert",
    "genCA",
    "genCAWithKey",
    "genSelfSignedCert",
    "genSelfSignedCertWithKey",
    "genSignedCert",
    "genSignedCertWithKey",
    "encryptAES",
    "decryptAES",
    "getHostByName",
];

/// Adds the functions, in place of those of the same names.
pub(super) fn add(functions: &mut Functions) {
    functions.extend(strings::functions());
    functions.extend(cases::functions());
    functions.extend(lists::functions());
    functions.extend(dicts::functions());
    functions.extend(math::functions());
    functions.extend(decimal::functions());
    functions.extend(defaults::functions());
    functions.extend(date::functions());
    functions.extend(encoding::functions());
    functions.extend(regexes::functions());
    functions.extend(semver::functions());
    functions.extend(urls::functions());
    functions.extend(paths::functions());
    functions.extend(random::functions());
    functions.extend(REFUSED.iter().map(|name| {
        Function::variadic(name, &[Type::Any], Type::String, move |_, _| {
            Err(Failure::message("the function is not supported"))
        })
    }));
    for (alias, name) in ALIASES {
        functions.alias(alias, name);
    }
}

/// The bytes of a string argument. The signature guarantees the type.
fn bytes<'a>(arguments: &[&'a Value], position: usize) -> &'a [u8] {
    match arguments.get(position) {
        Some(Value::String(text)) => text.bytes(),
        _ => b"",
    }
}

/// An argument that the signature guarantees to be an `int`.
fn int(arguments: &[&Value], position: usize) -> i64 {
    match arguments.get(position) {
        Some(Value::Int(_, number)) => *number,
        _ => 0,
    }
}

/// An argument that the signature guarantees to be a map.
fn map(arguments: &[&Value], position: usize) -> Map {
    match arguments.get(position) {
        Some(Value::Map(map)) => map.clone(),
        _ => Map::nil(Type::Any),
    }
}

/// A function of strings.
fn of_strings(
    name: &str,
    count: usize,
    result: Type,
    body: fn(&mut Context<'_>, &[&Value]) -> Result<Value, Failure>,
) -> Function {
    Function::new(name, &vec![Type::String; count], result, body)
}

/// Go's error for reflection on nil.
fn nil_pointer() -> Failure {
    Failure::message("runtime error: invalid memory address or nil pointer dereference")
}

/// Returns bytes as a string that the budget pays.
fn text(context: &mut Context<'_>, bytes: &[u8]) -> Result<Value, Failure> {
    context.allocate(bytes.len())?;
    Ok(Value::String(Text::from(bytes)))
}
