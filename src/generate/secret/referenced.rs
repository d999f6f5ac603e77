//! Names of secrets that a proxy's configuration may refer to. The set is as large as possible: secrets outside it are
//! not served, and those in it that the proxy never requests are never sent.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{
    base::select,
    generate::{
        BuildContext, ProxyType,
        constant::{CredentialSource, credential_source},
        proxy::MetadataKey,
        proxy_view::backend_certificate,
        selected::Selected,
    },
    model::{
        credential::{
            AUTHORITY_SUFFIX, CONFIG_MAP, is_served,
            references::{CredentialUsers, client_credentials},
            resource_name,
        },
        export,
    },
    proto::istio::networking::v1alpha3::{
        ServerTlsSettings, client_tls_settings::TlSmode as ClientMode, server_tls_settings::TlSmode,
    },
};

/// Returns the names, sorted.
pub(super) fn names(ctx: &BuildContext, selected: &Selected) -> BTreeSet<SmolStr> {
    let mut names = Names {
        has_socket: selected.proxy.metadata_value(MetadataKey::Credential) == "true",
        names: BTreeSet::new(),
    };
    match selected.proxy.proxy_type {
        ProxyType::Router | ProxyType::Waypoint => {
            names.of_gateways(ctx, selected);
            names.of_rules(ctx, selected, &CredentialUsers::Gateways);
        }
        _ => {
            names.of_sidecar(ctx, selected);
            names.of_rules(
                ctx,
                selected,
                &CredentialUsers::Selected(selected.proxy.namespace.clone()),
            );
            names.of_rules(ctx, selected, &CredentialUsers::Everyone);
        }
    }
    names.of_filters(ctx, selected);
    names.names
}

struct Names {
    /// True if the proxy requests credentials of a provider from a socket of its own.
    has_socket: bool,
    names: BTreeSet<SmolStr>,
}

impl Names {
    fn note(&mut self, credential: &str, suffix: &str) {
        let name = format!("{credential}{suffix}");
        let name = match credential_source(&name, self.has_socket) {
            CredentialSource::Ads(name) => name,
            // Without a provider, and in clients, the control plane serves the secret.
            CredentialSource::Provider(name) => resource_name(&name),
            CredentialSource::Agent(_) | CredentialSource::Socket => return,
        };
        if is_served(&name) {
            self.names.insert(name);
        }
    }

    fn of_gateways(&mut self, ctx: &BuildContext, selected: &Selected) {
        if let Some(name) = backend_certificate(ctx, selected) {
            self.note(&name, "");
        }
        for key in &*selected.gateways {
            let gateway = ctx.mesh.gateways.get(ctx.cx, key);
            let servers = gateway.into_iter().flat_map(|gateway| &gateway.spec.servers);
            servers
                .filter_map(|server| server.tls.as_ref())
                .for_each(|tls| self.of_server(tls));
        }
    }

    /// Sidecars terminate TLS where their ingress listeners declare it.
    fn of_sidecar(&mut self, ctx: &BuildContext, selected: &Selected) {
        let key = selected.scope.sidecar();
        let sidecar = key.and_then(|key| ctx.mesh.sidecars.get(ctx.cx, key));
        let listeners = sidecar.into_iter().flat_map(|sidecar| &sidecar.spec.ingress);
        listeners
            .filter_map(|listener| listener.tls.as_ref())
            .for_each(|tls| self.of_server(tls));
    }

    fn of_server(&mut self, tls: &ServerTlsSettings) {
        let validates = match tls.mode() {
            TlSmode::Simple => false,
            TlSmode::Mutual | TlSmode::OptionalMutual => true,
            _ => return,
        };
        let single = std::slice::from_ref(&tls.credential_name);
        let credentials = if tls.credential_names.is_empty() {
            single
        } else {
            &tls.credential_names
        };
        let mut credentials = credentials
            .iter()
            .filter(|credential| !credential.is_empty())
            .peekable();
        let Some(first) = credentials.peek().copied() else {
            return;
        };
        credentials.for_each(|credential| self.note(credential, ""));
        if validates {
            match tls.ca_cert_credential_name.as_str() {
                "" => self.note(first, AUTHORITY_SUFFIX),
                authority => self.note(authority, ""),
            }
        }
    }

    fn of_rules(&mut self, ctx: &BuildContext, selected: &Selected, clients: &CredentialUsers) {
        // Parity (pilot/pkg/model/push_context.go): of the default, only `.` counts.
        let default = ctx.mesh_config().default_destination_rule_export_to.iter();
        let default: Vec<String> = default.filter(|value| *value == ".").cloned().collect();
        let namespace = &selected.proxy.namespace;
        for (_, rule) in ctx.mesh.credential_rules.get(ctx.cx, clients) {
            if !export::read(&rule.spec.export_to, &default, rule.meta.namespace()).visible_to(namespace) {
                continue;
            }
            if let (CredentialUsers::Selected(_), Some(selector)) = (clients, &rule.spec.workload_selector) {
                let pairs = selector.match_labels.iter().map(|(k, v)| (k.as_str(), v.as_str()));
                if !select::matches(pairs, &selected.labels) {
                    continue;
                }
            }
            for tls in client_credentials(&rule.spec) {
                if *clients == CredentialUsers::Everyone && !tls.credential_name.starts_with(CONFIG_MAP) {
                    continue;
                }
                if tls.mode() == ClientMode::Mutual {
                    self.note(&tls.credential_name, "");
                }
                self.note(&tls.credential_name, AUTHORITY_SUFFIX);
            }
        }
    }

    fn of_filters(&mut self, ctx: &BuildContext, selected: &Selected) {
        let patches = &selected.patches;
        let lists = [
            &patches.clusters,
            &patches.listeners,
            &patches.routes,
            &patches.extensions,
        ];
        let filters: BTreeSet<_> = lists
            .iter()
            .flat_map(|list| list.iter().map(|patch| &patch.filter))
            .collect();
        for key in filters {
            let found = ctx.mesh.filter_credentials.get(ctx.cx, key);
            self.names
                .extend(found.into_iter().flat_map(|names| names.iter().cloned()));
        }
    }
}
