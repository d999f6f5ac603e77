//! The targets of the log: standard output, files, and files that are rotated.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use time::{OffsetDateTime, PrimitiveDateTime, format_description::BorrowedFormatItem, macros::format_description};

/// The time in the name of a rotated file.
const SUFFIX: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]-[minute]-[second].[subsecond digits:3]");
/// A megabyte, the unit of `--log_rotate_max_size`.
const MEGABYTE: u64 = 1 << 20;
/// The size for 0.
///
/// Parity (gopkg.in/natefinch/lumberjack.v2): defaultMaxSize.
const DEFAULT_MEGABYTES: u64 = 100;
/// Time after a failed rotation until the next one, and between two reports of the same error.
const RETRY: Duration = Duration::from_mins(1);
/// A day, the unit of `--log_rotate_max_age`.
const DAY: Duration = Duration::from_hours(24);

/// Limits of a rotated log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationLimits {
    /// Size of the file in megabytes; 0 for [`DEFAULT_MEGABYTES`].
    pub max_megabytes: u64,
    /// Age of rotated files in days; 0 for no limit.
    pub max_days: u32,
    /// Number of rotated files; 0 for no limit.
    pub max_files: usize,
}

/// A log target that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("failed to open log target {}: {source}", path.display())]
pub struct OutputError {
    path: PathBuf,
    source: io::Error,
}

/// A target of lines.
#[derive(Debug)]
pub(super) enum Output {
    Stdout,
    Stderr,
    File(File),
    Rotated(RotatedFile),
}

impl Output {
    /// Opens a target of `--log_target`: `stdout`, `stderr`, or a file, to which lines are appended.
    pub(super) fn open(target: &str) -> Result<Self, OutputError> {
        match target {
            "stdout" => Ok(Self::Stdout),
            "stderr" => Ok(Self::Stderr),
            path => append_to(Path::new(path)).map(Self::File),
        }
    }

    /// Writes whole lines.
    pub(super) fn write(&mut self, lines: &str, now: SystemTime) -> io::Result<()> {
        match self {
            Self::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(lines.as_bytes())?;
                stdout.flush()
            }
            Self::Stderr => io::stderr().write_all(lines.as_bytes()),
            Self::File(file) => file.write_all(lines.as_bytes()),
            Self::Rotated(file) => file.write(lines, now),
        }
    }
}

/// Returns true if something failed less than [`RETRY`] ago. A clock that was set back does not delay the next attempt.
pub(super) fn is_recent(failed_at: SystemTime, now: SystemTime) -> bool {
    now.duration_since(failed_at).is_ok_and(|age| age < RETRY)
}

fn append_to(path: &Path) -> Result<File, OutputError> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.map_err(|source| OutputError {
        path: path.to_owned(),
        source,
    })
}

/// A file that is renamed when it is large: `istiod.log` becomes `istiod-2026-11-24T05-48-00.000.log`.
///
/// Parity (gopkg.in/natefinch/lumberjack.v2): the names, and which of them are removed.
#[derive(Debug)]
pub(super) struct RotatedFile {
    path: PathBuf,
    limits: RotationLimits,
    file: File,
    bytes: u64,
    /// Time of the last rotation, if it failed.
    failed_at: Option<SystemTime>,
}

impl RotatedFile {
    pub(super) fn open(path: &Path, limits: RotationLimits) -> Result<Self, OutputError> {
        let file = append_to(path)?;
        let metadata = file.metadata().map_err(|source| OutputError {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            limits,
            file,
            bytes: metadata.len(),
            failed_at: None,
        })
    }

    fn write(&mut self, lines: &str, now: SystemTime) -> io::Result<()> {
        let size = lines.len() as u64;
        let megabytes = match self.limits.max_megabytes {
            0 => DEFAULT_MEGABYTES,
            other => other,
        };
        let is_full = self.bytes > 0 && self.bytes + size > megabytes.saturating_mul(MEGABYTE);
        let is_resting = self.failed_at.is_some_and(|failed_at| is_recent(failed_at, now));
        // A failed rotation must not lose lines. The file grows until the next attempt.
        let rotated = if is_full && !is_resting {
            let rotated = self.rotate(now);
            self.failed_at = rotated.is_err().then_some(now);
            rotated
        } else {
            Ok(())
        };
        self.file.write_all(lines.as_bytes())?;
        self.bytes += size;
        rotated
    }

    fn rotate(&mut self, now: SystemTime) -> io::Result<()> {
        let time = OffsetDateTime::from(now).format(SUFFIX).map_err(io::Error::other)?;
        let (stem, extension) = self.parts();
        let rotated = self.path.with_file_name(format!("{stem}-{time}{extension}"));
        // The file is missing if it was removed, or if an earlier rotation could not open a new one.
        if let Err(error) = fs::rename(&self.path, rotated)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        self.bytes = 0;
        self.remove_old(now)
    }

    /// Removes rotated files beyond the limits.
    fn remove_old(&self, now: SystemTime) -> io::Result<()> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut rotated: Vec<(SystemTime, PathBuf)> = fs::read_dir(folder.unwrap_or(Path::new(".")))?
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                Some((self.rotated_at(&path)?, path))
            })
            .collect();
        rotated.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
        // None if there is no limit, or one before the earliest time.
        let oldest = now
            .checked_sub(DAY * self.limits.max_days)
            .filter(|_| self.limits.max_days > 0);
        for (index, (time, path)) in rotated.into_iter().enumerate() {
            let is_surplus = self.limits.max_files > 0 && index >= self.limits.max_files;
            if is_surplus || oldest.is_some_and(|oldest| time < oldest) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Returns the time in the name of a rotated file; `None` for other files.
    fn rotated_at(&self, path: &Path) -> Option<SystemTime> {
        let (stem, extension) = self.parts();
        let name = path.file_name()?.to_str()?;
        let time = name
            .strip_prefix(stem.as_str())?
            .strip_prefix('-')?
            .strip_suffix(extension.as_str())?;
        Some(PrimitiveDateTime::parse(time, SUFFIX).ok()?.assume_utc().into())
    }

    /// Returns the name of the file before its extension, and the extension with its dot.
    fn parts(&self) -> (String, String) {
        let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
        let extension = text(self.path.extension());
        let dot = if extension.is_empty() { "" } else { "." };
        (text(self.path.file_stem()), format!("{dot}{extension}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RotationLimits = RotationLimits {
        max_megabytes: 1,
        max_days: 2,
        max_files: 2,
    };

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("the folder exists");
        let name =
            |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name().to_string_lossy().into_owned();
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn large_files_are_rotated_and_old_ones_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("istiod.log");
        fs::write(folder.path().join("istiod-other.log"), "kept").expect("a writable folder");
        let mut file = RotatedFile::open(&path, LIMITS).expect("a writable folder");
        let begin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let line = "x".repeat(600 << 10);
        let mut write = |days: u32| file.write(&line, begin + DAY * days).expect("a writable folder");
        write(0);
        assert_eq!(names(folder.path()), ["istiod-other.log", "istiod.log"]);
        write(0);
        write(1);
        let first = [
            "istiod-2023-11-14T22-13-20.000.log",
            "istiod-2023-11-15T22-13-20.000.log",
        ];
        assert_eq!(
            names(folder.path()),
            [first[0], first[1], "istiod-other.log", "istiod.log"]
        );
        // A third rotated file replaces the oldest; later, both are too old.
        write(2);
        assert_eq!(
            names(folder.path()),
            [
                first[1],
                "istiod-2023-11-16T22-13-20.000.log",
                "istiod-other.log",
                "istiod.log"
            ]
        );
        write(9);
        assert_eq!(
            names(folder.path()),
            ["istiod-2023-11-23T22-13-20.000.log", "istiod-other.log", "istiod.log"]
        );
    }

    #[test]
    fn a_removed_file_is_opened_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("istiod.log");
        let limits = RotationLimits {
            max_days: u32::MAX,
            ..LIMITS
        };
        let mut file = RotatedFile::open(&path, limits).expect("a writable folder");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let line = "x".repeat(600 << 10);
        file.write(&line, now).expect("a writable folder");
        fs::remove_file(&path).expect("the file");
        file.write(&line, now).expect("a writable folder");
        assert_eq!(names(folder.path()), ["istiod.log"]);
        file.write(&line, now).expect("a writable folder");
        assert_eq!(
            names(folder.path()),
            ["istiod-2023-11-14T22-13-20.000.log", "istiod.log"]
        );
    }

    #[test]
    fn a_failed_rotation_is_repeated_after_a_pause() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("logs");
        fs::create_dir(&folder).expect("a writable folder");
        let mut file = RotatedFile::open(&folder.join("istiod.log"), LIMITS).expect("a writable folder");
        // Without its folder, the file cannot be opened again, but still be written to.
        fs::remove_dir_all(&folder).expect("the folder");
        let begin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let line = "x".repeat(600 << 10);
        let mut write = |now: SystemTime| file.write(&line, now).is_ok();
        assert!(write(begin));
        assert!(!write(begin));
        assert!(write(begin + RETRY / 2));
        assert!(!write(begin + RETRY));
        // The clock was set back.
        assert!(!write(begin));
        fs::create_dir(&folder).expect("a writable folder");
        assert!(write(begin + RETRY / 2));
        assert!(names(&folder).is_empty());
        assert!(write(begin + RETRY));
        assert_eq!(names(&folder), ["istiod.log"]);
    }

    #[test]
    fn an_existing_file_is_continued() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        fs::write(&path, "first\n").expect("a writable folder");
        let mut output = Output::open(path.to_str().expect("a text")).expect("a writable folder");
        output
            .write("second\n", SystemTime::UNIX_EPOCH)
            .expect("a writable folder");
        assert_eq!(fs::read_to_string(&path).expect("the file"), "first\nsecond\n");
        let missing = Output::open("/nowhere/istiod.log")
            .map(drop)
            .map_err(|error| error.to_string());
        assert!(missing.is_err_and(|error| error.starts_with("failed to open log target /nowhere/istiod.log: ")));
    }
}
