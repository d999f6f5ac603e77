//! Files with the last known state of a source. Their modification time is the time at which the state was current.
//! Replicas may share a folder.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, DirEntry, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::environment::wall_clock;

/// End of the names of files that are being written, after the extension of the finished ones.
const UNFINISHED: &str = "-unfinished";
/// Age of an unfinished file whose writer was killed. A younger one may be another replica's.
const ABANDONED: Duration = Duration::from_hours(1);

/// Replaces a file with a state that was current at this time. Creates its folder, which only this user can read. A
/// reader sees the previous file or the new one, also after a crash.
pub(super) fn replace<T>(
    path: &Path,
    current_at: SystemTime,
    write: impl FnOnce(&File) -> io::Result<T>,
) -> io::Result<T> {
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unfinished = unfinished(path);
    let mut options = OpenOptions::new();
    let created = options.write(true).create_new(true).mode(0o600).open(&unfinished);
    let written = created.and_then(|file| {
        let written = write(&file)?;
        file.set_modified(current_at)?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        File::open(folder)?.sync_all()?;
        Ok(written)
    });
    if written.is_err() {
        // It may not exist.
        let _ = fs::remove_file(&unfinished);
    }
    written
}

/// Records that the state of a file was current at this time.
pub(super) fn confirm(path: &Path, current_at: SystemTime) -> io::Result<()> {
    File::options().write(true).open(path)?.set_modified(current_at)
}

/// Returns true for an unfinished file with this extension whose writer was killed.
pub(super) fn is_abandoned(entry: &DirEntry, extension: &str) -> bool {
    let name = entry.file_name();
    let name = name.to_str().and_then(|name| name.strip_suffix(UNFINISHED));
    let is_unfinished = name.is_some_and(|name| Path::new(name).extension() == Some(OsStr::new(extension)));
    let modified = || entry.metadata().and_then(|metadata| metadata.modified());
    let age = |modified| wall_clock().duration_since(modified).unwrap_or_default();
    is_unfinished && modified().is_ok_and(|modified| age(modified) > ABANDONED)
}

/// Removes a file that another replica may have removed.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns a name that no other writer uses.
fn unfinished(path: &Path) -> PathBuf {
    let now = wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let unique = format!("{}-{}.{extension}{UNFINISHED}", std::process::id(), now.as_nanos());
    path.with_extension(unique)
}
