//! HTTP routes of a VirtualService, in order, for one listener port and one proxy view.

use std::borrow::Cow;

use super::{
    action, filters,
    headers::{self, HeaderChanges},
    matches, retry,
    routes::Routes,
    translation::Translation,
};
use crate::{
    api::Meta,
    base::{Shared, select},
    generate::{
        BuildContext, constant,
        name::ClusterName,
        wire::{Encoded, Writer},
    },
    model::{
        Service,
        gateway_api::inference_pool::Picker,
        virtual_service::{MESH_GATEWAY, Semantics, VirtualService},
    },
    proto::{
        envoy::config::{
            core::v3::{Metadata, header_value_option::HeaderAppendAction},
            route::v3::{
                Route, RouteAction, RouteMatch, VirtualHost,
                route::Action,
                route_action::{ClusterSpecifier, HashPolicy},
                route_match::PathSpecifier,
            },
        },
        field::{decorator, metadata, route, route_action, virtual_host},
        istio::networking::v1alpha3::{HttpMatchRequest, HttpRoute},
    },
    table::{Memo, Memoized},
};

/// Translates all routes that apply; none if no match applies to the proxy.
pub(crate) fn routes(translation: &Translation, declared: &VirtualService) -> Routes {
    let mut writer = RouteWriter::new(&declared.meta);
    for (index, http) in declared.http.resolved(&translation.ctx.mesh.installation).enumerate() {
        let (http, asks_picker) = (&*http, declared.http.asks_picker(index));
        if http.r#match.is_empty() {
            RouteTemplate::of(translation, declared, http, asks_picker, None).write(&mut writer, None);
            break;
        }
        let conditions = http.r#match.iter();
        let mut conditions = conditions
            .filter(|condition| applies(translation, condition))
            .peekable();
        let Some(first) = conditions.peek() else { continue };
        let mut template = RouteTemplate::of(translation, declared, http, asks_picker, Some(first));
        let mut ended = false;
        for (position, condition) in conditions.enumerate() {
            if position > 0 && http.rewrite.is_some() && declared.semantics == Semantics::Gateway {
                // A rewritten path may depend on the match.
                template = RouteTemplate::of(translation, declared, http, asks_picker, Some(condition));
            }
            ended = template.write(&mut writer, Some(condition));
            if ended {
                break;
            }
        }
        if ended {
            break;
        }
    }
    writer.finish()
}

/// The default routes, built once in an update. Without it, route configurations take a tenth longer (bench `suite`,
/// case `auto`).
pub(crate) type DefaultRoutesMemo = Memo<(), DefaultRoutes>;

/// Routes of services without a VirtualService: encoded once, except for the fields that differ between them.
pub(crate) struct DefaultRoutes {
    /// Encoded fields of a route before the action: the match.
    before: Encoded<Route>,
    /// Encoded fields of the action after the cluster.
    action: Encoded<RouteAction>,
    /// Encoded fields of a route after action and decorator.
    after: Encoded<Route>,
}

impl DefaultRoutes {
    /// Returns the default routes that this update shares.
    pub(crate) fn shared(ctx: &BuildContext) -> Memoized<Self> {
        let memo: &DefaultRoutesMemo = ctx.memo.get();
        memo.get(ctx.cx, (), |cx| Self::new(&BuildContext { cx, ..*ctx }))
    }

    /// Encodes the common fields.
    pub(crate) fn new(ctx: &BuildContext) -> Self {
        let retry_policy = ctx.mesh_config().default_http_retry_policy.as_ref();
        let before = Route {
            r#match: Some(matches::route_match(None, Semantics::Istio)),
            ..Default::default()
        };
        let action = RouteAction {
            timeout: Some(prost_types::Duration::default()),
            max_grpc_timeout: Some(prost_types::Duration::default()),
            retry_policy: retry::policy(retry_policy, retry::Balancing::Free),
            ..Default::default()
        };
        let after = Route {
            name: "default".to_owned(),
            ..Default::default()
        };
        Self {
            before: Encoded::of(&before),
            action: Encoded::of(&action),
            after: Encoded::of(&after),
        }
    }

    /// Returns the route to a cluster.
    pub(crate) fn route(&self, cluster: &str, operation: &str, hashed_by: Option<HashPolicy>) -> Routes {
        let hashed = hashed_by.map(|policy| {
            Encoded::of(&RouteAction {
                hash_policy: vec![policy],
                ..self.action.decode()
            })
        });
        let action = hashed.as_ref().unwrap_or(&self.action);
        let room = self.before.len() + cluster.len() + action.len() + operation.len() + self.after.len() + 32;
        let routes = Encoded::write(room, |out| {
            out.nested(virtual_host::ROUTES, |out| {
                out.fields(&self.before);
                out.nested(route::ROUTE, |out| {
                    out.text(route_action::CLUSTER, cluster);
                    out.fields(action);
                });
                out.nested(route::DECORATOR, |out| out.text(decorator::OPERATION, operation));
                out.fields(&self.after);
            });
        });
        Routes::new(routes, Some(0))
    }
}

/// Typical size of an encoded action, in bytes.
const USUAL_ACTION: usize = 384;

fn write_action(out: &mut Writer<Route>, action: Option<&Action>) {
    match action {
        None => {}
        Some(Action::Route(forward)) => out.message(route::ROUTE, forward),
        Some(Action::Redirect(redirect)) => out.message(route::REDIRECT, redirect),
        Some(Action::DirectResponse(response)) => out.message(route::DIRECT_RESPONSE, response),
        Some(Action::FilterAction(filter)) => out.message(route::FILTER_ACTION, filter),
        Some(Action::NonForwardingAction(none)) => out.message(route::NON_FORWARDING_ACTION, none),
    }
}

/// A declared route without its matches, encoded once for all of them.
struct RouteTemplate<'a> {
    declared: &'a HttpRoute,
    semantics: Semantics,
    /// Encoded action field.
    action: Encoded<Route>,
    /// Encoded fields of header operations and filters.
    changes: Encoded<Route>,
    /// Operation name for traces, without the path.
    operation: String,
}

impl<'a> RouteTemplate<'a> {
    fn of(
        translation: &Translation,
        virtual_service: &VirtualService,
        declared: &'a HttpRoute,
        asks_picker: bool,
        condition: Option<&HttpMatchRequest>,
    ) -> Self {
        let semantics = virtual_service.semantics;
        let changes = HeaderChanges::of(declared.headers.as_deref());
        let mut route = Route {
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
            let matched = || matches::route_match(condition, semantics);
            services = action::forward(&mut route, declared, translation, semantics, changes.authority, matched);
        }
        add_filters(&mut route, declared);
        if asks_picker && let Some(picker) = picker(translation, &services) {
            let filters = &mut route.typed_per_filter_config;
            filters.insert(
                constant::EXTERNAL_PROCESSING.to_owned(),
                filters::endpoint_picker(&picker),
            );
        }
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
        let operation = operation(&route, virtual_service.meta.name(), translation.port);
        let action = route.action.take();
        Self {
            declared,
            semantics,
            action: Encoded::write(USUAL_ACTION, |out| write_action(out, action.as_ref())),
            changes: Encoded::of(&route),
            operation,
        }
    }

    /// Writes the route for one match; returns true for a catch-all route.
    fn write(&self, writer: &mut RouteWriter, condition: Option<&HttpMatchRequest>) -> bool {
        let matched = matches::route_match(condition, self.semantics);
        let is_catch_all = matches::is_catch_all(&matched);
        if is_catch_all {
            writer.catch_all = Some(writer.routes.len());
        }
        let metadata = &writer.metadata;
        let write_route = |out: &mut Writer<Route>| {
            out.message(route::MATCH, &matched);
            out.fields(&self.action);
            out.fields(metadata);
            let [path, suffix] = operation_path(&matched);
            out.nested(route::DECORATOR, |out| {
                out.joined(decorator::OPERATION, &[&self.operation, path, suffix]);
            });
            out.fields(&self.changes);
            out.text(route::NAME, &route_name(self.declared, condition));
            let stat_prefix = condition.map_or("", |condition| &condition.stat_prefix);
            out.text(route::STAT_PREFIX, stat_prefix);
        };
        writer
            .routes
            .append(|out| out.nested(virtual_host::ROUTES, write_route));
        is_catch_all
    }
}

/// Routes under construction, see [`Routes`].
struct RouteWriter {
    routes: Encoded<VirtualHost>,
    /// Encoded metadata field with the origin of the routes.
    metadata: Encoded<Route>,
    catch_all: Option<usize>,
}

impl RouteWriter {
    fn new(meta: &Meta) -> Self {
        let path = meta.config_path();
        Self {
            routes: Encoded::empty(),
            metadata: Encoded::write(path.len() + 48, |out| {
                out.nested(route::METADATA, |out| write_config_metadata(out, &path));
            }),
            catch_all: None,
        }
    }

    fn finish(self) -> Routes {
        Routes::new(self.routes, self.catch_all)
    }
}

/// Writes [`constant::config_metadata`] of this path. VirtualServices take 20 % longer if it and the actions are Rust
/// types (bench `suite`, case `virtualservice`).
fn write_config_metadata(out: &mut Writer<Metadata>, path: &str) {
    out.entry(metadata::FILTER_METADATA, constant::ISTIO_METADATA, |out| {
        out.text_field(constant::CONFIG_FIELD, path);
    });
}

fn route_name<'a>(declared: &'a HttpRoute, condition: Option<&HttpMatchRequest>) -> Cow<'a, str> {
    match condition.map(|condition| condition.name.as_str()) {
        None | Some("") => Cow::Borrowed(&declared.name),
        Some(name) => Cow::Owned([&declared.name, ".", name].concat()),
    }
}

/// Returns true if a match applies to this port, gateway and proxy.
fn applies(translation: &Translation, condition: &HttpMatchRequest) -> bool {
    if condition.port != 0 && condition.port != translation.port {
        return false;
    }
    // Parity (pilot/pkg/networking/core/listener_waypoint.go): even if the match names gateways.
    if translation.clients_are_unknown && !condition.source_labels.is_empty() {
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

/// Returns the picker of the last destination, if that is an InferencePool. Only gateways have the filter that asks it.
///
/// Parity (pilot/pkg/config/kube/gateway/conversion.go, `buildHTTPDestination`): the last destination decides.
fn picker(translation: &Translation, services: &[Option<Shared<Service>>]) -> Option<Picker> {
    let service = services.last()?.as_ref()?;
    let picker = || Picker::of(translation.ctx.mesh, &service.key.namespace, &service.labels);
    (translation.gateway != MESH_GATEWAY).then(picker).flatten()
}

/// Returns the session of the first destination that has one; a following destination without one clears it.
fn pick_session<T>(sessions: impl Iterator<Item = Option<T>>) -> Option<T> {
    let mut picked = None;
    for session in sessions {
        // Parity (pilot/pkg/networking/core/route/route.go): the search ends at the second session, but a destination
        // without a session resets it.
        if session.is_some() && picked.is_some() {
            break;
        }
        picked = session;
    }
    picked
}

/// Returns the operation name for traces, without the path: the destination if there is one, or else the
/// VirtualService.
fn operation(route: &Route, virtual_service: &str, port: u32) -> String {
    if let Some(Action::Route(action)) = &route.action
        && let Some(ClusterSpecifier::Cluster(cluster)) = &action.cluster_specifier
        && let ClusterName { host, port, .. } = ClusterName::parse(cluster)
        && !host.is_empty()
    {
        return [host, ":", itoa::Buffer::new().format(port)].concat();
    }
    [virtual_service, ":", itoa::Buffer::new().format(port)].concat()
}

/// Returns the path in two parts.
fn operation_path(declared: &RouteMatch) -> [&str; 2] {
    match &declared.path_specifier {
        Some(PathSpecifier::Prefix(prefix)) => [prefix, "*"],
        Some(PathSpecifier::Path(path)) => [path, ""],
        Some(PathSpecifier::SafeRegex(regex)) => [&regex.regex, ""],
        _ => ["/", "*"],
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
