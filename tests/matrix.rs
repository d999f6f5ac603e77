//! Access control: every caller requests every endpoint for every namespace, with a real daemon and a real API server.
//!
//! The expected results come from [`rule`], which is written from the documented guarantees, not from the
//! implementation.

mod attempt;
mod fixture;

use std::time::Duration;

use libtest_mimic::{Failed, Trial};

use crate::support::http::RUNTIME;
use crate::support::{kubernetes, wait};
use attempt::{Failure, attempt};
use fixture::{Caller, Fixture};

pub(crate) fn trials() -> Vec<Trial> {
    vec![kubernetes::trial(
        "matrix::r5_r9_r10_r11_access_control_matrix",
        access_control_matrix,
    )]
}

/// Time limit for a request on a quiet machine. A request without an answer is a failure that names it.
const LONGEST: Duration = Duration::from_mins(3);

/// The namespaces of the test; the last is the control plane's.
const NAMESPACES: [&str; 3] = ["a", "b", SYSTEM];
const SYSTEM: &str = "istio-system";
/// The account that may list the Secrets of its namespace, in `a` and in `b`.
const GATEWAY: &str = "gw";

/// A request about a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    /// Clusters, as a proxy of that namespace.
    Clusters,
    /// Listeners, as a proxy of that namespace.
    Listeners,
    /// The name table, as a proxy of that namespace.
    Names,
    /// A certificate in a Secret of that namespace, as a proxy of the caller's namespace.
    Secret,
    /// A certificate in a Secret of that namespace, as a proxy of that namespace.
    SecretThere,
    /// `istio.io/debug/syncz`: whether it lists proxies of that namespace.
    SyncStatus,
    /// `istio.io/debug/config_dump` of a proxy in that namespace.
    Dump,
    /// `istio.io/debug` with the page of a proxy in that namespace.
    PageOfProxy,
    /// `istio.io/debug` with a page of the whole mesh.
    PageOfMesh,
    /// The page of a proxy in that namespace, over HTTP from another machine.
    HttpOfProxy,
    /// A page of the whole mesh, over HTTP from another machine.
    HttpOfMesh,
    /// A certificate for the caller's own identity, if it is in that namespace.
    OwnCertificate,
    /// A certificate for another account in that namespace.
    Impersonation,
    /// The query of a replica: the status of proxies of that namespace.
    Replicas,
}

const ENDPOINTS: [Endpoint; 14] = [
    Endpoint::Clusters,
    Endpoint::Listeners,
    Endpoint::Names,
    Endpoint::Secret,
    Endpoint::SecretThere,
    Endpoint::SyncStatus,
    Endpoint::Dump,
    Endpoint::PageOfProxy,
    Endpoint::PageOfMesh,
    Endpoint::HttpOfProxy,
    Endpoint::HttpOfMesh,
    Endpoint::OwnCertificate,
    Endpoint::Impersonation,
    Endpoint::Replicas,
];

/// Reports whether a caller may have a resource.
fn rule(caller: &Caller, endpoint: Endpoint, target: &str) -> bool {
    let Some((namespace, account)) = caller.is else {
        // Configuration is served in plaintext to every client, for trusted networks; nothing else is.
        return caller.is_plaintext && matches!(endpoint, Endpoint::Clusters | Endpoint::Listeners | Endpoint::Names);
    };
    let is_own = namespace == target;
    match endpoint {
        Endpoint::Clusters | Endpoint::Listeners | Endpoint::Names | Endpoint::OwnCertificate => is_own,
        Endpoint::Secret | Endpoint::SecretThere => is_own && account == GATEWAY,
        Endpoint::SyncStatus | Endpoint::Dump | Endpoint::PageOfProxy => is_own || namespace == SYSTEM,
        Endpoint::PageOfMesh => namespace == SYSTEM,
        // A plaintext connection has no client certificate.
        Endpoint::HttpOfProxy => caller.credentials.token.is_some() && (is_own || namespace == SYSTEM),
        Endpoint::HttpOfMesh => caller.credentials.token.is_some() && namespace == SYSTEM,
        Endpoint::Impersonation => false,
        Endpoint::Replicas => !caller.is_plaintext && namespace == SYSTEM && account == "istiod",
    }
}

fn access_control_matrix(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let _connected = RUNTIME.block_on(fixture.connect_proxies())?;
    fixture.await_denials()?;
    let callers = fixture.callers()?;
    let cells = callers.iter().flat_map(|caller| {
        let tried = ENDPOINTS.into_iter().filter(|endpoint| fixture.can_try(*endpoint));
        let of_caller = tried.flat_map(|endpoint| NAMESPACES.map(|target| (endpoint, target)));
        of_caller.map(move |(endpoint, target)| (caller, endpoint, target))
    });
    // Two rounds: resources cached in the first must not be given to other callers in the second.
    let cells: Vec<_> = cells.collect();
    let mut wrong = Vec::new();
    for round in 1..=2 {
        for chunk in cells.chunks(24) {
            let tried = chunk.iter().map(|(caller, endpoint, target)| {
                tokio::time::timeout(wait::extended(LONGEST), attempt(&fixture, caller, *endpoint, target))
            });
            let outcomes = RUNTIME.block_on(async { futures::future::join_all(tried).await });
            for ((caller, endpoint, target), outcome) in chunk.iter().zip(outcomes) {
                let outcome = outcome.unwrap_or_else(|_| Err(Failure::Unanswered("timed out".to_owned())));
                let (is_given, was) = match outcome {
                    Ok(()) => (Some(true), "given".to_owned()),
                    Err(Failure::Refused(why)) => (Some(false), format!("refused: {why}")),
                    Err(Failure::Unanswered(why)) => (None, format!("unanswered: {why}")),
                };
                if is_given != Some(rule(caller, *endpoint, target)) {
                    let name = caller.name;
                    wrong.push(format!("round {round}: {name} × {endpoint:?} × {target}: {was}"));
                }
            }
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Failed::from(wrong.join("\n")))
}
