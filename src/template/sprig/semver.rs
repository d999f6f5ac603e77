//! Semantic versions and constraints on them.

use std::{cmp::Ordering, sync::Arc, sync::LazyLock};

use regex::Regex;

use super::{
    super::{
        limits::Failure,
        quote::{Charset, quote},
        types::{Type, UintType},
        value::{Function, Object, Value},
    },
    bytes, of_strings,
};

pub(super) fn functions() -> Vec<Function> {
    let version = Type::named("semver.Version").pointer();
    vec![
        of_strings("semver", 1, version, |_, arguments| {
            let text = String::from_utf8_lossy(bytes(arguments, 0));
            Version::parse(&text).map(Value::object)
        }),
        of_strings("semverCompare", 2, Type::Bool, |context, arguments| {
            let (constraint, version) = (bytes(arguments, 0), bytes(arguments, 1));
            context.step(constraint.len().min(MAX_CONSTRAINT).saturating_mul(4))?;
            let groups = constraints(&String::from_utf8_lossy(constraint))?;
            let version = Version::parse(&String::from_utf8_lossy(version))?;
            let fits = |group: &Vec<Constraint>| {
                let allows_prerelease = group.iter().any(|constraint| !constraint.version.prerelease.is_empty());
                let is_prerelease = !version.prerelease.is_empty();
                (allows_prerelease || !is_prerelease) && group.iter().all(|constraint| constraint.fits(&version))
            };
            Ok(groups.iter().any(fits).into())
        }),
    ]
}

const MAX_VERSION: usize = 256;
const MAX_CONSTRAINT: usize = 512;
const MAX_GROUPS: usize = 32;

const VERSION: &str =
    r"v?([0-9]+)(\.[0-9]+)?(\.[0-9]+)?(-([0-9A-Za-z\-]+(\.[0-9A-Za-z\-]+)*))?(\+([0-9A-Za-z\-]+(\.[0-9A-Za-z\-]+)*))?";
const PATTERN: &str = r"v?([0-9|xX*]+)(\.[0-9|xX*]+)?(\.[0-9|xX*]+)?(-([0-9A-Za-z\-]+(\.[0-9A-Za-z\-]+)*))?(\+([0-9A-Za-z\-]+(\.[0-9A-Za-z\-]+)*))?";
const OPERATORS: &str = r"=||!=|>|<|>=|=>|<=|=<|~|~>|\^";

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("because the pattern is constant")
}

static LOOSE: LazyLock<Regex> = LazyLock::new(|| regex(&format!("^{VERSION}$")));
static ONE: LazyLock<Regex> = LazyLock::new(|| regex(&format!(r"^\s*({OPERATORS})\s*({PATTERN})\s*$")));
static FIND: LazyLock<Regex> = LazyLock::new(|| regex(&format!(r"({OPERATORS})\s*({PATTERN})")));
static RANGE: LazyLock<Regex> = LazyLock::new(|| regex(&format!(r"\s*({PATTERN})\s+-\s+({PATTERN})\s*")));
static VALID: LazyLock<Regex> = LazyLock::new(|| {
    let constraint = format!(r"({OPERATORS})\s*({PATTERN})\s*");
    regex(&format!(r"^(\s*{constraint})((?:\s+|,\s*){constraint})*$"))
});

/// A version. Missing parts are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    major: u64,
    minor: u64,
    patch: u64,
    prerelease: String,
    metadata: String,
    original: String,
}

impl Version {
    fn parse(text: &str) -> Result<Self, Failure> {
        if text.len() > MAX_VERSION {
            return Err(Failure::Message(format!(
                "version string is too long (max {MAX_VERSION} bytes)"
            )));
        }
        let parts = LOOSE.captures(text);
        let parts = parts.ok_or_else(|| Failure::message("invalid semantic version"))?;
        let group = |number: usize| parts.get(number).map_or("", |part| part.as_str());
        let number = |text: &str| match text.trim_start_matches('.') {
            "" => Ok(0),
            digits => digits.parse::<u64>().map_err(|_| {
                Failure::Message(format!(
                    "error parsing version segment: strconv.ParseUint: parsing \"{digits}\": value out of range"
                ))
            }),
        };
        let version = Self {
            major: number(group(1))?,
            minor: number(group(2))?,
            patch: number(group(3))?,
            prerelease: group(5).to_owned(),
            metadata: group(8).to_owned(),
            original: text.to_owned(),
        };
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let has_zero = |part: &str| is_number(part) && part.len() > 1 && part.starts_with('0');
        if !version.prerelease.is_empty() && version.prerelease.split('.').any(has_zero) {
            return Err(Failure::message("version segment starts with 0"));
        }
        Ok(version)
    }

    fn compare(&self, other: &Self) -> Ordering {
        (self.major, self.minor, self.patch)
            .cmp(&(other.major, other.minor, other.patch))
            .then_with(|| compare_prereleases(&self.prerelease, &other.prerelease))
    }

    fn text(&self) -> String {
        let mut text = format!("{}.{}.{}", self.major, self.minor, self.patch);
        if !self.prerelease.is_empty() {
            text = format!("{text}-{}", self.prerelease);
        }
        if !self.metadata.is_empty() {
            text = format!("{text}+{}", self.metadata);
        }
        text
    }
}

/// Compares prereleases part by part: numbers by value and before names, and a release after all its prereleases.
fn compare_prereleases(left: &str, right: &str) -> Ordering {
    match (left.is_empty(), right.is_empty()) {
        (true, true) => return Ordering::Equal,
        (true, false) => return Ordering::Greater,
        (false, true) => return Ordering::Less,
        (false, false) => {}
    }
    let mut left = left.split('.');
    let mut right = right.split('.');
    loop {
        let order = match (left.next(), right.next()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => Ordering::Less,
            (Some(_), None) => Ordering::Greater,
            (Some(left), Some(right)) => match (left.parse::<u64>(), right.parse::<u64>()) {
                (Ok(left), Ok(right)) => left.cmp(&right),
                (Ok(_), Err(_)) => Ordering::Less,
                (Err(_), Ok(_)) => Ordering::Greater,
                (Err(_), Err(_)) => left.cmp(right),
            },
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

impl Object for Version {
    fn type_of(&self) -> Type {
        Type::named("semver.Version").pointer()
    }

    fn to_text(&self) -> Option<String> {
        Some(self.text())
    }

    fn to_json(&self) -> Option<Value> {
        Some(self.text().into())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let number = |number: u64| Value::Uint(UintType::Uint64, number);
        let value = match name {
            "Major" => number(self.major),
            "Minor" => number(self.minor),
            "Patch" => number(self.patch),
            "Prerelease" => self.prerelease.as_str().into(),
            "Metadata" => self.metadata.as_str().into(),
            "Original" => self.original.as_str().into(),
            "String" => self.text().into(),
            _ => return self.comparison(name),
        };
        Some(Arc::new(Function::getter(name, value)))
    }
}

impl Version {
    fn comparison(&self, name: &str) -> Option<Arc<Function>> {
        let own = self.clone();
        let parameter = [self.type_of()];
        let is: fn(Ordering) -> Value = match name {
            "Compare" => |order| Value::int(order as i64),
            "Equal" => |order| order.is_eq().into(),
            "LessThan" => |order| order.is_lt().into(),
            "LessThanEqual" => |order| order.is_le().into(),
            "GreaterThan" => |order| order.is_gt().into(),
            "GreaterThanEqual" => |order| order.is_ge().into(),
            _ => return None,
        };
        let result = is(Ordering::Equal).type_of();
        Some(Arc::new(Function::new(
            name,
            &parameter,
            result,
            move |_, arguments| {
                let text = match arguments[0] {
                    Value::Object(object) => object.to_text().unwrap_or_default(),
                    _ => String::new(),
                };
                Ok(is(own.compare(&Version::parse(&text)?)))
            },
        )))
    }
}

/// The part of a constraint's version that is a wildcard.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wildcard {
    None,
    Patch,
    Minor,
    All,
}

/// A comparison with a version.
struct Constraint {
    operator: String,
    version: Version,
    wildcard: Wildcard,
}

/// Reads constraints: groups of which one has to fit.
fn constraints(text: &str) -> Result<Vec<Vec<Constraint>>, Failure> {
    if text.len() > MAX_CONSTRAINT {
        return Err(Failure::Message(format!(
            "constraint string is too long (max {MAX_CONSTRAINT} bytes)"
        )));
    }
    let mut rewritten = text.to_owned();
    for range in RANGE.captures_iter(text) {
        let bounds = format!(">= {}, <= {} ", &range[1], &range[11]);
        rewritten = rewritten.replacen(&range[0], &bounds, 1);
    }
    let groups: Vec<&str> = rewritten.split("||").collect();
    if groups.len() > MAX_GROUPS {
        return Err(Failure::Message(format!(
            "too many constraint groups (max {MAX_GROUPS})"
        )));
    }
    groups
        .into_iter()
        .map(|group| {
            if !VALID.is_match(group) {
                return Err(improper(group));
            }
            FIND.find_iter(group)
                .map(|constraint| Constraint::parse(constraint.as_str()))
                .collect()
        })
        .collect()
}

fn improper(text: &str) -> Failure {
    Failure::Message(format!(
        "improper constraint: {}",
        quote(text.as_bytes(), Charset::Unicode)
    ))
}

impl Constraint {
    fn parse(text: &str) -> Result<Self, Failure> {
        let parts = ONE.captures(text).ok_or_else(|| improper(text))?;
        let group = |number: usize| parts.get(number).map_or("", |part| part.as_str());
        let is_wildcard = |text: &str| matches!(text.trim_start_matches('.'), "" | "x" | "X" | "*");
        let (major, minor, patch, suffix) = (group(3), group(4), group(5), group(6));
        let (wildcard, version) = if is_wildcard(major) {
            (Wildcard::All, format!("0.0.0{suffix}"))
        } else if is_wildcard(minor) {
            (Wildcard::Minor, format!("{major}.0.0{suffix}"))
        } else if is_wildcard(patch) {
            (Wildcard::Patch, format!("{major}{minor}.0{suffix}"))
        } else {
            (Wildcard::None, group(2).to_owned())
        };
        Ok(Self {
            operator: group(1).to_owned(),
            version: Version::parse(&version).map_err(|_| Failure::message("constraint parser error"))?,
            wildcard,
        })
    }

    fn fits(&self, version: &Version) -> bool {
        let order = version.compare(&self.version);
        match self.operator.as_str() {
            "" | "=" if self.wildcard == Wildcard::None => order.is_eq(),
            "" | "=" | "~" | "~>" => self.fits_tilde(version),
            "!=" => self.differs(version),
            ">" => self.is_below(version),
            "<" => order.is_lt(),
            ">=" | "=>" => order.is_ge(),
            "<=" | "=<" => self.is_not_below(version),
            _ => self.fits_caret(version),
        }
    }

    fn differs(&self, version: &Version) -> bool {
        let other = &self.version;
        match self.wildcard {
            Wildcard::None => version.compare(other).is_ne(),
            _ if version.major != other.major => true,
            Wildcard::Minor => false,
            _ if version.minor != other.minor => true,
            Wildcard::Patch => {
                let has_prerelease = !version.prerelease.is_empty() || !other.prerelease.is_empty();
                has_prerelease && compare_prereleases(&version.prerelease, &other.prerelease).is_ne()
            }
            // Without any number, the patch counts as well.
            Wildcard::All => version.patch != other.patch || version.compare(other).is_ne(),
        }
    }

    fn is_below(&self, version: &Version) -> bool {
        let other = &self.version;
        match self.wildcard {
            Wildcard::None => version.compare(other).is_gt(),
            _ if version.major != other.major => version.major > other.major,
            Wildcard::Minor => false,
            Wildcard::Patch => version.minor > other.minor,
            Wildcard::All => version.compare(other).is_gt(),
        }
    }

    fn is_not_below(&self, version: &Version) -> bool {
        let other = &self.version;
        match self.wildcard {
            Wildcard::None => version.compare(other).is_le(),
            wildcard => {
                let is_above = version.minor > other.minor && wildcard != Wildcard::Minor;
                version.major < other.major || version.major == other.major && !is_above
            }
        }
    }

    fn fits_tilde(&self, version: &Version) -> bool {
        let other = &self.version;
        if version.compare(other).is_lt() {
            return false;
        }
        let is_zero = (other.major, other.minor, other.patch) == (0, 0, 0);
        if is_zero && !matches!(self.wildcard, Wildcard::Minor | Wildcard::Patch) {
            return true;
        }
        version.major == other.major && (version.minor == other.minor || self.wildcard == Wildcard::Minor)
    }

    fn fits_caret(&self, version: &Version) -> bool {
        let other = &self.version;
        if version.compare(other).is_lt() {
            return false;
        }
        if other.major > 0 || self.wildcard == Wildcard::Minor {
            return version.major == other.major;
        }
        if version.major > 0 {
            return false;
        }
        if other.minor > 0 || self.wildcard == Wildcard::Patch {
            return version.minor == other.minor;
        }
        version.minor == 0 && version.patch == other.patch
    }
}
