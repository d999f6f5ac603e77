//! The last good state of a config source on disk: complete responses, each after its length.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use prost::Message;
use xxhash_rust::xxh3::xxh3_64;

use super::objects::{Answer, requested_types};
use crate::{api::Kind, ingest::state_file, proto::envoy::service::discovery::v3::DiscoveryResponse};

/// First line of a file. Another format has another line.
const MAGIC: &[u8] = b"istiod config source 1\n";
/// Extension of the names of files.
const EXTENSION: &str = "config-source-state";
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
        let name = format!("{:016x}.{EXTENSION}", xxh3_64(address.as_bytes()));
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
            tracing::warn!(file = %self.file.display(), ?age, "stored state of a config source too old, ignoring it");
            return Ok(None);
        }
        if metadata.len() > MAX_BYTES {
            return Err(io::Error::other("the file is too large"));
        }
        decode(&fs::read(&self.file)?).map(Some)
    }

    /// Replaces the state, which is current now.
    pub(super) fn write(&self, answers: Vec<(Kind, Answer)>, now: SystemTime) -> io::Result<()> {
        state_file::replace(&self.file, now, |mut file| file.write_all(&encode(answers)))
    }

    /// Records that the stored state is current now.
    pub(super) fn confirm(&self, now: SystemTime) -> io::Result<()> {
        state_file::confirm(&self.file, now)
    }

    /// Removes unfinished files whose writer was killed.
    pub(super) fn remove_abandoned(&self) -> io::Result<()> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if state_file::is_abandoned(&entry, EXTENSION) {
                state_file::remove(&entry.path())?;
            }
        }
        Ok(())
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
        cache.write(answers(), now).expect("a writable folder");
        let read = cache.read(now).expect("a valid file").expect("a young file");
        assert_eq!((read.len(), read[0].1.resources.len()), (1, 3));
        assert!(
            cache
                .read(now + Duration::from_hours(2))
                .expect("a valid file")
                .is_none()
        );
        let later = now + Duration::from_hours(2);
        cache.confirm(later).expect("a file");
        assert!(
            cache.read(later).expect("a valid file").is_some(),
            "it was current until then"
        );
        let draft = folder.path().join(format!("a.1-1.{EXTENSION}-unfinished"));
        fs::write(&draft, "").expect("writable");
        state_file::confirm(&draft, now - Duration::from_hours(2)).expect("a file");
        cache.remove_abandoned().expect("a folder");
        let files = fs::read_dir(folder.path()).expect("the folder");
        assert_eq!(files.count(), 1, "no unfinished file is left");
        let other = Cache::new(folder.path(), "xds://b:1", Duration::ZERO);
        assert!(other.confirm(now).is_err());
        assert!(other.read(now).expect("no file").is_none());
        let mut bytes = fs::read(&cache.file).expect("the file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&cache.file, bytes).expect("writable");
        assert!(cache.read(now).is_err());
    }
}
