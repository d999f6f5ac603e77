//! The folder of stored states: one file per cluster.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    io::{self, BufReader, BufWriter},
    path::{Path, PathBuf},
    time::SystemTime,
};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    file::{self, FileError},
    objects::Objects,
};
use crate::{
    base::ClusterId,
    ingest::{discovery_filter::WatchedObject, state_file},
};

/// Extension of the names of files.
const EXTENSION: &str = "remote-state";
/// Longest part of a name that comes from the cluster id. File systems allow 255 bytes.
const MAX_NAME: usize = 150;
/// Characters of a cluster id that are not part of a file name.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// The folder.
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the file of a cluster. Different ids have different files, all of them directly in the folder.
    pub(super) fn file(&self, cluster: &ClusterId) -> PathBuf {
        self.path.join(name(cluster))
    }

    /// Reads the state of a cluster with the time at which it was current; `None` if it has no file.
    pub(super) fn read(&self, cluster: &ClusterId) -> Result<Option<(SystemTime, Vec<WatchedObject>)>, FileError> {
        let path = self.file(cluster);
        let metadata = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        if !metadata.is_file() {
            return Err(FileError::NotRegular);
        }
        let file = File::open(&path)?;
        let since = file.metadata()?.modified()?;
        let objects = file::read(BufReader::new(file), cluster)?;
        Ok(Some((since, objects)))
    }

    /// Replaces the state of a cluster, which was current at this time. Returns the size.
    pub(super) fn write(&self, cluster: &ClusterId, objects: &Objects, current_at: SystemTime) -> io::Result<u64> {
        state_file::replace(&self.file(cluster), current_at, |file| {
            file::write(BufWriter::new(file), cluster, objects)
        })
    }

    /// Records that the stored state of a cluster was current at this time.
    pub(super) fn confirm(&self, cluster: &ClusterId, current_at: SystemTime) -> io::Result<()> {
        state_file::confirm(&self.file(cluster), current_at)
    }

    /// Removes the files of all other clusters, and unfinished files whose writer was killed. Returns the names.
    pub(super) fn keep_only(&self, clusters: &BTreeSet<ClusterId>) -> io::Result<Vec<String>> {
        let kept: BTreeSet<String> = clusters.iter().map(name).collect();
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut removed = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = OsStr::to_str(&name) else { continue };
            let is_other = Path::new(name).extension() == Some(OsStr::new(EXTENSION)) && !kept.contains(name);
            if is_other || state_file::is_abandoned(&entry, EXTENSION) {
                state_file::remove(&entry.path())?;
                removed.push(name.to_owned());
            }
        }
        Ok(removed)
    }
}

fn name(cluster: &ClusterId) -> String {
    let escaped = utf8_percent_encode(cluster.as_str(), ESCAPED).to_string();
    if escaped.len() <= MAX_NAME {
        return format!("{escaped}.{EXTENSION}");
    }
    // The header of the file has the whole id. Escaped ids are ASCII and contain no dot.
    let hash = xxh3_128(cluster.as_str().as_bytes());
    format!("{}.{hash:032x}.{EXTENSION}", &escaped[..MAX_NAME])
}
