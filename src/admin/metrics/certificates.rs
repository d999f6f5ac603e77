//! Certificates that proxies are served and that are not valid now. Generation has no clock, so they are found when
//! metrics are read.

use std::collections::BTreeMap;

use crate::{
    base::Version,
    generate::{ResourceKey, plan::Resource, resource::Built, secret},
    model::credential::pem::Validity,
    table::{Cx, Table},
};

/// The secrets of the last collection, by version.
#[derive(Default)]
pub(super) struct ServedCertificates {
    secrets: BTreeMap<Version, ServedSecret>,
}

/// The certificates of a secret.
struct ServedSecret {
    /// `None` if they cannot be parsed, which a note of generation says.
    validity: Option<Validity>,
    /// True if they were not valid at the last collection.
    is_invalid: bool,
}

impl ServedCertificates {
    /// Returns the number of secrets whose certificates are not valid at a time, in seconds since 1970, and were valid
    /// or not served at the last collection. Equal secrets of several proxies count once.
    pub(super) fn newly_invalid(&mut self, resources: &Table<ResourceKey, Built>, now: i64) -> u64 {
        let (mut served, mut number) = (BTreeMap::new(), 0);
        let cx = Cx::untracked();
        let secrets = resources
            .iter(&cx)
            .filter(|(key, _)| matches!(***key, Resource::Secret(_)));
        for secret in secrets.filter_map(|(_, built)| built.resource.as_ref()) {
            if served.contains_key(&secret.version) {
                continue;
            }
            let before = self.secrets.get(&secret.version);
            let validity = before.map_or_else(|| secret::validity(secret), |before| before.validity);
            let is_invalid = validity.is_some_and(|validity| !validity.contains(now));
            if is_invalid && before.is_none_or(|before| !before.is_invalid) {
                tracing::warn!(secret = %secret.name, "served certificate is expired or not yet valid");
                number += 1;
            }
            served.insert(secret.version, ServedSecret { validity, is_invalid });
        }
        self.secrets = served;
        number
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use serde_json::json;
    use time::{Duration, OffsetDateTime};

    use super::*;
    use crate::{
        generate::{Proxy, fixture, proxy::Identity},
        model::Installation,
    };

    fn day(number: i64) -> OffsetDateTime {
        OffsetDateTime::UNIX_EPOCH + Duration::days(20_000 + number)
    }

    #[test]
    fn certificates_count_when_they_become_invalid() {
        let key = KeyPair::generate().expect("a key");
        let mut parameters = CertificateParams::new(["x.test".to_owned()]).expect("parameters");
        (parameters.not_before, parameters.not_after) = (day(10), day(20));
        let certificate = parameters.self_signed(&key).expect("a certificate").pem();
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cred", "namespace": "default"},
            "stringData": {"tls.crt": certificate, "tls.key": key.serialize_pem()}});
        let gateway = json!({"apiVersion": "networking.istio.io/v1", "kind": "Gateway",
            "metadata": {"name": "g", "namespace": "default"},
            "spec": {"selector": {"app": "gw"}, "servers": [{
                "port": {"number": 443, "name": "https", "protocol": "HTTPS"}, "hosts": ["*"],
                "tls": {"mode": "SIMPLE", "credentialName": "cred"}}]}});
        let objects = format!("{secret}\n---\n{gateway}\n");
        let node = "router~10.0.0.1~gw.default~default.svc.cluster.local";
        let routers = (0..2).map(|_| Proxy {
            identity: Identity::from_spiffe("spiffe://cluster.local/ns/default/sa/gw"),
            ..fixture::client(node, &json!({"LABELS": {"app": "gw"}}))
        });
        let files = [("mesh.yaml", ""), ("objects.yaml", objects.as_str())];
        let store = fixture::store(Installation::default(), &files, routers.collect());
        let mut served = ServedCertificates::default();
        let counted = [5, 6, 15, 16, 25, 26].map(|number| {
            let now = day(number).unix_timestamp();
            served.newly_invalid(store.resources(), now)
        });
        assert_eq!(counted, [1, 0, 0, 0, 1, 0]);
    }
}
