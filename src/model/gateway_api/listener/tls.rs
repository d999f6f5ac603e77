//! TLS settings of a listener.

use smol_str::SmolStr;

use super::ListenerOwner;
use crate::{
    api::{
        Config, Meta,
        gateway_api::{
            self,
            common::ObjectReference,
            gateway::{ListenerTls, PortTls},
        },
    },
    base::{Namespace, ObjectKey},
    model::{
        MeshSnapshot, cipher_suite,
        credential::{
            AUTHORITY_SUFFIX, BUILTIN, CONFIG_MAP, GATEWAY_SECRET, Secrets, config_map_authority,
            pem::{self, CertificateError},
        },
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
/// Server certificates of a listener.
const MAX_CERTIFICATES: usize = 2;

/// Returns the TLS settings of a listener's server; `None` without TLS.
pub(super) fn settings(
    cx: &Cx,
    mesh: &MeshSnapshot,
    owner: &ListenerOwner,
    gateway: &Config<gateway_api::Gateway>,
    meta: &Meta,
    listener: &gateway_api::gateway::Listener,
) -> Result<Option<ServerTlsSettings>, Mistake> {
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
    ) -> Result<bool, Mistake> {
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
        if let Some(authority) = self.client_authority(&gateway.spec, port)? {
            settings.ca_cert_credential_name = authority;
            if option != Some("OPTIONAL_MUTUAL") {
                settings.set_mode(TlSmode::Mutual);
            }
        }
        Ok(true)
    }

    /// Returns the resource names of the valid certificates; without any, the mistakes in all.
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
        let invalid = |reason: &str| {
            let message = format!("invalid certificate reference {}, {reason}", text(reference));
            Mistake::new("InvalidCertificateRef", message)
        };
        let is_secret = reference.group.as_ref().is_none_or(SmolStr::is_empty)
            && reference.kind.as_ref().is_none_or(|kind| kind == "Secret");
        if !is_secret {
            return Err(invalid("only secret is allowed"));
        }
        let namespace = self.namespace_of(reference);
        let secrets = Secrets::of_config_cluster(self.cx, self.mesh);
        let key = self.key(&namespace, &reference.name);
        if self.mesh.secrets.get(self.cx, &key).is_none() {
            return Err(invalid(&format!("secret {namespace}/{} not found", reference.name)));
        }
        let certificate = secrets.certificate(&namespace, &reference.name);
        let certificate = certificate.map_err(|reason| invalid(&reason))?;
        pem::check_certificate(&certificate.chain)
            .map_err(|error| invalid(&format!("the certificate is malformed: {}", malformed(error))))?;
        if !self.is_allowed("Secret", &namespace, &reference.name) {
            let (kind, own) = ("certificateRef", &self.owner.object.namespace);
            return Err(not_permitted(kind, &format!("{}/{namespace}", reference.name), own));
        }
        Ok(format!("{GATEWAY_SECRET}{namespace}/{}", reference.name))
    }

    /// Returns the resource name of the CA certificates for clients on a port.
    fn client_authority(&self, gateway: &gateway_api::Gateway, port: u16) -> Result<Option<String>, Mistake> {
        let Some(frontend) = gateway.tls.as_ref().and_then(|tls| tls.frontend.as_ref()) else {
            return Ok(None);
        };
        let own = frontend.per_port.iter().find(|it: &&PortTls| it.port == port);
        let tls = own.map_or(&frontend.default, |it| &it.tls);
        let references = tls.validation.as_ref().map_or(&[][..], |it| &it.ca_certificate_refs);
        match references {
            [] => Ok(None),
            [reference] => self.authority(reference).map(Some),
            _ => {
                let message = "only one caCertificateRef is supported";
                Err(Mistake::new("InvalidCertificateRef", message))
            }
        }
    }

    fn authority(&self, reference: &ObjectReference) -> Result<String, Mistake> {
        let invalid = |reason: &str| {
            let message = format!("invalid CA certificate reference {}, {reason}", text(reference));
            Mistake::new("InvalidCertificateRef", message)
        };
        let namespace = self.namespace_of(reference);
        let key = self.key(&namespace, &reference.name);
        let is_core = reference.group.as_ref().is_none_or(SmolStr::is_empty);
        let kind = reference.kind.as_deref().filter(|_| is_core);
        let not_found = |kind: &str| invalid(&format!("{kind} {namespace}/{} not found", reference.name));
        let (scheme, found) = match kind {
            Some("ConfigMap") => {
                if self.mesh.config_maps.get(self.cx, &key).is_none() {
                    return Err(not_found("configmap"));
                }
                let found = config_map_authority(self.cx, self.mesh, &namespace, &reference.name);
                (CONFIG_MAP, found)
            }
            Some("Secret") => {
                if self.mesh.secrets.get(self.cx, &key).is_none() {
                    return Err(not_found("secret"));
                }
                let secrets = Secrets::of_config_cluster(self.cx, self.mesh);
                (GATEWAY_SECRET, secrets.authority(&namespace, &reference.name))
            }
            _ => return Err(invalid("only secret and configmap are allowed")),
        };
        let found = found.map_err(|reason| invalid(&reason))?;
        pem::check_certificate(&found.roots).map_err(|_| invalid("the bundle is malformed"))?;
        if !self.is_allowed(kind.unwrap_or_default(), &namespace, &reference.name) {
            let own = &self.owner.object.namespace;
            let named = format!("{namespace}/{}", reference.name);
            return Err(not_permitted("caCertificateRef", &named, own));
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

/// Returns the reason for which the parser of Istio refuses a certificate.
fn malformed(error: CertificateError) -> &'static str {
    match error {
        CertificateError::NotPem => "tls: failed to find any PEM data in certificate input",
        CertificateError::NotACertificate => "x509: malformed certificate",
    }
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
