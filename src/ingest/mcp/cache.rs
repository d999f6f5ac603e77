//! The last good state of a config source on disk: complete responses, each after its length.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use prost::Message;
use xxhash_rust::xxh3::xxh3_64;

use super::objects::{Answer, requested_types};
use crate::{api::Kind, proto::envoy::service::discovery::v3::DiscoveryResponse};

/// First line of a file. Another format has another line.
const MAGIC: &[u8] = b"istiod config source 1\n";
/// The largest file.
const MAX_BYTES: u64 = 1 << 30;

/// The file of one config source.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    file: PathBuf,
    /// The age at which a state no longer serves; 0: no limit.
    max_age: Duration,
}

impl Cache {
    /// Returns the file for the source with this address.
    pub(super) fn new(folder: &Path, address: &str, max_age: Duration) -> Self {
        let name = format!("{:016x}.config-source-state", xxh3_64(address.as_bytes()));
        Self {
            file: folder.join(name),
            max_age,
        }
    }

    /// Reads the state; `None` if there is none, or if it is too old.
    pub(super) fn read(&self, now: SystemTime) -> io::Result<Option<Vec<(Kind, Answer)>>> {
        let metadata = match fs::metadata(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        let age = now.duration_since(metadata.modified()?).unwrap_or_default();
        if !self.max_age.is_zero() && age > self.max_age {
            return Ok(None);
        }
        if metadata.len() > MAX_BYTES {
            return Err(io::Error::other("the file is too large"));
        }
        decode(&fs::read(&self.file)?).map(Some)
    }

    /// Writes the state. A reader finds the previous one or this one.
    pub(super) fn write(&self, answers: Vec<(Kind, Answer)>) -> io::Result<()> {
        if let Some(folder) = self.file.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let draft = self.file.with_extension("config-source-state-unfinished");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&draft)?;
        file.write_all(&encode(answers))?;
        file.sync_all()?;
        fs::rename(&draft, &self.file)
    }
}

fn encode(answers: Vec<(Kind, Answer)>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for (_, answer) in answers {
        let response = DiscoveryResponse {
            type_url: answer.type_url,
            resources: answer.resources,
            ..Default::default()
        };
        bytes.extend(response.encode_length_delimited_to_vec());
    }
    let sum = xxh3_64(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> io::Result<Vec<(Kind, Answer)>> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let (content, sum) = bytes.split_last_chunk::<8>().ok_or_else(|| invalid("it is cut off"))?;
    if u64::from_le_bytes(*sum) != xxh3_64(content) {
        return Err(invalid("it is damaged"));
    }
    let mut left = content
        .strip_prefix(MAGIC)
        .ok_or_else(|| invalid("it has another format"))?;
    let mut answers = Vec::new();
    while !left.is_empty() {
        let response = DiscoveryResponse::decode_length_delimited(&mut left);
        let response = response.map_err(|error| invalid(&error.to_string()))?;
        let known = requested_types().find(|(_, type_url)| *type_url == response.type_url);
        if let Some((kind, type_url)) = known {
            let answer = Answer {
                type_url,
                resources: response.resources,
                removed: Vec::new(),
                is_complete: true,
            };
            answers.push((kind, answer));
        }
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::Any;

    fn answers() -> Vec<(Kind, Answer)> {
        let answer = Answer {
            type_url: "networking.istio.io/v1/Gateway".to_owned(),
            resources: vec![Any::default(); 3],
            removed: Vec::new(),
            is_complete: true,
        };
        vec![(Kind::Gateway, answer)]
    }

    #[test]
    fn a_state_is_read_as_it_was_written_unless_it_is_old_or_damaged() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::new(folder.path(), "xds://a:1", Duration::from_hours(1));
        let now = crate::environment::wall_clock();
        assert!(cache.read(now).expect("no file").is_none());
        cache.write(answers()).expect("a writable folder");
        let read = cache.read(now).expect("a valid file").expect("a young file");
        assert_eq!((read.len(), read[0].1.resources.len()), (1, 3));
        assert!(
            cache
                .read(now + Duration::from_hours(2))
                .expect("a valid file")
                .is_none()
        );
        let other = Cache::new(folder.path(), "xds://b:1", Duration::ZERO);
        assert!(other.read(now).expect("no file").is_none());
        let mut bytes = fs::read(&cache.file).expect("the file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&cache.file, bytes).expect("writable");
        assert!(cache.read(now).is_err());
    }
}
