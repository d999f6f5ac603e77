//! The ports: HTTP from the start, xDS once there is something to serve.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use axum::{
    Router,
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response, StatusCode, header},
    response::IntoResponse,
};
use bytes::Bytes;
use http_body_util::Either;
use hyper::body::Incoming;
use rustix::{io::Errno, net::sockopt::set_ipv6_v6only};
use tokio::{
    net::{TcpListener, TcpSocket, lookup_host},
    runtime::Handle,
    sync::watch,
};
use tower::ServiceExt;

use super::AppError;
use crate::{
    admin::{
        access::Access,
        config_objects::SnapshotObjects,
        controlz,
        debug::{self, wire::XdsDebugHandler},
        http, page,
        profile::Profiles,
        registration,
        renderer::Renderer,
        server,
    },
    auth::{
        Authenticators,
        tls::{Acceptor, HANDSHAKE_TIMEOUT},
    },
    base::address::{HostPort, Port},
    environment::Environment,
    rpc::{self, Accepting, Connections, Peer, PreAuthLimiter, Shedding, body::FlatBody, is_grpc},
    settings::Address,
    webhook::{self, server::InjectionInputs},
    xds::{message::Message, server::Server},
};

/// The maximum number of connections of the webhooks. API servers keep tens of connections.
const MAX_WEBHOOK_CONNECTIONS: u32 = 512;

/// The webhooks, and the bounded set of connections that reach them over TLS.
pub(super) struct Webhooks {
    router: Router,
    limiter: PreAuthLimiter,
}

impl Webhooks {
    /// Creates the pages of the webhooks; that of injection only with its inputs.
    pub(super) fn new(environment: &Environment, injection: Option<InjectionInputs>) -> Result<Self, AppError> {
        let limiter = PreAuthLimiter::new(MAX_WEBHOOK_CONNECTIONS);
        let router = webhook::server::pages(&environment.registry, limiter.clone(), injection)?;
        Ok(Self { router, limiter })
    }
}

/// The inputs of the HTTP ports.
pub(super) struct PageInputs<'a> {
    /// The sources of debug pages.
    pub(super) sources: debug::Sources,
    /// The gRPC services.
    pub(super) grpc: &'a rpc::Router<Server>,
    /// The authentication of readers.
    pub(super) authenticators: Authenticators,
    /// The webhooks.
    pub(super) webhooks: &'a Webhooks,
    /// The runtime that renders the pages.
    pub(super) runtime: &'a Handle,
}

/// Opens the HTTP ports. Pages of empty addresses move to `--httpAddr`.
pub(super) async fn pages(environment: &Arc<Environment>, inputs: PageInputs<'_>) -> Result<(), AppError> {
    let PageInputs {
        sources,
        grpc,
        authenticators,
        webhooks,
        runtime,
    } = inputs;
    let renderer = Renderer::new(environment.tasks.clone(), runtime.clone());
    let flags = &environment.settings.flags;
    let inspect = sources.inspect.clone();
    let sources = Arc::new(sources);
    let access = Access::new(authenticators, sources.mesh.clone());
    let instance = environment.settings.variable("POD_NAME").unwrap_or_default();
    grpc.streams().set_debug_handler(Arc::new(XdsDebugHandler::new(
        sources.clone(),
        access.clone(),
        renderer.clone(),
        instance,
    )));
    let objects = SnapshotObjects::new(access.clone(), sources.committed.clone());
    grpc.streams().set_config_objects(Arc::new(objects));
    let is_shown = sources.mesh.borrow().installation.features.enable_debug_on_http;
    let profiles = Profiles::new(renderer.clone());
    let pages = || match (is_shown, flags.profile) {
        (false, _) => Router::new(),
        (true, has_profiles) => {
            let pages = debug::guarded_pages(sources.clone(), &access, &renderer).merge(page::guarded_page(&access));
            if has_profiles {
                pages.merge(profiles.guarded_pages(&access))
            } else {
                pages
            }
        }
    };
    control(environment, &access, &profiles).await;
    let mut http = server::readiness(environment).merge(pages());
    if is_shown {
        http = http.merge(registration::pages(sources.mesh.clone(), &access, &renderer));
    }
    let monitoring = server::monitoring(environment, inspect, &renderer)?;
    match &flags.monitoring_address() {
        Address(Some(address)) => {
            serve_http(
                environment,
                "--monitoringAddr",
                address,
                monitoring.merge(pages()),
                None,
            )
            .await?;
        }
        Address(None) => http = http.merge(monitoring),
    }
    if flags.https_addr == Address(None) {
        http = http.merge(webhooks.router.clone());
    }
    if let Address(Some(address)) = &flags.http_addr {
        let http2 = (flags.grpc_addr == Address(None)).then(|| with_grpc(environment, &http, grpc));
        serve_http(environment, "--httpAddr", address, http, http2).await?;
    }
    Ok(())
}

/// Answers all requests at the HTTP port with 503 until the future is dropped: the sources of the pages are unknown
/// before the API server is reached. Returns the error if the port cannot be opened.
pub(super) async fn not_ready(environment: &Arc<Environment>) -> AppError {
    if let Address(Some(address)) = &environment.settings.flags.http_addr {
        match bind("--httpAddr", address).await {
            Ok(listener) => {
                // No connection outlives this router.
                let answer = (StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")]);
                let router = Router::new().fallback(async move || answer);
                http::serve(listener, router, None, environment.tasks.clone()).await;
            }
            Err(error) => return error,
        }
    }
    std::future::pending().await
}

/// Opens ControlZ. A port in use does not end the process: other processes of the machine may have ControlZ too.
///
/// Parity (pilot/pkg/bootstrap/server.go): the error is ignored, and `*` stands for all addresses.
async fn control(environment: &Arc<Environment>, access: &Access, profiles: &Profiles) {
    let flags = &environment.settings.flags;
    if flags.ctrlz_port == 0 {
        return;
    }
    let host = if flags.ctrlz_address == "*" {
        ""
    } else {
        &flags.ctrlz_address
    };
    let address = HostPort {
        host: host.into(),
        port: Port::Number(flags.ctrlz_port),
    };
    let others = if flags.profile {
        profiles.guarded_pages(access)
    } else {
        Router::new()
    };
    let pages = controlz::guarded_pages(environment, access, others);
    if let Err(error) = serve_http(environment, "--ctrlz_port", &address, pages, None).await {
        tracing::warn!(%error, "ControlZ is off");
    }
}

/// Opens the plaintext xDS port. Call it only once the sources are synced: a partial mesh must not reach proxies.
pub(super) async fn xds(
    environment: &Arc<Environment>,
    grpc: &rpc::Router<Server>,
    shedding: watch::Receiver<Shedding>,
) -> Result<(), AppError> {
    if let Address(Some(address)) = &environment.settings.flags.grpc_addr {
        let listener = bind("--grpcAddr", address).await?;
        let connections = connections(environment, grpc).with_shedding(shedding);
        environment
            .tasks
            .spawn("xds", async move { connections.serve(listener).await });
    }
    Ok(())
}

/// Opens the TLS port of xDS and the CA once a serving certificate exists. Connections start on `ca_runtime`, which
/// pushes do not block.
pub(super) async fn secure(
    environment: &Arc<Environment>,
    grpc: &rpc::Router<Server>,
    mut acceptor: Acceptor,
    ca_runtime: &Handle,
    shedding: watch::Receiver<Shedding>,
) -> Result<(), AppError> {
    let Address(Some(address)) = &environment.settings.flags.secure_grpc_addr else {
        return Ok(());
    };
    if !acceptor.ready().await {
        return Ok(());
    }
    let listener = bind("--secureGRPCAddr", address).await?;
    let connections = connections(environment, grpc)
        .with_stream_runtime(Handle::current())
        .with_shedding(shedding);
    let handshake = move |stream| {
        let acceptor = acceptor.clone();
        async move { acceptor.accept(stream).await.map_err(io::Error::other) }
    };
    environment.tasks.spawn_on(ca_runtime, "secure xds", async move {
        connections.serve_tls(listener, handshake).await;
    });
    Ok(())
}

/// Opens the port of the webhooks once a serving certificate exists. Requests are answered on `ca_runtime`, which
/// pushes do not block.
pub(super) async fn webhooks(
    environment: &Arc<Environment>,
    webhooks: Webhooks,
    mut acceptor: Acceptor,
    ca_runtime: &Handle,
) -> Result<(), AppError> {
    let Address(Some(address)) = &environment.settings.flags.https_addr else {
        return Ok(());
    };
    if !acceptor.ready().await {
        return Ok(());
    }
    let listener = bind("--httpsAddr", address).await?;
    let handshake = move |stream| {
        let acceptor = acceptor.clone();
        async move { acceptor.accept(stream).await.map_err(io::Error::other) }
    };
    let router = server::readiness(environment).merge(webhooks.router);
    let tasks = environment.tasks.clone();
    let serve = move |established| {
        let serving = http::webhooks(established, router.clone(), tasks.clone());
        tasks.spawn("webhook connection", serving);
    };
    let accepting = Accepting {
        tasks: environment.tasks.clone(),
        limiter: webhooks.limiter,
        handshake_timeout: HANDSHAKE_TIMEOUT,
    };
    environment.tasks.spawn_on(ca_runtime, "webhooks", async move {
        accepting.run(listener, handshake, serve).await;
    });
    Ok(())
}

/// Serves HTTP/2 connections of the HTTP port like those of the xDS port, with the same limits.
fn with_grpc(environment: &Environment, pages: &Router, grpc: &rpc::Router<Server>) -> http::Http2 {
    let service = GrpcAndPages {
        grpc: grpc.clone(),
        pages: pages.clone(),
        ready: environment.ready.subscribe(),
    };
    let options = grpc.streams().connection_options();
    let connections = Connections::new(service, options, environment.tasks.clone());
    Arc::new(move |stream, address| {
        let connections = connections.clone();
        Box::pin(async move {
            // Responses are written when they are complete, so Nagle's algorithm would only delay them.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, %address, "failed to set TCP_NODELAY");
            }
            connections.connection(stream, Peer::plaintext(address)).await;
        })
    })
}

/// The services of the HTTP port if there is no xDS port.
#[derive(Clone)]
struct GrpcAndPages {
    grpc: rpc::Router<Server>,
    pages: Router,
    ready: watch::Receiver<bool>,
}

impl rpc::Service for GrpcAndPages {
    type Data = Bytes;
    type Body = Either<FlatBody<Message>, Body>;

    async fn handle(&self, mut request: Request<Incoming>) -> Response<Self::Body> {
        if is_grpc(request.headers()) && *self.ready.borrow() {
            return self.grpc.handle(request).await.map(|body| Either::Left(body.into()));
        }
        if is_grpc(request.headers()) {
            return StatusCode::SERVICE_UNAVAILABLE.into_response().map(Either::Right);
        }
        if let Some(address) = request.extensions().get::<Peer>().map(|peer| peer.address) {
            request.extensions_mut().insert(ConnectInfo(address));
        }
        let Ok(response) = self.pages.clone().oneshot(request.map(Body::new)).await;
        response.map(Either::Right)
    }
}

fn connections(environment: &Environment, grpc: &rpc::Router<Server>) -> Connections<rpc::Router<Server>> {
    let options = grpc.streams().connection_options();
    Connections::new(grpc.clone(), options, environment.tasks.clone())
}

/// The accept backlog, capped by `net.core.somaxconn`. Thousands of proxies reconnect at once when a replica is lost,
/// and connections beyond the backlog are reset.
const BACKLOG: u32 = 1 << 16;

/// The file with the names of services. Without it, those that are built in are known.
const SERVICES: &str = "/etc/services";

async fn bind(flag: &'static str, address: &HostPort) -> Result<TcpListener, AppError> {
    let listener = listener(address).await.map_err(|source| AppError::Listen {
        address: address.clone(),
        flag,
        source,
    })?;
    tracing::info!(flag, address = %listener.local_addr()?, "listening");
    Ok(listener)
}

/// Listens as Go does (`net.Listen`): without a host on both address families, at a host name on its first IPv4
/// address, or else its first address. A port may be the name of a service.
async fn listener(address: &HostPort) -> io::Result<TcpListener> {
    let services = match address.port {
        Port::Number(_) => String::new(),
        Port::Service(_) => tokio::fs::read_to_string(SERVICES).await.unwrap_or_default(),
    };
    let port = address.port.number(&services).ok_or_else(|| {
        let message = format!("unknown port: {SERVICES} has no TCP service {}", address.port);
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })?;
    if address.is_wildcard() {
        return match socket((Ipv6Addr::UNSPECIFIED, port).into()) {
            // A machine without IPv6.
            Err(error) if is_unsupported(&error) => socket((Ipv4Addr::UNSPECIFIED, port).into()),
            listening => listening,
        };
    }
    let found: Vec<SocketAddr> = lookup_host((address.host.as_str(), port)).await?.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    let first = first.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no address"))?;
    socket(*first)
}

/// Returns true for the errors of IPv6 sockets where the kernel has no IPv6.
fn is_unsupported(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        number,
        Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL | Errno::PROTONOSUPPORT)
    )
}

fn socket(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        let socket = TcpSocket::new_v6()?;
        // The default of the machine (net.ipv6.bindv6only) does not count.
        set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
        socket
    };
    // Allows a restart while connections of the previous process are in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn serve_http(
    environment: &Arc<Environment>,
    flag: &'static str,
    address: &HostPort,
    router: Router,
    http2: Option<http::Http2>,
) -> Result<(), AppError> {
    let listener = bind(flag, address).await?;
    let tasks = environment.tasks.clone();
    environment
        .tasks
        .spawn("http", async move { http::serve(listener, router, http2, tasks).await });
    Ok(())
}
