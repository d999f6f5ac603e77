//! HTTP routes of a VirtualService, in order, for one listener port and one proxy view.

use std::borrow::Cow;

use prost::Message;

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
    generate::{BuildContext, constant, name::ClusterName, wire},
    model::{
        Service,
        virtual_service::{Semantics, VirtualService},
    },
    proto::{
        envoy::config::{
            core::v3::header_value_option::HeaderAppendAction,
            route::v3::{
                Route, RouteAction, RouteMatch,
                route::Action,
                route_action::{ClusterSpecifier, HashPolicy},
                route_match::PathSpecifier,
            },
        },
        istio::networking::v1alpha3::{HttpMatchRequest, HttpRoute},
    },
    table::{Memo, Memoized},
};

/// Gateway name that refers to sidecars.
pub(crate) const MESH_GATEWAY: &str = "mesh";

/// Translates all routes that apply; none if no match applies to the proxy.
pub(crate) fn routes(translation: &Translation, declared: &VirtualService) -> Routes {
    let mut writer = RouteWriter::new(&declared.meta);
    for http in &declared.spec.http {
        if http.r#match.is_empty() {
            RouteTemplate::of(translation, declared, http, None).write(&mut writer, None);
            break;
        }
        let conditions = http.r#match.iter();
        let mut conditions = conditions
            .filter(|condition| applies(translation, condition))
            .peekable();
        let Some(first) = conditions.peek() else { continue };
        let mut template = RouteTemplate::of(translation, declared, http, Some(first));
        let mut ended = false;
        for (position, condition) in conditions.enumerate() {
            if position > 0 && http.rewrite.is_some() && declared.semantics == Semantics::Gateway {
                // A rewritten path may depend on the match.
                template = RouteTemplate::of(translation, declared, http, Some(condition));
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

/// The default routes, built once in an update.
pub(crate) type DefaultRoutesMemo = Memo<(), DefaultRoutes>;

/// Routes of services without a VirtualService: encoded once, except for the fields that differ between them.
pub(crate) struct DefaultRoutes {
    /// Encoded fields of a route before the action: the match.
    before: Vec<u8>,
    /// Encoded fields of the action after the cluster.
    action: Vec<u8>,
    /// Encoded fields of a route after action and decorator.
    after: Vec<u8>,
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
            before: before.encode_to_vec(),
            action: action.encode_to_vec(),
            after: after.encode_to_vec(),
        }
    }

    /// Returns the route to a cluster.
    pub(crate) fn route(&self, cluster: &str, operation: &str, hashed_by: Option<HashPolicy>) -> Routes {
        let hashed = hashed_by.map(|policy| RouteAction {
            hash_policy: vec![policy],
            ..RouteAction::decode(&*self.action).expect("because these bytes were encoded from an action")
        });
        let hashed = hashed.map(|action| action.encode_to_vec());
        let action = hashed.as_ref().unwrap_or(&self.action);
        let room = self.before.len() + cluster.len() + action.len() + operation.len() + self.after.len() + 32;
        let mut bytes = Vec::with_capacity(room);
        wire::nested(&mut bytes, field::ROUTES, |out| {
            out.extend_from_slice(&self.before);
            wire::nested(out, field::FORWARD, |out| {
                wire::text(out, field::CLUSTER, cluster);
                out.extend_from_slice(action);
            });
            wire::nested(out, field::DECORATOR, |out| wire::text(out, 1, operation));
            out.extend_from_slice(&self.after);
        });
        Routes::of_bytes(bytes, Some(0))
    }
}

/// Typical size of an encoded action, in bytes.
const USUAL_ACTION: usize = 384;

/// A declared route without its matches, encoded once for all of them.
struct RouteTemplate<'a> {
    declared: &'a HttpRoute,
    semantics: Semantics,
    /// Encoded action field.
    action: Vec<u8>,
    /// Encoded fields of header operations and filters.
    changes: Vec<u8>,
    /// Operation name for traces, without the path.
    operation: String,
}

impl<'a> RouteTemplate<'a> {
    fn of(
        translation: &Translation,
        virtual_service: &VirtualService,
        declared: &'a HttpRoute,
        condition: Option<&HttpMatchRequest>,
    ) -> Self {
        let semantics = virtual_service.semantics;
        let changes = HeaderChanges::of(declared.headers.as_ref());
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
        let mut action = Vec::with_capacity(USUAL_ACTION);
        if let Some(made) = route.action.take() {
            made.encode(&mut action);
        }
        Self {
            declared,
            semantics,
            action,
            changes: route.encode_to_vec(),
            operation,
        }
    }

    /// Writes the route for one match; returns true for a catch-all route.
    fn write(&self, writer: &mut RouteWriter, condition: Option<&HttpMatchRequest>) -> bool {
        let matched = matches::route_match(condition, self.semantics);
        let is_catch_all = matches::is_catch_all(&matched);
        if is_catch_all {
            writer.catch_all = Some(writer.bytes.len());
        }
        let metadata = &writer.metadata;
        wire::nested(&mut writer.bytes, field::ROUTES, |out| {
            wire::nested(out, field::MATCH, |out| matched.encode_raw(out));
            out.extend_from_slice(&self.action);
            out.extend_from_slice(metadata);
            let [path, suffix] = operation_path(&matched);
            wire::nested(out, field::DECORATOR, |out| {
                wire::joined(out, 1, &[&self.operation, path, suffix]);
            });
            out.extend_from_slice(&self.changes);
            wire::text(out, field::NAME, &route_name(self.declared, condition));
            wire::text(
                out,
                field::STAT_PREFIX,
                condition.map_or("", |condition| &condition.stat_prefix),
            );
        });
        is_catch_all
    }
}

/// Field numbers of virtual hosts and routes, in the order of encoding.
mod field {
    /// Routes of a virtual host.
    pub(super) const ROUTES: u32 = 3;
    /// Match of a route; precedes the action and the metadata.
    pub(super) const MATCH: u32 = 1;
    /// Forwarding action of a route.
    pub(super) const FORWARD: u32 = 2;
    /// Cluster of a forwarding action; its first field.
    pub(super) const CLUSTER: u32 = 1;
    /// Decorator of a route; header operations, filters, the name and the statistics prefix follow.
    pub(super) const DECORATOR: u32 = 5;
    /// Name of a route.
    pub(super) const NAME: u32 = 14;
    /// Statistics prefix of a route.
    pub(super) const STAT_PREFIX: u32 = 19;
}

/// Routes under construction, see [`Routes`].
struct RouteWriter {
    bytes: Vec<u8>,
    /// Encoded metadata field with the origin of the routes.
    metadata: Vec<u8>,
    catch_all: Option<usize>,
}

impl RouteWriter {
    fn new(meta: &Meta) -> Self {
        let metadata = metadata(&meta.config_path());
        debug_assert!(
            metadata
                == Route {
                    metadata: Some(constant::config_metadata(meta)),
                    ..Default::default()
                }
                .encode_to_vec(),
            "because it is the same by hand"
        );
        Self {
            bytes: Vec::new(),
            metadata,
            catch_all: None,
        }
    }

    fn finish(self) -> Routes {
        Routes::of_bytes(self.bytes, self.catch_all)
    }
}

/// Encodes the field of [`constant::config_metadata`], which differs only in the path.
fn metadata(path: &str) -> Vec<u8> {
    const METADATA: u32 = 4;
    let (outer, inner) = constant::CONFIG_METADATA;
    let mut bytes = Vec::with_capacity(path.len() + 48);
    wire::nested(&mut bytes, METADATA, |out| {
        wire::entry(out, 1, outer, |out| wire::text_field(out, inner, path));
    });
    bytes
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
