//! Layers inside the large modules: a submodule imports only submodules before it. No folder has an import cycle.

use libtest_mimic::{Failed, Trial};

use super::graph::{FOLDERS, Graph};
use super::source::sources;
use super::verdict;

/// The submodules of the large modules, bottom up.
const LAYERS: &[(&str, &[&str])] = &[
    (
        "generate",
        &[
            // Messages and names.
            "wire",
            "constant",
            "block",
            "encoded",
            "name",
            "tls",
            "traffic_policy",
            // The proxy, and access to the mesh.
            "proxy",
            "vip",
            "requested",
            "build_context",
            "resource",
            // Inputs that many types share.
            "proxy_class",
            "waypoint",
            "patch",
            "selected",
            "proxy_view",
            "labels",
            "gateway",
            "tunnel",
            // Types of resources.
            "filter",
            "endpoint",
            "cluster",
            "route",
            "listener",
            "extension",
            "secret",
            "name_table",
            "address",
            "authorization",
            "trust_anchors",
            "grpc",
            "config_object",
            // Dispatch by type, and the memos.
            "plan",
            "store",
        ],
    ),
    (
        "model",
        &[
            "export",
            "features",
            "installation",
            "canonical",
            "identity",
            "selector",
            "service",
            "policy",
            "authentication",
            "inputs",
            "output_limit",
            "change",
            "cluster_local",
            "credential",
            "destination_rule",
            "network",
            "workload",
            "endpoint",
            "envoy_filter",
            "extension",
            "gateway",
            "locality_dependencies",
            "per_replica",
            "virtual_service",
            "reference",
            "sidecar_scope",
            "external_dependencies",
            "waypoint",
            "ambient",
            "gateway_api",
            "ambient_status",
            "ingress",
            "snapshot",
            "world",
        ],
    ),
    (
        "xds",
        &[
            "admission",
            "order",
            "protocol",
            "share",
            "attribution",
            "watched",
            "delta",
            "sotw",
            "connection",
            "debug",
            "config_objects",
            "events",
            "message",
            "metrics",
            "registry",
            "request",
            "stream",
            "server",
        ],
    ),
];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("tidy::layers::modules_import_lower_layers", modules_import_lower_layers),
        Trial::test("tidy::layers::folders_have_no_cycles", folders_have_no_cycles),
    ]
}

fn modules_import_lower_layers() -> Result<(), Failed> {
    let sources = sources();
    let mut breaches = Vec::new();
    for (folder, layers) in LAYERS {
        let graph = Graph::of(folder, &sources);
        let missing = graph.imports.keys().filter(|module| !layers.contains(&module.as_str()));
        breaches.extend(missing.map(|module| format!("src/{folder}: {module} is not in the list of layers")));
        let gone = layers.iter().filter(|module| !graph.imports.contains_key(**module));
        breaches
            .extend(gone.map(|module| format!("src/{folder}: {module} is in the list of layers but does not exist")));
        let position = |module: &str| layers.iter().position(|layer| *layer == module);
        for (module, imports) in &graph.imports {
            let above = imports.iter().filter(|import| position(import) > position(module));
            breaches.extend(above.map(|import| format!("src/{folder}: {module} imports {import}, which is above it")));
        }
    }
    verdict(
        "a module imports only modules before it in tests/tidy/layers.rs",
        breaches,
    )
}

fn folders_have_no_cycles() -> Result<(), Failed> {
    let sources = sources();
    let mut breaches = Vec::new();
    for folder in FOLDERS {
        let graph = Graph::of(folder, &sources);
        for cycle in graph.cycles() {
            let modules: Vec<&str> = cycle.into_iter().collect();
            let modules = modules.join(", ");
            breaches.push(format!("src/{folder}: {modules} import each other (see `make graph`)"));
        }
    }
    verdict("modules of a folder do not import each other in a circle", breaches)
}
