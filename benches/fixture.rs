//! Shared code of benches that drive the model and the generators without a daemon.

use istiod::{
    api::{document, folder},
    generate::{
        Proxy,
        proxy::{Extensions, Identity},
    },
    model::{Change, Installation},
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

/// Returns the rows of these objects, and of a mesh config as in a mesh file (none: the defaults).
pub(crate) fn changes(objects: &[Value], mesh_config: Option<&Value>) -> Vec<Change> {
    let installation = Installation::default();
    let files: Vec<_> = mesh_config
        .map(|config| ("mesh.yaml".to_owned(), config.to_string()))
        .into_iter()
        .collect();
    let mesh = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
    let read = |object| document::parse(&installation.cluster, object).rows;
    let rows = mesh.rows.into_values().flatten().chain(objects.iter().flat_map(read));
    rows.map(Change::Upsert).collect()
}

/// An authenticated proxy.
pub(crate) fn proxy(node: &str, metadata: &Value, identity: &str) -> Result<Proxy, String> {
    let metadata = metadata.as_object().into_iter().flatten();
    let metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
    let mut proxy =
        Proxy::new(node, "", metadata, "".into(), Extensions::default()).map_err(|error| error.to_string())?;
    proxy.identity = Identity::from_spiffe(identity);
    Ok(proxy)
}

/// Returns the CPU time of this thread, in milliseconds.
pub(crate) fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
