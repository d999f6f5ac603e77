//! The parts of Consul's HTTP API that are read.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use smol_str::SmolStr;

use crate::fetch::{HttpClient, HttpError};

/// The limit of a query that does not block.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The time that a blocking query waits for a change. The server adds up to a sixteenth.
const WAIT: Duration = Duration::from_mins(5);
/// Status of a check that passes.
const PASSING: &str = "passing";

/// The services with their tags.
pub(super) type Catalog = BTreeMap<String, Vec<String>>;

/// An instance with its node and all their checks.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct HealthEntry {
    pub(super) node: Node,
    pub(super) service: Instance,
    #[serde(deserialize_with = "or_default")]
    pub(super) checks: Vec<CheckStatus>,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Node {
    pub(super) address: String,
    pub(super) datacenter: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) meta: BTreeMap<String, String>,
}

/// An instance.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Instance {
    /// Not empty for proxies and gateways.
    pub(super) kind: String,
    pub(super) address: String,
    pub(super) port: u32,
    #[serde(deserialize_with = "or_default")]
    pub(super) tags: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) meta: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) weights: Weights,
}

/// The weights of an instance.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Weights {
    pub(super) passing: u32,
}

/// The status of a check.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct CheckStatus {
    pub(super) status: String,
}

/// A check in the list of all checks.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Check {
    pub(super) node: SmolStr,
    #[serde(rename = "CheckID")]
    pub(super) check_id: SmolStr,
    /// The service; empty for a check of the node.
    pub(super) service_name: SmolStr,
    pub(super) status: SmolStr,
}

/// Reads `null` as the default.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

impl HealthEntry {
    /// Returns true if all checks of the instance and its node pass.
    pub(super) fn is_healthy(&self) -> bool {
        self.checks.iter().all(|check| check.status == PASSING)
    }
}

/// A failed query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueryError {
    /// The request failed.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The response is not what the API defines.
    #[error("malformed response: {0}")]
    Malformed(String),
    /// Objects are missing because the token lost rights.
    #[error("the token may no longer read all services and nodes")]
    Filtered,
}

impl QueryError {
    /// Returns the label of the error in metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Http(error) => error.label(),
            Self::Malformed(_) => "malformed",
            Self::Filtered => "filtered",
        }
    }
}

/// A response with its index, from which a blocking query continues.
pub(super) struct Indexed<T> {
    pub(super) value: T,
    /// 0 if the server reports none.
    pub(super) index: u64,
    /// True if objects are missing because the token may not read them.
    pub(super) is_filtered: bool,
}

/// A client of one server.
#[derive(Clone)]
pub(super) struct ConsulClient {
    http: HttpClient,
    /// Parameters of all queries: namespace and partition.
    scope: String,
}

impl ConsulClient {
    pub(super) fn new(http: HttpClient, parameters: &[(&str, &str)]) -> Self {
        let mut scope = String::new();
        for (name, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
            scope.push('&');
            scope.push_str(name);
            scope.push('=');
            scope.push_str(&escaped(value));
        }
        Self { http, scope }
    }

    /// Returns the names of all datacenters.
    pub(super) async fn datacenters(&self) -> Result<Vec<String>, QueryError> {
        let (_, body) = self.http.get("/v1/catalog/datacenters", TIMEOUT).await?;
        parse(&body)
    }

    /// Returns the services. With an index, waits until it is exceeded.
    pub(super) async fn catalog(&self, datacenter: Option<&str>, index: u64) -> Result<Indexed<Catalog>, QueryError> {
        self.query("/v1/catalog/services", datacenter, index).await
    }

    /// Returns all checks. With an index, waits until it is exceeded.
    pub(super) async fn checks(&self, datacenter: Option<&str>, index: u64) -> Result<Indexed<Vec<Check>>, QueryError> {
        self.query("/v1/health/state/any", datacenter, index).await
    }

    /// Returns the instances of a service.
    pub(super) async fn service(
        &self,
        datacenter: Option<&str>,
        name: &str,
    ) -> Result<Indexed<Vec<HealthEntry>>, QueryError> {
        let path = format!("/v1/health/service/{}", escaped(name));
        self.query(&path, datacenter, 0).await
    }

    async fn query<T: DeserializeOwned>(
        &self,
        path: &str,
        datacenter: Option<&str>,
        index: u64,
    ) -> Result<Indexed<T>, QueryError> {
        let datacenter = datacenter.map(|name| format!("&dc={}", escaped(name)));
        let datacenter = datacenter.unwrap_or_default();
        let (blocking, limit) = match index {
            0 => (String::new(), TIMEOUT),
            index => {
                let wait = WAIT.as_secs();
                (format!("&index={index}&wait={wait}s"), WAIT + WAIT / 16 + TIMEOUT)
            }
        };
        // Without this, a server that has just started answers from what it has read of its log so far.
        let query = format!("consistent{datacenter}{blocking}{}", self.scope);
        let (headers, body) = self.http.get(&format!("{path}?{query}"), limit).await?;
        let header = |name: &str| headers.get(name)?.to_str().ok();
        Ok(Indexed {
            value: parse(&body)?,
            index: header("x-consul-index")
                .and_then(|index| index.parse().ok())
                .unwrap_or(0),
            is_filtered: header("x-consul-results-filtered-by-acls") == Some("true"),
        })
    }
}

fn escaped(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, QueryError> {
    serde_json::from_slice(body).map_err(|error| QueryError::Malformed(error.to_string()))
}
