//! Secrets of the config cluster that a gateway may read: those that Gateways with its identity refer to, in the same
//! namespace or as ReferenceGrants allow.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{
    api::Config,
    base::{Namespace, ObjectKey},
    generate::{BuildContext, proxy::Identity},
    model::{
        credential::{AUTHORITY_SUFFIX, BUILTIN, Reference, Store, resource_name},
        gateway::{PARENT_NAMESPACE_ANNOTATION, converted_annotation},
        gateway_api::{
            PARENTS_ANNOTATION, grant,
            listener::{BACKEND_CERTIFICATE_ANNOTATION, SERVICE_ACCOUNT_ANNOTATION},
        },
    },
    proto::istio::networking::v1alpha3::{Gateway, ServerTlsSettings, server_tls_settings::TlSmode},
};

const LISTENER_SET: &str = "ListenerSet";
const GATEWAY: &str = "Gateway";

/// Returns the resource names that a proxy with this identity may read because of its Gateways.
pub(super) fn references(ctx: &BuildContext, gateways: &[ObjectKey], identity: &Identity) -> BTreeSet<SmolStr> {
    let mut found = BTreeSet::new();
    for key in gateways {
        let Some(gateway) = ctx.mesh.gateways.get(ctx.cx, key) else {
            continue;
        };
        if !has_identity(gateway, identity) {
            continue;
        }
        // The reference is one of the Gateway, for its listeners in ListenerSets too.
        if let Some(name) = converted_annotation(&gateway.meta, BACKEND_CERTIFICATE_ANNOTATION)
            && Referrer::gateway(identity).may_read(ctx, identity, name)
        {
            found.insert(resource_name(name));
        }
        for tls in gateway.spec.servers.iter().filter_map(|server| server.tls.as_ref()) {
            let validates = matches!(tls.mode(), TlSmode::Mutual | TlSmode::OptionalMutual);
            for credential in credentials(tls) {
                let name = resource_name(credential);
                if is_allowed(ctx, gateway, identity, &name) {
                    if validates {
                        found.insert(SmolStr::from(format!("{name}{AUTHORITY_SUFFIX}")));
                    }
                    found.insert(name);
                }
            }
            // A name without the suffix is that of a key. The reference is to the object, which has no suffix.
            let authority = resource_name(&tls.ca_cert_credential_name);
            if validates
                && let Some(object) = authority.strip_suffix(AUTHORITY_SUFFIX)
                && is_allowed(ctx, gateway, identity, object)
            {
                found.insert(authority);
            }
        }
    }
    found
}

/// Returns true if a proxy has the identity of a Gateway's proxies.
///
/// Parity (pilot/pkg/model/gateway.go): Istio also reads the namespace and the parents that a Gateway of a user names.
/// Such a Gateway would use what ReferenceGrants permit to the Gateways of that namespace. The webhook refuses it, but
/// does not see an object whose label `istio.io/rev` is a tag.
fn has_identity(gateway: &Config<Gateway>, identity: &Identity) -> bool {
    let parent = converted_annotation(&gateway.meta, PARENT_NAMESPACE_ANNOTATION).filter(|parent| !parent.is_empty());
    let namespace = parent.map_or(gateway.meta.namespace().as_str(), SmolStr::as_str);
    let account = gateway.meta.annotations.get(SERVICE_ACCOUNT_ANNOTATION);
    let account = account.filter(|account| !account.is_empty());
    identity.namespace == *namespace && account.is_none_or(|account| *account == identity.service_account)
}

fn credentials(tls: &ServerTlsSettings) -> impl Iterator<Item = &String> {
    let single = tls.credential_names.is_empty().then_some(&tls.credential_name);
    let all = tls.credential_names.iter().chain(single);
    all.filter(|credential| !credential.is_empty() && !credential.starts_with(BUILTIN))
}

fn is_allowed(ctx: &BuildContext, gateway: &Config<Gateway>, identity: &Identity, name: &str) -> bool {
    let of_set = converted_annotation(&gateway.meta, PARENTS_ANNOTATION).is_some_and(|parents| {
        let kind = parents.strip_prefix(LISTENER_SET);
        kind.is_some_and(|rest| rest.starts_with('/'))
    });
    let own = gateway.meta.namespace();
    // A ListenerSet may be in another namespace than its Gateway, if the Gateway allows it.
    let referrer = if of_set {
        Referrer {
            kind: LISTENER_SET,
            namespace: own,
            needs_grant: false,
        }
    } else {
        Referrer {
            needs_grant: *own != identity.namespace,
            ..Referrer::gateway(identity)
        }
    };
    referrer.may_read(ctx, identity, name)
}

/// An object that refers to a credential.
struct Referrer<'a> {
    kind: &'static str,
    namespace: &'a Namespace,
    /// True if it needs a ReferenceGrant for credentials in its namespace, too.
    needs_grant: bool,
}

impl<'a> Referrer<'a> {
    /// Returns the Gateway of a proxy with this identity.
    fn gateway(identity: &'a Identity) -> Self {
        Self {
            kind: GATEWAY,
            namespace: &identity.namespace,
            needs_grant: false,
        }
    }

    /// Returns true if it may refer to a credential of the proxy: in its namespace, or as a ReferenceGrant allows.
    fn may_read(&self, ctx: &BuildContext, identity: &Identity, name: &str) -> bool {
        let Ok(reference) = Reference::parse(name, &identity.namespace) else {
            return false;
        };
        !self.needs_grant && reference.namespace == *self.namespace || is_granted(ctx, self.kind, self.namespace, name)
    }
}

/// Returns true if a ReferenceGrant allows it.
fn is_granted(ctx: &BuildContext, kind: &str, from: &Namespace, name: &str) -> bool {
    // A name without a namespace cannot be granted.
    let Ok(reference) = Reference::parse(name, &Namespace::default()) else {
        return false;
    };
    let target_kind = match reference.store {
        Store::Secret | Store::GatewaySecret => "Secret",
        Store::ConfigMap => "ConfigMap",
    };
    grant::is_granted(
        ctx.cx,
        ctx.mesh,
        grant::Reference {
            from_kind: kind,
            from,
            group: "",
            kind: target_kind,
            namespace: &reference.namespace,
            name: &reference.name,
        },
    )
}
