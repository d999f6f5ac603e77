use std::{convert::Infallible, future::pending};

use ::kube::client::Body;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, SanType};

use super::*;
use crate::{
    ca::mesh_trust::{Anchor, AnchorSource},
    settings::fixture,
};

const HOUR: Duration = Duration::from_hours(1);
const LIMITS: TtlLimits = TtlLimits {
    default: HOUR,
    max: Duration::from_hours(24),
};

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000)
}

fn settings(variables: &[(&str, &str)]) -> Settings {
    fixture::settings(&[], variables)
}

fn rules(signer: &str, domain: &str) -> RegistrationRules {
    RegistrationRules {
        signer: signer.into(),
        domain: domain.into(),
        roots: None,
        own_signer: SmolStr::default(),
        limits: LIMITS,
    }
}

fn params(name: &str, ca: bool) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    (params.not_before, params.not_after) = ((now() - HOUR).into(), (now() + HOUR).into());
    if ca {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn root(name: &str) -> Issuer {
    CertifiedIssuer::self_signed(params(name, true), KeyPair::generate().expect("a key")).expect("a root")
}

fn leaf(issuer: &Issuer) -> String {
    let key = KeyPair::generate().expect("a key");
    params("leaf", false).signed_by(&key, issuer).expect("a leaf").pem()
}

#[test]
fn settings_select_the_signer() {
    let of = |variables: &[(&str, &str)]| RegistrationRules::of(&settings(variables), LIMITS);
    assert_eq!(of(&[]), Ok(None));
    assert_eq!(
        of(&[("EXTERNAL_CA", "ISTIOD_RA_ISTIO_API")]),
        Err(RegistrationError::UnknownCa("ISTIOD_RA_ISTIO_API".into()))
    );
    let rules = of(&[
        ("EXTERNAL_CA", KUBERNETES),
        ("K8S_SIGNER", "kubernetes.io/legacy-unknown"),
        ("CERT_SIGNER_DOMAIN", "clusterissuers.cert-manager.io"),
        ("PILOT_CERT_PROVIDER", "k8s.io/clusterissuers.cert-manager.io/own"),
    ]);
    let rules = rules.expect("rules").expect("a registration");
    assert_eq!(rules.signer, "kubernetes.io/legacy-unknown");
    assert_eq!(rules.own_signer, "clusterissuers.cert-manager.io/own");
    assert_eq!(rules.roots, None, "signers of a domain have their own");
}

#[test]
fn roots_are_mounted_or_the_clusters() {
    assert_eq!(roots_file("", &|_| true), Some(ROOTS.into()));
    assert_eq!(roots_file("a.b", &|_| true), Some(ROOTS.into()));
    assert_eq!(roots_file("", &|_| false), Some(CLUSTER_ROOTS.into()));
    assert_eq!(roots_file("a.b", &|_| false), None);
}

#[test]
fn callers_name_signers_of_the_domain_only() {
    assert_eq!(rules("a.b/c", "d.e").signer(""), Ok("a.b/c".into()));
    assert_eq!(rules("a.b/c", "d.e").signer("f"), Ok("d.e/f".into()));
    assert!(
        rules("", "d.e")
            .signer("")
            .expect_err("no signer")
            .to_string()
            .contains("K8S_SIGNER")
    );
    let error = rules("a.b/c", "").signer("f").expect_err("no domain");
    assert_eq!(error.to_string(), "certSignerDomain is required for signer f");
    for bad in ["f/g", "../f", "f\n", &"x".repeat(254)] {
        assert!(rules("a.b/c", "d.e").signer(bad).is_err(), "{bad}");
    }
}

#[test]
fn lifetimes_are_bounded() {
    let rules = rules("a.b/c", "");
    assert_eq!(rules.lifetime(None), Ok(None));
    assert_eq!(rules.lifetime(Some(Duration::ZERO)), Ok(None));
    assert_eq!(rules.lifetime(Some(HOUR)), Ok(Some(HOUR)));
    assert_eq!(rules.lifetime(Some(LIMITS.max)), Ok(Some(LIMITS.max)));
    let error = rules
        .lifetime(Some(LIMITS.max + Duration::from_secs(1)))
        .expect_err("too long");
    assert_eq!(
        error.to_string(),
        "requested TTL 24h0m1s is greater than the max allowed TTL 24h0m0s"
    );
}

fn answer(chain: &str, file: Option<&str>, mesh: Option<&str>, must_verify: bool) -> Result<SignedCertificate, String> {
    let known = SignerRoots {
        file: file.map(str::as_bytes),
        mesh,
        must_verify,
    };
    issued(chain, &known, now()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn one_identity_does_not_use_all_permits() {
    let permits = Permits::new();
    let mut held = Vec::new();
    for _ in 0..MAX_REQUESTS_PER_IDENTITY {
        held.push(permits.acquire("a", request::SIGNING_TIMEOUT).await.expect("a permit"));
    }
    let error = permits.acquire("a", Duration::ZERO).await.expect_err("too many");
    assert_eq!(
        error.to_string(),
        "16 signing requests for a are in progress; try again later"
    );
    let other = permits.acquire("b", request::SIGNING_TIMEOUT).await.expect("a permit");
    held.clear();
    held.push(permits.acquire("a", request::SIGNING_TIMEOUT).await.expect("a permit"));
    drop(other);
}

/// The API server does not answer in the meantime.
#[tokio::test]
async fn r20_callers_that_go_away_keep_their_permits_until_their_requests_are_deleted() {
    let silent = tower::service_fn(|_: http::Request<Body>| pending::<Result<http::Response<Body>, Infallible>>());
    let signer = KubernetesSigner {
        rules: rules("a.b/c", ""),
        client: Client::new(silent, "default"),
        tasks: Tasks::default(),
        roots: watch::channel(None).1,
        mesh: watch::channel(None).1,
        permits: Permits::new(),
    };
    let id = "spiffe://cluster.local/ns/default/sa/reviews";
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(id.try_into().expect("ASCII text"))];
    let csr = params.serialize_request(&KeyPair::generate().expect("a key"));
    let csr = csr.and_then(|csr| csr.pem()).expect("a request");
    let mut signing = signer.sign(SigningRequest {
        csr: csr.into_bytes(),
        identities: vec![id.into()],
        lifetime: None,
        signer: SmolStr::default(),
    });
    assert!(futures::poll!(&mut signing).is_pending());
    drop(signing);
    let left = signer.permits.of_identities.available(id.to_owned());
    assert_eq!(left, MAX_REQUESTS_PER_IDENTITY - 1);
    assert_eq!(signer.permits.all.available_permits(), MAX_CONCURRENT_REQUESTS - 1);
}

#[test]
fn roots_come_from_the_file() {
    let (root, other) = (root("root"), root("other").pem());
    let answer = answer(&leaf(&root), Some(&other), None, false).expect("an answer");
    assert_eq!((answer.chain.len(), answer.roots.as_str()), (1, other.as_str()));
}

#[test]
fn chains_of_named_signers_are_verified() {
    let (root, other) = (root("root"), root("root").pem());
    let leaf = leaf(&root);
    let both = format!("{leaf}{}", root.pem());
    let pem = root.pem();

    let answered = answer(&both, None, None, true).expect("the chain has its root");
    assert_eq!((answered.chain.len(), answered.roots.as_str()), (2, ""));
    assert!(answered.chain.iter().all(|block| block.ends_with('\n')));
    let answered = answer(&both, None, Some(&pem), true).expect("roots from the mesh config");
    assert_eq!((answered.chain.len(), answered.roots.as_str()), (2, ""));
    let answered = answer(&leaf, None, Some(&pem), true).expect("roots from the mesh config");
    assert_eq!((answered.chain.len(), answered.roots.trim()), (1, pem.trim()));
    let two = format!("{pem}{other}");
    let answered = answer(&both, None, Some(&two), true).expect("roots from the mesh config");
    assert_eq!(
        answered.roots.matches("BEGIN").count(),
        2,
        "they are the last element, as one"
    );

    let error = answer(&leaf, None, None, true).expect_err("no root");
    assert!(error.starts_with("failed to find root cert from either signed cert-chain or mesh config"));
    let error = answer(&both, None, Some(&other), true).expect_err("another root");
    assert!(
        error.starts_with("root cert from signed cert-chain is invalid"),
        "{error}"
    );
    assert!(
        answer(&leaf, None, None, false).is_ok(),
        "the signer of the settings is believed"
    );
}

#[test]
fn an_expired_chain_is_rejected() {
    let root = root("root");
    let mut params = params("leaf", false);
    params.not_after = (now() - Duration::from_secs(1)).into();
    let leaf = params
        .signed_by(&KeyPair::generate().expect("a key"), &root)
        .expect("a leaf");
    assert!(answer(&leaf.pem(), None, Some(&root.pem()), true).is_err());
}

#[test]
fn the_mesh_trusts_the_roots_of_its_signers() {
    let (file, own, default, other) = (
        root("file").pem(),
        root("own").pem(),
        root("default").pem(),
        root("x").pem(),
    );
    let anchor = |pem: &str, signer: &str| Anchor {
        source: AnchorSource::Pem(pem.into()),
        signers: vec![signer.into()],
        trust_domains: Vec::new(),
    };
    let mesh = MeshTrust {
        anchors: vec![
            anchor(&default, "a/default"),
            anchor(&own, "a/own"),
            anchor(&other, "a/x"),
        ],
        ..MeshTrust::default()
    };
    let rules = RegistrationRules {
        own_signer: "a/own".into(),
        ..rules("a/default", "")
    };
    let file = Bytes::from(file);
    let trust_bundle = |file: Option<&Bytes>, mesh: Option<&MeshTrust>| {
        trust_bundle(&rules, file, mesh).map(|trust| trust.roots.clone())
    };
    let block = |pem: &str| Certificate::all_from_pem(pem.as_bytes()).expect("valid PEM")[0].pem();
    let blocks = |pems: &[&str]| Some(Bytes::from(pems.iter().map(|pem| block(pem)).collect::<String>()));
    let file_text = std::str::from_utf8(&file).expect("a text value");
    assert_eq!(trust_bundle(None, None), None);
    assert_eq!(trust_bundle(Some(&file), None), blocks(&[file_text]));
    assert_eq!(
        trust_bundle(Some(&file), Some(&mesh)),
        blocks(&[file_text, &own, &default])
    );
    assert_eq!(
        trust_bundle(Some(&Bytes::from(own.clone())), Some(&mesh)),
        blocks(&[&own, &default]),
        "each once"
    );
}
