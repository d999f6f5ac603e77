//! Connections that pods open.

use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::addresses::{NoRoute, Request, Route};
use super::socket::{Transport, accept, connect, original_destination};
use super::{Member, OUTBOUND, Shared, count, start, tunnel};
use crate::lab::app::listen;

/// Carries the connections of a pod.
pub(super) fn serve(shared: &Arc<Shared>, member: &Arc<Member>) -> Result<JoinHandle<()>, String> {
    let listener = listen(&member.host, OUTBOUND).map_err(|error| format!("{}: {error}", member.name))?;
    let (shared, member) = (Arc::clone(shared), Arc::clone(member));
    Ok(start(accept(listener, move |stream| {
        carry(Arc::clone(&shared), Arc::clone(&member), stream)
    })))
}

async fn carry(shared: Arc<Shared>, member: Arc<Member>, mut stream: TcpStream) {
    match open(&shared, &member, &stream).await {
        // Either side may close at any time.
        Ok(mut upstream) => drop(copy_bidirectional(&mut stream, &mut *upstream).await),
        Err(error) => shared.say(&format!("{}: connection refused: {error}", member.name)),
    }
}

/// Opens the way to the destination of a connection.
async fn open(shared: &Shared, member: &Member, stream: &TcpStream) -> Result<Box<dyn Transport>, String> {
    let destination = original_destination(stream).map_err(|error| error.to_string())?;
    let source = shared.workload(member).await?;
    let request = Request {
        source: &source,
        network: &shared.spec.network,
        destination,
        turn: shared.next_turn(),
    };
    let route = loop {
        let found = shared.discovery.view().route(request);
        match found {
            Ok(route) => break route,
            Err(NoRoute::Unknown(name)) => shared.discovery.require(&name).await?,
            Err(NoRoute::Unreachable(reason)) => return Err(format!("{destination}: {reason}")),
        }
    };
    shared.say(&format!("{} -> {destination}: {route:?}", member.name));
    let opened = match &route {
        Route::Direct(to) => {
            let stream = connect(&member.host, *to).await;
            stream
                .map(|stream| Box::new(stream) as _)
                .map_err(|error| error.to_string())
        }
        Route::Tunnel(hop) => shared.pool.open(member, hop).await,
        Route::Nested { outer, inner } => {
            let carrier = shared.pool.open(member, outer).await?;
            tunnel::open_inside(member, carrier, outer, inner).await
        }
    };
    let counter = match route {
        Route::Direct(_) => &shared.counts.direct,
        Route::Tunnel(_) | Route::Nested { .. } => &shared.counts.opened,
    };
    let opened = opened.map_err(|error| format!("{destination}: {route:?}: {error}"))?;
    count(counter);
    Ok(opened)
}
