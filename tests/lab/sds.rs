//! The SDS server of istio-agent on a socket: it sends the workload's certificate and roots, and sends them again when
//! they change.

use std::convert::Infallible;
use std::future::ready;
use std::path::Path;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istiod::proto::Any;
use istiod::proto::envoy::config::core::v3::DataSource;
use istiod::proto::envoy::config::core::v3::data_source::Specifier;
use istiod::proto::envoy::extensions::transport_sockets::tls::v3::secret::Type;
use istiod::proto::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, TlsCertificate,
};
use istiod::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::agent::CertificateWatch;
use crate::support::agent::Certificate;
use crate::support::http::{RUNTIME, quietly};

const STREAM: &str = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// The server; dropping it closes its socket.
pub(crate) struct Secrets {
    server: JoinHandle<()>,
}

impl Drop for Secrets {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Secrets {
    /// Serves the current secrets and their later versions.
    pub(crate) fn serve(socket: &Path, known: CertificateWatch) -> Result<Secrets, String> {
        let _runtime = RUNTIME.enter();
        let listener = UnixListener::bind(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        let server = RUNTIME.spawn(accept(listener, known));
        Ok(Secrets { server })
    }
}

async fn accept(listener: UnixListener, known: CertificateWatch) {
    while let Ok((stream, _)) = listener.accept().await {
        let known = known.clone();
        let answers = service_fn(move |request| {
            let known = known.clone();
            async move { Ok::<_, Infallible>(dispatch(request, known).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        RUNTIME.spawn(quietly(connection.serve_connection(TokioIo::new(stream), answers)));
    }
}

async fn dispatch(request: http::Request<Incoming>, known: CertificateWatch) -> http::Response<tonic::body::Body> {
    if request.uri().path() != STREAM {
        return Status::unimplemented(request.uri().path().to_owned()).into_http();
    }
    let rpc = tower::service_fn(move |request| ready(Ok(stream(request, known.clone()))));
    let codec = ProstCodec::<DiscoveryResponse, DiscoveryRequest>::default();
    tonic::server::Grpc::new(codec).streaming(rpc, request).await
}

/// Serves one stream: each requested secret, now and after each change. ACKs get no response.
fn stream(
    request: Request<Streaming<DiscoveryRequest>>,
    mut known: CertificateWatch,
) -> Response<ReceiverStream<Result<DiscoveryResponse, Status>>> {
    let mut requests = request.into_inner();
    let (outbox, answers) = mpsc::channel(4);
    RUNTIME.spawn(async move {
        let mut names: Vec<String> = Vec::new();
        let mut count = 0_u64;
        loop {
            let changed = tokio::select! {
                request = requests.message() => match request {
                    Ok(Some(request)) => {
                        let news = request.resource_names != names;
                        names = request.resource_names;
                        news
                    }
                    Ok(None) | Err(_) => return,
                },
                changed = known.changed() => match changed {
                    Ok(()) => !names.is_empty(),
                    Err(_) => return,
                },
            };
            if !changed {
                continue;
            }
            count += 1;
            let certificate = known.borrow_and_update().clone();
            let response = DiscoveryResponse {
                version_info: count.to_string(),
                nonce: count.to_string(),
                type_url: SECRET.into(),
                resources: names.iter().map(|name| secret(name, &certificate)).collect(),
                ..Default::default()
            };
            if outbox.send(Ok(response)).await.is_err() {
                return;
            }
        }
    });
    Response::new(ReceiverStream::new(answers))
}

fn secret(name: &str, certificate: &Certificate) -> Any {
    let inline = |text: &str| {
        Some(DataSource {
            specifier: Some(Specifier::InlineBytes(text.to_owned().into())),
            ..Default::default()
        })
    };
    let roots = |pem: &str| {
        Type::ValidationContext(CertificateValidationContext {
            trusted_ca: inline(pem),
            ..Default::default()
        })
    };
    let content = if name == "ROOTCA" {
        roots(&certificate.roots)
    } else if let Some(path) = name.strip_prefix("file-root:") {
        // A rule names the file.
        roots(&std::fs::read_to_string(path).unwrap_or_default())
    } else {
        Type::TlsCertificate(TlsCertificate {
            certificate_chain: inline(&certificate.chain),
            private_key: inline(&certificate.key),
            ..Default::default()
        })
    };
    Any::pack(&Secret {
        name: name.to_owned(),
        r#type: Some(content),
    })
}
