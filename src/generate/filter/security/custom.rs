//! `CUSTOM` policies. A shadow RBAC filter finds the requests that a policy selects, and an external authorization
//! filter asks the provider about these.

use std::{collections::BTreeMap, time::Duration};

use super::{
    HTTP_EXT_AUTHZ, HTTP_RBAC, NETWORK_EXT_AUTHZ, NETWORK_RBAC, NETWORK_STAT_PREFIX, Traffic,
    matcher::{self, Pattern},
    provider_name,
    rbac::{self, Rules, Translation},
    trust_domain::MeshTrustDomains,
};
use crate::{
    api::Config,
    base::url::Url,
    generate::{
        constant::{self, http_filter, network_filter},
        filter::{FilterStack, PeerSource, stack::ProviderCluster},
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

/// Default timeout of a provider.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(10);

/// Prefix of rule names, by which the external authorization filter recognises them.
const RULE_PREFIX: &str = "istio-ext-authz";

/// Prefix of the shadow filter's results.
const SHADOW_PREFIX: &str = "istio_ext_authz_";

/// Metadata key with the name of the rule that applied.
const SHADOW_RULE: &str = "istio_ext_authz_shadow_effective_policy_id";

/// Treatment of the policies of one provider.
enum Treatment {
    /// The provider is asked.
    Ask(Rules, Box<AuthzService>),
    /// The provider cannot be asked: requests that the policies select are denied.
    Deny(Rules),
}

/// A provider that can be asked.
enum AuthzService {
    Http(HttpExtAuthz),
    Grpc(HttpExtAuthz, GrpcService),
}

/// Returns the filters of HTTP chains.
pub(crate) fn http_filters(stack: &FilterStack, peer_source: PeerSource) -> Vec<HttpFilter> {
    let filters = |(provider, verdict): (String, Treatment)| match verdict {
        Treatment::Deny(rules) => vec![rules.http_filter()],
        Treatment::Ask(rules, service) => {
            let (AuthzService::Http(mut config) | AuthzService::Grpc(mut config, _)) = *service;
            config.filter_enabled_metadata = Some(selected_by(HTTP_RBAC, &provider));
            vec![rules.http_filter(), http_filter(HTTP_EXT_AUTHZ, Any::pack(&config))]
        }
    };
    let treatments = treatments(stack, Traffic::Http, peer_source);
    treatments.into_iter().flat_map(filters).collect()
}

/// Returns the filters of TCP chains. Parity (pilot/pkg/security/authz/builder/builder.go): HTTP providers are ignored
/// in TCP chains, without denial.
pub(crate) fn network_filters(stack: &FilterStack, peer_source: PeerSource) -> Vec<Filter> {
    let filters = |(provider, verdict): (String, Treatment)| match verdict {
        Treatment::Deny(rules) => vec![rules.network_filter()],
        Treatment::Ask(rules, service) => match *service {
            AuthzService::Http(_) => Vec::new(),
            AuthzService::Grpc(http, grpc) => {
                let config = NetworkExtAuthz {
                    stat_prefix: NETWORK_STAT_PREFIX.to_owned(),
                    grpc_service: Some(grpc),
                    failure_mode_allow: http.failure_mode_allow,
                    transport_api_version: ApiVersion::V3.into(),
                    filter_enabled_metadata: Some(selected_by(NETWORK_RBAC, &provider)),
                    ..Default::default()
                };
                let filter = network_filter(NETWORK_EXT_AUTHZ, Any::pack(&config));
                vec![rules.network_filter(), filter]
            }
        },
    };
    let treatments = treatments(stack, Traffic::Tcp, peer_source);
    treatments.into_iter().flat_map(filters).collect()
}

/// Matches requests that a policy with this provider selected.
fn selected_by(filter: &str, provider: &str) -> MetadataMatcher {
    let name = matcher::pattern(MatchPattern::Prefix(format!("{RULE_PREFIX}-{provider}")));
    matcher::metadata(filter, [SHADOW_RULE], matcher::value(name))
}

/// Returns the treatment of each provider's policies, by provider name.
fn treatments(stack: &FilterStack, traffic: Traffic, peer_source: PeerSource) -> BTreeMap<String, Treatment> {
    let mut by_provider: BTreeMap<&str, Vec<&Config<AuthorizationPolicy>>> = BTreeMap::new();
    for policy in stack.policies_with(Action::Custom) {
        by_provider.entry(provider_name(&policy.spec)).or_default().push(policy);
    }
    let too_many = by_provider.len() > 1 && !stack.features().pilot_enable_multiple_custom_authz_providers;
    let translation = Translation {
        stack,
        domains: MeshTrustDomains::of(stack.mesh),
        traffic,
        peer_source,
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
                    // Parity (pilot/pkg/security/authz/builder/builder.go): dry-run policies are among the enforced
                    // rules.
                    enforced: dry_run.filter(|rules| !rules.policies.is_empty()),
                    shadow: Some(enforced),
                    shadow_prefix: SHADOW_PREFIX,
                };
                Treatment::Ask(rules, Box::new(service))
            }
            None => {
                stack.note("authorization_provider_unusable", provider);
                Treatment::Deny(denying(enforced))
            }
        };
        (provider.to_owned(), verdict)
    };
    by_provider.into_iter().map(verdict).collect()
}

/// Returns rules that deny the requests that the policies select.
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

/// Returns the provider of a name, if there is exactly one and it is valid.
fn service(stack: &FilterStack, name: &str) -> Option<AuthzService> {
    let providers = stack.mesh.extension_providers.iter();
    let mut named = providers.filter(|provider| is_safe(name) && provider.name == name && decides(provider));
    let provider = named.next()?;
    if named.next().is_some() {
        return None;
    }
    match provider.provider.as_ref()? {
        Provider::EnvoyExtAuthzHttp(config) => http_service(stack, config).map(AuthzService::Http),
        Provider::EnvoyExtAuthzGrpc(config) => grpc_service(stack, config),
        _ => None,
    }
}

/// Returns true for names that are valid in rule names: DNS labels.
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

fn cluster(stack: &FilterStack, service: &str, port: u32) -> Option<ProviderCluster> {
    let is_port = (1..=65535).contains(&port);
    is_port
        .then(|| stack.provider_cluster("authz", service, port))
        .flatten()
}

/// Returns the timeout, if Envoy accepts it.
fn timeout(declared: Option<prost_types::Duration>) -> Option<prost_types::Duration> {
    let declared = declared.unwrap_or_else(|| constant::duration(DEFAULT_TIMEOUT));
    (declared.seconds >= 0 && declared.nanos >= 0).then_some(declared)
}

/// Returns the status while the provider fails: `Some(None)` if none is set, `None` if Envoy does not know it.
#[expect(clippy::option_option, reason = "the two say different things")]
fn status_on_error(text: &str) -> Option<Option<HttpStatus>> {
    if text.is_empty() {
        return Some(None);
    }
    let code = StatusCode::try_from(text.parse::<i32>().ok()?).ok()?;
    (code != StatusCode::Empty).then(|| Some(HttpStatus { code: code.into() }))
}

/// Returns how much of the body the provider gets: `Some(None)` if nothing, `None` if Envoy refuses the size.
#[expect(clippy::option_option, reason = "the two say different things")]
fn buffer(body: Option<&RequestBody>) -> Option<Option<BufferSettings>> {
    let Some(body) = body else {
        return Some(None);
    };
    let settings = BufferSettings {
        max_request_bytes: body.max_request_bytes,
        allow_partial_message: body.allow_partial_message,
        pack_as_bytes: body.pack_as_bytes,
    };
    (settings.max_request_bytes > 0).then_some(Some(settings))
}

fn http_service(stack: &FilterStack, config: &HttpProvider) -> Option<HttpExtAuthz> {
    let status_on_error = status_on_error(&config.status_on_error)?;
    let with_request_body = buffer(config.include_request_body_in_check.as_ref())?;
    let is_path = config.path_prefix.starts_with('/') && Url::parse(&config.path_prefix).is_some();
    if !config.path_prefix.is_empty() && !is_path {
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
    let target = cluster(stack, &config.service, config.port)?;
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
            // Envoy requires a URI and ignores it.
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
        with_request_body,
        status_on_error,
        allowed_headers,
        services: Some(Services::HttpService(service)),
        ..Default::default()
    })
}

fn grpc_service(stack: &FilterStack, config: &GrpcProvider) -> Option<AuthzService> {
    let status_on_error = status_on_error(&config.status_on_error)?;
    let with_request_body = buffer(config.include_request_body_in_check.as_ref())?;
    let timeout = timeout(config.timeout)?;
    let target = cluster(stack, &config.service, config.port)?;
    let service = GrpcService {
        timeout: Some(timeout),
        target_specifier: Some(TargetSpecifier::EnvoyGrpc(EnvoyGrpc {
            cluster_name: target.cluster,
            // Envoy's default, the cluster name, is not a valid authority.
            authority: target.host,
            ..Default::default()
        })),
        ..Default::default()
    };
    let config = HttpExtAuthz {
        transport_api_version: ApiVersion::V3.into(),
        failure_mode_allow: config.fail_open,
        with_request_body,
        status_on_error,
        services: Some(Services::GrpcService(service.clone())),
        ..Default::default()
    };
    Some(AuthzService::Grpc(config, service))
}

/// Returns header names, with a star at one end; `Some(None)` without any, `None` if one is not allowed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_status_codes_that_envoy_accepts_are_sent() {
        assert_eq!(status_on_error(""), Some(None));
        assert_eq!(status_on_error("503"), Some(Some(HttpStatus { code: 503 })));
        for text in ["0", "1", "abc"] {
            assert_eq!(status_on_error(text), None, "{text}");
        }
    }

    #[test]
    fn only_sizes_of_bodies_that_envoy_accepts_are_sent() {
        let body = |max_request_bytes| RequestBody {
            max_request_bytes,
            ..Default::default()
        };
        let size = |body: Option<&RequestBody>| buffer(body).map(|sent| sent.map(|sent| sent.max_request_bytes));
        assert_eq!(size(None), Some(None));
        assert_eq!(size(Some(&body(10))), Some(Some(10)));
        assert_eq!(size(Some(&body(0))), None);
    }
}
