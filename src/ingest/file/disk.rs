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

/// The maximum depth of subfolders.
const MAX_DEPTH: usize = 32;

/// Lists the relevant files of a folder and its subfolders. Links to files are followed, because a mounted ConfigMap
/// consists of them; links to folders are not, and neither are hidden folders.
pub(super) fn list(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    add_files(folder, "", &mut entries)?;
    for (subfolder, name) in subfolders(folder) {
        // A subfolder that is being removed has no files.
        if let Err(error) = add_files(&subfolder, &format!("{name}/"), &mut entries)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(entries)
}

/// Adds the relevant files of one folder.
fn add_files(folder: &Path, prefix: &str, entries: &mut Vec<Entry>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let name = format!("{prefix}{name}");
        let role = Role::of(&name);
        // Folders, pipes and devices are ignored whatever their names.
        if role != Role::Ignored && !fs::metadata(entry.path()).is_ok_and(|metadata| !metadata.is_file()) {
            entries.push(Entry::new(name, role, entry.path()));
        }
    }
    Ok(())
}

/// Returns the subfolders of a folder at any depth, with their relative paths.
pub(super) fn subfolders(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    let mut waiting = vec![(folder.to_owned(), String::new(), 0)];
    while let Some((folder, prefix, depth)) = waiting.pop() {
        if depth == MAX_DEPTH {
            continue;
        }
        // The list of files reports a folder that cannot be read.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|file_type| file_type.is_dir());
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if is_folder && !name.starts_with('.') {
                let name = format!("{prefix}{name}");
                waiting.push((entry.path(), format!("{name}/"), depth + 1));
                found.push((entry.path(), name));
            }
        }
    }
    found
}

/// Reads a file up to one byte beyond the limit, which shows that it is too large.
pub(in crate::ingest) fn read(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
