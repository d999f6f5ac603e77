//! Connections to document servers: name resolution, address checks, proxies, TLS.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderValue, Request, header};
use http_body_util::Empty;
use hyper_util::{
    client::proxy::matcher::{Intercept, Matcher},
    rt::TokioIo,
};
use ipnet::IpNet;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use url::{Host, Url};

use super::FetchError;

/// Timeout per address if there are several.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Resolves host names.
pub trait Resolve: Send + Sync {
    /// Returns the addresses of a host name, in the order in which to try them.
    fn addresses<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// Resolves like other programs of the system: `/etc/hosts`, DNS, search domains.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn addresses<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            let found = tokio::net::lookup_host((host, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// Read and write halves of a connection.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection, with or without TLS.
pub(super) type Stream = Box<dyn Duplex>;

/// Marks a connection through a plain HTTP proxy.
pub(super) struct ThroughProxy {
    /// Credentials for the proxy.
    pub(super) authorization: Option<HeaderValue>,
}

/// Makes connections.
pub(super) struct Connector {
    blocked: Vec<IpNet>,
    resolver: Arc<dyn Resolve>,
    proxies: Matcher,
    tls: TlsConnector,
}

impl Connector {
    pub(super) fn new(
        blocked: Vec<IpNet>,
        resolver: Arc<dyn Resolve>,
        proxies: Matcher,
        tls: Arc<ClientConfig>,
    ) -> Self {
        Self {
            blocked,
            resolver,
            proxies,
            tls: TlsConnector::from(tls),
        }
    }

    /// Returns a connection for requesting the document of a URL.
    pub(super) async fn connect(&self, url: &Url) -> Result<(Stream, Option<ThroughProxy>), FetchError> {
        let (host, port) = host_and_port(url)?;
        let is_tls = url.scheme() == "https";
        let proxy = self.proxy(url, &host);
        let (stream, through) = match proxy {
            None => (self.dial(&host, port).await?, None),
            Some(proxy) => {
                self.check_behind_proxy(&host).await?;
                let authorization = proxy.basic_auth().cloned();
                let stream = self.dial_proxy(&proxy).await?;
                if is_tls {
                    (tunnel(stream, url, authorization).await?, None)
                } else {
                    (stream, Some(ThroughProxy { authorization }))
                }
            }
        };
        if !is_tls {
            return Ok((Box::new(stream), through));
        }
        let failed = |reason: String| FetchError::Tls {
            host: host.to_string(),
            reason,
        };
        let name = match &host {
            Host::Domain(name) => ServerName::try_from(name.clone()).map_err(|error| failed(error.to_string()))?,
            Host::Ipv4(ip) => ServerName::from(IpAddr::from(*ip)),
            Host::Ipv6(ip) => ServerName::from(IpAddr::from(*ip)),
        };
        let stream = self
            .tls
            .connect(name, stream)
            .await
            .map_err(|error| failed(error.to_string()))?;
        Ok((Box::new(stream), None))
    }

    /// Connects to a server that a user named.
    async fn dial(&self, host: &Host<String>, port: u16) -> Result<TcpStream, FetchError> {
        let addresses = self.allowed(host).await?;
        connect_first(&host.to_string(), &addresses, port).await
    }

    /// Returns the allowed addresses of a host; never empty.
    async fn allowed(&self, host: &Host<String>) -> Result<Vec<IpAddr>, FetchError> {
        let mut addresses = self.resolve(host).await?;
        let blocked = addresses.iter().find_map(|ip| Some((*ip, blocks(&self.blocked, *ip)?)));
        addresses.retain(|ip| blocks(&self.blocked, *ip).is_none());
        match blocked {
            Some((address, range)) if addresses.is_empty() => Err(FetchError::Blocked {
                host: host.to_string(),
                address,
                range,
            }),
            _ => Ok(addresses),
        }
    }

    async fn resolve(&self, host: &Host<String>) -> Result<Vec<IpAddr>, FetchError> {
        let name = match host {
            Host::Ipv4(ip) => return Ok(vec![IpAddr::from(*ip)]),
            Host::Ipv6(ip) => return Ok(vec![IpAddr::from(*ip)]),
            Host::Domain(name) => name,
        };
        let failed = |reason: String| FetchError::Resolve {
            host: name.clone(),
            reason,
        };
        let found = self.resolver.addresses(name).await;
        let found = found.map_err(|error| failed(error.to_string()))?;
        if found.is_empty() {
            return Err(failed("no addresses".to_owned()));
        }
        Ok(found)
    }

    /// Returns the proxy for a URL; servers of this host need none, as in Go.
    fn proxy(&self, url: &Url, host: &Host<String>) -> Option<Intercept> {
        let is_local = match host {
            Host::Domain(name) => name == "localhost",
            Host::Ipv4(ip) => ip.is_loopback(),
            Host::Ipv6(ip) => ip.is_loopback(),
        };
        if is_local {
            return None;
        }
        self.proxies.intercept(&url.as_str().parse().ok()?)
    }

    /// Checks a host behind a proxy. The proxy resolves the name, so only its local meaning can be checked; a name
    /// without one is left to the proxy.
    async fn check_behind_proxy(&self, host: &Host<String>) -> Result<(), FetchError> {
        if self.blocked.is_empty() {
            return Ok(());
        }
        match self.allowed(host).await {
            Ok(_) | Err(FetchError::Resolve { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Connects to a proxy. The operator configured it, so any address is allowed.
    async fn dial_proxy(&self, proxy: &Intercept) -> Result<TcpStream, FetchError> {
        let uri = proxy.uri();
        let host = uri.host().unwrap_or_default();
        let failed = |reason: &str| FetchError::Connect {
            host: format!("proxy {host}"),
            reason: reason.to_owned(),
        };
        if uri.scheme_str() != Some("http") {
            return Err(failed("only proxies with http:// are supported"));
        }
        let parsed = Host::parse(host).map_err(|error| failed(&error.to_string()))?;
        let addresses = self.resolve(&parsed).await?;
        connect_first(&format!("proxy {host}"), &addresses, uri.port_u16().unwrap_or(80)).await
    }
}

/// Returns the range that blocks an address.
fn blocks(blocked: &[IpNet], ip: IpAddr) -> Option<IpNet> {
    let embedded = match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => embedded(ip),
    };
    let mut addresses = vec![ip];
    addresses.extend(embedded.map(IpAddr::V4));
    // Linux connects to this machine for the unspecified address.
    if addresses.iter().any(IpAddr::is_unspecified) {
        addresses.extend([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]);
    }
    let is_within = |range: &&IpNet| addresses.iter().any(|ip| range.contains(ip));
    blocked.iter().find(is_within).copied()
}

/// Returns the IPv4 address embedded in an IPv6 address: mapped (RFC 4291), NAT64's well-known prefix (RFC 6052), 6to4
/// (RFC 3056).
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let from = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(from(high, low)),
        [0x2002, high, low, ..] => Some(from(high, low)),
        _ => None,
    }
}

/// Tries addresses in order.
async fn connect_first(host: &str, addresses: &[IpAddr], port: u16) -> Result<TcpStream, FetchError> {
    let mut reason = String::from("no addresses");
    for (index, ip) in addresses.iter().enumerate() {
        let connecting = TcpStream::connect(SocketAddr::new(*ip, port));
        let is_last = index + 1 == addresses.len();
        let connected = if is_last {
            connecting.await
        } else {
            let limited = tokio::time::timeout(ADDRESS_TIMEOUT, connecting).await;
            limited.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        };
        match connected {
            Ok(stream) => return Ok(stream),
            Err(error) => reason = format!("{ip}: {error}"),
        }
    }
    Err(FetchError::Connect {
        host: host.to_owned(),
        reason,
    })
}

/// Asks a proxy to connect to the server of a URL, and returns the connection through it.
async fn tunnel(stream: TcpStream, url: &Url, authorization: Option<HeaderValue>) -> Result<TcpStream, FetchError> {
    let failed = |reason: String| FetchError::Connect {
        host: format!("{} through the proxy", url.host_str().unwrap_or_default()),
        reason,
    };
    let authority = format!(
        "{}:{}",
        url.host_str().unwrap_or_default(),
        url.port_or_known_default().unwrap_or(443)
    );
    let mut request = Request::connect(&authority).header(header::HOST, &authority);
    if let Some(authorization) = authorization {
        request = request.header(header::PROXY_AUTHORIZATION, authorization);
    }
    let request = request
        .body(Empty::<Bytes>::new())
        .map_err(|error| failed(error.to_string()))?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| failed(error.to_string()))?;
    let connection = connection.without_shutdown();
    tokio::pin!(connection);
    let response = {
        let sending = sender.send_request(request);
        tokio::pin!(sending);
        tokio::select! {
            response = &mut sending => response,
            // The connection ends with the response to CONNECT, which may still have to be read.
            parts = &mut connection => {
                let response = sending.await.map_err(|error| failed(error.to_string()))?;
                return taken_out(parts, response.status()).map_err(failed);
            }
        }
    };
    let status = response.map_err(|error| failed(error.to_string()))?.status();
    taken_out(connection.await, status).map_err(failed)
}

/// Returns the connection below HTTP.
fn taken_out(
    parts: hyper::Result<hyper::client::conn::http1::Parts<TokioIo<TcpStream>>>,
    status: http::StatusCode,
) -> Result<TcpStream, String> {
    if !status.is_success() {
        return Err(format!("it answered with status {}", status.as_u16()));
    }
    let parts = parts.map_err(|error| error.to_string())?;
    // In TLS the server does not send first, so no bytes can be buffered.
    if parts.read_buf.is_empty() {
        Ok(parts.io.into_inner())
    } else {
        Err("it sent data before the connection was used".to_owned())
    }
}

fn host_and_port(url: &Url) -> Result<(Host<String>, u16), FetchError> {
    let missing = || FetchError::Url("it has no host".to_owned());
    let host = url.host().ok_or_else(missing)?.to_owned();
    let port = url.port_or_known_default().ok_or_else(missing)?;
    Ok((host, port))
}

/// Returns the value of the `Host` header.
pub(super) fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}
