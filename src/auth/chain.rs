//! The authenticator chains.
//!
//! Parity (pilot/pkg/bootstrap/server.go): the order is client certificate, OIDC issuer of `JWT_RULE`, Kubernetes
//! token, `x-forwarded-client-cert`. Outside a cluster the CA also accepts tokens of the issuer of istiod's own token.

use std::sync::Arc;

use ipnet::IpNet;
use smol_str::SmolStr;
use tokio::sync::watch;

use super::{
    Authenticator, Authenticators, ClientCertificates, ForwardedCertificates, JwtRule, KubernetesTokens, OidcTokens,
    TrustDomains, token,
};
use crate::{fetch::Fetcher, kube::clients::Clients, settings::Settings, task::Tasks};

/// The mount path of istiod's own token.
pub const ISTIO_TOKEN_PATH: &str = "/var/run/secrets/tokens/istio-token";

/// The options of the authenticator chains.
#[derive(Clone, Default)]
pub struct ChainOptions {
    /// `JWT_RULE`.
    pub rule: Option<JwtRule>,
    /// Outside a cluster: `TOKEN_ISSUER` and `AUDIENCE`, else the issuer and audience of istiod's own token.
    pub own_issuer: Option<JwtRule>,
    /// `TRUSTED_GATEWAY_CIDR`.
    pub gateways: Vec<IpNet>,
    /// `TOKEN_AUDIENCES`.
    pub audiences: Vec<SmolStr>,
    /// Clients of the API servers; none without Kubernetes.
    pub clients: Option<Clients>,
}

/// Invalid options.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// `JWT_RULE` is not a valid rule.
    #[error("JWT_RULE: {0}; want JSON such as {{\"issuer\": \"https://...\", \"audiences\": [\"istio-ca\"]}}")]
    Rule(String),
}

/// The two authenticator chains.
#[derive(Clone, Default)]
pub struct Chains {
    /// For xDS and debug endpoints.
    pub requests: Authenticators,
    /// For the certificate service.
    pub signing: Authenticators,
}

impl ChainOptions {
    /// Reads the options from environment variables. `own_token` is the content of [`ISTIO_TOKEN_PATH`]; `gateways` and
    /// `audiences` come from the feature flags.
    pub fn new(
        settings: &Settings,
        own_token: Option<&str>,
        gateways: &[SmolStr],
        audiences: &[SmolStr],
        clients: Option<Clients>,
    ) -> Result<Self, ChainError> {
        let rule = settings.variable("JWT_RULE").map(rule).transpose()?;
        let is_inside = settings.variable("KUBERNETES_SERVICE_HOST").is_some();
        let own_issuer = own_issuer(settings, own_token);
        Ok(Self {
            rule,
            own_issuer: own_issuer.filter(|_| !is_inside),
            gateways: ranges(gateways),
            audiences: audiences.to_vec(),
            clients,
        })
    }

    /// Builds the chains. `fetcher` fetches the key sets of issuers, in tasks.
    pub fn chains(self, fetcher: &Fetcher, domains: &watch::Receiver<Arc<TrustDomains>>, tasks: &Tasks) -> Chains {
        let oidc = |rule: JwtRule| -> Arc<dyn Authenticator> {
            Arc::new(OidcTokens::new(rule, fetcher.clone(), domains.clone(), tasks.clone()))
        };
        let mut chain: Vec<Arc<dyn Authenticator>> = vec![Arc::new(ClientCertificates)];
        chain.extend(self.rule.map(oidc));
        if let Some(clients) = self.clients {
            chain.push(Arc::new(KubernetesTokens::new(
                clients,
                &self.audiences,
                domains.clone(),
            )));
        }
        if let Some(forwarded) = ForwardedCertificates::new(self.gateways, domains.clone()) {
            chain.push(Arc::new(forwarded));
        }
        let boxed = |chain: &[Arc<dyn Authenticator>]| {
            let boxed = chain
                .iter()
                .map(|authenticator| Box::new(authenticator.clone()) as Box<dyn Authenticator>);
            Authenticators::new(boxed.collect())
        };
        let requests = boxed(&chain);
        chain.extend(self.own_issuer.map(oidc));
        Chains {
            requests,
            signing: boxed(&chain),
        }
    }
}

fn own_issuer(settings: &Settings, own_token: Option<&str>) -> Option<JwtRule> {
    let claims = own_token.and_then(|own| token::unverified_claims(own.trim()).ok());
    let claims = claims.unwrap_or_default();
    let variable = |name: &str| settings.variable(name).map(str::to_owned);
    let issuer = variable("TOKEN_ISSUER").unwrap_or(claims.iss);
    let audience = variable("AUDIENCE").or_else(|| claims.aud.all().first().cloned());
    (!issuer.is_empty()).then(|| JwtRule {
        issuer,
        audiences: audience.into_iter().collect(),
        jwks_uri: String::new(),
    })
}

fn rule(text: &str) -> Result<JwtRule, ChainError> {
    let rule: JwtRule = serde_json::from_str(text).map_err(|error| ChainError::Rule(error.to_string()))?;
    if rule.issuer.is_empty() {
        return Err(ChainError::Rule("issuer is empty".into()));
    }
    Ok(rule)
}

/// Parses CIDR ranges. Parity (security/pkg/server/ca/authenticate/xfcc_authenticator.go): an address without `/` is
/// not a range, so it grants no trust by accident.
fn ranges(texts: &[SmolStr]) -> Vec<IpNet> {
    let texts = texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty());
    let parsed = texts.filter_map(|text| match text.parse::<IpNet>() {
        Ok(range) => Some(range),
        Err(_) => {
            tracing::warn!(
                range = text,
                "range of TRUSTED_GATEWAY_CIDR ignored; hint: want one such as 10.0.0.0/8"
            );
            None
        }
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
    use http::HeaderMap;

    use super::*;
    use crate::{
        auth::{Credentials, Unauthenticated},
        fetch::FetchOptions,
        settings::fixture,
    };

    fn settings(variables: &[(&str, &str)]) -> Settings {
        fixture::settings(&[], variables)
    }

    fn options(
        variables: &[(&str, &str)],
        own_token: Option<&str>,
        gateways: &[&str],
    ) -> Result<ChainOptions, ChainError> {
        let gateways: Vec<SmolStr> = gateways.iter().map(SmolStr::new).collect();
        ChainOptions::new(&settings(variables), own_token, &gateways, &["istio-ca".into()], None)
    }

    async fn names(chain: &Authenticators) -> Vec<&'static str> {
        let headers = HeaderMap::new();
        let nothing = Credentials {
            address: None,
            is_tls: false,
            certificate: None,
            headers: &headers,
        };
        let Unauthenticated(errors) = chain.authenticate(nothing).await.expect_err("nothing was shown");
        errors.into_iter().map(|(name, _)| name).collect()
    }

    #[tokio::test]
    async fn the_chain_has_istios_order() {
        let map = watch::channel(Arc::new(BTreeMap::new())).1;
        let variables = [("JWT_RULE", r#"{"issuer":"a"}"#), ("TOKEN_ISSUER", "b")];
        let mut options = options(&variables, None, &["10.0.0.0/8"]).expect("valid options");
        options.clients = Some(Clients::new("Kubernetes".into(), BTreeMap::new(), map));
        let chains = options.chains(
            &Fetcher::new(FetchOptions::default()),
            &watch::channel(Arc::default()).1,
            &Tasks::default(),
        );
        let order = [
            "client certificate",
            "OIDC token",
            "Kubernetes token",
            "forwarded client certificate",
        ];
        assert_eq!(names(&chains.requests).await, order);
        assert_eq!(names(&chains.signing).await, [&order[..], &["OIDC token"]].concat());
    }

    #[tokio::test]
    async fn r11_no_address_is_trusted_unless_configured() {
        for gateways in [&[][..], &["", "10.0.0.1", "localhost"]] {
            let chains = options(&[], None, gateways).expect("valid options");
            let chains = chains.chains(
                &Fetcher::new(FetchOptions::default()),
                &watch::channel(Arc::default()).1,
                &Tasks::default(),
            );
            assert_eq!(names(&chains.signing).await, ["client certificate"]);
            let mut headers = HeaderMap::new();
            let forged = "URI=spiffe://cluster.local/ns/istio-system/sa/istiod"
                .parse()
                .expect("a value");
            headers.insert("x-forwarded-client-cert", forged);
            let local = Credentials {
                address: Some(([127, 0, 0, 1], 9).into()),
                is_tls: true,
                certificate: None,
                headers: &headers,
            };
            assert!(chains.signing.authenticate(local).await.is_err(), "{gateways:?}");
        }
    }

    #[test]
    fn the_own_token_sets_the_issuer_outside_a_cluster() {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(r#"{"iss":"https://k8s","aud":["istio-ca","x"]}"#);
        let token = format!("e30.{claims}.c2ln\n");
        let own = options(&[], Some(&token), &[])
            .expect("valid options")
            .own_issuer
            .expect("an issuer");
        assert_eq!(
            (own.issuer.as_str(), own.audiences),
            ("https://k8s", vec!["istio-ca".to_owned()])
        );
        let variables = [("TOKEN_ISSUER", "https://other"), ("AUDIENCE", "aud")];
        let named = options(&variables, Some(&token), &[])
            .expect("valid options")
            .own_issuer
            .expect("an issuer");
        assert_eq!(
            (named.issuer.as_str(), named.audiences),
            ("https://other", vec!["aud".to_owned()])
        );
        let inside = [("KUBERNETES_SERVICE_HOST", "10.0.0.1")];
        assert_eq!(
            options(&inside, Some(&token), &[]).expect("valid options").own_issuer,
            None
        );
        assert_eq!(options(&[], None, &[]).expect("valid options").own_issuer, None);
    }

    #[test]
    fn an_invalid_rule_is_an_error() {
        for bad in ["{", "[]", "{}", r#"{"issuer":""}"#, r#"{"issuer":1}"#] {
            assert!(
                matches!(options(&[("JWT_RULE", bad)], None, &[]), Err(ChainError::Rule(_))),
                "{bad}"
            );
        }
    }
}
