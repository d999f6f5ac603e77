use std::{cell::Cell, sync::LazyLock};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{CertificateDer, pem::PemObject};

use super::*;
use crate::{
    ca::bundle::{BundlePart, CaBundle},
    settings::fixture::settings,
};

const HOUR: Duration = Duration::from_hours(1);
static NOW: LazyLock<SystemTime> = LazyLock::new(|| SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000));

/// A self-signed CA with this lifetime.
fn authority(lifetime: Duration) -> Arc<Authority> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    (params.not_before, params.not_after) = ((*NOW - HOUR).into(), (*NOW + lifetime).into());
    let key = KeyPair::generate().expect("a key");
    let root = BundlePart {
        name: "ca-cert.pem".into(),
        pem: params.self_signed(&key).expect("a root").pem().into(),
    };
    let bundle = CaBundle {
        location: "the test".into(),
        certificate: root.clone(),
        key_name: "ca-key.pem".into(),
        key: Sensitive::new(key.serialize_pem().into()),
        chain: BundlePart {
            name: "cert-chain.pem".into(),
            pem: Bytes::new(),
        },
        roots: root,
        crl: None,
    };
    Arc::new(Authority::new(bundle, *NOW).expect("a CA"))
}

fn trust(authority: &Authority) -> Option<Arc<TrustBundle>> {
    Some(Arc::new(TrustBundle {
        roots: authority.trusted_roots().clone(),
        crl: None,
    }))
}

/// A chain and its key.
fn pair(authority: &Authority) -> (Bytes, Sensitive) {
    let issued = authority
        .issue_serving(&["a.b".into()], HOUR, *NOW)
        .expect("a certificate");
    (issued.chain.into(), issued.key)
}

fn dns_names(served: &ServingCertificate) -> Vec<String> {
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
    let leaf = served.key.cert.first().expect("a leaf");
    let (_, parsed) = X509Certificate::from_der(leaf).expect("a certificate");
    let names = parsed
        .subject_alternative_name()
        .expect("valid names")
        .expect("valid names");
    let dns = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    dns.collect()
}

#[test]
fn dns_names_are_those_of_the_services() {
    let known = ["istio-pilot.mesh.svc", "istiod-remote.mesh.svc", "istiod.mesh.svc"];
    assert_eq!(names("mesh", "default", "").into_iter().collect::<Vec<_>>(), known);
    assert_eq!(names("mesh", "", " ,").into_iter().collect::<Vec<_>>(), known);
    let all: Vec<SmolStr> = names("mesh", "canary", "a.example.com, istiod.mesh.svc")
        .into_iter()
        .collect();
    let mut expected = vec!["a.example.com", "istio-pilot.mesh.svc", "istiod-canary.mesh.svc"];
    expected.extend(&known[1..]);
    assert_eq!(all, expected);
}

#[test]
fn flags_come_before_mounted_files_before_the_provider() {
    let nothing = |_: &Path| false;
    let everything = |_: &Path| true;
    let all = ["--tlsCertFile", "c", "--tlsKeyFile", "k", "--caCertFile", "r"];
    let files = |certificate: &str, key: &str, roots: &str| {
        ServingSource::Files(ServingFiles {
            certificate: certificate.into(),
            key: key.into(),
            roots: roots.into(),
        })
    };
    assert_eq!(
        source(&settings(&all, &[]), true, &everything),
        Ok(files("c", "k", "r"))
    );
    assert_eq!(
        source(&settings(&all[..4], &[]), true, &nothing),
        Ok(ServingSource::Authority),
        "two of three flags are ignored"
    );
    assert_eq!(
        source(&settings(&[], &[]), true, &everything),
        Ok(files(MOUNTED, MOUNTED_KEY, MOUNTED_ROOTS[0]))
    );
    let other_root = |path: &Path| path != Path::new(MOUNTED_ROOTS[0]);
    assert_eq!(
        source(&settings(&[], &[]), true, &other_root),
        Ok(files(MOUNTED, MOUNTED_KEY, MOUNTED_ROOTS[1]))
    );
    let no_key = |path: &Path| path != Path::new(MOUNTED_KEY);
    assert_eq!(source(&settings(&[], &[]), true, &no_key), Ok(ServingSource::Authority));
    let provider =
        |name: &str, serves_ca: bool| source(&settings(&[], &[("PILOT_CERT_PROVIDER", name)]), serves_ca, &nothing);
    assert_eq!(provider("istiod", false), Ok(ServingSource::None));
    let external = settings(&[], &[("EXTERNAL_CA", "ISTIOD_RA_KUBERNETES_API")]);
    assert_eq!(
        source(&external, true, &nothing),
        Ok(ServingSource::Authority),
        "for the control plane alone"
    );
    assert_eq!(provider("none", true), Ok(ServingSource::None));
    assert_eq!(provider("custom", true), Ok(ServingSource::None));
    assert_eq!(provider("kubernetes", true), Err(ServingError::LegacyProvider));
    let signer = "clusterissuers.cert-manager.io/mesh".into();
    assert_eq!(
        provider("k8s.io/clusterissuers.cert-manager.io/mesh", true),
        Ok(ServingSource::Kubernetes { signer })
    );
}

#[test]
fn renewal_is_due_at_half_of_the_lifetime() {
    assert_eq!(time_until_renewal(*NOW, *NOW + 10 * HOUR, *NOW), 5 * HOUR);
    assert_eq!(time_until_renewal(*NOW, *NOW + 10 * HOUR, *NOW + 2 * HOUR), 3 * HOUR);
    assert_eq!(
        time_until_renewal(*NOW, *NOW + 10 * HOUR, *NOW + 6 * HOUR),
        Duration::ZERO
    );
    assert_eq!(time_until_renewal(*NOW, *NOW - HOUR, *NOW), Duration::ZERO);
    assert_eq!(retry_after(0), RETRY_MIN);
    assert_eq!(retry_after(3), 8 * RETRY_MIN);
    assert_eq!(retry_after(u32::MAX), RETRY_MAX);
}

#[test]
fn mismatched_material_is_rejected() {
    let issuer = authority(10 * HOUR);
    let roots = || issuer.trusted_roots().clone();
    let (chain, key) = pair(&issuer);
    let material = certificate(&chain, &key, roots(), *NOW).expect("a certificate");
    assert_eq!(material.expires_at, *NOW + HOUR);
    assert_eq!(material.roots, roots());
    let refused = |chain: &[u8], key: &Sensitive, roots: Bytes, now| {
        certificate(chain, key, roots, now).map(|_| ()).expect_err("a refusal")
    };
    let (_, other_key) = pair(&issuer);
    assert!(matches!(
        refused(&chain, &other_key, roots(), *NOW),
        MaterialError::Mismatch
    ));
    assert!(matches!(
        refused(&chain, &key, roots(), *NOW + HOUR),
        MaterialError::Expired(_)
    ));
    assert!(matches!(refused(b"", &key, roots(), *NOW), MaterialError::Chain(_)));
    assert!(matches!(
        refused(&chain, &key, Bytes::new(), *NOW),
        MaterialError::Roots(_)
    ));
    let junk = Sensitive::new(Bytes::from_static(
        b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
    ));
    let error = refused(&chain, &junk, roots(), *NOW);
    assert!(matches!(error, MaterialError::Key(_)));
    assert!(!format!("{error} {error:?}").contains("c2VjcmV0"), "keys do not print");
}

#[test]
fn requests_have_names_and_no_subject() {
    use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer};
    let (csr, key) = material::request(&["a.b".into(), "c.d".into()]).expect("a request");
    assert_eq!(format!("{key:?}"), "redacted");
    let der = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(csr.as_bytes()).expect("valid PEM");
    let (_, parsed) = X509CertificationRequest::from_der(&der).expect("a request");
    assert_eq!(parsed.certification_request_info.subject.iter().count(), 0);
    assert!(parsed.verify_signature().is_ok());
}

thread_local! {
    /// The time by which the test clock is advanced.
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Number of reads of the test clock.
    static READS: Cell<usize> = const { Cell::new(0) };
}

const CLOCK: Clock = Clock {
    now: || {
        READS.set(READS.get() + 1);
        *NOW + PASSED.get()
    },
    poll_interval: Duration::from_millis(10),
};
/// Long enough for pending changes to be applied.
const SETTLE_TIME: Duration = Duration::from_millis(200);

fn advance(time: Duration) {
    PASSED.set(PASSED.get() + time);
}

/// Waits until the test clock was read this many times more. Each decision about a certificate reads it.
async fn until_read(times: usize) {
    let until = READS.get() + times;
    let read = async {
        while READS.get() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let read = tokio::time::timeout(Duration::from_secs(20), read).await;
    read.expect("decisions in time");
}

fn own(mesh: &MeshTrust) -> watch::Sender<Option<Arc<MeshTrust>>> {
    watch::Sender::new(Some(Arc::new(mesh.clone())))
}

fn rules() -> ServingRules {
    ServingRules {
        source: ServingSource::Authority,
        names: names("mesh", "", ""),
        lifetime: LIFETIME,
    }
}

struct Harness {
    authority: watch::Sender<Option<Arc<Authority>>>,
    trust: watch::Sender<Option<Arc<TrustBundle>>>,
    mesh: watch::Sender<Option<Arc<MeshTrust>>>,
    serving: ServingReceiver,
    tasks: Tasks,
}

impl Harness {
    fn start(issuer: Option<Arc<Authority>>) -> Self {
        let trust = watch::Sender::new(issuer.as_deref().and_then(trust));
        let authority = watch::Sender::new(issuer);
        let mesh = own(&MeshTrust::default());
        let (out, serving) = watch::channel(None);
        let inputs = ServingInputs {
            authority: authority.subscribe(),
            trust: trust.subscribe(),
            mesh: mesh.subscribe(),
            client: None,
        };
        let tasks = Tasks::default();
        tasks.spawn_until_shutdown("test", follow_authority(rules(), inputs, CLOCK, out));
        Self {
            authority,
            trust,
            mesh,
            serving,
            tasks,
        }
    }

    async fn next(&mut self) -> Arc<ServingCertificate> {
        self.serving.changed().await.expect("an open channel");
        self.serving.borrow_and_update().clone().expect("a certificate")
    }

    /// Returns true if nothing is published while there is no CA.
    async fn is_quiet(&mut self) -> bool {
        tokio::time::timeout(SETTLE_TIME, self.serving.changed()).await.is_err()
    }

    /// Returns true if nothing is published while the clock is read this many times more.
    async fn is_quiet_for(&mut self, reads: usize) -> bool {
        until_read(reads).await;
        !self.serving.has_changed().expect("an open channel")
    }

    async fn end(self) {
        assert!(self.tasks.end(Duration::from_secs(5)).await);
    }
}

#[tokio::test]
async fn the_mesh_ca_issues_and_reissues() {
    let mut harness = Harness::start(Some(authority(10 * HOUR)));
    let first = harness.next().await;
    assert_eq!(first.expires_at, *NOW + 10 * HOUR, "the CA decides the lifetime");
    advance(4 * HOUR);
    assert!(harness.is_quiet_for(4).await, "less than half of its life");
    advance(HOUR);
    let second = harness.next().await;
    assert_eq!(second.expires_at, first.expires_at, "the CA itself holds no longer");
    assert_ne!(first.key.cert, second.key.cert);

    // A new CA issues a new certificate, published with its root.
    let other = authority(10_000 * HOUR);
    harness.authority.send_replace(Some(other.clone()));
    let third = harness.next().await;
    assert_ne!(third.key.cert, second.key.cert);
    harness.trust.send_replace(trust(&other));
    let fourth = harness.next().await;
    assert_eq!(fourth.key.cert, third.key.cert, "roots alone are no reason to sign");
    assert_eq!(fourth.roots, *other.trusted_roots());

    let mesh = MeshTrust {
        discovery_host: "discovery.example.com".into(),
        ..MeshTrust::default()
    };
    harness.mesh.send_replace(Some(Arc::new(mesh)));
    let fifth = harness.next().await;
    assert!(dns_names(&fifth).contains(&"discovery.example.com".to_owned()));
    assert_eq!(
        dns_names(&fourth),
        ["istio-pilot.mesh.svc", "istiod-remote.mesh.svc", "istiod.mesh.svc"]
    );
    advance(1000 * HOUR);
    assert!(harness.is_quiet_for(4).await, "no event without a change");
    harness.end().await;
}

#[tokio::test]
async fn a_failing_ca_is_retried_and_keeps_the_certificate() {
    let mut harness = Harness::start(None);
    assert!(harness.is_quiet().await, "there is no CA");
    let issuer = authority(10_000 * HOUR);
    harness.trust.send_replace(trust(&issuer));
    harness.authority.send_replace(Some(issuer));
    let first = harness.next().await;
    let expired = authority(HOUR);
    advance(2 * HOUR);
    harness.authority.send_replace(Some(expired));
    // The second attempt follows the failure of the first one.
    assert!(harness.is_quiet_for(2).await);
    let served = harness.serving.borrow().clone().expect("a certificate");
    assert!(Arc::ptr_eq(&served, &first));
    harness.authority.send_replace(None);
    assert!(harness.is_quiet().await);
    harness.end().await;
}

#[tokio::test]
async fn files_may_be_replaced_one_by_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let files = ServingFiles {
        certificate: path("tls.crt"),
        key: path("tls.key"),
        roots: path("ca.crt"),
    };
    let issuer = authority(10 * HOUR);
    let (chain, key) = pair(&issuer);
    let (out, mut serving) = watch::channel(None);
    let tasks = Tasks::default();
    tasks.spawn_until_shutdown("test", follow_files(files.clone(), CLOCK, out));
    std::fs::write(&files.certificate, &chain).expect("a file");
    std::fs::write(&files.key, key.reveal()).expect("a file");
    std::fs::write(&files.roots, issuer.trusted_roots()).expect("a file");
    let patience = Duration::from_secs(20);
    let mut next = async || {
        let changed = tokio::time::timeout(patience, serving.changed()).await;
        changed.expect("a result in time").expect("an open channel");
        serving.borrow_and_update().clone().expect("a certificate")
    };
    let first: Arc<ServingCertificate> = next().await;
    assert_eq!(
        Some(&first.key.cert[0]),
        CertificateDer::from_pem_slice(&chain).as_ref().ok()
    );

    // The root alone.
    let both = [issuer.trusted_roots().clone(), authority(HOUR).trusted_roots().clone()].concat();
    std::fs::write(&files.roots, &both).expect("a file");
    let second = next().await;
    assert_eq!(second.roots, both);
    assert_eq!(second.key.cert, first.key.cert);

    // A certificate without its key is not presented; the pair is.
    let (chain, key) = pair(&issuer);
    std::fs::write(&files.certificate, &chain).expect("a file");
    until_read(1).await;
    std::fs::write(&files.key, key.reveal()).expect("a file");
    let third = next().await;
    assert_eq!(
        Some(&third.key.cert[0]),
        CertificateDer::from_pem_slice(&chain).as_ref().ok()
    );
    assert!(tasks.end(Duration::from_secs(5)).await);
}

#[test]
fn the_roots_are_published_with_the_crl() {
    let issuer = authority(HOUR);
    let (chain, key) = pair(&issuer);
    let own = certificate(&chain, &key, issuer.trusted_roots().clone(), *NOW).expect("a certificate");
    let trust = TrustBundle {
        roots: Bytes::from_static(b"others"),
        crl: Some(Bytes::from_static(b"revoked")),
    };
    assert_eq!(published_now(None, Some(&trust)), None);
    let published_trust = published_now(Some(&own), Some(&trust)).expect("root certificates");
    assert_eq!(
        (&published_trust.roots, &published_trust.crl),
        (issuer.trusted_roots(), &trust.crl)
    );
    assert_eq!(published_now(Some(&own), None).expect("root certificates").crl, None);
}

#[test]
fn errors_name_the_file() {
    let files = ServingFiles {
        certificate: "/tls.crt".into(),
        key: "/tls.key".into(),
        roots: "/ca.crt".into(),
    };
    let missing = files.read().expect_err("no files").to_string();
    assert!(missing.starts_with("/tls.crt: "), "{missing}");
    let issuer = authority(HOUR);
    let (chain, key) = pair(&issuer);
    let roots = Sensitive::new(issuer.trusted_roots().clone());
    let contents = [Sensitive::new(chain), Sensitive::default(), roots];
    let error = files.certificate_of(&contents, *NOW).map(|_| ()).expect_err("no key");
    let error = error.to_string();
    assert!(error.starts_with("/tls.key: "), "{error}");
    let [chain, _, _] = contents;
    let error = files
        .certificate_of(&[chain, key, Sensitive::default()], *NOW)
        .map(|_| ())
        .expect_err("no roots")
        .to_string();
    assert!(error.starts_with("/ca.crt: "), "{error}");
}
