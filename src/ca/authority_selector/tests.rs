use super::{
    super::{
        fixture::{
            DAY, HOUR, ID, Issuer, LIMITS, file, files, intermediate, request, root, root_options, start, verify,
        },
        plugged_in::{CERTIFICATE, CHAIN, CRL, KEY, ROOTS},
    },
    *,
};

use crate::base::Sensitive;

fn rules() -> SelectionRules {
    SelectionRules {
        namespace: "istio-system".into(),
        folder: "folder etc/cacerts".into(),
        self_signed_in_cacerts: false,
        revocation: true,
        multi_root: false,
        has_secret_store: true,
        limits: LIMITS,
        root: root_options(),
        grace_percent: 20,
    }
}

fn selector(files: BundleFiles) -> AuthoritySelector {
    AuthoritySelector::new(rules(), files)
}

fn secret(name: &str, data: BundleFiles) -> SecretState {
    SecretState::Present(Secret {
        name: name.into(),
        version: "1".into(),
        data,
    })
}

fn own_root() -> Root {
    Root::new("cluster.local", &root_options(), start()).unwrap()
}

/// A selector with a self-signed root, and the root.
fn own() -> (AuthoritySelector, Root) {
    let root = own_root();
    let mut selector = selector(BundleFiles::new());
    selector.cacerts = SecretState::Absent;
    selector.istio_ca_secret = SecretState::Present(root.to_secret(SELF_SIGNED_SECRET));
    settle(&mut selector, start());
    (selector, root)
}

fn settle(selector: &mut AuthoritySelector, now: SystemTime) -> Arc<Authority> {
    match selector.decide(now) {
        Decision::Switch(current) => {
            let authority = current.authority.clone();
            selector.current = Some(current);
            assert!(matches!(selector.decide(now), Decision::NoChange), "that is all");
            authority
        }
        decision => panic!("a CA, not {decision:?}"),
    }
}

fn rejection(selector: &AuthoritySelector) -> String {
    match selector.decide(start()) {
        Decision::Reject(why) => why,
        decision => panic!("a complaint, not {decision:?}"),
    }
}

fn bundle() -> (Issuer, BundleFiles) {
    let root = root("root", 3650);
    let files = files(&intermediate("ca", 365, &root), &root);
    (root, files)
}

#[test]
fn no_root_is_created_while_secrets_are_unknown() {
    let mut selector = selector(BundleFiles::new());
    assert!(matches!(selector.decide(start()), Decision::NoChange));
    selector.istio_ca_secret = SecretState::Absent;
    assert!(
        matches!(selector.decide(start()), Decision::NoChange),
        "cacerts may be there"
    );
    selector.cacerts = SecretState::Absent;
    assert!(matches!(
        selector.decide(start()),
        Decision::CreateRoot(RootStorage::Secret(SELF_SIGNED_SECRET))
    ));
    selector.istio_ca_secret = SecretState::Unknown;
    assert!(
        matches!(selector.decide(start()), Decision::NoChange),
        "a root of our own may be there"
    );
}

#[test]
fn the_folder_is_used_without_the_api_server() {
    let (_, files) = bundle();
    let mut selector = selector(files);
    let authority = settle(&mut selector, start());
    assert_eq!(authority.bundle().location, "folder etc/cacerts");
}

#[test]
fn a_self_signed_root_is_read_back() {
    let (selector, root) = own();
    let current = selector.current.unwrap();
    assert_eq!(current.source, AuthoritySource::SelfSigned(SELF_SIGNED_SECRET));
    assert_eq!(current.authority.trusted_roots(), &root.certificate);
    let issued = current.authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &root.certificate, start()).unwrap();
}

#[test]
fn self_signed_secrets_have_istios_keys() {
    let root = own_root();
    let secret = root.to_secret(SELF_SIGNED_SECRET);
    let keys: Vec<_> = secret.data.keys().map(SmolStr::as_str).collect();
    assert_eq!(
        keys,
        [
            "ca-cert.pem",
            "ca-key.pem",
            "cert-chain.pem",
            "key.pem",
            "root-cert.pem"
        ]
    );
    assert_eq!(secret.data[ROOTS], secret.data[CERTIFICATE]);
    assert!(secret.data[CHAIN].is_empty() && !secret.data[KEY].is_empty());
    assert!(root.to_secret(CACERTS_SECRET).data.contains_key(GENERATED_MARKER));
    assert!(!format!("{secret:?} {root:?}").contains("BEGIN PRIVATE"));
}

#[test]
fn an_invalid_secret_is_rejected_and_never_replaced() {
    let mut selector = selector(BundleFiles::new());
    selector.cacerts = SecretState::Absent;
    for data in [
        BundleFiles::new(),
        BundleFiles::from([(CERTIFICATE.into(), file("x"))]),
        BundleFiles::from([(CERTIFICATE.into(), file("x")), (KEY.into(), file("y"))]),
    ] {
        selector.istio_ca_secret = secret(SELF_SIGNED_SECRET, data);
        let why = rejection(&selector);
        assert!(
            why.contains("Secret istio-system/istio-ca-secret") && why.contains(CERTIFICATE),
            "{why}"
        );
    }
    // A working CA stays.
    let (mut selector, _) = own();
    selector.istio_ca_secret = secret(SELF_SIGNED_SECRET, BundleFiles::new());
    rejection(&selector);
    selector.istio_ca_secret = SecretState::Absent;
    assert!(rejection(&selector).contains("is gone"));
}

#[test]
fn switching_to_cacerts_keeps_all_peers_verifiable() {
    let (mut selector, old) = own();
    let before = selector.current.clone().unwrap().authority;
    let (new, files) = bundle();
    selector.cacerts = secret(CACERTS_SECRET, files.clone());
    let authority = settle(&mut selector, start());
    assert_eq!(authority.bundle().location, "Secret istio-system/cacerts");
    let ours = |authority: &Authority| authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    let (old_leaf, new_leaf) = (ours(&before), ours(&authority));
    // Peers that trust only the old root, only the new one, or the published bundle.
    verify(&new_leaf.chain, &old.certificate, start()).unwrap();
    verify(&new_leaf.chain, new.pem().as_bytes(), start()).unwrap();
    verify(&old_leaf.chain, authority.trusted_roots(), start()).unwrap();
    verify(&new_leaf.chain, authority.trusted_roots(), start()).unwrap();
    verify(&old_leaf.chain, new_leaf.roots.as_bytes(), start()).unwrap();
    // The same bundle from the other source is not a change.
    selector.files = files;
    assert!(matches!(selector.decide(start()), Decision::NoChange));
    // Once no certificate of the old CA can be in use, its root is dropped.
    let later = start() + LIMITS.max;
    assert!(rotate::without_expired(&authority, later - HOUR).is_none());
    let after = rotate::without_expired(&authority, later).unwrap();
    assert_eq!(after.trusted_roots(), &new.pem());
    assert_eq!(after.chain().len(), 2);
}

#[test]
fn switching_to_a_self_signed_bundle_keeps_peers_verifiable() {
    let (mut selector, old) = own();
    let new = root("root", 3650);
    selector.cacerts = secret(CACERTS_SECRET, files(&new, &new));
    let authority = settle(&mut selector, start());
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &old.certificate, start()).unwrap();
    verify(&issued.chain, new.pem().as_bytes(), start()).unwrap();
}

#[test]
fn another_root_in_the_secret_is_switched_to() {
    let (mut selector, old) = own();
    let before = selector.current.clone().unwrap().authority;
    let other = own_root();
    selector.istio_ca_secret = SecretState::Present(other.to_secret(SELF_SIGNED_SECRET));
    let authority = settle(&mut selector, start());
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &old.certificate, start()).unwrap();
    verify(&issued.chain, &other.certificate, start()).unwrap();
    let issued = before.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, authority.trusted_roots(), start()).unwrap();
}

#[test]
fn a_broken_or_missing_bundle_keeps_the_current_ca() {
    let (_, good) = bundle();
    let mut selector = selector(good.clone());
    settle(&mut selector, start());
    let mut partly = good.clone();
    partly.remove(KEY);
    selector.files = partly;
    assert!(rejection(&selector).contains("incomplete"));
    let mut broken = good.clone();
    broken.insert(KEY.into(), file("nonsense"));
    selector.files = broken;
    assert!(rejection(&selector).contains("ca-key.pem"));
    selector.files = BundleFiles::new();
    (selector.cacerts, selector.istio_ca_secret) = (SecretState::Absent, SecretState::Absent);
    assert!(rejection(&selector).contains("is gone"));
    selector.istio_ca_secret = SecretState::Present(own_root().to_secret(SELF_SIGNED_SECRET));
    assert!(rejection(&selector).contains("is gone"));
    selector.files = good;
    assert!(matches!(selector.decide(start()), Decision::NoChange));
}

#[test]
fn a_broken_bundle_does_not_create_a_root() {
    let (_, mut files) = bundle();
    files.remove(KEY);
    let mut selector = selector(files.clone());
    assert!(rejection(&selector).contains("folder etc/cacerts: ca-key.pem"));
    selector.files = BundleFiles::new();
    selector.cacerts = secret(CACERTS_SECRET, files);
    selector.istio_ca_secret = SecretState::Absent;
    assert!(rejection(&selector).contains("Secret istio-system/cacerts: ca-key.pem"));
}

#[test]
fn certificate_key_and_chain_are_renewed_under_the_same_root() {
    let (root, first) = bundle();
    let mut selector = selector(first);
    let before = settle(&mut selector, start());
    selector.files = files(&intermediate("next", 300, &root), &root);
    let after = settle(&mut selector, start());
    assert_ne!(before.certificate(), after.certificate());
    assert_eq!(before.trusted_roots(), after.trusted_roots());
    assert_eq!(after.chain().len(), 2, "no cross-signed certificate is needed");
}

#[test]
fn other_roots_need_multi_root_and_an_overlap() {
    let (old, first) = bundle();
    let new = root("new", 3650);
    let both = old.pem() + &new.pem();
    let with_roots = |ca: &Issuer, above: &Issuer, roots: &str| {
        let mut files = files(ca, above);
        files.insert(ROOTS.into(), file(roots));
        files
    };
    let (old_ca, new_ca) = (intermediate("ca", 365, &old), intermediate("ca", 365, &new));
    let mut selector = selector(first);
    settle(&mut selector, start());
    selector.files = with_roots(&old_ca, &old, &both);
    assert!(rejection(&selector).contains("ISTIO_MULTIROOT_MESH"));
    selector.rules.multi_root = true;
    assert_eq!(settle(&mut selector, start()).trusted_roots(), &both);
    selector.files = with_roots(&new_ca, &new, &both);
    settle(&mut selector, start());
    selector.files = with_roots(&new_ca, &new, &new.pem());
    assert_eq!(
        settle(&mut selector, start()).trusted_roots(),
        &new.pem(),
        "it was taken away on purpose"
    );
    selector.files = with_roots(&old_ca, &old, &old.pem());
    assert!(rejection(&selector).contains("first add the new root"));
}

#[test]
fn a_removed_crl_stays_in_effect() {
    use rcgen::{CertificateRevocationListParams, KeyIdMethod, SerialNumber};
    let list = |by: &Issuer| {
        let parameters = CertificateRevocationListParams {
            this_update: start().into(),
            next_update: (start() + DAY).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        parameters.signed_by(by).unwrap().pem().unwrap()
    };
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    let without = files(&ca, &root);
    let mut with = without.clone();
    with.insert(CRL.into(), file(list(&ca) + &list(&root)));
    let mut selector = selector(without.clone());
    settle(&mut selector, start());
    selector.files = with;
    assert!(settle(&mut selector, start()).bundle().crl.is_some());
    selector.files = without;
    assert!(
        matches!(selector.decide(start()), Decision::NoChange),
        "what was revoked stays revoked"
    );
}

#[test]
fn cacerts_can_hold_a_self_signed_root() {
    let mut selector = selector(BundleFiles::new());
    selector.rules.self_signed_in_cacerts = true;
    (selector.cacerts, selector.istio_ca_secret) = (SecretState::Absent, SecretState::Absent);
    assert!(matches!(
        selector.decide(start()),
        Decision::CreateRoot(RootStorage::Secret(CACERTS_SECRET))
    ));
    let root = own_root();
    let kept = root.to_secret(CACERTS_SECRET);
    selector.cacerts = SecretState::Present(kept.clone());
    // The Secret is also mounted.
    selector.files = kept.data.clone();
    let authority = settle(&mut selector, start());
    assert_eq!(
        selector.current.as_ref().unwrap().source,
        AuthoritySource::SelfSigned(CACERTS_SECRET)
    );
    assert_eq!(authority.trusted_roots(), &root.certificate);
    // istio-ca-secret takes precedence.
    let first = own_root();
    selector.current = None;
    selector.istio_ca_secret = SecretState::Present(first.to_secret(SELF_SIGNED_SECRET));
    let authority = settle(&mut selector, start());
    assert!(authority.trusted_roots().starts_with(&first.certificate));
    // Without the variable it is a plugged-in bundle.
    selector.rules.self_signed_in_cacerts = false;
    selector.current = None;
    settle(&mut selector, start());
    assert_eq!(selector.current.as_ref().unwrap().source, AuthoritySource::PluggedIn);
}

#[test]
fn without_a_cluster_the_root_is_in_memory() {
    let mut selector = selector(BundleFiles::new());
    selector.rules.has_secret_store = false;
    assert!(matches!(
        selector.decide(start()),
        Decision::CreateRoot(RootStorage::Memory)
    ));
    selector.in_memory_root = Some(own_root());
    settle(&mut selector, start());
    assert_eq!(selector.current.as_ref().unwrap().source, AuthoritySource::InMemory);
}

#[test]
fn a_root_is_renewed_in_the_last_fifth_of_its_lifetime() {
    let (mut selector, old) = own();
    let life = DAY * 3650;
    assert!(selector.renewal(start()).is_none());
    assert!(selector.renewal(start() + life / 5 * 4 - DAY).is_none());
    let now = start() + life / 5 * 4 + DAY;
    let before = selector.current.clone().unwrap().authority;
    let (renewed, source) = selector.renewal(now).unwrap().unwrap();
    assert_eq!(source, AuthoritySource::SelfSigned(SELF_SIGNED_SECRET));
    assert_eq!(renewed.key, old.key, "the key stays");
    let secret = selector.renewed_secret(&renewed, source).unwrap();
    selector.istio_ca_secret = SecretState::Present(secret);
    let after = settle(&mut selector, now);
    assert_eq!(after.certificate().subject, before.certificate().subject);
    assert_eq!(after.root_expires_at(), now + life);
    assert_eq!(after.roots().len(), 2, "the old root is trusted while it holds");
    assert!(after.chain().is_empty(), "no cross-signed certificate is needed");
    // No handshake fails: each side may know either root, or both.
    let leaves = [&before, &after].map(|ca| ca.issue(&request(&[ID]), now, LIMITS).unwrap());
    for leaf in &leaves {
        for roots in [&old.certificate, &renewed.certificate, after.trusted_roots()] {
            verify(&leaf.chain, roots, now).unwrap();
        }
    }
    assert!(selector.renewal(now).is_none(), "once is enough");
    // The old root is dropped after its expiry.
    let later = start() + life + DAY;
    let last = settle(&mut selector, later);
    assert_eq!(last.trusted_roots(), &renewed.certificate);
}

#[test]
fn a_root_renewed_by_istio_keeps_the_old_one_trusted() {
    let (mut selector, old) = own();
    let now = start() + DAY * 3000;
    let (renewed, source) = selector.renewal(now).unwrap().unwrap();
    let mut secret = selector.renewed_secret(&renewed, source).unwrap();
    // Istio writes the certificate and leaves root-cert.pem unchanged.
    secret
        .data
        .insert(ROOTS.into(), Sensitive::new(old.certificate.clone()));
    selector.istio_ca_secret = SecretState::Present(secret);
    let authority = settle(&mut selector, now);
    assert_eq!(authority.roots().len(), 2);
    assert!(authority.trusted_roots().starts_with(&renewed.certificate));
}

#[test]
fn an_expired_root_is_read_and_renewed() {
    let mut selector = selector(BundleFiles::new());
    selector.cacerts = SecretState::Absent;
    selector.istio_ca_secret = SecretState::Present(own_root().to_secret(SELF_SIGNED_SECRET));
    let late = start() + DAY * 4000;
    let authority = settle(&mut selector, late);
    assert!(authority.issue(&request(&[ID]), late, LIMITS).is_err());
    let (renewed, source) = selector.renewal(late).unwrap().unwrap();
    selector.istio_ca_secret = SecretState::Present(selector.renewed_secret(&renewed, source).unwrap());
    let authority = settle(&mut selector, late);
    assert!(authority.issue(&request(&[ID]), late, LIMITS).is_ok());
}

#[test]
fn plugged_in_cas_are_not_renewed() {
    let (_, files) = bundle();
    let mut selector = selector(files);
    settle(&mut selector, start());
    assert!(selector.renewal(start() + DAY * 364).is_none());
}

#[test]
fn the_number_of_retained_roots_is_bounded() {
    let (mut selector, _) = own();
    selector.rules.grace_percent = 100;
    for hour in 1..12 {
        let now = start() + HOUR * hour;
        let (renewed, source) = selector.renewal(now).unwrap().unwrap();
        selector.istio_ca_secret = SecretState::Present(selector.renewed_secret(&renewed, source).unwrap());
        let authority = settle(&mut selector, now);
        assert!(authority.roots().len() <= 5 && authority.retained_roots().is_empty());
    }
}
