//! Plugged-in CA bundles: in a folder (a mounted Secret) or in a Secret, with the file names of Istio or of
//! cert-manager and `kubernetes.io/tls`.
//!
//! Parity (security/pkg/pki/ca/ca.go, pilot/pkg/bootstrap/istio_ca.go): file names and completeness rules.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use smol_str::{SmolStr, ToSmolStr};

use super::bundle::{BundleError, BundlePart, CaBundle, Problem};
use crate::base::Sensitive;

/// Files of a folder, or data of a Secret, by name.
pub type BundleFiles = BTreeMap<SmolStr, Sensitive>;

/// Istio's name of the signing certificate.
pub const CERTIFICATE: &str = "ca-cert.pem";
/// See [`CERTIFICATE`].
pub const KEY: &str = "ca-key.pem";
/// See [`CERTIFICATE`].
pub const CHAIN: &str = "cert-chain.pem";
/// See [`CERTIFICATE`].
pub const ROOTS: &str = "root-cert.pem";
/// See [`CERTIFICATE`].
pub const CRL: &str = "ca-crl.pem";
/// Marks a bundle that the control plane generated itself.
pub const GENERATED_MARKER: &str = "istio-generated";
const TLS_CERTIFICATE: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const TLS_ROOTS: &str = "ca.crt";
/// All file names that are read.
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
/// The maximum file size: that of a Secret.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// The symbolic link by which the kubelet swaps all files of a mounted Secret at once.
const DATA: &str = "..data";
/// The maximum number of reads while the folder is being swapped.
const ATTEMPTS: usize = 5;

/// The result of a bundle lookup.
#[derive(Debug)]
pub enum BundleLookup {
    /// No part is present.
    Absent,
    /// Some parts are missing: the bundle is being written, or misconfigured.
    Incomplete(BundleError),
    /// All parts are present; not verified yet.
    Complete(CaBundle),
}

/// Looks up the parts of a bundle in files. `with_crl`: `PILOT_ENABLE_CA_CRL`.
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
    // The chain of a self-signed root is empty.
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

/// Builds the chain of a cert-manager bundle, which has no chain file: the signing certificate and its issuer.
fn cert_manager_chain(certificate: &BundlePart, roots: &BundlePart) -> BundlePart {
    BundlePart {
        name: SmolStr::new_static("tls.crt, ca.crt"),
        pem: Bytes::from([certificate.pem.as_ref(), b"\n", roots.pem.as_ref()].concat()),
    }
}

/// A failed read of a folder. Retryable: the content is unknown, which differs from empty.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct FolderError {
    /// The folder or file.
    pub path: PathBuf,
    /// The cause.
    pub error: io::Error,
}

/// Reads the bundle files consistently: a mounted Secret that is swapped meanwhile is read again. A missing folder is
/// empty.
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
                    "the file is longer than {FILE_BYTES_MAX} bytes"
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
