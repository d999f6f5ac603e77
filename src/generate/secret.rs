//! Secrets (SDS): certificates and CA certificates from Secrets and ConfigMaps.
//!
//! A proxy requests them by the names in its listeners and clusters. Selection finds the names that may occur, and each
//! is a resource of its own. Note: the reader is part of the resource's key, so a cached secret cannot reach another
//! identity. A stream without a verified identity has no such part.

mod message;
mod referenced;
#[cfg(test)]
mod tests;
mod verified;

use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource,
    resource::{Built, Note},
    selected::Selected,
};
use crate::{
    api::access_review::{Access, AccessReview, Subject},
    base::{MessageKey, Namespace, Shared},
    model::credential::{
        AUTHORITY_SUFFIX, CONFIG_MAP, GATEWAY_SECRET, Reference, Secrets, Store, config_map_authority,
        pem::{self, Validity},
    },
    proto::{
        envoy::extensions::transport_sockets::tls::v3::Secret,
        istio::mesh::v1alpha1::{PrivateKeyProvider, private_key_provider::Provider},
    },
};

/// Code of the note about a credential that is missing, denied or malformed.
pub const CERTIFICATE_ERROR: &str = "pilot_sds_certificate_errors_total";

/// Secrets of one proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecretPart {
    /// Secrets that it may request, sorted.
    keys: Shared<[SecretKey]>,
}

/// Inputs of a secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecretKey {
    /// Resource name.
    name: SmolStr,
    /// Reader; `None` for content that every proxy may read.
    reader: Option<Shared<Subject>>,
    /// True if a Gateway of the reader refers to it and is allowed to.
    is_verified: bool,
    /// Provider that performs private key operations in Envoy's place, if there is one.
    provider: Option<MessageKey<PrivateKeyProvider>>,
}

/// Selects the secrets of a proxy, if it may request any.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Option<SecretPart> {
    let proxy = selected.proxy;
    let identity = selected.class.identity.as_ref()?;
    // Without a cluster, no API server could review the access.
    if proxy.cluster.is_empty() {
        return None;
    }
    let names = referenced::names(ctx, selected);
    if names.is_empty() {
        return None;
    }
    let reader = Shared::new(Subject {
        namespace: identity.namespace.clone(),
        service_account: identity.service_account.clone(),
        cluster: proxy.cluster.clone(),
    });
    let verified = if names.iter().any(|name| name.starts_with(GATEWAY_SECRET)) {
        verified::references(ctx, &selected.gateways, identity)
    } else {
        Default::default()
    };
    let provider = provider(selected);
    let keys = names.into_iter().map(|name| {
        let is_public = name.starts_with(CONFIG_MAP);
        SecretKey {
            is_verified: verified.contains(&name),
            provider: provider
                .clone()
                .filter(|_| !is_public && !name.ends_with(AUTHORITY_SUFFIX)),
            reader: (!is_public).then(|| reader.clone()),
            name,
        }
    });
    Some(SecretPart {
        keys: keys.collect::<Vec<_>>().into(),
    })
}

/// Returns `privateKeyProvider` of the effective ProxyConfig, if the proxy has the extension.
fn provider(selected: &Selected) -> Option<MessageKey<PrivateKeyProvider>> {
    let settings = selected.proxy_config.private_key_provider.as_ref()?;
    let name = message::provider_name(settings.provider.as_ref()?);
    let has = selected.proxy.extensions.has(name);
    has.then(|| MessageKey::new(*settings))
}

impl SecretPart {
    /// Returns the reader whose access must be reviewed before all secrets can be sent.
    pub fn subject(&self) -> Option<&Subject> {
        self.keys.iter().find_map(SecretKey::subject)
    }

    /// Lists the secrets that the proxy may request.
    pub fn list(&self) -> impl Iterator<Item = SecretKey> {
        self.keys.iter().cloned()
    }
}

impl SecretKey {
    /// Returns the reader whose access must be reviewed, if the review makes a difference.
    fn subject(&self) -> Option<&Subject> {
        let reader = self.reader.as_deref()?;
        let reference = Reference::parse(&self.name, &reader.namespace).ok()?;
        let is_reviewed =
            reference.store == Store::Secret && !reference.is_authority() && reference.namespace == reader.namespace;
        is_reviewed.then_some(reader)
    }

    /// Builds the secret; without one, adds a note if it is missing or denied.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let (secret, remark) = match self.secret(ctx) {
            Ok((secret, remark)) => (Some(secret), remark),
            Err(reason) => (None, reason),
        };
        let notes = remark.map(|reason| Note {
            code: CERTIFICATE_ERROR,
            detail: SmolStr::from(format!("{}: {reason}{}", self.name, self.reader_suffix())),
        });
        let built = match secret {
            Some(secret) => Built::new(EncodedResource::new(self.name.clone(), &secret)),
            None => Built::none(),
        };
        built.with_notes(notes.into_iter().collect())
    }

    fn reader_suffix(&self) -> String {
        let reader = self.reader.as_ref();
        reader.map_or_else(String::new, |reader| format!("; requested by {}", **reader))
    }

    /// Returns the secret and a problem of its content. An error is the reason why it is not sent, or `None` while the
    /// review is pending.
    ///
    /// Parity (pilot/pkg/xds/sds.go): content that is not a certificate is sent, and Envoy refuses it.
    fn secret(&self, ctx: &BuildContext) -> Result<(Secret, Option<String>), Option<String>> {
        let (cx, mesh) = (ctx.cx, ctx.mesh);
        let none = Namespace::default();
        let own = self.reader.as_ref().map_or(&none, |reader| &reader.namespace);
        let reference = Reference::parse(&self.name, own).map_err(|error| error.to_string())?;
        let Reference { namespace, name, .. } = &reference;
        let secrets = match (reference.store, &self.reader) {
            (Store::ConfigMap, _) => {
                // Removed once: the name of the ConfigMap may end with the suffix, too.
                let object = name.strip_suffix(AUTHORITY_SUFFIX).unwrap_or(name);
                let authority = config_map_authority(cx, mesh, namespace, object)?;
                let remark = doubts(&authority.roots);
                return Ok((message::authority(&self.name, authority), remark));
            }
            (Store::Secret, Some(reader)) if *namespace == reader.namespace => {
                // CA certificates are public: only keys are protected.
                if !reference.is_authority() {
                    review(ctx, reader)?;
                }
                Secrets::of(cx, mesh, &reader.cluster)
            }
            (Store::GatewaySecret, Some(_)) if self.is_verified => Secrets::of_config_cluster(cx, mesh),
            (Store::Secret | Store::GatewaySecret, _) => {
                return Err(Some("a Secret of another namespace needs a ReferenceGrant".to_owned()));
            }
        };
        if reference.is_authority() {
            let authority = secrets.authority(namespace, name)?;
            let remark = doubts(&authority.roots);
            return Ok((message::authority(&self.name, authority), remark));
        }
        let certificate = secrets.certificate(namespace, name)?;
        let remark = doubts(&certificate.chain);
        let provider = self.provider.as_ref().and_then(|settings| settings.provider.as_ref());
        Ok((message::certificate(&self.name, certificate, provider), remark))
    }
}

/// Returns the review by the API server of the reader's cluster: an error if access is denied, `None` until the first
/// answer.
fn review(ctx: &BuildContext, reader: &Subject) -> Result<(), Option<String>> {
    let installation = &ctx.mesh.installation;
    if !installation.reviews_access {
        return Ok(());
    }
    let key = AccessReview::key(&installation.cluster, reader);
    let review = ctx.mesh.access_reviews.get(ctx.cx, &key);
    let reason = match review.map(|review| &review.access) {
        Some(Access::Allowed) => return Ok(()),
        Some(Access::Denied(reason)) => format!("the service account may not list Secrets: {reason}"),
        Some(Access::Unknown(reason)) => format!("access to Secrets could not be reviewed: {reason}"),
        None => return Err(None),
    };
    Err(Some(reason))
}

/// Returns the validity of the certificates in a secret; `None` if they cannot be parsed.
pub fn validity(secret: &EncodedResource) -> Option<Validity> {
    pem::validity(&message::certificates(secret)?)
}

fn doubts(certificate: &[u8]) -> Option<String> {
    let error = pem::check_certificate(certificate).err()?;
    Some(format!("the certificate cannot be read: {error}"))
}

/// Provider of private key operations.
type KeyProvider = Provider;
