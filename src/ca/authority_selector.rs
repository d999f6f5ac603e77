//! Which CA it is to be, from what is known of the folder and the Secrets. Decisions only: no waiting, no clock, no
//! writing.
//!
//! What a reader would get wrong: not knowing is not the same as there being nothing. Without an answer of the API
//! server nothing is made, and what went away or broke does not take away a CA that works.

use std::{sync::Arc, time::SystemTime};

use smol_str::SmolStr;

use super::{
    authority::{Authority, TtlLimits},
    bundle::{CaBundle, ExpiryCheck},
    certificate::Certificate,
    plugged_in::{self, BundleFiles, BundleLookup, GENERATED_MARKER},
    rotate,
    secrets::Secret,
    self_signed::{self, CACERTS_SECRET, Root, RootOptions, SELF_SIGNED_SECRET},
};

/// How a CA is chosen and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectionRules {
    /// The control plane's namespace, for messages.
    pub namespace: SmolStr,
    /// How the folder is called in messages.
    pub folder: SmolStr,
    /// `USE_CACERTS_FOR_SELF_SIGNED_CA`: a root of our own may be in Secret `cacerts`.
    pub self_signed_in_cacerts: bool,
    /// `PILOT_ENABLE_CA_CRL`.
    pub revocation: bool,
    /// `ISTIO_MULTIROOT_MESH`: roots of a plugged-in CA may be added and removed while we run.
    pub multi_root: bool,
    /// Whether there is an API server to keep a root in.
    pub has_secret_store: bool,
    /// How long certificates hold.
    pub limits: TtlLimits,
    /// How roots are made.
    pub root: RootOptions,
    /// `CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE`.
    pub grace_percent: u32,
}

/// What is known of a Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SecretState {
    /// Nobody has said yet.
    #[default]
    Unknown,
    /// It is not there.
    Absent,
    /// It is there.
    Present(Secret),
}

impl From<Option<Secret>> for SecretState {
    fn from(secret: Option<Secret>) -> Self {
        secret.map_or(Self::Absent, Self::Present)
    }
}

/// Where the CA is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthoritySource {
    /// The folder, or Secret `cacerts`: the same bundle by two ways.
    PluggedIn,
    /// A root of our own in this Secret.
    SelfSigned(&'static str),
    /// A root of our own that nobody keeps.
    InMemory,
}

/// The CA of the moment.
#[derive(Clone, Debug)]
pub struct CurrentAuthority {
    /// Where it is from.
    pub source: AuthoritySource,
    /// What it is.
    pub authority: Arc<Authority>,
}

/// Where a root is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootStorage {
    /// In this Secret.
    Secret(&'static str),
    /// In memory.
    Memory,
}

/// What is to be done.
#[derive(Debug)]
pub enum Decision {
    /// All is as it should be, or nothing is known that could be acted on.
    NoChange,
    /// This is the CA from now on.
    Switch(CurrentAuthority),
    /// A root has to be made and kept.
    CreateRoot(RootStorage),
    /// Something is wrong that people have to mend; meanwhile all stays as it is.
    Reject(String),
}

/// Everything that decides.
#[derive(Debug)]
pub struct AuthoritySelector {
    /// The rules.
    pub rules: SelectionRules,
    /// The files of the folder.
    pub files: BundleFiles,
    /// Secret `cacerts`.
    pub cacerts: SecretState,
    /// Secret `istio-ca-secret`.
    pub istio_ca_secret: SecretState,
    /// A root that is kept nowhere else.
    pub in_memory_root: Option<Root>,
    /// The CA of the moment.
    pub current: Option<CurrentAuthority>,
}

impl AuthoritySelector {
    /// Nothing is known yet but the folder.
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

    /// What follows from what is known.
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
            // It may hold a bundle. A root that is made meanwhile would be one too many.
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

    /// Neither a bundle nor a root of our own is there.
    fn no_source(&self) -> Decision {
        let name = if self.rules.self_signed_in_cacerts {
            CACERTS_SECRET
        } else {
            SELF_SIGNED_SECRET
        };
        match &self.current {
            None => Decision::CreateRoot(RootStorage::Secret(name)),
            Some(current) => Decision::Reject(format!(
                "what the CA {} came from is gone; it goes on until this process ends",
                current.authority.certificate().name
            )),
        }
    }

    fn use_secret(&self, name: &'static str, secret: &Secret, now: SystemTime) -> Decision {
        let location = self_signed::location(&self.rules.namespace, name);
        match Root::from_secret(secret) {
            Some(root) => self.use_self_signed(AuthoritySource::SelfSigned(name), &root, location, now),
            None => Decision::Reject(format!(
                "{location}: there is no ca-cert.pem or no ca-key.pem in it; hint: mend it, or delete it and restart for a new root"
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
                "the bundle of the plugged-in CA {} is gone; it goes on until this process ends",
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
            // A list that is gone is no reason to trust again what it named.
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

    /// Another CA than the current one, or a new certificate of the same root.
    fn transition(
        &self,
        source: AuthoritySource,
        current: &CurrentAuthority,
        next: Authority,
        now: SystemTime,
    ) -> Decision {
        let is_renewed = current.authority.certificate().public_key == next.certificate().public_key
            && current.authority.certificate().subject == next.certificate().subject;
        // Roots beside it that its Secret no longer names are held too: a replica that does not know of them wrote it.
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

    /// Whether the roots of a plugged-in CA may become others without a restart.
    fn check_root_change(&self, before: &[Certificate], after: &[Certificate]) -> Result<(), &'static str> {
        let within = |few: &[Certificate], many: &[Certificate]| few.iter().all(|one| many.contains(one));
        let (fewer, more) = (within(after, before), within(before, after));
        if fewer && more {
            return Ok(());
        }
        if !self.rules.multi_root {
            return Err(
                "other roots are not taken while the process runs; hint: ISTIO_MULTIROOT_MESH=true, or restart",
            );
        }
        if fewer || more {
            return Ok(());
        }
        Err("other roots are not taken while the process runs; hint: first add the new root, later remove the old one")
    }

    /// A root to take the place of the current one, if that is one of our own and ends soon.
    pub fn renewal(&self, now: SystemTime) -> Option<Result<(Root, AuthoritySource), String>> {
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
        Some(
            root.map(|root| (root, current.source))
                .map_err(|error| error.to_string()),
        )
    }

    /// The Secret of a renewed root: what stands there, with other certificates. None if it is not known to be there.
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

/// Where it stands is no difference.
fn same_content(one: &CaBundle, other: &CaBundle) -> bool {
    one.certificate.pem == other.certificate.pem
        && one.key == other.key
        && one.chain.pem == other.chain.pem
        && one.roots.pem == other.roots.pem
        && one.crl.as_ref().map(|part| &part.pem) == other.crl.as_ref().map(|part| &part.pem)
}

#[cfg(test)]
mod tests;
