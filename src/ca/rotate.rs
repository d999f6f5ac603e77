//! From one root to the next without a failed handshake.
//!
//! A root of our own is renewed with its own key and name, so that either certificate verifies what the other's holders
//! have. When another CA takes over, two things keep both sides talking: the roots that were trusted stay trusted for
//! as long as certificates under them may hold, and what signed before signs a certificate for the new root, which is
//! sent along with every chain. So those who know only the old roots verify the new certificates, and the others the
//! old ones.

use std::time::{Duration, SystemTime};

use super::{
    authority::{Authority, CLOCK_SKEW, ExpiringRoot},
    certificate::{self, Certificate, Validity},
};

/// True if less than so many percent of a certificate's life are left.
pub fn is_renewal_due(certificate: &Certificate, now: SystemTime, grace_percent: u32) -> bool {
    let life = certificate.not_after.duration_since(certificate.not_before);
    let left = certificate.not_after.duration_since(now);
    match (life, left) {
        (Ok(life), Ok(left)) => left.as_secs() <= life.as_secs() / 100 * u64::from(grace_percent.min(100)),
        _ => true,
    }
}

/// `next` after `before`, another CA. `span`: how long certificates of `before` may still be in use.
pub fn hand_over(before: &Authority, next: Authority, span: Duration, now: SystemTime) -> Authority {
    let until = now.checked_add(span).unwrap_or(now);
    let mut retained_roots = before.retained_roots().to_vec();
    // Nobody needs a root beside another one of its name and key.
    let own = std::slice::from_ref(next.root());
    for root in before.roots().iter().filter(|root| !covers(own, root)) {
        let expiring = ExpiringRoot {
            until: until.min(root.not_after),
            certificate: root.clone(),
        };
        match retained_roots.iter_mut().find(|one| one.certificate == *root) {
            Some(one) => one.until = one.until.max(expiring.until),
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
                tracing::warn!(%error, "the old CA cannot vouch for the new one; hint: whoever knows only its roots may refuse new certificates");
            }
        }
    }
    next.with_retained(retained_roots, cross_certs, now)
}

/// `next` after `before`, the same CA with other content: what still passes passes on.
pub fn inherit_retained(before: &Authority, next: Authority, now: SystemTime) -> Authority {
    next.with_retained(before.retained_roots().to_vec(), before.cross_certs().to_vec(), now)
}

/// An authority without what has passed; none if nothing has.
pub fn without_expired(authority: &Authority, now: SystemTime) -> Option<Authority> {
    let mut all = authority.retained_roots().iter().chain(authority.cross_certs());
    all.any(|one| one.until <= now).then(|| {
        let (retained_roots, cross_certs) = (authority.retained_roots().to_vec(), authority.cross_certs().to_vec());
        authority.clone().with_retained(retained_roots, cross_certs, now)
    })
}

/// True if some of these roots verify what `root` verifies.
fn covers(roots: &[Certificate], root: &Certificate) -> bool {
    roots
        .iter()
        .any(|one| one.subject == root.subject && one.public_key == root.public_key)
}

/// The certificate of a root by another authority, and what leads from that to its root.
fn cross_sign(before: &Authority, root: &Certificate, validity: Validity) -> Result<Vec<ExpiringRoot>, String> {
    let der = certificate::cross_signed(root, validity, before.certificate(), before.key())
        .map_err(|error| error.to_string())?;
    let cross_cert = Certificate::from_der(der.into())?;
    let above = before.own_chain().iter().filter(|one| !one.is_self_issued());
    let all = std::iter::once(&cross_cert).chain(above);
    Ok(all
        .map(|one| ExpiringRoot {
            certificate: one.clone(),
            until: validity.not_after,
        })
        .collect())
}
