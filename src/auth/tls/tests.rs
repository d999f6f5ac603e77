use std::{collections::BTreeMap, sync::Arc, time::Duration as StdDuration};

use bytes::Bytes;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, pem::PemObject},
};
use smol_str::SmolStr;
use time::{Duration, OffsetDateTime};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::watch,
};
use tokio_rustls::TlsConnector;

use super::{
    fixture::{TestCa, TestCertificate},
    *,
};
use crate::auth::trust::TrustPools;

const REVIEWS: &str = "spiffe://cluster.local/ns/default/sa/reviews";

/// A server whose parts can be exchanged, and how a client reaches it.
struct Setup {
    acceptor: Acceptor,
    serving: watch::Sender<Option<Arc<ServingCertificate>>>,
    pools: watch::Sender<Arc<TrustPools>>,
    root: TestCa,
}

fn pools(roots: &[(&str, &TestCa)], crls: Option<Bytes>) -> Arc<TrustPools> {
    let roots = roots.iter().map(|(domain, ca)| {
        let roots = CertificateDer::pem_slice_iter(ca.pem.as_bytes()).map(|root| root.expect("our own PEM"));
        (SmolStr::new(domain), roots.collect())
    });
    let domains: BTreeMap<_, Vec<_>> = roots.collect();
    let crls = crls.unwrap_or_default();
    let crls = CertificateRevocationListDer::pem_slice_iter(&crls).map(|list| list.expect("our own PEM"));
    let crls = crls.collect();
    Arc::new(TrustPools { domains, crls })
}

fn setup() -> Setup {
    let root = TestCa::new("cluster.local");
    let (serving, serving_in) = watch::channel(Some(Arc::new(root.serving("istiod.istio-system.svc"))));
    let (pools, pools_in) = watch::channel(pools(&[("cluster.local", &root)], None));
    let acceptor = Acceptor::new(&TlsOptions::default(), serving_in, pools_in).expect("an acceptor");
    Setup {
        acceptor,
        serving,
        pools,
        root,
    }
}

fn client(roots: &TestCa, certificate: Option<TestCertificate>, protocols: &[&str]) -> TlsConnector {
    let mut store = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(roots.pem.as_bytes()) {
        store.add(root.expect("our own PEM")).expect("a root");
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .expect("supported versions")
        .with_root_certificates(store);
    let mut config = match certificate {
        Some(certificate) => builder
            .with_client_auth_cert(certificate.chain, certificate.key)
            .expect("a matching key pair"),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

impl Setup {
    /// Connects, and returns the server's view of the client after one byte.
    async fn connect(&self, certificate: Option<TestCertificate>) -> Result<Option<Arc<PeerCertificate>>, AcceptError> {
        self.connect_with(client(&self.root, certificate, &["h2"])).await
    }

    async fn connect_with(&self, client: TlsConnector) -> Result<Option<Arc<PeerCertificate>>, AcceptError> {
        let (here, there) = duplex(1 << 16);
        let name = ServerName::try_from("istiod.istio-system.svc").expect("a name");
        let client = async {
            let mut stream = client.connect(name, there).await.ok()?;
            stream.write_all(b"x").await.ok()?;
            stream.flush().await.ok()
        };
        let server = async {
            let (mut stream, peer) = self.acceptor.accept(here).await?;
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
            let mut byte = [0];
            stream.read_exact(&mut byte).await?;
            Ok(peer)
        };
        let (served, _) = tokio::join!(server, client);
        served
    }
}

#[tokio::test]
async fn client_certificates_are_optional_and_identify_the_client() {
    let setup = setup();
    assert_eq!(setup.connect(None).await.expect("no certificate is fine"), None);
    let until = OffsetDateTime::now_utc() + Duration::hours(1);
    let certificate = setup.root.leaf(&[REVIEWS], &["10.1.2.3", "vm.example.com"], 5, until);
    let peer = setup.connect(Some(certificate)).await.expect("a good certificate");
    let peer = peer.expect("the certificate was shown");
    assert_eq!(peer.identities, ["10.1.2.3", "vm.example.com", REVIEWS]);
    let left = peer
        .expires_at
        .duration_since(until.into())
        .unwrap_or_else(|early| early.duration());
    assert!(left < StdDuration::from_secs(1), "the expiry is exact to the second");
}

#[tokio::test]
async fn untrusted_certificates_are_refused() {
    let setup = setup();
    let other_ca = TestCa::new("cluster.local");
    let past = OffsetDateTime::now_utc() - Duration::hours(1);
    let bad = [
        ("signed by another CA", other_ca.client(&[REVIEWS])),
        ("expired", setup.root.leaf(&[REVIEWS], &[], 5, past)),
        (
            "of an unknown trust domain",
            setup.root.client(&["spiffe://other/ns/default/sa/reviews"]),
        ),
        (
            "two ids",
            setup
                .root
                .client(&[REVIEWS, "spiffe://cluster.local/ns/default/sa/ratings"]),
        ),
        (
            "no id",
            setup.root.leaf(
                &[],
                &["vm.example.com"],
                5,
                OffsetDateTime::now_utc() + Duration::hours(1),
            ),
        ),
        ("no account", setup.root.client(&["spiffe://cluster.local/db"])),
    ];
    for (what, certificate) in bad {
        let refused = setup.connect(Some(certificate)).await;
        assert!(matches!(refused, Err(AcceptError::Handshake(_))), "{what}: {refused:?}");
    }
}

#[tokio::test]
async fn a_ca_vouches_for_its_own_trust_domain_alone() {
    let setup = setup();
    let other = TestCa::new("other");
    setup
        .pools
        .send_replace(pools(&[("cluster.local", &setup.root), ("other", &other)], None));
    let own = "spiffe://other/ns/default/sa/reviews";
    let peer = setup.connect(Some(other.client(&[own]))).await.expect("its own domain");
    assert_eq!(peer.expect("a certificate").identities, [own]);
    assert!(setup.connect(Some(other.client(&[REVIEWS]))).await.is_err());
    assert!(setup.connect(Some(setup.root.client(&[own]))).await.is_err());
}

#[tokio::test]
async fn r11_a_dns_name_is_not_an_identity() {
    let setup = setup();
    let other = TestCa::new("other");
    setup
        .pools
        .send_replace(pools(&[("cluster.local", &setup.root), ("other", &other)], None));
    let until = OffsetDateTime::now_utc() + Duration::hours(1);
    let own = "spiffe://other/ns/default/sa/reviews";
    let named = setup.connect(Some(other.leaf(&[own], &["reviews.other"], 5, until)));
    assert!(named.await.is_ok());
    let forged = other.leaf(&[own], &[REVIEWS], 5, until);
    let refused = PeerCertificate::of_leaf(forged.leaf());
    assert!(matches!(refused, Err(PeerCertificateError::Names(_))), "{refused:?}");
    let refused = setup.connect(Some(forged)).await;
    assert!(matches!(refused, Err(AcceptError::Handshake(_))), "{refused:?}");
}

#[tokio::test]
async fn intermediates_are_followed_and_a_leaf_cannot_sign() {
    let setup = setup();
    let middle = setup.root.intermediate("middle");
    let peer = setup
        .connect(Some(middle.client(&[REVIEWS])))
        .await
        .expect("a chain of three");
    assert!(peer.is_some());
    let mut forged = TestCa::new("forger").client(&[REVIEWS]);
    forged.chain.push(setup.root.client(&[REVIEWS]).chain.remove(0));
    assert!(setup.connect(Some(forged)).await.is_err());
}

#[tokio::test]
async fn only_certificates_on_a_crl_are_revoked() {
    let setup = setup();
    let until = OffsetDateTime::now_utc() + Duration::hours(1);
    let other = TestCa::new("other");
    let crls = setup.root.revoke(&[666]);
    setup
        .pools
        .send_replace(pools(&[("cluster.local", &setup.root), ("other", &other)], Some(crls)));
    assert!(
        setup
            .connect(Some(setup.root.leaf(&[REVIEWS], &[], 666, until)))
            .await
            .is_err()
    );
    assert!(
        setup
            .connect(Some(setup.root.leaf(&[REVIEWS], &[], 667, until)))
            .await
            .is_ok()
    );
    let id = "spiffe://other/ns/default/sa/reviews";
    assert!(setup.connect(Some(other.leaf(&[id], &[], 666, until))).await.is_ok());
}

#[tokio::test]
async fn roots_and_certificates_are_those_of_the_moment() {
    let setup = setup();
    let next = TestCa::new("cluster.local");
    setup.pools.send_replace(pools(&[("cluster.local", &next)], None));
    assert!(setup.connect(Some(setup.root.client(&[REVIEWS]))).await.is_err());
    assert!(setup.connect(Some(next.client(&[REVIEWS]))).await.is_ok());
    let serving = next.serving("istiod.istio-system.svc");
    setup.serving.send_replace(Some(Arc::new(serving)));
    assert!(setup.connect(None).await.is_err(), "the client knows the old root only");
    assert!(setup.connect_with(client(&next, None, &["h2"])).await.is_ok());
    setup.serving.send_replace(None);
    assert!(matches!(setup.connect(None).await, Err(AcceptError::NoCertificate)));
}

#[tokio::test]
async fn sessions_are_not_resumed() {
    let setup = setup();
    // One client config, so that it could resume.
    let client = client(&setup.root, Some(setup.root.client(&[REVIEWS])), &["h2"]);
    assert!(setup.connect_with(client.clone()).await.is_ok());
    setup
        .pools
        .send_replace(pools(&[("cluster.local", &TestCa::new("cluster.local"))], None));
    assert!(
        setup.connect_with(client).await.is_err(),
        "the certificate is looked at again"
    );
}

#[tokio::test]
async fn a_silent_handshake_times_out() {
    let mut setup = setup();
    setup.acceptor.timeout = StdDuration::from_millis(20);
    let (here, _there) = duplex(1 << 10);
    assert!(matches!(setup.acceptor.accept(here).await, Err(AcceptError::Timeout)));
}

#[tokio::test]
async fn a_handshake_is_bounded() {
    let setup = setup();
    let (here, mut there): (DuplexStream, DuplexStream) = duplex(1 << 10);
    // A ClientHello of great announced length, in records that never complete it.
    let mut record = vec![22, 3, 1, 0x40, 0];
    record.extend([1, 0, 0xff, 0xf0]);
    record.resize(5 + 0x4000, 0);
    let next: Vec<u8> = [22, 3, 1, 0x40, 0]
        .into_iter()
        .chain(std::iter::repeat_n(0, 0x4000))
        .collect();
    let flood = async {
        let mut sent = 0;
        let mut bytes = record.iter().chain(next.iter().cycle()).copied();
        loop {
            let part: Vec<u8> = bytes.by_ref().take(512).collect();
            if there.write_all(&part).await.is_err() {
                return sent;
            }
            sent += part.len();
        }
    };
    let accept = async {
        let refused = setup.acceptor.accept(here).await.map(drop);
        refused.expect_err("no handshake is that long")
    };
    let (refused, sent) = tokio::join!(accept, flood);
    assert!(matches!(refused, AcceptError::Handshake(_)), "{refused}");
    assert!(sent <= MAX_HANDSHAKE_BYTES + (8 << 10), "{sent} bytes were taken");
}

#[test]
fn arbitrary_certificates_are_parsed_without_panic() {
    let root = TestCa::new("cluster.local");
    let good = root.client(&[REVIEWS]);
    let der = good.leaf().to_vec();
    for end in 0..der.len() {
        assert!(PeerCertificate::of_leaf(&der[..end]).is_err());
    }
    let mut longer = der.clone();
    longer.push(0);
    assert!(PeerCertificate::of_leaf(&longer).is_err());
    let uris: Vec<String> = (0..65)
        .map(|n| format!("spiffe://cluster.local/ns/default/sa/n{n}"))
        .collect();
    let many = root.client(&uris.iter().map(String::as_str).collect::<Vec<_>>());
    let refused = PeerCertificate::of_leaf(many.leaf());
    assert!(matches!(refused, Err(PeerCertificateError::Names(_))), "{refused:?}");
}
