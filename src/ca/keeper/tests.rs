use super::{
    super::{
        fixture::{
            DAY, HOUR, ID, Issuer, LIMITS, file, files, intermediate, request, root, root_options, start, verify,
        },
        plugged_in::{CERTIFICATE, CHAIN, KEY, REVOKED, ROOTS},
    },
    *,
};

use crate::base::Sensitive;

fn rules() -> Rules {
    Rules {
        namespace: "istio-system".into(),
        folder: "folder etc/cacerts".into(),
        own_in_cacerts: false,
        revocation: true,
        multi_root: false,
        has_secrets: true,
        limits: LIMITS,
        root: root_options(),
        grace_percent: 20,
    }
}

fn keeper(files: Files) -> Keeper {
    Keeper::new(rules(), files)
}

fn secret(name: &str, data: Files) -> Known {
    Known::Present(Secret {
        name: name.into(),
        version: "1".into(),
        data,
    })
}

fn own_root() -> Root {
    Root::new("cluster.local", &root_options(), start()).unwrap()
}

/// A keeper with a root of its own, and the root.
fn own() -> (Keeper, Root) {
    let root = own_root();
    let mut keeper = keeper(Files::new());
    keeper.plugged = Known::Absent;
    keeper.own = Known::Present(root.to_secret(OWN_SECRET));
    settle(&mut keeper, start());
    (keeper, root)
}

fn settle(keeper: &mut Keeper, now: SystemTime) -> Arc<Authority> {
    match keeper.step(now) {
        Step::Become(current) => {
            let authority = current.authority.clone();
            keeper.current = Some(current);
            assert!(matches!(keeper.step(now), Step::Stay), "that is all");
            authority
        }
        step => panic!("a CA, not {step:?}"),
    }
}

fn complaint(keeper: &Keeper) -> String {
    match keeper.step(start()) {
        Step::Complain(why) => why,
        step => panic!("a complaint, not {step:?}"),
    }
}

fn bundle() -> (Issuer, Files) {
    let root = root("root", 3650);
    let files = files(&intermediate("ca", 365, &root), &root);
    (root, files)
}

#[test]
fn nothing_is_made_while_the_secrets_are_not_known() {
    let mut keeper = keeper(Files::new());
    assert!(matches!(keeper.step(start()), Step::Stay));
    keeper.own = Known::Absent;
    assert!(matches!(keeper.step(start()), Step::Stay), "cacerts may be there");
    keeper.plugged = Known::Absent;
    assert!(matches!(keeper.step(start()), Step::Make(Keeping::Secret(OWN_SECRET))));
    keeper.own = Known::Unknown;
    assert!(
        matches!(keeper.step(start()), Step::Stay),
        "a root of our own may be there"
    );
}

#[test]
fn the_folder_counts_without_the_api_server() {
    let (_, files) = bundle();
    let mut keeper = keeper(files);
    let authority = settle(&mut keeper, start());
    assert_eq!(authority.material().place, "folder etc/cacerts");
}

#[test]
fn a_root_of_our_own_is_read_back() {
    let (keeper, root) = own();
    let current = keeper.current.unwrap();
    assert_eq!(current.source, Source::Own(OWN_SECRET));
    assert_eq!(current.authority.trusted(), &root.certificate);
    let issued = current.authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &root.certificate, start()).unwrap();
}

#[test]
fn secrets_of_our_own_have_istios_keys() {
    let root = own_root();
    let secret = root.to_secret(OWN_SECRET);
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
    assert!(root.to_secret(PLUGGED_SECRET).data.contains_key(GENERATED));
    assert!(!format!("{secret:?} {root:?}").contains("BEGIN PRIVATE"));
}

#[test]
fn garbage_in_the_secret_is_told_of_and_never_replaced() {
    let mut keeper = keeper(Files::new());
    keeper.plugged = Known::Absent;
    for data in [
        Files::new(),
        Files::from([(CERTIFICATE.into(), file("x"))]),
        Files::from([(CERTIFICATE.into(), file("x")), (KEY.into(), file("y"))]),
    ] {
        keeper.own = secret(OWN_SECRET, data);
        let why = complaint(&keeper);
        assert!(
            why.contains("Secret istio-system/istio-ca-secret") && why.contains(CERTIFICATE),
            "{why}"
        );
    }
    // A CA that works goes on.
    let (mut keeper, _) = own();
    keeper.own = secret(OWN_SECRET, Files::new());
    complaint(&keeper);
    keeper.own = Known::Absent;
    assert!(complaint(&keeper).contains("is gone"));
}

#[test]
fn cacerts_that_come_later_are_switched_to_and_nobody_is_cut_off() {
    let (mut keeper, old) = own();
    let before = keeper.current.clone().unwrap().authority;
    let (new, files) = bundle();
    keeper.plugged = secret(PLUGGED_SECRET, files.clone());
    let authority = settle(&mut keeper, start());
    assert_eq!(authority.material().place, "Secret istio-system/cacerts");
    let ours = |authority: &Authority| authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    let (old_leaf, new_leaf) = (ours(&before), ours(&authority));
    // Who knows only the old root, who knows only the new one, who knows what is distributed now.
    verify(&new_leaf.chain, &old.certificate, start()).unwrap();
    verify(&new_leaf.chain, new.pem().as_bytes(), start()).unwrap();
    verify(&old_leaf.chain, authority.trusted(), start()).unwrap();
    verify(&new_leaf.chain, authority.trusted(), start()).unwrap();
    verify(&old_leaf.chain, new_leaf.roots.as_bytes(), start()).unwrap();
    // The same bundle by the other way is no change.
    keeper.files = files;
    assert!(matches!(keeper.step(start()), Step::Stay));
    // When no certificate of the old CA can be in use any more, it is forgotten.
    let later = start() + LIMITS.max;
    assert!(rotate::without_passed(&authority, later - HOUR).is_none());
    let after = rotate::without_passed(&authority, later).unwrap();
    assert_eq!(after.trusted(), &new.pem());
    assert_eq!(after.chain().len(), 2);
}

#[test]
fn a_root_that_signs_itself_can_take_over_too() {
    let (mut keeper, old) = own();
    let new = root("root", 3650);
    keeper.plugged = secret(PLUGGED_SECRET, files(&new, &new));
    let authority = settle(&mut keeper, start());
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &old.certificate, start()).unwrap();
    verify(&issued.chain, new.pem().as_bytes(), start()).unwrap();
}

#[test]
fn another_root_in_the_secret_takes_over_like_another_ca() {
    let (mut keeper, old) = own();
    let before = keeper.current.clone().unwrap().authority;
    let other = own_root();
    keeper.own = Known::Present(other.to_secret(OWN_SECRET));
    let authority = settle(&mut keeper, start());
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, &old.certificate, start()).unwrap();
    verify(&issued.chain, &other.certificate, start()).unwrap();
    let issued = before.issue(&request(&[ID]), start(), LIMITS).unwrap();
    verify(&issued.chain, authority.trusted(), start()).unwrap();
}

#[test]
fn a_bundle_that_is_broken_or_gone_leaves_the_ca_that_works() {
    let (_, good) = bundle();
    let mut keeper = keeper(good.clone());
    settle(&mut keeper, start());
    let mut partly = good.clone();
    partly.remove(KEY);
    keeper.files = partly;
    assert!(complaint(&keeper).contains("incomplete"));
    let mut broken = good.clone();
    broken.insert(KEY.into(), file("nonsense"));
    keeper.files = broken;
    assert!(complaint(&keeper).contains("ca-key.pem"));
    keeper.files = Files::new();
    (keeper.plugged, keeper.own) = (Known::Absent, Known::Absent);
    assert!(complaint(&keeper).contains("is gone"));
    keeper.own = Known::Present(own_root().to_secret(OWN_SECRET));
    assert!(complaint(&keeper).contains("is gone"));
    keeper.files = good;
    assert!(matches!(keeper.step(start()), Step::Stay));
}

#[test]
fn a_broken_bundle_is_no_reason_for_a_root_of_our_own() {
    let (_, mut files) = bundle();
    files.remove(KEY);
    let mut keeper = keeper(files.clone());
    assert!(complaint(&keeper).contains("folder etc/cacerts: ca-key.pem"));
    keeper.files = Files::new();
    keeper.plugged = secret(PLUGGED_SECRET, files);
    keeper.own = Known::Absent;
    assert!(complaint(&keeper).contains("Secret istio-system/cacerts: ca-key.pem"));
}

#[test]
fn certificate_key_and_chain_are_renewed_under_the_same_root() {
    let (root, first) = bundle();
    let mut keeper = keeper(first);
    let before = settle(&mut keeper, start());
    keeper.files = files(&intermediate("next", 300, &root), &root);
    let after = settle(&mut keeper, start());
    assert_ne!(before.certificate(), after.certificate());
    assert_eq!(before.trusted(), after.trusted());
    assert_eq!(after.chain().len(), 2, "nothing has to vouch for it");
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
    let mut keeper = keeper(first);
    settle(&mut keeper, start());
    keeper.files = with_roots(&old_ca, &old, &both);
    assert!(complaint(&keeper).contains("ISTIO_MULTIROOT_MESH"));
    keeper.rules.multi_root = true;
    assert_eq!(settle(&mut keeper, start()).trusted(), &both);
    keeper.files = with_roots(&new_ca, &new, &both);
    settle(&mut keeper, start());
    keeper.files = with_roots(&new_ca, &new, &new.pem());
    assert_eq!(
        settle(&mut keeper, start()).trusted(),
        &new.pem(),
        "it was taken away on purpose"
    );
    keeper.files = with_roots(&old_ca, &old, &old.pem());
    assert!(complaint(&keeper).contains("first add the new root"));
}

#[test]
fn a_list_of_the_revoked_comes_and_stays() {
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
    with.insert(REVOKED.into(), file(list(&ca) + &list(&root)));
    let mut keeper = keeper(without.clone());
    settle(&mut keeper, start());
    keeper.files = with;
    assert!(settle(&mut keeper, start()).material().revoked.is_some());
    keeper.files = without;
    assert!(
        matches!(keeper.step(start()), Step::Stay),
        "what was revoked stays revoked"
    );
}

#[test]
fn cacerts_can_hold_a_root_of_our_own() {
    let mut keeper = keeper(Files::new());
    keeper.rules.own_in_cacerts = true;
    (keeper.plugged, keeper.own) = (Known::Absent, Known::Absent);
    assert!(matches!(
        keeper.step(start()),
        Step::Make(Keeping::Secret(PLUGGED_SECRET))
    ));
    let root = own_root();
    let kept = root.to_secret(PLUGGED_SECRET);
    keeper.plugged = Known::Present(kept.clone());
    // It is mounted too.
    keeper.files = kept.data.clone();
    let authority = settle(&mut keeper, start());
    assert_eq!(keeper.current.as_ref().unwrap().source, Source::Own(PLUGGED_SECRET));
    assert_eq!(authority.trusted(), &root.certificate);
    // istio-ca-secret goes before it.
    let first = own_root();
    keeper.current = None;
    keeper.own = Known::Present(first.to_secret(OWN_SECRET));
    let authority = settle(&mut keeper, start());
    assert!(authority.trusted().starts_with(&first.certificate));
    // Without the variable it is a bundle like any other.
    keeper.rules.own_in_cacerts = false;
    keeper.current = None;
    settle(&mut keeper, start());
    assert_eq!(keeper.current.as_ref().unwrap().source, Source::PluggedIn);
}

#[test]
fn without_a_cluster_the_root_is_in_memory() {
    let mut keeper = keeper(Files::new());
    keeper.rules.has_secrets = false;
    assert!(matches!(keeper.step(start()), Step::Make(Keeping::Memory)));
    keeper.memory = Some(own_root());
    settle(&mut keeper, start());
    assert_eq!(keeper.current.as_ref().unwrap().source, Source::Memory);
}

#[test]
fn a_root_is_renewed_in_the_last_fifth_of_its_life() {
    let (mut keeper, old) = own();
    let life = DAY * 3650;
    assert!(keeper.renewal(start()).is_none());
    assert!(keeper.renewal(start() + life / 5 * 4 - DAY).is_none());
    let now = start() + life / 5 * 4 + DAY;
    let before = keeper.current.clone().unwrap().authority;
    let (renewed, source) = keeper.renewal(now).unwrap().unwrap();
    assert_eq!(source, Source::Own(OWN_SECRET));
    assert_eq!(renewed.key, old.key, "the key stays");
    let secret = keeper.secret_of(&renewed, source).unwrap();
    keeper.own = Known::Present(secret);
    let after = settle(&mut keeper, now);
    assert_eq!(after.certificate().subject, before.certificate().subject);
    assert_eq!(after.root_expires_at(), now + life);
    assert_eq!(after.roots().len(), 2, "the old root is trusted while it holds");
    assert!(after.chain().is_empty(), "nothing has to vouch for it");
    // No handshake fails: each side may know either root, or both.
    let leaves = [&before, &after].map(|ca| ca.issue(&request(&[ID]), now, LIMITS).unwrap());
    for leaf in &leaves {
        for roots in [&old.certificate, &renewed.certificate, after.trusted()] {
            verify(&leaf.chain, roots, now).unwrap();
        }
    }
    assert!(keeper.renewal(now).is_none(), "once is enough");
    // When the old one has expired, it goes.
    let later = start() + life + DAY;
    let last = settle(&mut keeper, later);
    assert_eq!(last.trusted(), &renewed.certificate);
}

#[test]
fn roots_that_a_replica_of_istio_renewed_are_taken_with_the_old_one() {
    let (mut keeper, old) = own();
    let now = start() + DAY * 3000;
    let (renewed, source) = keeper.renewal(now).unwrap().unwrap();
    let mut secret = keeper.secret_of(&renewed, source).unwrap();
    // It writes the certificate and leaves root-cert.pem as it was.
    secret
        .data
        .insert(ROOTS.into(), Sensitive::new(old.certificate.clone()));
    keeper.own = Known::Present(secret);
    let authority = settle(&mut keeper, now);
    assert_eq!(authority.roots().len(), 2);
    assert!(authority.trusted().starts_with(&renewed.certificate));
}

#[test]
fn an_expired_root_is_read_and_renewed() {
    let mut keeper = keeper(Files::new());
    keeper.plugged = Known::Absent;
    keeper.own = Known::Present(own_root().to_secret(OWN_SECRET));
    let late = start() + DAY * 4000;
    let authority = settle(&mut keeper, late);
    assert!(authority.issue(&request(&[ID]), late, LIMITS).is_err());
    let (renewed, source) = keeper.renewal(late).unwrap().unwrap();
    keeper.own = Known::Present(keeper.secret_of(&renewed, source).unwrap());
    let authority = settle(&mut keeper, late);
    assert!(authority.issue(&request(&[ID]), late, LIMITS).is_ok());
}

#[test]
fn plugged_in_cas_are_not_renewed_here() {
    let (_, files) = bundle();
    let mut keeper = keeper(files);
    settle(&mut keeper, start());
    assert!(keeper.renewal(start() + DAY * 364).is_none());
}

#[test]
fn roots_do_not_pile_up() {
    let (mut keeper, _) = own();
    keeper.rules.grace_percent = 100;
    for hour in 1..12 {
        let now = start() + HOUR * hour;
        let (renewed, source) = keeper.renewal(now).unwrap().unwrap();
        keeper.own = Known::Present(keeper.secret_of(&renewed, source).unwrap());
        let authority = settle(&mut keeper, now);
        assert!(authority.roots().len() <= 5 && authority.held().is_empty());
    }
}
