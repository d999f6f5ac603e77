//! The folder of stored states: one file per cluster.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, BufReader, BufWriter},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    file::{self, FileError},
    objects::Objects,
};
use crate::{base::ClusterId, environment::wall_clock, ingest::discovery_filter::WatchedObject};

/// End of the names of files.
const SUFFIX: &str = ".remote-state";
/// End of the names of files that are being written.
const UNFINISHED: &str = ".remote-state-unfinished";
/// Longest part of a name that comes from the cluster id. File systems allow 255 bytes.
const MAX_NAME: usize = 150;
/// Characters of a cluster id that are not part of a file name.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');
/// Age of an unfinished file whose writer was killed. Replicas may share a folder, and younger ones may be theirs.
const ABANDONED: Duration = Duration::from_hours(1);

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

    /// Replaces the state of a cluster, which was current at this time. Returns the size. A reader sees the previous
    /// file or the new one, also after a crash.
    pub(super) fn write(&self, cluster: &ClusterId, objects: &Objects, current_at: SystemTime) -> io::Result<u64> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        let unfinished = self.unfinished(cluster);
        let written = create(&unfinished).and_then(|file| {
            let bytes = file::write(BufWriter::new(&file), cluster, objects)?;
            file.set_modified(current_at)?;
            file.sync_all()?;
            fs::rename(&unfinished, self.file(cluster))?;
            File::open(&self.path)?.sync_all()?;
            Ok(bytes)
        });
        if written.is_err() {
            // It may not exist.
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    /// Records that the stored state of a cluster was current at this time. The modification time of the file says it.
    pub(super) fn confirm(&self, cluster: &ClusterId, current_at: SystemTime) -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .open(self.file(cluster))?
            .set_modified(current_at)
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
            let goes = if name.ends_with(SUFFIX) {
                !kept.contains(name)
            } else {
                name.ends_with(UNFINISHED) && is_abandoned(&entry)
            };
            if goes {
                remove(&entry.path())?;
                removed.push(name.to_owned());
            }
        }
        Ok(removed)
    }

    /// Returns a name that no other writer uses, for replicas that share the folder.
    fn unfinished(&self, cluster: &ClusterId) -> PathBuf {
        let now = wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let stem = name(cluster);
        let stem = stem.trim_end_matches(SUFFIX);
        let unique = format!("{stem}.{}-{}{UNFINISHED}", std::process::id(), now.as_nanos());
        self.path.join(unique)
    }
}

fn name(cluster: &ClusterId) -> String {
    let escaped = utf8_percent_encode(cluster.as_str(), ESCAPED).to_string();
    if escaped.len() <= MAX_NAME {
        return format!("{escaped}{SUFFIX}");
    }
    // The header of the file has the whole id. Escaped ids are ASCII and contain no dot.
    let hash = xxh3_128(cluster.as_str().as_bytes());
    format!("{}.{hash:032x}{SUFFIX}", &escaped[..MAX_NAME])
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn is_abandoned(entry: &fs::DirEntry) -> bool {
    let modified = entry.metadata().and_then(|metadata| metadata.modified());
    let age = modified.map(|modified| wall_clock().duration_since(modified).unwrap_or_default());
    age.is_ok_and(|age| age > ABANDONED)
}

/// Removes a file that another replica may have removed.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
