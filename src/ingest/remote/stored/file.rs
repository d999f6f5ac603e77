//! Format of a stored state: lines of JSON. The first line names format, version and cluster, then each line is a
//! Kubernetes object, and the last line has their number and a checksum of all lines before it.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::objects::Objects;
use crate::{
    api::{Kind, manifest},
    base::{ClusterId, SmolStr},
    ingest::{cluster, discovery_filter::WatchedObject},
    kube::Object,
};

/// Name of the format.
const FORMAT: &str = "istiod-remote-state";
/// Version of the format. A file of another version is ignored.
const VERSION: u32 = 1;
/// Largest file.
pub(super) const MAX_BYTES: u64 = 256 << 20;

/// First line.
#[derive(Deserialize, Serialize)]
struct Header {
    format: SmolStr,
    version: u32,
    cluster: SmolStr,
}

/// Last line.
#[derive(Deserialize, Serialize)]
struct Trailer {
    objects: usize,
    checksum: SmolStr,
}

/// Reason why a file does not count.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is not a regular file")]
    NotRegular,
    #[error("it has more than {MAX_BYTES} bytes")]
    TooLarge,
    #[error("line 1: it is not a stored state of a remote cluster")]
    Foreign,
    #[error("line 1: version {0} is not supported, want {VERSION}; hint: another version of istiod wrote it")]
    Version(u32),
    #[error("line 1: cluster: it is a state of the cluster {0:?}")]
    Cluster(SmolStr),
    #[error("it is truncated: the last line is missing")]
    Truncated,
    #[error("the checksum of the last line does not match: the file is corrupt")]
    Checksum,
    #[error("line {line}: {message}")]
    Object { line: usize, message: String },
    #[error("reading it failed; this is a bug in istiod: {0}")]
    Panic(String),
}

/// Writes a state. Returns its size; an error above [`MAX_BYTES`].
pub(super) fn write(out: impl Write, cluster: &ClusterId, objects: &Objects) -> io::Result<u64> {
    let mut out = Lines {
        out,
        hash: Xxh3::new(),
        bytes: 0,
        line: Vec::new(),
    };
    out.line(&Header {
        format: SmolStr::new_static(FORMAT),
        version: VERSION,
        cluster: SmolStr::new(cluster.as_str()),
    })?;
    let mut count = 0;
    for manifest in objects.rows().filter_map(manifest::manifest) {
        out.line(&manifest)?;
        count += 1;
    }
    let checksum = SmolStr::new(format!("{:032x}", out.hash.digest128()));
    out.line(&Trailer {
        objects: count,
        checksum,
    })?;
    out.out.flush()?;
    Ok(out.bytes)
}

struct Lines<W> {
    out: W,
    hash: Xxh3,
    bytes: u64,
    /// Buffer of one line.
    line: Vec<u8>,
}

impl<W: Write> Lines<W> {
    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, value)?;
        self.line.push(b'\n');
        self.bytes += self.line.len() as u64;
        if self.bytes > MAX_BYTES {
            return Err(io::Error::other(format!("the state has more than {MAX_BYTES} bytes")));
        }
        self.hash.update(&self.line);
        self.out.write_all(&self.line)
    }
}

/// Reads a state of a cluster.
pub(super) fn read(input: impl BufRead, cluster: &ClusterId) -> Result<Vec<WatchedObject>, FileError> {
    let mut input = input.take(MAX_BYTES + 1);
    let mut hash = Xxh3::new();
    let mut objects = Vec::new();
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        input.read_until(b'\n', &mut line)?;
        number += 1;
        if !line.ends_with(b"\n") {
            return Err(match input.limit() {
                0 => FileError::TooLarge,
                _ if number == 1 => FileError::Foreign,
                _ => FileError::Truncated,
            });
        }
        if number == 1 {
            check_header(&line, cluster)?;
        } else if let Ok(trailer) = serde_json::from_slice::<Trailer>(&line) {
            let checksum = format!("{:032x}", hash.digest128());
            let is_whole = trailer.checksum == checksum && trailer.objects == objects.len();
            let is_last = input.fill_buf()?.is_empty();
            return if is_whole && is_last {
                Ok(objects)
            } else {
                Err(FileError::Checksum)
            };
        } else {
            let object = object(&line, cluster).map_err(|message| FileError::Object { line: number, message })?;
            objects.push(object);
        }
        hash.update(&line);
    }
}

fn check_header(line: &[u8], cluster: &ClusterId) -> Result<(), FileError> {
    // A later version may have other fields, and is to be named as such.
    let header: Value = serde_json::from_slice(line).map_err(|_| FileError::Foreign)?;
    if header["format"] != FORMAT {
        return Err(FileError::Foreign);
    }
    match header["version"].as_u64() {
        Some(version) if version == u64::from(VERSION) => {}
        version => return Err(FileError::Version(version.unwrap_or_default() as u32)),
    }
    let header: Header = serde_json::from_value(header).map_err(|_| FileError::Foreign)?;
    if header.cluster != cluster.as_str() {
        return Err(FileError::Cluster(header.cluster));
    }
    Ok(())
}

fn object(line: &[u8], cluster: &ClusterId) -> Result<WatchedObject, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let name = value["kind"].as_str().unwrap_or_default();
    let kind: Option<Kind> = manifest::KINDS.into_iter().find(|kind| kind.name() == name);
    let kind = kind.ok_or_else(|| format!("kind: {name:?} is not stored"))?;
    let object = Object::from_value(value).map_err(|error| error.to_string())?;
    Ok(cluster::item(kind, cluster, object))
}
