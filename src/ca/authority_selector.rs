//! Selects the signing CA from the known state of the folder and the Secrets. Pure decisions: no I/O, no clock.
//!
//! Note: unknown differs from absent. While the state of a Secret is unknown no root is created, and a missing or
//! broken source never removes a working CA.

use std::{sync::Arc, time::SystemTime};

use smol_str::SmolStr;

use super::{
    authority::{Authority, TtlLimits},
    bundle::{CaBundle, ExpiryCheck},
    certificate::Certificate,
    key::KeyError,
    plugged_in::{self, BundleFiles, BundleLookup, GENERATED_MARKER},
    rotate,
    secrets::Secret,
    self_signed::{self, CACERTS_SECRET, Root, RootOptions, SELF_SIGNED_SECRET},
};

/// The rules of CA selection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectionRules {
    /// The control plane's namespace, for messages.
    pub namespace: SmolStr,
    /// The name of the folder in messages.
    pub folder: SmolStr,
    /// `USE_CACERTS_FOR_SELF_SIGNED_CA`: Secret `cacerts` may hold a self-signed root.
    pub self_signed_in_cacerts: bool,
    /// `PILOT_ENABLE_CA_CRL`.
    pub revocation: bool,
    /// `ISTIO_MULTIROOT_MESH`: roots of a plugged-in CA may be added and removed at run time.
    pub multi_root: bool,
    /// True if Secrets can store a root.
    pub has_secret_store: bool,
    /// The lifetimes of certificates.
    pub limits: TtlLimits,
    /// The parameters of self-signed roots.
    pub root: RootOptions,
    /// `CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE`.
    pub grace_percent: u32,
}

/// The known state of a Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SecretState {
    /// Not listed yet.
    #[default]
    Unknown,
    /// It does not exist.
    Absent,
    /// It exists.
    Present(Secret),
}

impl From<Option<Secret>> for SecretState {
    fn from(secret: Option<Secret>) -> Self {
        secret.map_or(Self::Absent, Self::Present)
    }
}

/// The source of the CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthoritySource {
    /// The folder, or Secret `cacerts`, which hold the same bundle.
    PluggedIn,
    /// A self-signed root in this Secret.
    SelfSigned(&'static str),
    /// A self-signed root in memory only.
    InMemory,
}

/// The current CA.
#[derive(Clone, Debug)]
pub struct CurrentAuthority {
    /// Its source.
    pub source: AuthoritySource,
    /// The signing CA.
    pub authority: Arc<Authority>,
}

/// The storage of a new root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootStorage {
    /// This Secret.
    Secret(&'static str),
    /// Memory.
    Memory,
}

/// The next action.
#[derive(Debug)]
pub enum Decision {
    /// Nothing to do, or not enough is known.
    NoChange,
    /// Switch to this CA.
    Switch(CurrentAuthority),
    /// Create a root and store it.
    CreateRoot(RootStorage),
    /// The input is unusable and must be fixed by an operator; the current CA stays.
    Reject(String),
}

/// The inputs of CA selection.
#[derive(Debug)]
pub struct AuthoritySelector {
    /// The selection rules.
    pub rules: SelectionRules,
    /// The files of the folder.
    pub files: BundleFiles,
    /// Secret `cacerts`.
    pub cacerts: SecretState,
    /// Secret `istio-ca-secret`.
    pub istio_ca_secret: SecretState,
    /// A root that is stored in memory only.
    pub in_memory_root: Option<Root>,
    /// The current CA.
    pub current: Option<CurrentAuthority>,
}

impl AuthoritySelector {
    /// Creates a selector that knows only the folder.
    pub fn new(rules: SelectionRules, files: BundleFiles) -> Self {
        Self {
            rules,
            files,
            cacerts: SecretState::Unknown,
            istio_ca_secret: SecretState::Unknown,
            in_memory_root: None,
            current: None,
        }
    }

    /// Returns the next action.
    /// Parity (pilot/pkg/bootstrap/istio_ca.go): folder, then Secret `cacerts`, then the self-signed root.
    pub fn decide(&self, now: SystemTime) -> Decision {
        let is_ours = |has_mark: bool| self.rules.self_signed_in_cacerts && has_mark;
        if !is_ours(self.files.contains_key(GENERATED_MARKER)) {
            match plugged_in::find(self.rules.folder.clone(), &self.files, self.rules.revocation) {
                BundleLookup::Complete(bundle) => return self.use_plugged_in(bundle, now),
                BundleLookup::Incomplete(error) => return Decision::Reject(error.to_string()),
                BundleLookup::Absent => {}
            }
        }
        if !self.rules.has_secret_store {
            return self
                .in_memory_root
                .as_ref()
                .map_or(Decision::CreateRoot(RootStorage::Memory), |root| {
                    self.use_self_signed(AuthoritySource::InMemory, root, "memory".into(), now)
                });
        }
        match &self.cacerts {
            // The Secret may hold a bundle, so no root must be created yet.
            SecretState::Unknown => return Decision::NoChange,
            SecretState::Present(secret) if !is_ours(secret.data.contains_key(GENERATED_MARKER)) => {
                let location = self_signed::location(&self.rules.namespace, CACERTS_SECRET);
                match plugged_in::find(location, &secret.data, self.rules.revocation) {
                    BundleLookup::Complete(bundle) => return self.use_plugged_in(bundle, now),
                    BundleLookup::Incomplete(error) => return Decision::Reject(error.to_string()),
                    BundleLookup::Absent => {}
                }
            }
            SecretState::Present(_) | SecretState::Absent => {}
        }
        match (&self.istio_ca_secret, &self.cacerts) {
            (SecretState::Unknown, _) => Decision::NoChange,
            (SecretState::Present(secret), _) => self.use_secret(SELF_SIGNED_SECRET, secret, now),
            (SecretState::Absent, SecretState::Present(secret))
                if is_ours(secret.data.contains_key(GENERATED_MARKER)) =>
            {
                self.use_secret(CACERTS_SECRET, secret, now)
            }
            (SecretState::Absent, _) => self.no_source(),
        }
    }

    /// Handles the absence of both a bundle and a self-signed root.
    fn no_source(&self) -> Decision {
        let name = if self.rules.self_signed_in_cacerts {
            CACERTS_SECRET
        } else {
            SELF_SIGNED_SECRET
        };
        match &self.current {
            None => Decision::CreateRoot(RootStorage::Secret(name)),
            Some(current) => Decision::Reject(format!(
                "the source of CA {} is gone; it stays in use until istiod restarts",
                current.authority.certificate().name
            )),
        }
    }

    fn use_secret(&self, name: &'static str, secret: &Secret, now: SystemTime) -> Decision {
        let location = self_signed::location(&self.rules.namespace, name);
        match Root::from_secret(secret) {
            Some(root) => self.use_self_signed(AuthoritySource::SelfSigned(name), &root, location, now),
            None => Decision::Reject(format!(
                "{location}: ca-cert.pem or ca-key.pem is missing; hint: fix the Secret, or delete it and restart to create a new root"
            )),
        }
    }

    fn use_self_signed(&self, source: AuthoritySource, root: &Root, location: SmolStr, now: SystemTime) -> Decision {
        let bundle = root.bundle(location, &self.files, now);
        let Some(current) = &self.current else {
            return first_authority(source, bundle, now, ExpiryCheck::Skipped);
        };
        if same_content(current.authority.bundle(), &bundle) {
            return Decision::NoChange;
        }
        if current.source == AuthoritySource::PluggedIn {
            return Decision::Reject(format!(
                "the bundle of plugged-in CA {} is gone; it stays in use until istiod restarts",
                current.authority.certificate().name
            ));
        }
        match Authority::with_expiry_check(bundle, now, ExpiryCheck::Skipped) {
            Ok(next) => self.transition(source, current, next, now),
            Err(error) => Decision::Reject(error.to_string()),
        }
    }

    fn use_plugged_in(&self, mut bundle: CaBundle, now: SystemTime) -> Decision {
        let Some(current) = &self.current else {
            return first_authority(AuthoritySource::PluggedIn, bundle, now, ExpiryCheck::Enforced);
        };
        let before = current.authority.bundle();
        if current.source == AuthoritySource::PluggedIn {
            // Removal of a CRL must not make revoked certificates trusted again.
            if bundle.crl.is_none() && before.roots.pem == bundle.roots.pem {
                bundle.crl.clone_from(&before.crl);
            }
            if same_content(before, &bundle) {
                return Decision::NoChange;
            }
        }
        let next = match Authority::new(bundle, now) {
            Ok(next) => next,
            Err(error) => return Decision::Reject(error.to_string()),
        };
        if current.source != AuthoritySource::PluggedIn {
            return self.transition(AuthoritySource::PluggedIn, current, next, now);
        }
        match self.check_root_change(current.authority.roots(), next.roots()) {
            Ok(()) => Decision::Switch(CurrentAuthority {
                source: AuthoritySource::PluggedIn,
                authority: Arc::new(rotate::inherit_retained(&current.authority, next, now)),
            }),
            Err(why) => Decision::Reject(format!(
                "{}: {}: {why}",
                next.bundle().location,
                next.bundle().roots.name
            )),
        }
    }

    /// Switches to another CA, or to a renewed certificate of the same root.
    fn transition(
        &self,
        source: AuthoritySource,
        current: &CurrentAuthority,
        next: Authority,
        now: SystemTime,
    ) -> Decision {
        let is_renewed = current.authority.certificate().public_key == next.certificate().public_key
            && current.authority.certificate().subject == next.certificate().subject;
        // Additional roots that its Secret no longer lists are retained too: Istio's replicas do not write them.
        let span = if is_renewed {
            self.rules.root.lifetime
        } else {
            self.rules.limits.max
        };
        Decision::Switch(CurrentAuthority {
            source,
            authority: Arc::new(rotate::hand_over(&current.authority, next, span, now)),
        })
    }

    /// Checks whether the roots of a plugged-in CA may change without a restart.
    /// Parity (pilot/pkg/bootstrap/istio_ca.go, handleEvent): only with multi-root, and if one set contains the other.
    fn check_root_change(&self, before: &[Certificate], after: &[Certificate]) -> Result<(), &'static str> {
        let within =
            |few: &[Certificate], many: &[Certificate]| few.iter().all(|certificate| many.contains(certificate));
        let (fewer, more) = (within(after, before), within(before, after));
        if fewer && more {
            return Ok(());
        }
        if !self.rules.multi_root {
            return Err("roots cannot change at run time; hint: set ISTIO_MULTIROOT_MESH=true, or restart");
        }
        if fewer || more {
            return Ok(());
        }
        Err("roots cannot be replaced at once; hint: first add the new root, later remove the old one")
    }

    /// Returns a renewed root if the current one is self-signed and due for renewal.
    pub fn renewal(&self, now: SystemTime) -> Option<Result<(Root, AuthoritySource), KeyError>> {
        let current = self.current.as_ref()?;
        let authority = &current.authority;
        if current.source == AuthoritySource::PluggedIn
            || !rotate::is_renewal_due(authority.certificate(), now, self.rules.grace_percent)
        {
            return None;
        }
        let trusted: Vec<_> = authority.roots().to_vec();
        let key = &authority.bundle().key;
        let root = Root::renewed(authority.certificate(), key, &trusted, &self.rules.root, now);
        Some(root.map(|root| (root, current.source)))
    }

    /// Returns the Secret of a renewed root: the present one with new certificates. None if it is not known to exist.
    pub fn renewed_secret(&self, root: &Root, source: AuthoritySource) -> Option<Secret> {
        let AuthoritySource::SelfSigned(name) = source else {
            return None;
        };
        let known = if name == CACERTS_SECRET {
            &self.cacerts
        } else {
            &self.istio_ca_secret
        };
        let SecretState::Present(present) = known else {
            return None;
        };
        let mut secret = present.clone();
        secret.data.extend(root.to_secret(name).data);
        Some(secret)
    }
}

fn first_authority(source: AuthoritySource, bundle: CaBundle, now: SystemTime, expiry_check: ExpiryCheck) -> Decision {
    match Authority::with_expiry_check(bundle, now, expiry_check) {
        Ok(authority) => Decision::Switch(CurrentAuthority {
            source,
            authority: Arc::new(authority),
        }),
        Err(error) => Decision::Reject(error.to_string()),
    }
}

/// Compares the content of two bundles, and ignores their location.
fn same_content(one: &CaBundle, other: &CaBundle) -> bool {
    one.certificate.pem == other.certificate.pem
        && one.key == other.key
        && one.chain.pem == other.chain.pem
        && one.roots.pem == other.roots.pem
        && one.crl.as_ref().map(|part| &part.pem) == other.crl.as_ref().map(|part| &part.pem)
}

#[cfg(test)]
mod tests;
