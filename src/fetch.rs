//! Documents of web servers that users name: one GET each, with limits on time, size and addresses.
//!
//! The author of a URL makes the control plane request it. So every address is checked when it is connected to, also
//! after redirects: a name is resolved once, and the checked address is the one that is used. Response bodies of errors
//! are never shown to users, who could otherwise read services that only istiod can reach.

mod client_tls;
mod connect;
mod error;
mod operator;
mod tls;

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::{client::proxy::matcher::Matcher, rt::TokioIo};
use ipnet::IpNet;
use url::Url;

pub use client_tls::{ClientTls, ClientTlsError};
use connect::{Connector, Stream};
pub use connect::{Resolve, SystemResolver};
pub use error::FetchError;
pub use operator::{Dialer, Endpoint, HttpClient, HttpError, Link, ServerNameError, with_causes};
pub use tls::UnverifiedServer;

/// Largest number of redirects. Go's client has the same limit.
const MAX_REDIRECTS: usize = 10;
/// Largest size of status line and headers.
const MAX_HEAD: usize = 64 * 1024;
/// Default limit of a document.
const DEFAULT_MAX_BYTES: usize = 1024 * 1024;

/// Options of fetching.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Blocked addresses, in any spelling in the URL. IPv4 addresses embedded in IPv6 are checked as both.
    pub blocked: Vec<IpNet>,
    /// True if any server certificate is accepted.
    pub insecure_skip_verify: bool,
    /// Additional roots of servers, as PEM.
    pub extra_roots: Bytes,
    /// Largest body, in bytes.
    pub max_bytes: usize,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            blocked: Vec::new(),
            insecure_skip_verify: false,
            extra_roots: Bytes::new(),
            max_bytes: DEFAULT_MAX_BYTES,
        }
    }
}

/// Fetches documents. Cheap to clone; connections are not kept.
#[derive(Clone)]
pub struct Fetcher {
    connector: Arc<Connector>,
    max_bytes: usize,
}

impl Fetcher {
    /// Returns a fetcher with the system's resolver and proxies from `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`. Reads
    /// the system's roots, so it should be called at the start.
    pub fn new(options: FetchOptions) -> Self {
        Self::with(options, Arc::new(SystemResolver), Matcher::from_env())
    }

    /// Returns a fetcher with another resolver and without proxies.
    pub fn with_resolver(options: FetchOptions, resolver: Arc<dyn Resolve>) -> Self {
        Self::with(options, resolver, Matcher::builder().build())
    }

    fn with(options: FetchOptions, resolver: Arc<dyn Resolve>, proxies: Matcher) -> Self {
        let tls = tls::config(&options);
        Self {
            connector: Arc::new(Connector::new(options.blocked, resolver, proxies, tls)),
            max_bytes: options.max_bytes,
        }
    }

    /// Returns the body of the document, if the server responds with success. The timeout covers resolving, connecting,
    /// redirects and the body.
    pub async fn get(&self, url: &str, timeout: Duration) -> Result<Bytes, FetchError> {
        let document = self.follow(url);
        match tokio::time::timeout(timeout, document).await {
            Ok(answer) => answer,
            Err(_) => Err(FetchError::Timeout(timeout)),
        }
    }

    /// Follows redirects to a document.
    async fn follow(&self, url: &str) -> Result<Bytes, FetchError> {
        let mut url = parse(url)?;
        for _ in 0..=MAX_REDIRECTS {
            match self.get_once(&url).await? {
                Answer::Document(body) => return Ok(body),
                Answer::Moved(to) => url = target(&url, &to)?,
            }
        }
        Err(FetchError::Redirect(format!("more than {MAX_REDIRECTS} redirects")))
    }

    async fn get_once(&self, url: &Url) -> Result<Answer, FetchError> {
        let (stream, through_proxy) = self.connector.connect(url).await?;
        exchange(stream, request(url, through_proxy.as_ref())?, self.max_bytes).await
    }
}

/// Response of a server.
enum Answer {
    /// The document.
    Document(Bytes),
    /// A redirect target, as written.
    Moved(String),
}

/// Parses a URL of a user.
fn parse(text: &str) -> Result<Url, FetchError> {
    let url = Url::parse(text).map_err(|error| FetchError::Url(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(FetchError::Url(format!(
            "scheme {:?} is neither http nor https",
            url.scheme()
        )));
    }
    Ok(url)
}

/// Resolves a redirect. A document requested over TLS is not fetched without it.
fn target(from: &Url, to: &str) -> Result<Url, FetchError> {
    let joined = from.join(to).map_err(|error| FetchError::Redirect(error.to_string()))?;
    let url = parse(joined.as_str()).map_err(|error| FetchError::Redirect(error.to_string()))?;
    if from.scheme() == "https" && url.scheme() != "https" {
        return Err(FetchError::Redirect("from https to http".to_owned()));
    }
    Ok(url)
}

/// Returns the request; a plain HTTP proxy gets the whole URL.
fn request(url: &Url, proxy: Option<&connect::ThroughProxy>) -> Result<Request<Empty<Bytes>>, FetchError> {
    let invalid = |error: &dyn std::fmt::Display| FetchError::Url(error.to_string());
    let path = match url.query() {
        Some(query) => format!("{}?{query}", url.path()),
        None => url.path().to_owned(),
    };
    let host = connect::authority(url);
    let target = match proxy {
        Some(_) => format!("{}://{host}{path}", url.scheme()),
        None => path,
    };
    let mut request = Request::get(target)
        .header(header::HOST, host)
        .header(header::USER_AGENT, "istiod")
        .header(header::ACCEPT, "application/json, */*")
        .header(header::CONNECTION, "close");
    if let Some(authorization) = proxy.and_then(|proxy| proxy.authorization.clone()) {
        request = request.header(header::PROXY_AUTHORIZATION, authorization);
    }
    if let Some(credentials) = basic_authorization(url).map_err(|error| invalid(&error))? {
        request = request.header(header::AUTHORIZATION, credentials);
    }
    request.body(Empty::new()).map_err(|error| invalid(&error))
}

/// Returns user and password of a URL as a value of `Authorization`; `None` if the URL has neither.
pub fn basic_authorization(url: &Url) -> Result<Option<HeaderValue>, header::InvalidHeaderValue> {
    use base64::{Engine, prelude::BASE64_STANDARD};
    if url.username().is_empty() && url.password().is_none() {
        return Ok(None);
    }
    let plain = |text: &str| percent_encoding::percent_decode_str(text).collect::<Vec<u8>>();
    let mut pair = plain(url.username());
    pair.push(b':');
    pair.extend(plain(url.password().unwrap_or_default()));
    let mut value = HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(pair)))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Sends the request and reads the response, on a connection used once.
async fn exchange(stream: Stream, request: Request<Empty<Bytes>>, max_bytes: usize) -> Result<Answer, FetchError> {
    let broken = |error: hyper::Error| FetchError::Http(error.to_string());
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(broken)?;
        read(response, max_bytes).await
    };
    // The connection drives the exchange and may end before the last bytes of the body are read.
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        _ended = connection => answer.await,
    }
}

async fn read(response: Response<Incoming>, max_bytes: usize) -> Result<Answer, FetchError> {
    let status = response.status();
    if is_redirect(status)
        && let Some(to) = response.headers().get(header::LOCATION)
    {
        let to = to
            .to_str()
            .map_err(|_| FetchError::Redirect("the Location is no text".to_owned()))?;
        return Ok(Answer::Moved(to.to_owned()));
    }
    if !status.is_success() {
        return Err(FetchError::Status(status.as_u16()));
    }
    let mut body = response.into_body();
    let mut document = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| FetchError::Http(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if document.len() + data.len() > max_bytes {
            return Err(FetchError::TooLarge(max_bytes));
        }
        document.extend_from_slice(&data);
    }
    Ok(Answer::Document(document.freeze()))
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    )
}
