//! The table of pages: the only list of their names, handlers, access rules and descriptions. The router, the index and
//! `docs/debug-pages.md` are made from it.

use std::sync::Arc;

use axum::{
    Extension, Router,
    extract::{Query, State},
    response::{Html, Response},
    routing::{MethodRouter, get},
};
use serde_json::json;

use super::{
    SharedSources, Sources,
    forms::{ambient, endpoint, object, policy, scope, service},
    pages::{
        self, Parameters, Shown, adsz, cachez, certificatez, clusterz, config_dump, connections, endpoint_shards,
        force_disconnect, inject, instancesz, jwksz, krtz, notez, of_mesh, of_type, proxyz, push_status, reply,
        servicez, sidecarz, syncz, telemetryz, watchz,
    },
    status,
};
use crate::{
    admin::{
        access::{PREFIX, Readers},
        renderer::Renderer,
    },
    generate::ResourceType,
    model::features::Features,
};

/// Origin of a page's URL and form.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Istio,
    Own,
}

/// Condition under which a page exists.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Condition {
    Always,
    /// `UNSAFE_ENABLE_ADMIN_ENDPOINTS`.
    UnsafeEndpoints,
}

/// The way in which a page is rendered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rendering {
    /// In turn with other pages.
    InTurn,
    /// Beside other pages, since it waits for other replicas.
    Waiting,
    /// As a stream of events, and not as a whole.
    Events,
}

/// A page below `/debug/`.
pub(super) struct Page {
    pub(super) name: &'static str,
    /// Queries that Istio lists beside the page.
    queries: &'static [&'static str],
    readers: Readers,
    pub(super) origin: Origin,
    condition: Condition,
    rendering: Rendering,
    /// Content and query parameters.
    description: &'static str,
    handler: fn() -> MethodRouter<SharedSources>,
}

impl Page {
    const fn queries(self, queries: &'static [&'static str]) -> Self {
        Self { queries, ..self }
    }

    /// Returns a page that Istio does not have.
    const fn own(self) -> Self {
        Self {
            origin: Origin::Own,
            ..self
        }
    }

    /// Returns a page about one proxy, for callers of the proxy's namespace too.
    const fn of_proxy(self) -> Self {
        Self {
            readers: Readers::ProxyNamespace,
            ..self
        }
    }

    const fn waiting(self) -> Self {
        Self {
            rendering: Rendering::Waiting,
            ..self
        }
    }

    const fn events(self) -> Self {
        Self {
            rendering: Rendering::Events,
            ..self
        }
    }

    const fn unsafe_endpoint(self) -> Self {
        Self {
            condition: Condition::UnsafeEndpoints,
            ..self
        }
    }

    fn is_shown(&self, features: &Features) -> bool {
        match self.condition {
            Condition::Always => true,
            Condition::UnsafeEndpoints => features.unsafe_enable_admin_endpoints,
        }
    }
}

const fn page(name: &'static str, handler: fn() -> MethodRouter<SharedSources>, description: &'static str) -> Page {
    Page {
        name,
        queries: &[],
        readers: Readers::ControlPlane,
        origin: Origin::Istio,
        condition: Condition::Always,
        rendering: Rendering::InTurn,
        description,
        handler,
    }
}

/// All pages, by name.
pub(super) const PAGES: &[Page] = &[
    page(
        "adsz",
        || get(adsz),
        "connected clients with the resources that they watch, a million names at most. `proxyID` filters; `push=true` \
         pushes pending changes without waiting for the debounce interval",
    )
    .queries(&["push=true"]),
    page(
        "ambientz",
        || get(of_mesh(ambient::ambient)),
        "workloads, services and policies for ztunnels",
    ),
    page(
        "authorizationz",
        || get(of_mesh(policy::authorization)),
        "AuthorizationPolicies by namespace",
    ),
    page(
        "cachez",
        || get(cachez),
        "names of generated resources by type. `sizes=true` shows their sizes; `clear=true` drops encoded responses \
         (resources are never outdated and stay)",
    )
    .queries(&["clear=true", "sizes=true"]),
    page(
        "certificatez",
        || get(certificatez),
        "certificates by expiry: roots of the mesh, the CA's own, and those in Secrets",
    )
    .own(),
    page(
        "clusterz",
        || get(clusterz),
        "clusters with their state, kubeconfig errors, and `staleSince` while a stored state serves",
    ),
    page(
        "config_dump",
        || get(config_dump),
        "resources of a proxy as Envoy shows them: `proxyID`, `types`, `include_eds`",
    )
    .of_proxy(),
    page(
        "configz",
        || get(of_mesh(object::configs)),
        "configuration objects of Istio's API groups",
    ),
    page("connections", || get(connections), "connections"),
    page(
        "ecdsz",
        || get(of_type(ResourceType::Extension)),
        "extension configurations of a proxy: `proxyID`",
    ),
    page(
        "edsz",
        || get(of_type(ResourceType::Endpoint)),
        "endpoints of a proxy: `proxyID`",
    )
    .of_proxy(),
    page(
        "endpointShardz",
        || get(endpoint_shards),
        "endpoints by service and cluster",
    ),
    page(
        "endpointz",
        || get(endpoint_shards),
        "the same as `endpointShardz`",
    ),
    page(
        "force_disconnect",
        || get(force_disconnect),
        "closes the connection of a proxy: `proxyID`. Exists with `UNSAFE_ENABLE_ADMIN_ENDPOINTS`",
    )
    .unsafe_endpoint(),
    page(
        "inject",
        || get(inject),
        "injection templates; 404 before they are known",
    ),
    page(
        "instancesz",
        || get(instancesz),
        "service ports that each connected proxy serves",
    ),
    page(
        "jwksz",
        || get(jwksz),
        "servers of JWT keys with the last fetch and error",
    )
    .own(),
    page(
        "krtz",
        || get(krtz),
        "tables and indexes with their keys, in the form of Istio's collections",
    ),
    page("list", || get(list), "names of the pages"),
    page("mcsz", || get(of_mesh(scope::mcs)), "multi-cluster services"),
    page("mesh", || get(of_mesh(pages::mesh_config)), "mesh config"),
    page(
        "ndsz",
        || get(of_type(ResourceType::NameTable)),
        "DNS name table of a proxy: `proxyID`",
    )
    .of_proxy(),
    page("networkz", || get(of_mesh(endpoint::networks)), "gateways of networks"),
    page(
        "notez",
        || get(notez),
        "findings of generation: conflicts, filters left out, missing references, patches without effect",
    )
    .own(),
    page(
        "proxyz",
        || get(proxyz),
        "scope, group, services and refused resources of a proxy: `proxyID`",
    )
    .of_proxy()
    .own(),
    page(
        "push_status",
        || get(push_status),
        "findings of generation by Istio's push metric",
    ),
    page(
        "pushcontext",
        || get(of_mesh(policy::push_context)),
        "AuthorizationPolicies and network gateways",
    ),
    page("registryz", || get(of_mesh(service::registry)), "services"),
    page(
        "resourcesz",
        || get(of_mesh(|_| object::kinds())),
        "kinds of configuration objects that are read",
    ),
    page(
        "servicez",
        || get(servicez),
        "who sees the services of a host, through which gateways and routes, with which mutual TLS, and which policies \
         requests pass: `host`, `namespace`",
    )
    .own(),
    page(
        "sidecarz",
        || get(sidecarz),
        "services and DestinationRules visible to a proxy: `proxyID`",
    ),
    page(
        "status",
        || get(status::status),
        "which proxies run an object: `kind`, `namespace`, `name`, `resourceVersion`, `proxyID`; without an object the \
         proxies, refused resources and last pushes. All replicas answer; with `scope=replica` only the one that is asked",
    )
    .of_proxy()
    .own()
    .waiting(),
    page(
        "status_events",
        || get(status::status_events),
        "the same as server-sent events, until the answer is final or the time `timeout` is over",
    )
    .of_proxy()
    .own()
    .events(),
    page(
        "syncz",
        || get(syncz),
        "configuration that each proxy was sent and acknowledged; `namespace` filters",
    ),
    page(
        "telemetryz",
        || get(telemetryz),
        "Telemetries by namespace, or those that apply to a proxy: `proxyID`",
    ),
    page("watchz", || get(watchz), "watches of all clusters with their state").own(),
];

/// Returns the readers of a page by its name.
pub(super) fn readers_of(name: &str) -> Readers {
    let page = PAGES.iter().find(|page| page.name == name);
    page.map_or(Readers::ControlPlane, |page| page.readers)
}

/// Returns true if a page waits for other replicas.
pub(super) fn waits(name: &str) -> bool {
    let mut pages = PAGES.iter();
    pages.any(|page| page.name == name && page.rendering == Rendering::Waiting)
}

/// Returns the pages that are rendered in turn, unguarded.
pub(super) fn pages(sources: Arc<Sources>) -> Router {
    let index = || get(index);
    let router = Router::new().route("/debug", index()).route(PREFIX, index());
    with_pages(router, sources, Rendering::InTurn)
}

/// Returns the pages that wait for other replicas, unguarded. They are rendered beside those of `renderer`.
pub(super) fn waiting_pages(sources: Arc<Sources>, renderer: &Renderer) -> Router {
    with_pages(Router::new(), sources, Rendering::Waiting).layer(Extension(renderer.clone()))
}

/// Returns the pages with events, unguarded.
pub(super) fn event_pages(sources: Arc<Sources>) -> Router {
    with_pages(Router::new(), sources, Rendering::Events)
}

fn with_pages(router: Router<SharedSources>, sources: Arc<Sources>, rendering: Rendering) -> Router {
    let mesh = sources.mesh();
    let shown = PAGES.iter().filter(|page| page.is_shown(&mesh.installation.features));
    let shown = shown.filter(|page| page.rendering == rendering);
    let router = shown.fold(router, |router, page| {
        router.route(&format!("{PREFIX}{}", page.name), (page.handler)())
    });
    router.with_state(SharedSources::new(sources))
}

/// Returns the HTML of the index. Handlers must not name [`PAGES`] themselves: the table contains them, and the
/// compiler would need the type of one to check the other.
pub(super) fn index_text(features: &Features) -> String {
    let shown = PAGES.iter().filter(|page| page.is_shown(features));
    let links: String = shown.map(index_entry).collect();
    format!("<html><head><title>istiod debug pages</title></head><body><ul>{links}</ul></body></html>")
}

fn index_entry(page: &Page) -> String {
    let Page { name, description, .. } = page;
    let mark = match page.origin {
        Origin::Istio => "",
        Origin::Own => " (not Istio's)",
    };
    let description = description.replace('`', "");
    format!("<li><a href=\"/debug/{name}\">{name}</a>: {description}{mark}</li>")
}

/// Returns the names of the pages, with the queries that Istio lists.
fn names(features: &Features) -> Vec<String> {
    let shown = PAGES
        .iter()
        .filter(|page| page.name != "list" && page.is_shown(features));
    let entries = shown.flat_map(|page| {
        let queries = page.queries.iter().map(|query| format!("{}?{query}", page.name));
        std::iter::once(page.name.to_owned()).chain(queries)
    });
    entries.collect()
}

async fn index(State(sources): Shown) -> Html<String> {
    Html(index_text(&sources.mesh().installation.features))
}

async fn list(State(sources): Shown, Query(parameters): Query<Parameters>) -> Response {
    reply(&parameters, &json!(names(&sources.mesh().installation.features)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "<!-- The table is generated from src/admin/debug/table.rs. -->\n";

    fn row(page: &Page) -> String {
        let access = match page.readers {
            Readers::ControlPlane => "all",
            Readers::ProxyNamespace => "proxy",
        };
        let origin = match page.origin {
            Origin::Istio => "yes",
            Origin::Own => "",
        };
        format!(
            "| `/debug/{}` | {access} | {origin} | {} |\n",
            page.name, page.description
        )
    }

    /// Compares the table of `docs/debug-pages.md` with the one above. `UPDATE_GOLDEN=1` rewrites it.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "a developer asks the test to rewrite its file")]
    fn documentation_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/debug-pages.md");
        let current = std::fs::read_to_string(path).unwrap_or_default();
        let prose = current.split(BEGIN).next().unwrap_or_default();
        let rows: String = PAGES.iter().map(row).collect();
        let text = format!(
            "{prose}{BEGIN}| Page | Access | Istio has it | Content |\n|---|---|---|---|\n| `/debug` | all | yes | index |\n{rows}"
        );
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, &text).expect("the file is writable");
        }
        assert!(
            current == text,
            "docs/debug-pages.md is stale, run UPDATE_GOLDEN=1 cargo test --lib documentation"
        );
    }

    #[test]
    fn the_index_marks_pages_that_istio_lacks() {
        let index = index_text(&Features::default());
        let entries: Vec<&str> = index.split("<li>").skip(1).collect();
        let marked = entries.iter().filter(|entry| entry.contains("(not Istio's)"));
        let names: Vec<&str> = marked.filter_map(|entry| entry.split('"').nth(1)).collect();
        assert_eq!(
            names,
            [
                "/debug/certificatez",
                "/debug/jwksz",
                "/debug/notez",
                "/debug/proxyz",
                "/debug/servicez",
                "/debug/status",
                "/debug/status_events",
                "/debug/watchz"
            ]
        );
        assert_eq!(entries.len(), PAGES.len() - 1);
    }

    #[test]
    fn unsafe_pages_are_listed_only_where_they_exist() {
        let mut features = Features::default();
        assert!(!names(&features).contains(&"force_disconnect".to_owned()));
        features.unsafe_enable_admin_endpoints = true;
        let names = names(&features);
        assert!(names.contains(&"force_disconnect".to_owned()) && names.contains(&"cachez?clear=true".to_owned()));
        assert!(names.is_sorted() && !names.contains(&"list".to_owned()));
    }
}
