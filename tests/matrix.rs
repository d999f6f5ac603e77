//! Who gets what: every caller at every endpoint for every namespace, with a real daemon and a real API server.
//!
//! The rule that is tried stands in [`rule`], written from what users are promised, not from how it is done.

mod attempt;
mod bed;

use libtest_mimic::{Failed, Trial};

use crate::support::http::RUNTIME;
use crate::support::kubernetes;
use attempt::attempt;
use bed::{Bed, Caller};

pub(crate) fn trials() -> Vec<Trial> {
    vec![kubernetes::trial("matrix::r5_r9_r10_r11_who_gets_what", who_gets_what)]
}

/// The namespaces that things belong to; the last is the control plane's.
const NAMESPACES: [&str; 3] = ["a", "b", SYSTEM];
const SYSTEM: &str = "istio-system";
/// The account that may list the Secrets of its namespace, in `a` and in `b`.
const GATEWAY: &str = "gw";

/// What is asked for of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    /// Clusters, as a proxy of that namespace.
    Clusters,
    /// Listeners, likewise.
    Listeners,
    /// The name table, likewise.
    Names,
    /// A certificate in a Secret there, as a proxy of the own namespace.
    Secret,
    /// The same, as a proxy of that namespace.
    SecretThere,
    /// `istio.io/debug/syncz`: whether proxies there are told of.
    SyncStatus,
    /// `istio.io/debug/config_dump` of a proxy there.
    Dump,
    /// `istio.io/debug` with the page of a proxy there.
    PageOfProxy,
    /// `istio.io/debug` with a page of the whole mesh.
    PageOfMesh,
    /// The page of a proxy there, over HTTP from another machine.
    HttpOfProxy,
    /// A page of the whole mesh, likewise.
    HttpOfMesh,
    /// A certificate for the caller, if it is of that namespace.
    OwnCertificate,
    /// A certificate for an account there.
    Impersonation,
}

const ENDPOINTS: [Endpoint; 13] = [
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
];

/// Whether a caller is given what it asks for.
fn rule(caller: &Caller, endpoint: Endpoint, target: &str) -> bool {
    let Some((namespace, account)) = caller.is else {
        // Configuration is served in plaintext to whoever asks, for networks that are trusted; nothing else is.
        return caller.is_plaintext && matches!(endpoint, Endpoint::Clusters | Endpoint::Listeners | Endpoint::Names);
    };
    let is_own = namespace == target;
    match endpoint {
        Endpoint::Clusters | Endpoint::Listeners | Endpoint::Names | Endpoint::OwnCertificate => is_own,
        Endpoint::Secret | Endpoint::SecretThere => is_own && account == GATEWAY,
        Endpoint::SyncStatus | Endpoint::Dump | Endpoint::PageOfProxy => is_own || namespace == SYSTEM,
        Endpoint::PageOfMesh => namespace == SYSTEM,
        // A certificate cannot be shown in plaintext.
        Endpoint::HttpOfProxy => caller.shown.token.is_some() && (is_own || namespace == SYSTEM),
        Endpoint::HttpOfMesh => caller.shown.token.is_some() && namespace == SYSTEM,
        Endpoint::Impersonation => false,
    }
}

fn who_gets_what(name: &str) -> Result<(), Failed> {
    let bed = Bed::start(name)?;
    let _connected = RUNTIME.block_on(bed.connect_proxies())?;
    let callers = bed.callers()?;
    let cells = callers.iter().flat_map(|caller| {
        let tried = ENDPOINTS.into_iter().filter(|endpoint| bed.can_try(*endpoint));
        let of_caller = tried.flat_map(|endpoint| NAMESPACES.map(|target| (endpoint, target)));
        of_caller.map(move |(endpoint, target)| (caller, endpoint, target))
    });
    // Twice: what was held for the first round must not be handed to somebody else in the second.
    let cells: Vec<_> = cells.collect();
    let mut wrong = Vec::new();
    for round in 1..=2 {
        for chunk in cells.chunks(24) {
            let tried = chunk
                .iter()
                .map(|(caller, endpoint, target)| attempt(&bed, caller, *endpoint, target));
            let outcomes = RUNTIME.block_on(futures::future::join_all(tried));
            for ((caller, endpoint, target), outcome) in chunk.iter().zip(outcomes) {
                if outcome.is_ok() != rule(caller, *endpoint, target) {
                    let name = caller.name;
                    let was = outcome.map_or_else(|why| format!("refused: {why}"), |()| "given".to_owned());
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
