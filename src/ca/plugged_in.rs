//! A CA that an operator gives us: as files of a folder (a mounted Secret) or as a Secret that is read from the API
//! server, with the names of Istio or those of cert-manager and `kubernetes.io/tls`.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use smol_str::{SmolStr, ToSmolStr};

use super::bundle::{BundleError, BundlePart, CaBundle, Problem};
use crate::base::Sensitive;

/// The files of a folder, or the data of a Secret, by name.
pub type BundleFiles = BTreeMap<SmolStr, Sensitive>;

/// Istio's names.
pub const CERTIFICATE: &str = "ca-cert.pem";
/// See [`CERTIFICATE`].
pub const KEY: &str = "ca-key.pem";
/// See [`CERTIFICATE`].
pub const CHAIN: &str = "cert-chain.pem";
/// See [`CERTIFICATE`].
pub const ROOTS: &str = "root-cert.pem";
/// See [`CERTIFICATE`].
pub const CRL: &str = "ca-crl.pem";
/// Says that the control plane made the bundle itself.
pub const GENERATED_MARKER: &str = "istio-generated";
const TLS_CERTIFICATE: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const TLS_ROOTS: &str = "ca.crt";
/// All names that count.
const NAMES: [&str; 9] = [
    CERTIFICATE,
    KEY,
    CHAIN,
    ROOTS,
    CRL,
    GENERATED_MARKER,
    TLS_CERTIFICATE,
    TLS_KEY,
    TLS_ROOTS,
];
/// No bundle is longer than what a Secret can hold.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Through this link the kubelet swaps all files of a mounted Secret at once.
const DATA: &str = "..data";
/// How often a folder that is swapped while it is read is read again.
const ATTEMPTS: usize = 5;

/// What stands in a place.
#[derive(Debug)]
pub enum BundleLookup {
    /// No part of a bundle.
    Absent,
    /// Some parts but not all: somebody is not done, or made a mistake.
    Incomplete(BundleError),
    /// All parts. Whether they fit is another question.
    Complete(CaBundle),
}

/// Takes the parts of a bundle out of files. `revocation`: `PILOT_ENABLE_CA_CRL`.
pub fn find(location: SmolStr, files: &BundleFiles, with_crl: bool) -> BundleLookup {
    let bytes = |name: &str| files.get(name).map(|file| file.reveal().clone());
    let part = |name: &'static str| BundlePart {
        name: name.into(),
        pem: bytes(name).unwrap_or_default(),
    };
    let is_there = |name: &&str| files.get(*name).is_some_and(|file| !file.is_empty());
    let (certificate, key, roots) = if files.contains_key(TLS_CERTIFICATE) {
        (TLS_CERTIFICATE, TLS_KEY, TLS_ROOTS)
    } else {
        (CERTIFICATE, KEY, ROOTS)
    };
    let is_tls = certificate == TLS_CERTIFICATE;
    let chain = if is_tls { certificate } else { CHAIN };
    let parts = [key, certificate, roots, chain];
    if !parts.iter().any(is_there) {
        return BundleLookup::Absent;
    }
    // A root that signs itself has an empty chain.
    let is_missing = |name: &&str| !is_there(name) && (*name != CHAIN || !files.contains_key(CHAIN));
    let missing: Vec<&str> = parts.into_iter().filter(is_missing).collect();
    let bundle = CaBundle {
        location,
        certificate: part(certificate),
        key_name: key.into(),
        key: files.get(key).cloned().unwrap_or_default(),
        chain: if is_tls {
            cert_manager_chain(&part(certificate), &part(roots))
        } else {
            part(CHAIN)
        },
        roots: part(roots),
        crl: (with_crl && !is_tls && is_there(&CRL)).then(|| part(CRL)),
    };
    match missing.first() {
        Some(_) => BundleLookup::Incomplete(bundle.error(&missing.join(", ").into(), Problem::Missing)),
        None => BundleLookup::Complete(bundle),
    }
}

/// cert-manager has no file for the chain: it is the signing certificate and its issuer.
fn cert_manager_chain(certificate: &BundlePart, roots: &BundlePart) -> BundlePart {
    BundlePart {
        name: SmolStr::new_static("tls.crt, ca.crt"),
        pem: Bytes::from([certificate.pem.as_ref(), b"\n", roots.pem.as_ref()].concat()),
    }
}

/// A folder that cannot be read. Retryable: nothing is known of what it holds, which is not the same as nothing.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct FolderError {
    /// The folder or file.
    pub path: PathBuf,
    /// Why.
    pub error: io::Error,
}

/// Reads the files that count, all of one state: a mounted Secret that is swapped meanwhile is read again. A folder
/// that is not there is empty.
pub fn read(folder: &Path) -> Result<BundleFiles, FolderError> {
    let mut result = Ok(BundleFiles::new());
    for _ in 0..ATTEMPTS {
        let before = std::fs::read_link(folder.join(DATA)).ok();
        let at = before
            .as_ref()
            .map_or_else(|| folder.to_owned(), |data| folder.join(data));
        result = read_once(&at);
        if std::fs::read_link(folder.join(DATA)).ok() == before {
            break;
        }
    }
    result
}

fn read_once(folder: &Path) -> Result<BundleFiles, FolderError> {
    let mut files = BundleFiles::new();
    for name in NAMES {
        let path = folder.join(name);
        let failed = |error| FolderError {
            path: path.clone(),
            error,
        };
        match std::fs::metadata(&path) {
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                return Err(failed(io::Error::other(format!(
                    "it is longer than {FILE_BYTES_MAX} bytes"
                ))));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        }
        let bytes = std::fs::read(&path).map_err(failed)?;
        files.insert(name.to_smolstr(), Sensitive::new(Bytes::from(bytes)));
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
