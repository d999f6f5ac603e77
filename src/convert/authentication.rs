//! Policies and MeshPolicies to PeerAuthentications, RequestAuthentications and AuthorizationPolicies.

use serde_json::{Map, Value, json};

use super::{Converter, KubeService, Old, set, spec::Spec};

/// The name of policies of a namespace or the mesh.
const DEFAULT: &str = "default";

/// The objects that a policy concerns.
struct Scope {
    namespace: String,
    name: String,
    selector: Option<Map<String, Value>>,
    /// Ports of the workloads; empty for all.
    ports: Vec<u64>,
}

impl Scope {
    /// Sets the selector of an object.
    fn select(&self, object: &mut Value) {
        if let Some(selector) = &self.selector {
            object["spec"]["selector"] = json!({ "matchLabels": selector });
        }
    }
}

pub(super) fn convert(converter: &mut Converter<'_>) {
    let (meshes, policies) = (converter.take("MeshPolicy"), converter.take("Policy"));
    let of_mesh = meshes.first().and_then(mtls_mode).is_some();
    let of_namespace = |namespace: &str| {
        let mut defaults = policies.iter().filter(|policy| policy.spec.get("targets").is_empty());
        defaults
            .find(|policy| policy.namespace == namespace)
            .map(|policy| mtls_mode(policy).is_some())
    };
    for policy in &meshes {
        let scope = Scope {
            namespace: converter.options.root_namespace.clone(),
            name: DEFAULT.to_owned(),
            selector: None,
            ports: Vec::new(),
        };
        convert_in(converter, policy, &scope, false);
    }
    for policy in &policies {
        let targets: Vec<Spec<'_>> = policy.spec.items("targets").collect();
        if targets.is_empty() {
            let scope = Scope {
                namespace: policy.namespace.clone(),
                name: DEFAULT.to_owned(),
                selector: None,
                ports: Vec::new(),
            };
            convert_in(converter, policy, &scope, of_mesh);
            continue;
        }
        let is_strict = of_namespace(&policy.namespace).unwrap_or(of_mesh);
        for (index, target) in targets.iter().enumerate() {
            if let Some(scope) = scope(converter, policy, *target, index) {
                convert_in(converter, policy, &scope, is_strict);
            }
        }
    }
}

/// Returns the scope of a target; `None` if its Service is unknown.
fn scope(converter: &mut Converter<'_>, policy: &Old<'_>, target: Spec<'_>, index: usize) -> Option<Scope> {
    let field = format!("spec.targets[{index}]");
    let name = target.text("name").unwrap_or_default();
    let service = converter.service(&policy.namespace, name);
    let Some(selector) = service.and_then(KubeService::selector) else {
        let message = format!(
            "Service {}/{name} with a selector is not among the files",
            policy.namespace
        );
        converter.note(policy, &field, &message);
        return None;
    };
    let mut ports = Vec::new();
    let mut unknown = Vec::new();
    for port in target.items("ports") {
        let wanted = match (port.get("number").0, port.text("name")) {
            (Value::Null, Some(name)) => Value::from(name),
            (number, _) => number.clone(),
        };
        match service.and_then(|service| service.target_port(&wanted)) {
            Some(port) => ports.push(port),
            None => unknown.push(wanted),
        }
    }
    for port in &unknown {
        let message = format!("port {port} of Service {name} has no number as its target port");
        converter.note(policy, &format!("{field}.ports"), &message);
    }
    converter.lost(policy, target, &format!("{field}."), &[("labels", "had no effect")]);
    if ports.is_empty() && !unknown.is_empty() {
        return None;
    }
    Some(Scope {
        namespace: policy.namespace.clone(),
        name: format!("{}-{name}", policy.name),
        selector: Some(selector),
        ports,
    })
}

/// Returns the mode of mutual TLS; `None` if the policy accepts plaintext only.
fn mtls_mode(policy: &Old<'_>) -> Option<&'static str> {
    let mut peers = policy.spec.items("peers").filter(|peer| peer.has("mtls"));
    let mtls = peers.next()?.get("mtls");
    Some(match mtls.text("mode") {
        Some("PERMISSIVE") => "PERMISSIVE",
        _ => "STRICT",
    })
}

/// Converts a policy for the objects of a scope. `is_strict_otherwise` is true if a broader policy demands mutual TLS.
fn convert_in(converter: &mut Converter<'_>, policy: &Old<'_>, scope: &Scope, is_strict_otherwise: bool) {
    let spec = policy.spec;
    convert_peers(converter, policy, scope, is_strict_otherwise);
    let peers = spec
        .items("peers")
        .filter(|peer| !peer.get("jwt").is_empty())
        .map(|peer| peer.get("jwt"));
    let origins = spec
        .items("origins")
        .map(|origin| origin.get("jwt"))
        .filter(|jwt| !jwt.is_empty());
    let tokens: Vec<Spec<'_>> = peers.chain(origins).collect();
    if !tokens.is_empty() {
        convert_tokens(converter, policy, scope, &tokens);
    }
    for peer in spec.items("peers") {
        let allow_tls = "connections with TLS that is not mutual cannot be accepted by name";
        converter.lost(policy, peer.get("mtls"), "spec.peers.mtls.", &[("allowTls", allow_tls)]);
    }
    let optional = "a peer that fails authentication cannot be accepted; hint: mode PERMISSIVE accepts plaintext";
    converter.lost(policy, spec, "spec.", &[("peerIsOptional", optional)]);
    if spec.text("principalBinding") == Some("USE_ORIGIN") {
        let message = "policies name source.principal or request.auth.principal today";
        converter.note(policy, "spec.principalBinding", message);
    }
}

/// Adds the PeerAuthentication of a policy, if it needs one.
fn convert_peers(converter: &mut Converter<'_>, policy: &Old<'_>, scope: &Scope, is_strict_otherwise: bool) {
    let mode = match mtls_mode(policy) {
        None if is_strict_otherwise => "DISABLE",
        None => {
            converter.note(
                policy,
                "spec.peers",
                "without mtls only plaintext was accepted; today mutual TLS is too",
            );
            return;
        }
        Some(mode) => mode,
    };
    let object = converter.object("PeerAuthentication", &scope.namespace, &scope.name);
    scope.select(object);
    if scope.ports.is_empty() {
        object["spec"]["mtls"] = json!({ "mode": mode });
    }
    for port in &scope.ports {
        object["spec"]["portLevelMtls"][port.to_string()] = json!({ "mode": mode });
    }
}

/// Adds the RequestAuthentication of these tokens, and an AuthorizationPolicy that requires one of them unless they are
/// optional.
fn convert_tokens(converter: &mut Converter<'_>, policy: &Old<'_>, scope: &Scope, tokens: &[Spec<'_>]) {
    let rules: Vec<Value> = tokens.iter().map(|jwt| jwt_rule(*jwt)).collect();
    let object = converter.object("RequestAuthentication", &scope.namespace, &scope.name);
    scope.select(object);
    object["spec"]["jwtRules"] = rules.into();
    if !scope.ports.is_empty() {
        converter.note(
            policy,
            "spec.targets",
            "tokens are validated at all ports of the workload today",
        );
    }
    if policy.spec.is_true("originIsOptional") {
        converter.note(
            policy,
            "spec.originIsOptional",
            "requests with invalid tokens are rejected today",
        );
        return;
    }
    let operations = operations(converter, policy, tokens, &scope.ports);
    let name = format!("{}-require-token", scope.name);
    let object = converter.object("AuthorizationPolicy", &scope.namespace, &name);
    scope.select(object);
    object["spec"]["action"] = "DENY".into();
    let mut rule = json!({ "from": [{ "source": { "notRequestPrincipals": ["*"] } }] });
    set(&mut rule, "to", operations.into());
    object["spec"]["rules"] = json!([rule]);
}

fn jwt_rule(jwt: Spec<'_>) -> Value {
    let mut rule = json!({ "issuer": jwt.text("issuer").unwrap_or_default(), "forwardOriginalToken": true });
    set(&mut rule, "audiences", jwt.texts("audiences").into());
    for field in ["jwksUri", "jwks"] {
        set(&mut rule, field, jwt.text(field).map(Value::from).unwrap_or_default());
    }
    let headers = jwt.texts("jwtHeaders").into_iter().map(|name| match name.as_str() {
        // Parity (pilot/pkg/security/authn/policy_applier.go): this header had a prefix of its own.
        "ingress-authorization" => json!({ "name": name, "prefix": "istio " }),
        _ => json!({ "name": name }),
    });
    set(&mut rule, "fromHeaders", headers.collect::<Vec<_>>().into());
    set(&mut rule, "fromParams", jwt.texts("jwtParams").into());
    rule
}

/// Returns the requests that need a token; empty for all.
fn operations(converter: &mut Converter<'_>, policy: &Old<'_>, tokens: &[Spec<'_>], ports: &[u64]) -> Vec<Value> {
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    let triggers: Vec<Spec<'_>> = tokens.iter().flat_map(|jwt| jwt.items("triggerRules")).collect();
    let is_unlimited = tokens.iter().any(|jwt| jwt.get("triggerRules").is_empty());
    if is_unlimited && !triggers.is_empty() {
        let message = "applies to one of several issuers; a token is required at all paths";
        converter.note(policy, "spec.origins.jwt.triggerRules", message);
    }
    let mut operations = Vec::new();
    for trigger in triggers.iter().filter(|_| !is_unlimited) {
        let mut operation = json!({});
        for (from, to) in [("excludedPaths", "notPaths"), ("includedPaths", "paths")] {
            let mut paths = Vec::new();
            for path in trigger.items(from) {
                match (path.text("exact"), path.text("prefix"), path.text("suffix")) {
                    (Some(exact), ..) => paths.push(exact.to_owned()),
                    (_, Some(prefix), _) => paths.push(format!("{prefix}*")),
                    (_, _, Some(suffix)) => paths.push(format!("*{suffix}")),
                    _ => {
                        let field = format!("spec.origins.jwt.triggerRules.{from}");
                        converter.note(policy, &field, "regular expressions cannot be mapped");
                    }
                }
            }
            set(&mut operation, to, paths.into());
        }
        set(&mut operation, "ports", ports.clone().into());
        if operation.as_object().is_some_and(|operation| !operation.is_empty()) {
            operations.push(json!({ "operation": operation }));
        }
    }
    if operations.is_empty() && !ports.is_empty() {
        operations.push(json!({ "operation": { "ports": ports } }));
    }
    operations
}
