//! Certificates in PEM.

use rustls::pki_types::{
    CertificateDer,
    pem::{self, PemObject},
};

/// Reason why a PEM text has no usable certificates.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// It has no certificate.
    #[error("no PEM block CERTIFICATE")]
    NoCertificate,
    /// It is malformed.
    #[error(transparent)]
    Malformed(#[from] pem::Error),
}

/// Parses the certificates of a PEM text; at least one.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let all: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>()?;
    if all.is_empty() {
        return Err(PemError::NoCertificate);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_without_certificates_are_errors() {
        assert!(matches!(certificates(b""), Err(PemError::NoCertificate)));
        let malformed = b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";
        assert!(matches!(certificates(malformed), Err(PemError::Malformed(_))));
    }
}
