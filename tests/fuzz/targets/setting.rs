//! Configuration documents: mesh config, networks, proxy configs, kubeconfigs.

use std::collections::BTreeSet;

use istiod::{
    api::{mesh_config, mesh_networks, yaml},
    kube::kubeconfig::CheckedKubeconfig,
};
use serde_json::Value;

use super::{Target, class_of, parts};

/// A mesh config and networks, each a YAML text.
pub(super) const MESH_CONFIG: Target = Target {
    name: "mesh_config",
    run: mesh_config,
    words: &[
        b"defaultConfig:",
        b"extensionProviders:",
        b"meshMTLS:",
        b"null",
        b"{}",
        b"[]",
        b"-1s",
        b"0",
        b"\n---\n",
        b"proxyMetadata:",
        b"discoverySelectors:",
        b"matchExpressions:",
        b"trustDomainAliases:",
    ],
};

/// The kubeconfig of a remote cluster.
pub(super) const KUBECONFIG: Target = Target {
    name: "kubeconfig",
    run: kubeconfig,
    words: &[
        b"certificate-authority-data:",
        b"client-key-data:",
        b"exec:",
        b"auth-provider:",
        b"tokenFile:",
        b"proxy-url:",
        b"insecure-skip-tls-verify: true",
        b"current-context:",
        b"null",
        b"{}",
    ],
};

fn value(bytes: &[u8]) -> Result<Option<Value>, String> {
    let text = yaml::text(bytes).map_err(|error| error.message)?;
    let documents = yaml::documents(text);
    let value = documents.first().map(yaml::Document::parse).transpose();
    value.map_err(|error| error.message)
}

fn mesh_config(bytes: &[u8]) -> u64 {
    let [mesh, networks] = parts(bytes);
    let mut sort = match value(mesh) {
        Err(message) => class_of(&message),
        Ok(None) => 0,
        Ok(Some(value)) => {
            let _ = mesh_config::lay_over_proxy_config(&mesh_config::default_proxy_config(), &value);
            let _ = mesh_config::node_proxy_config(&value);
            match mesh_config::parse(&value) {
                Ok(parsed) => parsed.warnings.len().min(3) as u64,
                Err(errors) => class_of(&errors.iter().map(|error| error.message.as_str()).collect::<String>()),
            }
        }
    };
    if let Ok(Some(value)) = value(networks) {
        sort ^= match mesh_networks::parse(&value) {
            Ok(_) => 1 << 32,
            Err(errors) => class_of(&errors.iter().map(|error| error.message.as_str()).collect::<String>()),
        };
    }
    sort
}

fn kubeconfig(bytes: &[u8]) -> u64 {
    let value = match value(bytes) {
        Err(message) => return class_of(&message),
        Ok(value) => value.unwrap_or_default(),
    };
    match CheckedKubeconfig::of(value, &BTreeSet::new()) {
        Ok(checked) => {
            let cluster = checked.cluster();
            assert!(
                !format!("{checked:?}").contains("token"),
                "only the cluster may be printed"
            );
            u64::from(cluster.is_empty())
        }
        Err(error) => class_of(&error.to_string()),
    }
}
