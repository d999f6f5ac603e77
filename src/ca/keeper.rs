//! Which CA it is to be, from what is known of the folder and the Secrets. Decisions only: no waiting, no clock, no writing.
//!
//! What a reader would get wrong: not knowing is not the same as there being nothing. Without an answer of the API server
//! nothing is made, and what went away or broke does not take away a CA that works.

use std::{sync::Arc, time::SystemTime};

use smol_str::SmolStr;

use super::{
    authority::{Authority, Limits},
    bundle::{Expiry, Material},
    certificate::Certificate,
    plugged_in::{self, Files, Found, GENERATED},
    rotate,
    secrets::Secret,
    self_signed::{self, OWN_SECRET, PLUGGED_SECRET, Root, RootOptions},
};

/// How a CA is chosen and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The control plane's namespace, for messages.
    pub namespace: SmolStr,
    /// How the folder is called in messages.
    pub folder: SmolStr,
    /// `USE_CACERTS_FOR_SELF_SIGNED_CA`: a root of our own may be in Secret `cacerts`.
    pub own_in_cacerts: bool,
    /// `PILOT_ENABLE_CA_CRL`.
    pub revocation: bool,
    /// `ISTIO_MULTIROOT_MESH`: roots of a plugged-in CA may be added and removed while we run.
    pub multi_root: bool,
    /// Whether there is an API server to keep a root in.
    pub has_secrets: bool,
    /// How long certificates hold.
    pub limits: Limits,
    /// How roots are made.
    pub root: RootOptions,
    /// `CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE`.
    pub grace_percent: u32,
}

/// What is known of a Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Known {
    /// Nobody has said yet.
    #[default]
    Unknown,
    /// It is not there.
    Absent,
    /// It is there.
    Present(Secret),
}

impl From<Option<Secret>> for Known {
    fn from(secret: Option<Secret>) -> Self {
        secret.map_or(Self::Absent, Self::Present)
    }
}

/// Where the CA is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The folder, or Secret `cacerts`: the same bundle by two ways.
    PluggedIn,
    /// A root of our own in this Secret.
    Own(&'static str),
    /// A root of our own that nobody keeps.
    Memory,
}

/// The CA of the moment.
#[derive(Clone, Debug)]
pub struct Current {
    /// Where it is from.
    pub source: Source,
    /// What it is.
    pub authority: Arc<Authority>,
}

/// Where a root is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// In this Secret.
    Secret(&'static str),
    /// In memory.
    Memory,
}

/// What is to be done.
#[derive(Debug)]
pub enum Step {
    /// All is as it should be, or nothing is known that could be acted on.
    Stay,
    /// This is the CA from now on.
    Become(Current),
    /// A root has to be made and kept.
    Make(Keeping),
    /// Something is wrong that people have to mend; meanwhile all stays as it is.
    Complain(String),
}

/// Everything that decides.
#[derive(Debug)]
pub struct Keeper {
    /// The rules.
    pub rules: Rules,
    /// The files of the folder.
    pub files: Files,
    /// Secret `cacerts`.
    pub plugged: Known,
    /// Secret `istio-ca-secret`.
    pub own: Known,
    /// A root that is kept nowhere else.
    pub memory: Option<Root>,
    /// The CA of the moment.
    pub current: Option<Current>,
}

impl Keeper {
    /// Nothing is known yet but the folder.
    pub fn new(rules: Rules, files: Files) -> Self {
        Self {
            rules,
            files,
            plugged: Known::Unknown,
            own: Known::Unknown,
            memory: None,
            current: None,
        }
    }

    /// What follows from what is known.
    pub fn step(&self, now: SystemTime) -> Step {
        let is_ours = |has_mark: bool| self.rules.own_in_cacerts && has_mark;
        if !is_ours(self.files.contains_key(GENERATED)) {
            match plugged_in::find(self.rules.folder.clone(), &self.files, self.rules.revocation) {
                Found::Whole(material) => return self.plug_in(material, now),
                Found::Partly(error) => return Step::Complain(error.to_string()),
                Found::Nothing => {}
            }
        }
        if !self.rules.has_secrets {
            return self.memory.as_ref().map_or(Step::Make(Keeping::Memory), |root| {
                self.take_own(Source::Memory, root, "memory".into(), now)
            });
        }
        match &self.plugged {
            // It may hold a bundle. A root that is made meanwhile would be one too many.
            Known::Unknown => return Step::Stay,
            Known::Present(secret) if !is_ours(secret.data.contains_key(GENERATED)) => {
                let place = self_signed::place(&self.rules.namespace, PLUGGED_SECRET);
                match plugged_in::find(place, &secret.data, self.rules.revocation) {
                    Found::Whole(material) => return self.plug_in(material, now),
                    Found::Partly(error) => return Step::Complain(error.to_string()),
                    Found::Nothing => {}
                }
            }
            Known::Present(_) | Known::Absent => {}
        }
        match (&self.own, &self.plugged) {
            (Known::Unknown, _) => Step::Stay,
            (Known::Present(secret), _) => self.own(OWN_SECRET, secret, now),
            (Known::Absent, Known::Present(secret)) if is_ours(secret.data.contains_key(GENERATED)) => {
                self.own(PLUGGED_SECRET, secret, now)
            }
            (Known::Absent, _) => self.none(),
        }
    }

    /// Neither a bundle nor a root of our own is there.
    fn none(&self) -> Step {
        let name = if self.rules.own_in_cacerts {
            PLUGGED_SECRET
        } else {
            OWN_SECRET
        };
        match &self.current {
            None => Step::Make(Keeping::Secret(name)),
            Some(current) => Step::Complain(format!(
                "what the CA {} came from is gone; it goes on until this process ends",
                current.authority.certificate().name
            )),
        }
    }

    fn own(&self, name: &'static str, secret: &Secret, now: SystemTime) -> Step {
        let place = self_signed::place(&self.rules.namespace, name);
        match Root::from_secret(secret) {
            Some(root) => self.take_own(Source::Own(name), &root, place, now),
            None => Step::Complain(format!(
                "{place}: there is no ca-cert.pem or no ca-key.pem in it; hint: mend it, or delete it and restart for a new root"
            )),
        }
    }

    fn take_own(&self, source: Source, root: &Root, place: SmolStr, now: SystemTime) -> Step {
        let material = root.material(place, &self.files, now);
        let Some(current) = &self.current else {
            return become_first(source, material, now, Expiry::Ignored);
        };
        if is_same(current.authority.material(), &material) {
            return Step::Stay;
        }
        if current.source == Source::PluggedIn {
            return Step::Complain(format!(
                "the bundle of the plugged-in CA {} is gone; it goes on until this process ends",
                current.authority.certificate().name
            ));
        }
        match Authority::with(material, now, Expiry::Ignored) {
            Ok(next) => self.follow(source, current, next, now),
            Err(error) => Step::Complain(error.to_string()),
        }
    }

    fn plug_in(&self, mut material: Material, now: SystemTime) -> Step {
        let Some(current) = &self.current else {
            return become_first(Source::PluggedIn, material, now, Expiry::Counts);
        };
        let before = current.authority.material();
        if current.source == Source::PluggedIn {
            // A list that is gone is no reason to trust again what it named.
            if material.revoked.is_none() && before.roots.pem == material.roots.pem {
                material.revoked.clone_from(&before.revoked);
            }
            if is_same(before, &material) {
                return Step::Stay;
            }
        }
        let next = match Authority::new(material, now) {
            Ok(next) => next,
            Err(error) => return Step::Complain(error.to_string()),
        };
        if current.source != Source::PluggedIn {
            return self.follow(Source::PluggedIn, current, next, now);
        }
        match self.may_change(current.authority.roots(), next.roots()) {
            Ok(()) => Step::Become(Current {
                source: Source::PluggedIn,
                authority: Arc::new(rotate::carry_on(&current.authority, next, now)),
            }),
            Err(why) => Step::Complain(format!(
                "{}: {}: {why}",
                next.material().place,
                next.material().roots.name
            )),
        }
    }

    /// Another CA than the current one, or a new certificate of the same root.
    fn follow(&self, source: Source, current: &Current, next: Authority, now: SystemTime) -> Step {
        let is_renewed = current.authority.certificate().public_key == next.certificate().public_key
            && current.authority.certificate().subject == next.certificate().subject;
        // Roots beside it that its Secret no longer names are held too: a replica that does not know of them wrote it.
        let span = if is_renewed {
            self.rules.root.lifetime
        } else {
            self.rules.limits.max
        };
        Step::Become(Current {
            source,
            authority: Arc::new(rotate::take_over(&current.authority, next, span, now)),
        })
    }

    /// Whether the roots of a plugged-in CA may become others without a restart.
    fn may_change(&self, before: &[Certificate], after: &[Certificate]) -> Result<(), &'static str> {
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
    pub fn renewal(&self, now: SystemTime) -> Option<Result<(Root, Source), String>> {
        let current = self.current.as_ref()?;
        let authority = &current.authority;
        if current.source == Source::PluggedIn
            || !rotate::is_due(authority.certificate(), now, self.rules.grace_percent)
        {
            return None;
        }
        let trusted: Vec<_> = authority.roots().to_vec();
        let key = &authority.material().key;
        let root = Root::renewed(authority.certificate(), key, &trusted, &self.rules.root, now);
        Some(
            root.map(|root| (root, current.source))
                .map_err(|error| error.to_string()),
        )
    }

    /// The Secret of a renewed root: what stands there, with other certificates. None if it is not known to be there.
    pub fn secret_of(&self, root: &Root, source: Source) -> Option<Secret> {
        let Source::Own(name) = source else { return None };
        let known = if name == PLUGGED_SECRET {
            &self.plugged
        } else {
            &self.own
        };
        let Known::Present(present) = known else { return None };
        let mut secret = present.clone();
        secret.data.extend(root.to_secret(name).data);
        Some(secret)
    }
}

fn become_first(source: Source, material: Material, now: SystemTime, expiry: Expiry) -> Step {
    match Authority::with(material, now, expiry) {
        Ok(authority) => Step::Become(Current {
            source,
            authority: Arc::new(authority),
        }),
        Err(error) => Step::Complain(error.to_string()),
    }
}

/// Where it stands is no difference.
fn is_same(one: &Material, other: &Material) -> bool {
    one.certificate.pem == other.certificate.pem
        && one.key == other.key
        && one.chain.pem == other.chain.pem
        && one.roots.pem == other.roots.pem
        && one.revoked.as_ref().map(|part| &part.pem) == other.revoked.as_ref().map(|part| &part.pem)
}

#[cfg(test)]
mod tests;
