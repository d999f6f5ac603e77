//! From one root to the next without a failed handshake.
//!
//! A root of our own is renewed with its own key and name, so that either certificate verifies what the other's holders have.
//! When another CA takes over, two things keep both sides talking: the roots that were trusted stay trusted for as long as
//! certificates under them may hold, and what signed before signs a certificate for the new root, which is sent along
//! with every chain. So those who know only the old roots verify the new certificates, and the others the old ones.

use std::time::{Duration, SystemTime};

use super::{
    authority::{Authority, CLOCK_SKEW},
    certificate::{self, Certificate, Validity},
};

/// Something that stands beside an authority for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Passing {
    pub(super) certificate: Certificate,
    pub(super) until: SystemTime,
}

/// True if less than so many percent of a certificate's life are left.
pub fn is_due(certificate: &Certificate, now: SystemTime, grace_percent: u32) -> bool {
    let life = certificate.not_after.duration_since(certificate.not_before);
    let left = certificate.not_after.duration_since(now);
    match (life, left) {
        (Ok(life), Ok(left)) => left.as_secs() <= life.as_secs() / 100 * u64::from(grace_percent.min(100)),
        _ => true,
    }
}

/// `next` after `before`, another CA. `span`: how long certificates of `before` may still be in use.
pub fn take_over(before: &Authority, next: Authority, span: Duration, now: SystemTime) -> Authority {
    let until = now.checked_add(span).unwrap_or(now);
    let mut held = before.held().to_vec();
    // Nobody needs a root beside another one of its name and key.
    let own = std::slice::from_ref(next.root());
    for root in before.roots().iter().filter(|root| !vouches(own, root)) {
        let passing = Passing {
            until: until.min(root.not_after),
            certificate: root.clone(),
        };
        match held.iter_mut().find(|one| one.certificate == *root) {
            Some(one) => one.until = one.until.max(passing.until),
            None => held.push(passing),
        }
    }
    let mut bridges = before.bridges().to_vec();
    if !vouches(before.roots(), next.root()) && now < before.holds_until() {
        let validity = Validity {
            from: now.checked_sub(CLOCK_SKEW).unwrap_or(now),
            until: until.min(before.holds_until()).min(next.root().not_after),
        };
        match cross(before, next.root(), validity) {
            Ok(crossed) => bridges.extend(crossed),
            Err(error) => {
                tracing::warn!(%error, "the old CA cannot vouch for the new one; hint: whoever knows only its roots may refuse new certificates");
            }
        }
    }
    next.beside(held, bridges, now)
}

/// `next` after `before`, the same CA with other content: what still passes passes on.
pub fn carry_on(before: &Authority, next: Authority, now: SystemTime) -> Authority {
    next.beside(before.held().to_vec(), before.bridges().to_vec(), now)
}

/// An authority without what has passed; none if nothing has.
pub fn without_passed(authority: &Authority, now: SystemTime) -> Option<Authority> {
    let mut all = authority.held().iter().chain(authority.bridges());
    all.any(|one| one.until <= now).then(|| {
        let (held, bridges) = (authority.held().to_vec(), authority.bridges().to_vec());
        authority.clone().beside(held, bridges, now)
    })
}

/// True if some of these roots verify what `root` verifies.
fn vouches(roots: &[Certificate], root: &Certificate) -> bool {
    roots
        .iter()
        .any(|one| one.subject == root.subject && one.public_key == root.public_key)
}

/// The certificate of a root by another authority, and what leads from that to its root.
fn cross(before: &Authority, root: &Certificate, validity: Validity) -> Result<Vec<Passing>, String> {
    let der =
        certificate::cross(root, validity, before.certificate(), before.key()).map_err(|error| error.to_string())?;
    let crossed = Certificate::from_der(der.into())?;
    let above = before.own_chain().iter().filter(|one| !one.is_self_issued());
    let all = std::iter::once(&crossed).chain(above);
    Ok(all
        .map(|one| Passing {
            certificate: one.clone(),
            until: validity.until,
        })
        .collect())
}
