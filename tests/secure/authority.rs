//! A CA of a test, which the daemon uses as its plugged-in CA.

use std::path::Path;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

use crate::support::agent::Certificate;

/// The CA; its certificate is the root.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    key: String,
    /// Its certificate, as PEM.
    pub(crate) root: String,
}

impl Authority {
    /// Creates a new one.
    pub(crate) fn new(name: &str) -> Authority {
        let key = KeyPair::generate().expect("key generation succeeds");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::OrganizationName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = params.self_signed(&key).expect("signing succeeds").pem();
        Authority {
            key: key.serialize_pem(),
            issuer: Issuer::new(params, key),
            root,
        }
    }

    /// Writes the folder for `ROOT_CA_DIR`.
    pub(crate) fn plug_into(&self, folder: &Path) {
        std::fs::create_dir_all(folder).expect("the test's folder is writable");
        let files = [
            ("ca-cert.pem", &self.root),
            ("ca-key.pem", &self.key),
            ("root-cert.pem", &self.root),
            ("cert-chain.pem", &self.root),
        ];
        for (name, text) in files {
            std::fs::write(folder.join(name), text).expect("the test's folder is writable");
        }
    }

    /// Issues a certificate with a URI or DNS name.
    pub(crate) fn certificate(&self, name: &str) -> Certificate {
        let key = KeyPair::generate().expect("key generation succeeds");
        let mut params = CertificateParams::default();
        let text = Ia5String::try_from(name).expect("test names are ASCII");
        params.subject_alt_names = vec![if name.contains("://") {
            SanType::URI(text)
        } else {
            SanType::DnsName(text)
        }];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let chain = params.signed_by(&key, &self.issuer).expect("signing succeeds").pem();
        Certificate {
            chain,
            key: key.serialize_pem(),
            roots: self.root.clone(),
        }
    }

    /// Writes a certificate of a server to `tls.crt`, `tls.key` and `root.crt`. Each file is replaced as a whole, as in
    /// a mounted Secret: a reader never sees a partial file.
    pub(crate) fn write_serving_certificate(&self, folder: &Path, server: &str) {
        let own = self.certificate(server);
        for (file, text) in [("tls.crt", own.chain), ("tls.key", own.key), ("root.crt", own.roots)] {
            let part = folder.join(format!("{file}.part"));
            std::fs::write(&part, text).expect("the test's folder is writable");
            std::fs::rename(part, folder.join(file)).expect("the test's folder is writable");
        }
    }
}
