//! Root rotation without failed handshakes.
//!
//! A self-signed root is renewed with its key and name, so that either certificate verifies the leaves of both. When
//! another CA takes over, the old roots stay trusted while certificates under them may be valid, and the old CA
//! cross-signs the new root; that certificate is sent with every chain. Peers that trust only the old or only the new
//! roots accept both.

use std::time::{Duration, SystemTime};

use super::{
    authority::{Authority, CLOCK_SKEW, ExpiringRoot},
    certificate::{self, Certificate, CertificateError, Validity},
    key::KeyError,
};

/// Returns true if at most this percentage of a certificate's lifetime is left.
/// Parity (security/pkg/pki/ca/selfsignedcarootcertrotator.go).
pub fn is_renewal_due(certificate: &Certificate, now: SystemTime, grace_percent: u32) -> bool {
    let life = certificate.not_after.duration_since(certificate.not_before);
    let left = certificate.not_after.duration_since(now);
    match (life, left) {
        (Ok(life), Ok(left)) => left.as_secs() <= life.as_secs() / 100 * u64::from(grace_percent.min(100)),
        _ => true,
    }
}

/// Returns `next` as the successor of another CA, `before`. Certificates of `before` may be in use for `span`.
pub fn hand_over(before: &Authority, next: Authority, span: Duration, now: SystemTime) -> Authority {
    let until = now.checked_add(span).unwrap_or(now);
    let mut retained_roots = before.retained_roots().to_vec();
    // A root with the name and key of the new one need not be retained.
    let own = std::slice::from_ref(next.root());
    for root in before.roots().iter().filter(|root| !covers(own, root)) {
        let expiring = ExpiringRoot {
            until: until.min(root.not_after),
            certificate: root.clone(),
        };
        match retained_roots.iter_mut().find(|retained| retained.certificate == *root) {
            Some(retained) => retained.until = retained.until.max(expiring.until),
            None => retained_roots.push(expiring),
        }
    }
    let mut cross_certs = before.cross_certs().to_vec();
    if !covers(before.roots(), next.root()) && now < before.path_expires_at() {
        let validity = Validity {
            not_before: now.checked_sub(CLOCK_SKEW).unwrap_or(now),
            not_after: until.min(before.path_expires_at()).min(next.root().not_after),
        };
        match cross_sign(before, next.root(), validity) {
            Ok(cross_cert) => cross_certs.extend(cross_cert),
            Err(error) => {
                tracing::warn!(%error, "cross-signing the new root failed; peers that trust only the old roots may reject new certificates");
            }
        }
    }
    next.with_retained(retained_roots, cross_certs, now)
}

/// Returns `next`, the same CA with other content, with the retained roots and cross-signed certificates of `before`.
pub fn inherit_retained(before: &Authority, next: Authority, now: SystemTime) -> Authority {
    next.with_retained(before.retained_roots().to_vec(), before.cross_certs().to_vec(), now)
}

/// Returns the authority without expired roots and cross-signed certificates; `None` if none has expired.
pub fn without_expired(authority: &Authority, now: SystemTime) -> Option<Authority> {
    let mut all = authority.retained_roots().iter().chain(authority.cross_certs());
    all.any(|root| root.until <= now).then(|| {
        let (retained_roots, cross_certs) = (authority.retained_roots().to_vec(), authority.cross_certs().to_vec());
        authority.clone().with_retained(retained_roots, cross_certs, now)
    })
}

/// Returns true if one of these roots has the name and key of `root`, and so verifies the same certificates.
fn covers(roots: &[Certificate], root: &Certificate) -> bool {
    roots
        .iter()
        .any(|certificate| certificate.subject == root.subject && certificate.public_key == root.public_key)
}

/// Reason why a root cannot be cross-signed.
#[derive(Debug, thiserror::Error)]
enum CrossSignError {
    /// Signing failed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The signed certificate cannot be parsed.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// Cross-signs a root by another authority. Returns the certificate and the path to that authority's root.
fn cross_sign(before: &Authority, root: &Certificate, validity: Validity) -> Result<Vec<ExpiringRoot>, CrossSignError> {
    let der = certificate::cross_signed(root, validity, before.certificate(), before.key())?;
    let cross_cert = Certificate::from_der(der.into())?;
    let above = before
        .own_chain()
        .iter()
        .filter(|certificate| !certificate.is_self_issued());
    let all = std::iter::once(&cross_cert).chain(above);
    Ok(all
        .map(|certificate| ExpiringRoot {
            certificate: certificate.clone(),
            until: validity.not_after,
        })
        .collect())
}
