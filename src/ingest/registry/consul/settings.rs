//! Settings of the connection: flags, and the variables of Consul's own client.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};

use super::api::ConsulClient;
use crate::{
    base::{Sensitive, boolean},
    fetch::{ClientTls, ClientTlsError, Dialer, Endpoint, HttpClient},
    settings::Settings,
};

/// The largest response: the checks of some hundred thousand instances.
const MAX_BYTES: usize = 256 << 20;
/// The port of a server.
const PORT: u16 = 8500;

/// Invalid settings.
#[derive(Debug, thiserror::Error)]
pub enum ConsulSettingsError {
    /// The address.
    #[error("--consulserverURL: {0:?} {1}; hint: want host:port, http://, https:// or unix://")]
    Address(String, String),
    /// A file that a variable names.
    #[error("{0}: cannot read {1}: {2}")]
    File(&'static str, PathBuf, std::io::Error),
    /// Certificates.
    #[error("TLS with Consul: {0}")]
    Tls(#[from] ClientTlsError),
    /// Text that is not allowed in a header.
    #[error("{0} has characters that are not allowed")]
    Header(&'static str),
}

/// Settings of the registry.
#[derive(Clone)]
pub struct ConsulSettings {
    client: ConsulClient,
    /// Shortest interval between two complete readings.
    pub(super) interval: Duration,
    /// Datacenters; `*` is all, none that of the server.
    pub(super) datacenters: Vec<String>,
    /// True if each datacenter is a network.
    pub(super) datacenter_networks: bool,
}

impl ConsulSettings {
    /// Returns the settings of flags and variables. Reads the files that these name.
    pub fn of(settings: &Settings) -> Result<Self, ConsulSettingsError> {
        let flags = &settings.flags;
        let address = match flags.consul_server_url.as_str() {
            "" => settings.variable("CONSUL_HTTP_ADDR").unwrap_or_default(),
            address => address,
        };
        let is_on = |name: &str, default| settings.variable(name).and_then(boolean::parse).unwrap_or(default);
        let (mut is_tls, endpoint) =
            endpoint(address).map_err(|why| ConsulSettingsError::Address(address.to_owned(), why))?;
        is_tls |= is_on("CONSUL_HTTP_SSL", false) && !address.contains("://");
        let tls = if is_tls {
            Some(tls(settings, is_on("CONSUL_HTTP_SSL_VERIFY", true))?)
        } else {
            None
        };
        let tls = match &tls {
            None => None,
            Some(tls) => Some((tls.server_name.as_str(), tls.config()?)),
        };
        let dialer = Dialer::new(endpoint, tls);
        let dialer = dialer.map_err(|why| ConsulSettingsError::Address(address.to_owned(), why.to_string()))?;
        let http = HttpClient::new(dialer, headers(settings)?, MAX_BYTES);
        let scope = [
            ("ns", settings.variable("CONSUL_NAMESPACE").unwrap_or_default()),
            ("partition", settings.variable("CONSUL_PARTITION").unwrap_or_default()),
        ];
        Ok(Self {
            client: ConsulClient::new(http, &scope),
            interval: flags.consul_server_interval,
            datacenters: flags
                .consul_server_datacenters
                .iter()
                .filter(|name| !name.is_empty())
                .cloned()
                .collect(),
            datacenter_networks: flags.consul_server_networks,
        })
    }

    /// Returns true if all datacenters are read, also those that appear later.
    pub(super) fn has_all_datacenters(&self) -> bool {
        self.datacenters.iter().any(|name| name == "*")
    }

    /// Returns the client.
    pub(super) fn client(&self) -> &ConsulClient {
        &self.client
    }
}

/// Parses an address. The first value is true for TLS.
fn endpoint(address: &str) -> Result<(bool, Endpoint), String> {
    if let Some(path) = address.strip_prefix("unix://") {
        return Ok((false, Endpoint::Socket(path.into())));
    }
    let (is_tls, rest) = match address.split_once("://") {
        Some(("http", rest)) => (false, rest),
        Some(("https", rest)) => (true, rest),
        Some((scheme, _)) => return Err(format!("has the unknown scheme {scheme}")),
        None => (false, address),
    };
    let authority = rest.trim_end_matches('/');
    if authority.contains('/') {
        return Err("has a path".to_owned());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (
            host,
            port.parse().map_err(|_| format!("has the invalid port {port:?}"))?,
        ),
        _ if is_tls => (authority, 443),
        _ if address.contains("://") => (authority, 80),
        _ => (authority, PORT),
    };
    let host = if host.is_empty() { "127.0.0.1" } else { host };
    Ok((is_tls, Endpoint::Host(host.to_owned(), port)))
}

fn headers(settings: &Settings) -> Result<HeaderMap, ConsulSettingsError> {
    let mut headers = HeaderMap::new();
    let sensitive = |name: &'static str, text: &str| {
        let mut value = HeaderValue::try_from(text).map_err(|_| ConsulSettingsError::Header(name))?;
        value.set_sensitive(true);
        Ok::<_, ConsulSettingsError>(value)
    };
    let token = match settings.variable("CONSUL_HTTP_TOKEN_FILE") {
        Some(path) => {
            let text = read("CONSUL_HTTP_TOKEN_FILE", path)?;
            Some(String::from_utf8_lossy(&text).trim().to_owned())
        }
        None => settings.variable("CONSUL_HTTP_TOKEN").map(str::to_owned),
    };
    if let Some(token) = token {
        headers.insert("x-consul-token", sensitive("CONSUL_HTTP_TOKEN", &token)?);
    }
    if let Some(pair) = settings.variable("CONSUL_HTTP_AUTH") {
        let basic = format!("Basic {}", BASE64_STANDARD.encode(pair));
        headers.insert(AUTHORIZATION, sensitive("CONSUL_HTTP_AUTH", &basic)?);
    }
    Ok(headers)
}

fn tls(settings: &Settings, verifies: bool) -> Result<ClientTls, ConsulSettingsError> {
    let mut roots = Vec::new();
    if let Some(path) = settings.variable("CONSUL_CACERT") {
        roots.extend(read("CONSUL_CACERT", path)?);
    }
    if let Some(folder) = settings.variable("CONSUL_CAPATH") {
        let failed = |error| ConsulSettingsError::File("CONSUL_CAPATH", folder.into(), error);
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_file() {
                files.insert(path.clone(), std::fs::read(&path).map_err(failed)?);
            }
        }
        roots.extend(files.into_values().flatten());
    }
    let identity = match (
        settings.variable("CONSUL_CLIENT_CERT"),
        settings.variable("CONSUL_CLIENT_KEY"),
    ) {
        (Some(chain), Some(key)) => {
            let chain = read("CONSUL_CLIENT_CERT", chain)?;
            let key = read("CONSUL_CLIENT_KEY", key)?;
            Some((Bytes::from(chain), Sensitive::new(key.into())))
        }
        _ => None,
    };
    Ok(ClientTls {
        roots: (!roots.is_empty()).then(|| Bytes::from(roots)),
        identity,
        server_name: settings
            .variable("CONSUL_TLS_SERVER_NAME")
            .unwrap_or_default()
            .to_owned(),
        insecure_skip_verify: !verifies,
        alpn: vec![b"http/1.1".to_vec()],
        ..ClientTls::default()
    })
}

fn read(variable: &'static str, path: &str) -> Result<Vec<u8>, ConsulSettingsError> {
    std::fs::read(path).map_err(|error| ConsulSettingsError::File(variable, Path::new(path).to_owned(), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_forms_of_consuls_client() {
        let host = |host: &str, port| Endpoint::Host(host.to_owned(), port);
        for (text, want) in [
            ("", (false, host("127.0.0.1", 8500))),
            ("consul:1", (false, host("consul", 1))),
            ("consul", (false, host("consul", 8500))),
            ("http://consul:1/", (false, host("consul", 1))),
            ("https://consul", (true, host("consul", 443))),
            ("[::1]:2", (false, host("[::1]", 2))),
            (
                "unix:///run/consul.sock",
                (false, Endpoint::Socket("/run/consul.sock".into())),
            ),
        ] {
            assert_eq!(endpoint(text), Ok(want), "{text}");
        }
        for invalid in ["tcp://consul:1", "consul:port", "http://consul/path"] {
            assert!(endpoint(invalid).is_err(), "{invalid}");
        }
    }
}
