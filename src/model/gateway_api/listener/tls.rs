//! TLS settings of a listener.

use smol_str::SmolStr;

use super::{
    ListenerMistakes, ListenerOwner,
    authority::{self, ClientAuthority},
};
use crate::{
    api::{
        Config, Kind, Meta,
        gateway_api::{
            self,
            common::ObjectReference,
            gateway::{ClientValidation, ListenerTls, PortTls},
        },
    },
    base::{Namespace, ObjectKey, cipher_suite},
    model::{
        MeshSnapshot,
        credential::{AUTHORITY_SUFFIX, BUILTIN, CONFIG_MAP, GATEWAY_SECRET, Secrets},
        gateway_api::{
            Mistake,
            grant::{self, Reference},
        },
        network,
    },
    proto::istio::networking::v1alpha3::{ServerTlsSettings, server_tls_settings::TlSmode},
    table::Cx,
};

/// Option with the mode of terminated TLS.
const TERMINATE_MODE: &str = "gateway.istio.io/tls-terminate-mode";
/// Option with cipher suites, separated by commas.
const CIPHER_SUITES: &str = "gateway.istio.io/tls-cipher-suites";
/// Most server certificates of a listener.
pub(super) const MAX_CERTIFICATES: usize = 2;

/// Reason of an invalid reference to CA certificates for clients.
const INVALID_AUTHORITY: &str = "InvalidCACertificateRef";
/// Reason of a reference to CA certificates for clients of an unsupported kind.
const INVALID_AUTHORITY_KIND: &str = "InvalidCACertificateKind";

/// Returns the validation of client certificates on a port; `None` without any.
pub(super) fn client_validation(gateway: &gateway_api::Gateway, port: u16) -> Option<&ClientValidation> {
    let frontend = gateway.tls.as_ref()?.frontend.as_ref()?;
    let own = frontend
        .per_port
        .iter()
        .find(|settings: &&PortTls| settings.port == port);
    own.map_or(&frontend.default, |settings| &settings.tls)
        .validation
        .as_ref()
}

/// Returns true if clients without a valid certificate are accepted, too.
pub(in crate::model::gateway_api) fn accepts_untrusted(validation: Option<&ClientValidation>) -> bool {
    validation.is_some_and(|validation| validation.mode.as_deref() == Some("AllowInsecureFallback"))
}

/// Returns the resource name of the certificate with which a Gateway connects to backends; `None` without a reference.
pub(in crate::model::gateway_api) fn backend_certificate(
    cx: &Cx,
    mesh: &MeshSnapshot,
    gateway: &Config<gateway_api::Gateway>,
) -> Option<Result<String, Mistake>> {
    let backend = gateway.spec.tls.as_ref()?.backend.as_ref()?;
    let reference = backend.client_certificate_ref.as_ref()?;
    let owner = &ListenerOwner {
        kind: Kind::KubeGateway,
        object: gateway.meta.key.clone(),
    };
    let certificates = Certificates { cx, mesh, owner };
    Some(certificates.certificate(reference, "InvalidClientCertificateRef", "clientCertificateRef"))
}

/// Returns the TLS settings of a listener's server; `None` without TLS.
pub(super) fn settings(
    cx: &Cx,
    mesh: &MeshSnapshot,
    owner: &ListenerOwner,
    gateway: &Config<gateway_api::Gateway>,
    meta: &Meta,
    listener: &gateway_api::gateway::Listener,
) -> Result<Option<ServerTlsSettings>, ListenerMistakes> {
    let Some(tls) = &listener.tls else { return Ok(None) };
    let mut settings = ServerTlsSettings::default();
    if tls.mode.as_ref().is_some_and(|mode| mode == "Passthrough") {
        settings.set_mode(if network::is_passthrough(&meta.labels, listener) {
            TlSmode::AutoPassthrough
        } else {
            TlSmode::Passthrough
        });
    } else {
        let certificates = Certificates { cx, mesh, owner };
        if !certificates.terminate(&mut settings, tls, gateway, listener.port)? {
            return Ok(Some(settings));
        }
    }
    if let Some(suites) = tls.options.get(CIPHER_SUITES) {
        let suites = suites.split(',').map(str::trim).filter(|suite| !suite.is_empty());
        let suites: Vec<String> = suites.map(str::to_owned).collect();
        settings.cipher_suites = cipher_suite::known(&suites);
    }
    Ok(Some(settings))
}

/// Source of a listener's certificates.
struct Certificates<'a> {
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    owner: &'a ListenerOwner,
}

impl Certificates<'_> {
    /// Sets the mode and the certificates. Returns false if the proxy's own certificate is used.
    fn terminate(
        &self,
        settings: &mut ServerTlsSettings,
        tls: &ListenerTls,
        gateway: &Config<gateway_api::Gateway>,
        port: u16,
    ) -> Result<bool, ListenerMistakes> {
        let option = tls.options.get(TERMINATE_MODE).map(SmolStr::as_str);
        settings.set_mode(match option {
            Some("MUTUAL") => TlSmode::Mutual,
            Some("OPTIONAL_MUTUAL") => TlSmode::OptionalMutual,
            Some("ISTIO_MUTUAL") => TlSmode::IstioMutual,
            _ => TlSmode::Simple,
        });
        if option == Some("ISTIO_SIMPLE") {
            BUILTIN.clone_into(&mut settings.credential_name);
        }
        if matches!(option, Some("ISTIO_SIMPLE" | "ISTIO_MUTUAL")) {
            return Ok(false);
        }
        let mut names = self.server_certificates(&tls.certificate_refs)?;
        if names.len() == 1 {
            settings.credential_name = names.remove(0);
        } else {
            settings.credential_names = names;
        }
        let validation = client_validation(&gateway.spec, port);
        let authority = self.client_authority(validation);
        let authority = authority.map_err(|mistake| self.without_authority(mistake))?;
        if let Some(authority) = authority {
            if tls.certificate_refs.is_empty() {
                // Without references, the listener has the proxy's own certificate, as in Istio, which then ignores
                // the validation of clients: they would be admitted without a certificate.
                BUILTIN.clone_into(&mut settings.credential_name);
            }
            settings.ca_cert_credential_name = authority;
            if accepts_untrusted(validation) {
                settings.set_mode(TlSmode::OptionalMutual);
            } else if option != Some("OPTIONAL_MUTUAL") {
                settings.set_mode(TlSmode::Mutual);
            }
        }
        Ok(true)
    }

    /// Returns the resource names of the valid certificates; without any, the mistakes in all.
    ///
    /// Parity (pilot/pkg/config/kube/gateway/conversion.go, buildTLS): mistakes do not count beside a valid
    /// certificate. Istio takes the name of the first certificate then, which is empty if that is the invalid one.
    fn server_certificates(&self, references: &[ObjectReference]) -> Result<Vec<String>, Mistake> {
        if references.len() > MAX_CERTIFICATES {
            let message = "TLS mode can only support up to 2 server certificates";
            return Err(Mistake::new("InvalidCertificateRef", message));
        }
        let (mut names, mut mistakes) = (Vec::new(), None);
        for reference in references {
            match self.server_certificate(reference) {
                Ok(name) => names.push(name),
                Err(mistake) => mistakes = Mistake::joined(mistakes, Some(mistake)),
            }
        }
        match mistakes {
            Some(mistakes) if names.is_empty() => Err(mistakes),
            _ => Ok(names),
        }
    }

    fn server_certificate(&self, reference: &ObjectReference) -> Result<String, Mistake> {
        self.certificate(reference, "InvalidCertificateRef", "certificateRef")
    }

    /// Returns the resource name of a certificate. `invalid` is the reason if there is none, and `field` the field with
    /// the reference.
    fn certificate(&self, reference: &ObjectReference, invalid: &'static str, field: &str) -> Result<String, Mistake> {
        let invalid = |reason: &str| {
            let message = format!("invalid certificate reference {}, {reason}", text(reference));
            Mistake::new(invalid, message)
        };
        if !is_secret(reference) {
            return Err(invalid("only secret is allowed"));
        }
        let namespace = self.namespace_of(reference);
        // Permission precedes existence: a status must not tell which Secrets other namespaces have.
        if !self.is_allowed("Secret", &namespace, &reference.name) {
            let own = &self.owner.object.namespace;
            return Err(not_permitted(field, &format!("{}/{namespace}", reference.name), own));
        }
        let secrets = Secrets::of_config_cluster(self.cx, self.mesh);
        let key = self.key(&namespace, &reference.name);
        if self.mesh.secrets.get(self.cx, &key).is_none() {
            return Err(invalid(&format!("secret {namespace}/{} not found", reference.name)));
        }
        let certificate = secrets.certificate(&namespace, &reference.name);
        certificate.map_err(|reason| invalid(&reason))?;
        if let Some(error) = self.mesh.key_pair_errors.get(self.cx, &key) {
            return Err(invalid(&format!("the certificate is malformed: {}", **error)));
        }
        Ok(format!("{GATEWAY_SECRET}{namespace}/{}", reference.name))
    }

    /// Returns the mistakes of a listener whose reference to CA certificates for clients is invalid. Istio accepts the
    /// listener, and knows no other reason than for certificates.
    fn without_authority(&self, mistake: Mistake) -> ListenerMistakes {
        if !self.mesh.installation.features.pilot_gateway_api_standard_reasons {
            let reason = match mistake.reason {
                INVALID_AUTHORITY | INVALID_AUTHORITY_KIND => "InvalidCertificateRef",
                reason => reason,
            };
            return Mistake { reason, ..mistake }.into();
        }
        ListenerMistakes {
            accepted: Some(Mistake::new("NoValidCACertificate", mistake.message.clone())),
            references: Some(mistake),
            ..ListenerMistakes::default()
        }
    }

    /// Returns the resource name of the CA certificates for clients.
    fn client_authority(&self, validation: Option<&ClientValidation>) -> Result<Option<String>, Mistake> {
        let references = validation.map_or(&[][..], |validation| &validation.ca_certificate_refs);
        match references {
            [] => Ok(None),
            [reference] => self.authority(reference).map(Some),
            _ => {
                let message = "only one caCertificateRef is supported";
                Err(Mistake::new(INVALID_AUTHORITY, message))
            }
        }
    }

    fn authority(&self, reference: &ObjectReference) -> Result<String, Mistake> {
        let invalid = |reason: &str| {
            let message = format!("invalid CA certificate reference {}, {reason}", text(reference));
            Mistake::new(INVALID_AUTHORITY, message)
        };
        let Some(referenced) = ClientAuthority::of(&self.owner.object, reference) else {
            let mistake = invalid("only secret and configmap are allowed");
            return Err(Mistake {
                reason: INVALID_AUTHORITY_KIND,
                ..mistake
            });
        };
        let ClientAuthority { kind, object } = &referenced;
        let namespace = &object.namespace;
        if !self.is_allowed(kind.name(), namespace, &reference.name) {
            let own = &self.owner.object.namespace;
            let named = format!("{namespace}/{}", reference.name);
            return Err(not_permitted("caCertificateRef", &named, own));
        }
        let not_found = |kind: &str| invalid(&format!("{kind} {namespace}/{} not found", reference.name));
        let scheme = if *kind == Kind::ConfigMap {
            if self.mesh.config_maps.get(self.cx, object).is_none() {
                return Err(not_found("configmap"));
            }
            CONFIG_MAP
        } else {
            if self.mesh.secrets.get(self.cx, object).is_none() {
                return Err(not_found("secret"));
            }
            GATEWAY_SECRET
        };
        authority::content(self.cx, self.mesh, &referenced).map_err(|reason| invalid(&reason))?;
        let malformed = &self.mesh.malformed_client_authorities;
        if malformed.get(self.cx, &referenced).is_some() {
            return Err(invalid("the bundle is malformed"));
        }
        Ok(format!("{scheme}{namespace}/{}{AUTHORITY_SUFFIX}", reference.name))
    }

    fn namespace_of(&self, reference: &ObjectReference) -> Namespace {
        let written = reference.namespace.as_ref();
        written.map_or_else(|| self.owner.object.namespace.clone(), Namespace::new)
    }

    fn key(&self, namespace: &Namespace, name: &SmolStr) -> ObjectKey {
        ObjectKey::new(&self.owner.object.cluster, namespace.clone(), name.clone())
    }

    fn is_allowed(&self, kind: &str, namespace: &Namespace, name: &SmolStr) -> bool {
        let own = &self.owner.object.namespace;
        own == namespace
            || grant::is_granted(
                self.cx,
                self.mesh,
                Reference {
                    from_kind: self.owner.kind_name(),
                    from: own,
                    group: "",
                    kind,
                    namespace,
                    name,
                },
            )
    }
}

/// Returns true if a reference to a certificate is one to a Secret.
pub(super) fn is_secret(reference: &ObjectReference) -> bool {
    reference.group.as_ref().is_none_or(SmolStr::is_empty)
        && reference.kind.as_ref().is_none_or(|kind| kind == "Secret")
}

fn not_permitted(field: &str, named: &str, own: &Namespace) -> Mistake {
    let message = format!(
        "{field} {named} not accessible to a Gateway in namespace {own:?} (missing a ReferenceGrant?)",
        own = own.as_str()
    );
    Mistake::new("RefNotPermitted", message)
}

fn text(reference: &ObjectReference) -> String {
    let part = |value: &Option<SmolStr>| value.clone().unwrap_or_default();
    let (group, kind) = (part(&reference.group), part(&reference.kind));
    format!("{group}/{kind}/{}.{}", reference.name, part(&reference.namespace))
}
