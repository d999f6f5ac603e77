//! The HTTP routes of a VirtualService, in order, for one listener port and one kind of client.

use crate::{
    base::{Shared, select},
    generate::{View, constant},
    model::{
        Service,
        features::Features,
        virtual_service::{Semantics, VirtualService},
    },
    proto::{
        envoy::config::{
            core::v3::header_value_option::HeaderAppendAction,
            route::v3::{
                Decorator, Route, RouteAction, RouteMatch, route::Action, route_action::ClusterSpecifier,
                route_match::PathSpecifier,
            },
        },
        istio::networking::v1alpha3::{HttpMatchRequest, HttpRoute},
    },
};

use super::{
    RouteClient, action,
    destination::{self, PortInference, TargetMap},
    filters,
    headers::{self, HeaderChanges},
    matches, retry,
};

/// The gateway name that means sidecars.
pub(crate) const MESH_GATEWAY: &str = "mesh";

/// What routes are translated for.
pub(crate) struct Translation<'a> {
    /// The mesh.
    pub(crate) view: &'a View<'a>,
    /// The client.
    pub(crate) client: &'a RouteClient,
    /// [`MESH_GATEWAY`], or `namespace/name` of the Gateway.
    pub(crate) gateway: &'a str,
    /// The port of the listener, on gateways that of the server; 0 for route configurations of all ports.
    pub(crate) port: u32,
    /// The server terminates TLS.
    pub(crate) tls: bool,
    /// Responses advertise HTTP/3.
    pub(crate) advertise_http3: bool,
    /// How destinations without a port are understood.
    pub(crate) inference: PortInference,
    /// The rows of the destinations.
    pub(crate) targets: &'a TargetMap,
}

impl<'a> Translation<'a> {
    /// The feature variables.
    pub(crate) fn features(&self) -> &'a Features {
        &self.view.mesh.installation.features
    }
}

/// Translates all routes that apply; none if no match concerns the client.
pub(crate) fn routes(translation: &Translation, declared: &VirtualService) -> Vec<Route> {
    let mut routes = Vec::new();
    for http in &declared.spec.http {
        if http.r#match.is_empty() {
            routes.extend(route(translation, declared, http, None));
            return routes;
        }
        for condition in &http.r#match {
            let Some(route) = route(translation, declared, http, Some(condition)) else {
                continue;
            };
            let is_last = route.r#match.as_ref().is_some_and(matches::is_catch_all);
            routes.push(route);
            if is_last {
                return routes;
            }
        }
    }
    routes
}

/// The route of a service that no VirtualService speaks of.
pub(crate) fn default_route(view: &View, cluster: String, operation: String) -> Route {
    let retry_policy = view.mesh_config().default_http_retry_policy.as_ref();
    Route {
        name: "default".to_owned(),
        r#match: Some(matches::route_match(None, Semantics::Istio)),
        decorator: Some(decorator(operation)),
        action: Some(Action::Route(RouteAction {
            cluster_specifier: Some(ClusterSpecifier::Cluster(cluster)),
            timeout: Some(prost_types::Duration::default()),
            max_grpc_timeout: Some(prost_types::Duration::default()),
            retry_policy: retry::policy(retry_policy, retry::Balancing::Free),
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn decorator(operation: String) -> Decorator {
    Decorator {
        operation,
        ..Default::default()
    }
}

fn route(
    translation: &Translation,
    virtual_service: &VirtualService,
    declared: &HttpRoute,
    condition: Option<&HttpMatchRequest>,
) -> Option<Route> {
    if condition.is_some_and(|condition| !applies(translation, condition)) {
        return None;
    }
    let semantics = virtual_service.semantics;
    let changes = HeaderChanges::of(declared.headers.as_ref());
    let mut route = Route {
        name: route_name(declared, condition),
        r#match: Some(matches::route_match(condition, semantics)),
        metadata: Some(constant::config_metadata(&virtual_service.meta)),
        stat_prefix: condition
            .map(|condition| condition.stat_prefix.clone())
            .unwrap_or_default(),
        request_headers_to_add: changes.request_add,
        request_headers_to_remove: changes.request_remove,
        response_headers_to_add: changes.response_add,
        response_headers_to_remove: changes.response_remove,
        ..Default::default()
    };
    let mut services = Vec::new();
    if let Some(redirect) = &declared.redirect {
        route.action = action::redirect(redirect, translation, semantics);
    } else if let Some(response) = &declared.direct_response {
        route.action = Some(action::direct_response(response));
    } else {
        services = action::forward(&mut route, declared, translation, semantics, changes.authority);
    }
    route.decorator = Some(decorator(operation(
        &route,
        virtual_service.meta.name(),
        translation.port,
    )));
    add_filters(&mut route, declared);
    let session_of = |service: &Option<Shared<Service>>| {
        let service = service.as_ref()?;
        filters::stateful_session(service, translation.features())
    };
    if let Some(session) = pick_session(services.iter().map(session_of)) {
        let filters = &mut route.typed_per_filter_config;
        filters.insert(filters::STATEFUL_SESSION.to_owned(), session);
    }
    if translation.advertise_http3 {
        let value = format!("h3=\":{}\"; ma=86400", translation.port);
        let append = HeaderAppendAction::AppendIfExistsOrAdd;
        route
            .response_headers_to_add
            .push(headers::header("alt-svc", &value, append));
    }
    Some(route)
}

fn route_name(declared: &HttpRoute, condition: Option<&HttpMatchRequest>) -> String {
    match condition.map(|condition| condition.name.as_str()) {
        None | Some("") => declared.name.clone(),
        Some(name) => format!("{}.{name}", declared.name),
    }
}

/// True if a match concerns this port, gateway and client.
fn applies(translation: &Translation, condition: &HttpMatchRequest) -> bool {
    if condition.port != 0 && condition.port != translation.port {
        return false;
    }
    if !condition.gateways.is_empty() {
        return condition.gateways.iter().any(|gateway| gateway == translation.gateway);
    }
    let labels = condition.source_labels.iter();
    let namespace = &condition.source_namespace;
    select::matches(
        labels.map(|(key, value)| (key.as_str(), value.as_str())),
        &translation.client.labels,
    ) && (namespace.is_empty() || translation.client.namespace == namespace.as_str())
}

fn add_filters(route: &mut Route, declared: &HttpRoute) {
    let filters = &mut route.typed_per_filter_config;
    if let Some(fault) = &declared.fault {
        filters.insert(filters::FAULT.to_owned(), filters::fault(fault));
    }
    if let Some(cors) = &declared.cors_policy {
        filters.insert(filters::CORS.to_owned(), filters::cors(cors));
    }
}

/// Of several destinations with sessions the first one's counts; one without sessions after it clears it.
fn pick_session<T>(sessions: impl Iterator<Item = Option<T>>) -> Option<T> {
    let mut picked = None;
    for session in sessions {
        // Parity: the search ends at the second session, but a destination without one resets it.
        if session.is_some() && picked.is_some() {
            break;
        }
        picked = session;
    }
    picked
}

/// What traces call the route: the destination if there is one, else the VirtualService.
fn operation(route: &Route, virtual_service: &str, port: u32) -> String {
    let path = operation_path(route.r#match.as_ref());
    if let Some(Action::Route(action)) = &route.action
        && let Some(ClusterSpecifier::Cluster(cluster)) = &action.cluster_specifier
        && let Some((host, port)) = destination::host_and_port(cluster)
    {
        return format!("{host}:{port}{path}");
    }
    format!("{virtual_service}:{port}{path}")
}

fn operation_path(declared: Option<&RouteMatch>) -> String {
    match declared.and_then(|declared| declared.path_specifier.as_ref()) {
        Some(PathSpecifier::Prefix(prefix)) => format!("{prefix}*"),
        Some(PathSpecifier::Path(path)) => path.clone(),
        Some(PathSpecifier::SafeRegex(regex)) => regex.regex.clone(),
        _ => "/*".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_two_sessions_counts() {
        assert_eq!(pick_session([Some(1), Some(2), None].into_iter()), Some(1));
        assert_eq!(pick_session([Some(1), None].into_iter()), None);
        assert_eq!(pick_session([None, Some(2)].into_iter()), Some(2));
    }
}
