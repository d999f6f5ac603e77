//! Lists and reads files.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::api::folder::Role;

/// A file to read.
pub(super) struct Entry {
    /// Name in diagnostics.
    pub(super) name: String,
    /// Role.
    pub(super) role: Role,
    /// Path.
    pub(super) path: PathBuf,
    /// Present fingerprint.
    pub(super) fingerprint: Fingerprint,
}

/// Identity of a file's content: device, inode, length, modification time in seconds and nanoseconds.
pub(super) type Fingerprint = (u64, u64, u64, i64, i64);

impl Entry {
    /// Returns an entry for a file that may not exist.
    pub(super) fn new(name: String, role: Role, path: PathBuf) -> Self {
        let fingerprint = fs::metadata(&path)
            .map(|metadata| fingerprint(&metadata))
            .unwrap_or_default();
        Self {
            name,
            role,
            path,
            fingerprint,
        }
    }
}

/// Returns device and inode of a folder; `None` if it does not exist.
pub(super) fn identity(folder: &Path) -> Option<(u64, u64)> {
    fs::metadata(folder)
        .ok()
        .map(|metadata| (metadata.dev(), metadata.ino()))
}

fn fingerprint(metadata: &fs::Metadata) -> Fingerprint {
    (
        metadata.dev(),
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
    )
}

/// Lists the relevant files of a folder. Links are followed, because a mounted ConfigMap consists of them.
pub(super) fn list(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let role = Role::of(&name);
        // Folders, pipes and devices are ignored whatever their names.
        if role != Role::Ignored && !fs::metadata(entry.path()).is_ok_and(|metadata| !metadata.is_file()) {
            entries.push(Entry::new(name, role, entry.path()));
        }
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(entries)
}

/// Reads a file up to one byte beyond the limit, which shows that it is too large.
pub(in crate::ingest) fn read(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
