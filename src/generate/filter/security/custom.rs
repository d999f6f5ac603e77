//! `CUSTOM` policies: a shadow RBAC filter finds the requests that a policy picks, and an external authorization filter
//! asks the provider about those.

use std::{collections::BTreeMap, time::Duration};

use super::{
    HTTP_EXT_AUTHZ, HTTP_RBAC, NETWORK_EXT_AUTHZ, NETWORK_RBAC, NETWORK_STAT_PREFIX, Traffic,
    matcher::{self, Pattern},
    provider_name,
    rbac::{self, Rules, Translation},
    trust_domain::TrustDomains,
};
use crate::{
    api::Config,
    generate::{
        constant::{self, http_filter, network_filter},
        filter::{FilterStack, stack::ProviderCluster},
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    ApiVersion, GrpcService, HeaderValue, HttpUri,
                    grpc_service::{EnvoyGrpc, TargetSpecifier},
                    http_uri::HttpUpstreamType,
                },
                listener::v3::Filter,
                rbac::v3::{Rbac, rbac::Action as EnvoyAction},
            },
            extensions::filters::{
                http::ext_authz::v3::{
                    AuthorizationRequest, AuthorizationResponse, BufferSettings, ExtAuthz as HttpExtAuthz, HttpService,
                    ext_authz::Services,
                },
                network::{ext_authz::v3::ExtAuthz as NetworkExtAuthz, http_connection_manager::v3::HttpFilter},
            },
            r#type::{
                matcher::v3::{ListStringMatcher, MetadataMatcher, StringMatcher, string_matcher::MatchPattern},
                v3::{HttpStatus, StatusCode},
            },
        },
        istio::{
            mesh::v1alpha1::mesh_config::{
                ExtensionProvider,
                extension_provider::{
                    EnvoyExternalAuthorizationGrpcProvider as GrpcProvider,
                    EnvoyExternalAuthorizationHttpProvider as HttpProvider,
                    EnvoyExternalAuthorizationRequestBody as RequestBody, Provider,
                },
            },
            security::v1beta1::{AuthorizationPolicy, authorization_policy::Action},
        },
    },
};

/// The time that a provider has if nothing else is said.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(10);

/// Stands before the names of rules, so that the external authorization filter knows them.
const RULE_PREFIX: &str = "istio-ext-authz";

/// The prefix of what the shadow filter finds out.
const SHADOW_PREFIX: &str = "istio_ext_authz_";

/// The metadata in which the shadow filter leaves the name of the rule that applies.
const SHADOW_RULE: &str = "istio_ext_authz_shadow_effective_policy_id";

/// What is to be done for the policies of one provider.
enum Verdict {
    /// The provider is asked.
    Ask(Rules, Box<Service>),
    /// The provider cannot be asked: what the policies pick is denied.
    Deny(Rules),
}

/// A provider that can be asked.
enum Service {
    Http(HttpExtAuthz),
    Grpc(HttpExtAuthz, GrpcService),
}

/// The filters of HTTP chains.
pub(crate) fn http_filters(stack: &FilterStack, tunneled: bool) -> Vec<HttpFilter> {
    let filters = |(provider, verdict): (String, Verdict)| match verdict {
        Verdict::Deny(rules) => vec![rules.http_filter()],
        Verdict::Ask(rules, service) => {
            let (Service::Http(mut config) | Service::Grpc(mut config, _)) = *service;
            config.filter_enabled_metadata = Some(picked(HTTP_RBAC, &provider));
            vec![rules.http_filter(), http_filter(HTTP_EXT_AUTHZ, Any::pack(&config))]
        }
    };
    let verdicts = verdicts(stack, Traffic::Http, tunneled);
    verdicts.into_iter().flat_map(filters).collect()
}

/// The filters of TCP chains. Parity: there an HTTP provider is not asked and nothing denied.
pub(crate) fn network_filters(stack: &FilterStack, tunneled: bool) -> Vec<Filter> {
    let filters = |(provider, verdict): (String, Verdict)| match verdict {
        Verdict::Deny(rules) => vec![rules.network_filter()],
        Verdict::Ask(rules, service) => match *service {
            Service::Http(_) => Vec::new(),
            Service::Grpc(http, grpc) => {
                let config = NetworkExtAuthz {
                    stat_prefix: NETWORK_STAT_PREFIX.to_owned(),
                    grpc_service: Some(grpc),
                    failure_mode_allow: http.failure_mode_allow,
                    transport_api_version: ApiVersion::V3.into(),
                    filter_enabled_metadata: Some(picked(NETWORK_RBAC, &provider)),
                    ..Default::default()
                };
                let filter = network_filter(NETWORK_EXT_AUTHZ, Any::pack(&config));
                vec![rules.network_filter(), filter]
            }
        },
    };
    let verdicts = verdicts(stack, Traffic::Tcp, tunneled);
    verdicts.into_iter().flat_map(filters).collect()
}

/// True for requests that a policy with this provider picked.
fn picked(filter: &str, provider: &str) -> MetadataMatcher {
    let name = matcher::pattern(MatchPattern::Prefix(format!("{RULE_PREFIX}-{provider}")));
    matcher::metadata(filter, [SHADOW_RULE], matcher::value(name))
}

/// What is to be done for each provider, by name.
fn verdicts(stack: &FilterStack, traffic: Traffic, tunneled: bool) -> BTreeMap<String, Verdict> {
    let mut by_provider: BTreeMap<&str, Vec<&Config<AuthorizationPolicy>>> = BTreeMap::new();
    for policy in stack.policies_with(Action::Custom) {
        by_provider.entry(provider_name(&policy.spec)).or_default().push(policy);
    }
    let too_many = by_provider.len() > 1 && !stack.features().pilot_enable_multiple_custom_authz_providers;
    let translation = Translation {
        stack,
        domains: TrustDomains::of(stack.mesh),
        traffic,
        tunneled,
    };
    let verdict = |(provider, policies): (&str, Vec<_>)| {
        let prefix = if provider.is_empty() {
            format!("{RULE_PREFIX}-")
        } else {
            format!("{RULE_PREFIX}-{provider}-")
        };
        let (enforced, dry_run) = translation.rules(&policies, EnvoyAction::Deny, &prefix);
        let enforced = enforced.unwrap_or_else(|| rbac::empty(EnvoyAction::Deny));
        let service = if too_many { None } else { service(stack, provider) };
        let verdict = match service {
            Some(service) => {
                let rules = Rules {
                    // Parity: policies that are only tried stand among the rules that are enforced.
                    enforced: dry_run.filter(|rules| !rules.policies.is_empty()),
                    shadow: Some(enforced),
                    shadow_prefix: SHADOW_PREFIX,
                };
                Verdict::Ask(rules, Box::new(service))
            }
            None => {
                stack.note("authorization_provider_unusable", provider);
                Verdict::Deny(denying(enforced))
            }
        };
        (provider.to_owned(), verdict)
    };
    by_provider.into_iter().map(verdict).collect()
}

/// Rules that deny what the policies pick.
fn denying(rules: Rbac) -> Rules {
    let policies = rules.policies.into_iter();
    let renamed = policies.map(|(name, policy)| (format!("{name}-deny-due-to-bad-CUSTOM-action"), policy));
    Rules {
        enforced: Some(Rbac {
            policies: renamed.collect(),
            ..rbac::empty(EnvoyAction::Deny)
        }),
        ..Default::default()
    }
}

/// The provider of a name, if there is exactly one and it is in order.
fn service(stack: &FilterStack, name: &str) -> Option<Service> {
    let providers = stack.mesh.extension_providers.iter();
    let mut named = providers.filter(|provider| is_safe(name) && provider.name == name && decides(provider));
    let provider = named.next()?;
    if named.next().is_some() {
        return None;
    }
    match provider.provider.as_ref()? {
        Provider::EnvoyExtAuthzHttp(config) => http_service(stack, name, config).map(Service::Http),
        Provider::EnvoyExtAuthzGrpc(config) => grpc_service(stack, name, config),
        _ => None,
    }
}

/// True for names that can stand in the names of rules: labels of DNS.
fn is_safe(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends = name.starts_with('-') || name.ends_with('-');
    (1..=63).contains(&name.len()) && name.bytes().all(is_letter) && !ends
}

fn decides(provider: &ExtensionProvider) -> bool {
    let kind = provider.provider.as_ref();
    matches!(
        kind,
        Some(Provider::EnvoyExtAuthzHttp(_) | Provider::EnvoyExtAuthzGrpc(_))
    )
}

fn cluster(stack: &FilterStack, name: &str, service: &str, port: u32) -> Option<ProviderCluster> {
    let is_port = (1..=65535).contains(&port);
    is_port.then(|| stack.provider_cluster(name, service, port)).flatten()
}

/// The time-out, if it is none that Envoy refuses.
fn timeout(declared: Option<prost_types::Duration>) -> Option<prost_types::Duration> {
    let declared = declared.unwrap_or_else(|| constant::duration(DEFAULT_TIMEOUT));
    (declared.seconds >= 0 && declared.nanos >= 0).then_some(declared)
}

/// The status for requests while the provider fails: `Some(None)` if none is chosen, `None` if it is none of Envoy's.
#[expect(clippy::option_option, reason = "the two say different things")]
fn status_on_error(text: &str) -> Option<Option<HttpStatus>> {
    if text.is_empty() {
        return Some(None);
    }
    let code = StatusCode::try_from(text.parse::<i32>().ok()?).ok()?;
    Some(Some(HttpStatus { code: code.into() }))
}

fn buffer(body: Option<&RequestBody>) -> Option<BufferSettings> {
    body.map(|body| BufferSettings {
        max_request_bytes: body.max_request_bytes,
        allow_partial_message: body.allow_partial_message,
        pack_as_bytes: body.pack_as_bytes,
    })
}

fn http_service(stack: &FilterStack, name: &str, config: &HttpProvider) -> Option<HttpExtAuthz> {
    let status_on_error = status_on_error(&config.status_on_error)?;
    if !config.path_prefix.is_empty() && !config.path_prefix.starts_with('/') {
        return None;
    }
    let timeout = timeout(config.timeout)?;
    let of_request = if config.include_request_headers_in_check.is_empty() {
        &config.include_headers_in_check
    } else {
        &config.include_request_headers_in_check
    };
    let allowed_headers = headers(of_request)?;
    let response = AuthorizationResponse {
        allowed_upstream_headers: headers(&config.headers_to_upstream_on_allow)?,
        allowed_client_headers: headers(&config.headers_to_downstream_on_deny)?,
        allowed_client_headers_on_success: headers(&config.headers_to_downstream_on_allow)?,
        ..Default::default()
    };
    let target = cluster(stack, name, &config.service, config.port)?;
    let added = config.include_additional_headers_in_check.iter();
    let headers_to_add: Vec<HeaderValue> = added
        .map(|(key, value)| HeaderValue {
            key: key.clone(),
            value: value.clone(),
            ..Default::default()
        })
        .collect();
    let service = HttpService {
        server_uri: Some(HttpUri {
            // Envoy wants a URI and does not look at it.
            uri: format!("http://{}", target.host),
            timeout: Some(timeout),
            http_upstream_type: Some(HttpUpstreamType::Cluster(target.cluster)),
        }),
        path_prefix: config.path_prefix.clone(),
        authorization_request: (!headers_to_add.is_empty()).then(|| AuthorizationRequest {
            headers_to_add,
            ..Default::default()
        }),
        authorization_response: (response != AuthorizationResponse::default()).then_some(response),
        ..Default::default()
    };
    Some(HttpExtAuthz {
        transport_api_version: ApiVersion::V3.into(),
        failure_mode_allow: config.fail_open,
        with_request_body: buffer(config.include_request_body_in_check.as_ref()),
        status_on_error,
        allowed_headers,
        services: Some(Services::HttpService(service)),
        ..Default::default()
    })
}

fn grpc_service(stack: &FilterStack, name: &str, config: &GrpcProvider) -> Option<Service> {
    let status_on_error = status_on_error(&config.status_on_error)?;
    let timeout = timeout(config.timeout)?;
    let target = cluster(stack, name, &config.service, config.port)?;
    let service = GrpcService {
        timeout: Some(timeout),
        target_specifier: Some(TargetSpecifier::EnvoyGrpc(EnvoyGrpc {
            cluster_name: target.cluster,
            // The name of the cluster, Envoy's default, is no valid authority.
            authority: target.host,
            ..Default::default()
        })),
        ..Default::default()
    };
    let config = HttpExtAuthz {
        transport_api_version: ApiVersion::V3.into(),
        failure_mode_allow: config.fail_open,
        with_request_body: buffer(config.include_request_body_in_check.as_ref()),
        status_on_error,
        services: Some(Services::GrpcService(service.clone())),
        ..Default::default()
    };
    Some(Service::Grpc(config, service))
}

/// Names of headers, with a star at one end; `Some(None)` if there are none, `None` if one is not allowed.
#[expect(clippy::option_option, reason = "the two say different things")]
fn headers(names: &[String]) -> Option<Option<ListStringMatcher>> {
    if names.is_empty() {
        return Some(None);
    }
    let patterns = names.iter().map(|name| {
        let text = match Pattern::of(name) {
            Pattern::Present => return None,
            Pattern::Suffix(text) | Pattern::Prefix(text) | Pattern::Exact(text) => text,
        };
        (!text.is_empty()).then(|| StringMatcher {
            ignore_case: true,
            ..matcher::string(name)
        })
    });
    let patterns = patterns.collect::<Option<Vec<_>>>()?;
    Some(Some(ListStringMatcher { patterns }))
}
