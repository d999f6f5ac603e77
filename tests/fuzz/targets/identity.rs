//! Credentials of callers: TLS, certificates, tokens, headers of gateways, CSRs.

use std::{collections::BTreeMap, future::ready, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::Full;
use istiod::{
    auth::{
        AuthenticationError, Authenticator, Authenticators, Caller, CallerSource, Credentials, JwtRule, TrustDomains,
        chain::ChainOptions,
        tls::{Acceptor, PeerCertificate, ServingCertificate, TlsOptions},
        token,
        trust::TrustPools,
    },
    base::Sensitive,
    ca::{
        authority::{Authority, TtlLimits},
        certificate::Certificate,
        key::{KeyKind, PrivateKey},
        local::LocalSigner,
        plugged_in::{self, BundleFiles, BundleLookup},
        self_signed::{Root, RootOptions},
        server::CertificateService,
        signing::SigningRequest,
    },
    environment::wall_clock,
    fetch::{FetchOptions, Fetcher},
    rpc::{Call, Unary},
    task::Tasks,
};
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::Runtime,
    sync::watch,
};

use super::{Target, class_of, parts};

/// A certificate signing request: PEM, or DER.
pub(super) const CSR: Target = Target {
    name: "csr",
    run: csr,
    words: CERTIFICATE_WORDS,
};

/// A message to the certificate service with its gRPC frame, from an authenticated caller.
pub(super) const CSR_CALL: Target = Target {
    name: "csr_call",
    run: csr_call,
    words: &[
        b"-----BEGIN CERTIFICATE REQUEST-----\n",
        b"-----END CERTIFICATE REQUEST-----\n",
        b"ImpersonatedIdentity",
        b"CertSigner",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x00\x00\x01\x00\x00",
    ],
};

/// The headers `authorization`, `x-forwarded-client-cert` and `clusterid`.
pub(super) const CREDENTIALS: Target = Target {
    name: "credentials",
    run: credentials,
    words: &[
        b"Bearer ",
        b"bearer ",
        b"eyJhbGciOiJSUzI1NiJ9.",
        b"eyJhbGciOiJub25lIn0.",
        b"By=",
        b"Hash=",
        b"Subject=\"",
        b"URI=spiffe://",
        b"DNS=",
        b"Cert=\"",
        b";",
        b",",
        b"\\\"",
        b"CN=",
        b"system:serviceaccount:a:b",
        b"eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiZXhwIjoxZTMwOH0",
    ],
};

/// Certificates and keys: DER, or the parts of a bundle as PEM.
pub(super) const CERTIFICATES: Target = Target {
    name: "certificates",
    run: certificates,
    words: CERTIFICATE_WORDS,
};

/// The bytes of a TLS connection.
pub(super) const TLS: Target = Target {
    name: "tls",
    run: tls,
    words: &[
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x14\x03\x03\x00\x01\x01",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x40\x00",
        b"\x0b\x00\x00\x03\x00\x00\x00",
        b"\x00\x10\x00\x05\x00\x03\x02h2",
        b"\x00\x2b\x00\x03\x02\x03\x04",
        b"\x00\x33\x00\x02\x00\x00",
        b"\xff\xff",
    ],
};

const CERTIFICATE_WORDS: &[&[u8]] = &[
    b"-----BEGIN CERTIFICATE-----\n",
    b"-----END CERTIFICATE-----\n",
    b"-----BEGIN CERTIFICATE REQUEST-----\n",
    b"-----BEGIN PRIVATE KEY-----\n",
    b"-----BEGIN X509 CRL-----\n",
    b"\x30\x82\xff\xff",
    b"\x30\x80",
    b"\x06\x03\x55\x1d\x11",
    b"\x86\x10spiffe://a/ns/b",
    b"\x17\x0d491231235959Z",
    b"\x18\x0f99991231235959Z",
    b"\x02\x01\x00",
    b"\xa0\x03\x02\x01\x02",
    b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x09\x0e",
];

const IDENTITY: &str = "spiffe://cluster.local/ns/a/sa/b";

/// An authenticator that gives every caller the same identity.
struct AllowAll;

impl Authenticator for AllowAll {
    fn name(&self) -> &'static str {
        "nobody"
    }

    fn authenticate<'a>(&'a self, _: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        let caller = Caller {
            source: CallerSource::IdToken,
            identities: vec![IDENTITY.into()],
            kubernetes: None,
            expires_at: None,
        };
        ready(Ok(caller)).boxed()
    }
}

struct Fixture {
    runtime: Runtime,
    authority: Arc<Authority>,
    service: CertificateService,
    authenticators: Authenticators,
    acceptor: Acceptor,
    // The watches stay open as long as their senders.
    _authority: watch::Sender<Option<Arc<Authority>>>,
    _domains: watch::Sender<Arc<TrustDomains>>,
    _serving: watch::Sender<Option<Arc<ServingCertificate>>>,
    _pools: watch::Sender<Arc<TrustPools>>,
}

fn limits() -> TtlLimits {
    TtlLimits {
        default: Duration::from_hours(24),
        max: Duration::from_hours(2160),
    }
}

impl Fixture {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let options = RootOptions {
            lifetime: Duration::from_hours(24),
            key: KeyKind::P256,
        };
        let root = Root::new("cluster.local", &options, wall_clock()).expect("a root can be created");
        let bundle = root.bundle("nowhere".into(), &BundleFiles::new(), wall_clock());
        let authority = Arc::new(Authority::new(bundle, wall_clock()).expect("the key belongs to the certificate"));
        let (sender, receiver) = watch::channel(Some(authority.clone()));
        let signer = Arc::new(LocalSigner::new(receiver, limits(), wall_clock));
        let allow_all = Authenticators::new(vec![Box::new(AllowAll)]);
        let deny_others = Box::new(|_: &Caller, _: &str| Err("not allowed".to_owned()));
        let (domains, known) = watch::channel(Arc::new(TrustDomains::default()));
        let service = CertificateService::new(
            allow_all,
            signer,
            known.clone(),
            deny_others,
            &prometheus::Registry::new(),
        );
        let serving = serving(&authority);
        let pools = TrustPools {
            domains: BTreeMap::from([("cluster.local".into(), vec![authority.root().der.clone()])]),
            ..TrustPools::default()
        };
        let (serving, certificate) = watch::channel(Some(Arc::new(serving)));
        let (pools, trusted) = watch::channel(Arc::new(pools));
        Self {
            runtime: runtime.expect("a runtime can be created"),
            authority,
            service: service.expect("the registry is empty").accepting_plaintext(true),
            authenticators: chain(&known),
            acceptor: Acceptor::new(&TlsOptions::default(), certificate, trusted).expect("the defaults are valid"),
            _authority: sender,
            _domains: domains,
            _serving: serving,
            _pools: pools,
        }
    }
}

fn serving(authority: &Authority) -> ServingCertificate {
    let issued = authority
        .issue_serving(&["istiod".into()], Duration::from_hours(1), wall_clock())
        .expect("a certificate of the own CA");
    let chain =
        CertificateDer::pem_slice_iter(issued.chain.as_bytes()).map(|block| block.expect("the certificate is valid"));
    let key = PrivateKeyDer::from_pem_slice(issued.key.reveal()).expect("the key is valid");
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    ServingCertificate {
        key: Arc::new(
            CertifiedKey::from_der(chain.collect(), key, &provider).expect("the key belongs to the certificate"),
        ),
        roots: Bytes::new(),
        expires_at: issued.expires_at,
    }
}

/// Authenticators without network access: every address is blocked.
fn chain(domains: &watch::Receiver<Arc<TrustDomains>>) -> Authenticators {
    let options = ChainOptions {
        rule: Some(JwtRule {
            issuer: "https://issuer.example".into(),
            audiences: vec!["istio-ca".into()],
            jwks_uri: "https://127.0.0.1/keys".into(),
        }),
        gateways: vec!["127.0.0.0/8".parse().expect("the range is valid")],
        audiences: vec!["istio-ca".into()],
        ..ChainOptions::default()
    };
    let blocked = ["0.0.0.0/0", "::/0"].map(|range| range.parse().expect("the range is valid"));
    let fetcher = Fetcher::new(FetchOptions {
        blocked: blocked.into(),
        ..FetchOptions::default()
    });
    options.chains(&fetcher, domains, &Tasks::default()).requests
}

thread_local! {
    static FIXTURE: Fixture = Fixture::new();
}

fn pem(label: &str, der: &[u8]) -> Vec<u8> {
    use base64::Engine;
    let body = base64::prelude::BASE64_STANDARD.encode(der);
    format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n").into_bytes()
}

fn csr(bytes: &[u8]) -> u64 {
    let csr = if bytes.first() == Some(&0x30) {
        pem("CERTIFICATE REQUEST", bytes)
    } else {
        bytes.to_vec()
    };
    let request = SigningRequest {
        csr,
        identities: vec![IDENTITY.into()],
        lifetime: None,
        signer: "".into(),
    };
    let issued = FIXTURE.with(|fixture| fixture.authority.issue(&request, wall_clock(), limits()));
    match issued {
        Ok(issued) => {
            let leaf =
                Certificate::all_from_pem(issued.chain[0].as_bytes()).expect("an issued certificate can be parsed");
            let says = PeerCertificate::of_leaf(&leaf[0].der).expect("it is a certificate of a workload");
            assert_eq!(says.identities, [IDENTITY], "a CSR must not choose its identity");
            assert!(!leaf[0].is_ca, "a workload certificate must not be a CA");
            1
        }
        Err(error) => class_of(&error.text),
    }
}

fn csr_call(bytes: &[u8]) -> u64 {
    let request = Request::post("/istio.v1.auth.IstioCertificateService/CreateCertificate")
        .body(Full::new(Bytes::copy_from_slice(bytes)))
        .expect("the request is valid");
    let answer = FIXTURE.with(|fixture| fixture.runtime.block_on(fixture.service.call(Call::new(request))));
    match answer {
        Ok(_) => 1,
        Err(status) => class_of(status.message()) ^ status.code() as u64,
    }
}

fn credentials(bytes: &[u8]) -> u64 {
    let [authorization, forwarded, cluster] = parts(bytes);
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("authorization", authorization),
        ("x-forwarded-client-cert", forwarded),
        ("clusterid", cluster),
    ] {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(name, value);
        }
    }
    if let Ok(claims) = token::bearer(&headers).and_then(token::unverified_claims) {
        let _ = (
            claims.expires_at(),
            claims.not_before(),
            token::service_account(&claims.sub),
        );
    }
    let _ = token::cluster(&headers);
    let shown = Credentials {
        address: Some(SocketAddr::from(([127, 0, 0, 1], 1))),
        is_tls: true,
        certificate: None,
        headers: &headers,
    };
    let known = FIXTURE.with(|fixture| fixture.runtime.block_on(fixture.authenticators.authenticate(shown)));
    match known {
        Ok(caller) => {
            assert!(
                !caller.identities.is_empty(),
                "an authenticated caller must have an identity"
            );
            assert!(caller.source == CallerSource::Forwarded, "no token is signed");
            caller.identities.len() as u64
        }
        Err(refused) => class_of(&refused.to_string()),
    }
}

fn certificates(bytes: &[u8]) -> u64 {
    if bytes.first() == Some(&0x30) {
        let read = Certificate::from_der(CertificateDer::from(bytes.to_vec()));
        let says = PeerCertificate::of_leaf(bytes);
        if let Ok(read) = &read {
            let _ = (read.is_issued_by(read), read.is_valid_at(wall_clock()), read.pem());
        }
        let (read, says) = (read.err().map(|error| error.to_string()), says.err());
        return class_of(&read.unwrap_or_default()) ^ says.map_or(7, |says| class_of(&says.to_string()));
    }
    let [certificate, key, roots, chain, revoked] = parts(bytes);
    let mut files = BundleFiles::new();
    for (name, content) in [
        (plugged_in::CERTIFICATE, certificate),
        (plugged_in::KEY, key),
        (plugged_in::ROOTS, roots),
        (plugged_in::CHAIN, chain),
        (plugged_in::CRL, revoked),
    ] {
        files.insert(name.into(), Sensitive::new(Bytes::copy_from_slice(content)));
    }
    let _ = PrivateKey::from_pem(&Sensitive::new(Bytes::copy_from_slice(key)));
    let sort = Certificate::all_from_pem(certificate);
    let sort = sort.map_or_else(|error| class_of(&error.to_string()), |all| all.len() as u64);
    sort ^ match plugged_in::find("nowhere".into(), &files, true) {
        BundleLookup::Absent => 0,
        BundleLookup::Incomplete(error) => class_of(&error.to_string()),
        BundleLookup::Complete(bundle) => match Authority::new(bundle, wall_clock()) {
            Ok(_) => 1,
            Err(error) => class_of(&error.to_string()),
        },
    }
}

fn tls(bytes: &[u8]) -> u64 {
    FIXTURE.with(|fixture| {
        fixture.runtime.block_on(async {
            let (mut ours, theirs) = tokio::io::duplex(64 << 10);
            let client = async {
                let _ = ours.write_all(bytes).await;
                let _ = ours.shutdown().await;
                let mut answer = Vec::new();
                let _ = ours.read_to_end(&mut answer).await;
                answer
            };
            let accepting = async { fixture.acceptor.accept(theirs).await.map(drop) };
            let (accepted, answer) = tokio::join!(accepting, client);
            let answer = answer.first().copied().unwrap_or_default();
            accepted.map_or_else(|error| class_of(&error.to_string()), |()| 1) ^ u64::from(answer)
        })
    })
}
