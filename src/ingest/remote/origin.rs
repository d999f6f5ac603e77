//! Parses declarations of remote clusters in Secrets and files.

use std::{collections::BTreeSet, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde_json::Value;

use super::reconcile::{Claim, Origin};
use crate::{
    api::yaml::{self, YamlError},
    base::{ClusterId, ObjectKey},
    kube::{
        Object,
        kubeconfig::{CheckedKubeconfig, KubeconfigError, MAX_KUBECONFIG_BYTES},
    },
};

/// Allowed unsafe kubeconfig options (`PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS`).
pub(super) type Allowed = Arc<BTreeSet<String>>;

/// Returns the key of a Secret of the config cluster.
pub(super) fn key_of(secret: &Object, own: &ClusterId) -> ObjectKey {
    ObjectKey::new(own, secret.namespace(), secret.name())
}

/// Parses a Secret: each key of its data is the id of a cluster, each value a kubeconfig.
pub(super) fn of_secret(secret: &Object, allowed: &Allowed) -> Origin {
    let data = secret.value.get("data").and_then(Value::as_object);
    let claims = data.into_iter().flatten().map(|(cluster, text)| {
        let decoded = text.as_str().and_then(|text| STANDARD.decode(text).ok());
        let claim = match decoded {
            Some(content) => claim(Bytes::from(content), allowed),
            None => Claim {
                content: Bytes::new(),
                reading: Err("it is not base64".to_owned()),
            },
        };
        (ClusterId::new(cluster), claim)
    });
    let created = secret
        .value
        .pointer("/metadata/creationTimestamp")
        .and_then(Value::as_str);
    Origin {
        created: created.unwrap_or_default().into(),
        claims: claims.collect(),
        problem: None,
    }
}

/// Parses a file with one kubeconfig, whose current context names the cluster. A file that cannot be read keeps its
/// previous cluster.
pub(super) fn of_file(content: Result<Bytes, String>, before: Option<&Origin>, allowed: &Allowed) -> Origin {
    let claim = content.map(|content| claim(content, allowed));
    let read = claim.and_then(|claim| {
        let cluster = claim.reading.as_ref().map(|kubeconfig| kubeconfig.cluster());
        cluster.map(|cluster| (cluster, claim.clone())).map_err(Clone::clone)
    });
    let mut origin = Origin::default();
    match read {
        Ok((cluster, claim)) => {
            origin.claims.insert(cluster, claim);
        }
        Err(problem) => {
            origin.claims = before.map(|before| before.claims.clone()).unwrap_or_default();
            origin.problem = Some(problem);
        }
    }
    origin
}

fn claim(content: Bytes, allowed: &Allowed) -> Claim {
    let reading = read(&content, allowed).map(Arc::new).map_err(|error| error.to_string());
    Claim { content, reading }
}

fn read(content: &[u8], allowed: &BTreeSet<String>) -> Result<CheckedKubeconfig, KubeconfigError> {
    if content.len() > MAX_KUBECONFIG_BYTES {
        return Err(KubeconfigError::TooLarge);
    }
    // The parser's message may quote the text.
    let not_yaml = |error: YamlError| KubeconfigError::NotYaml {
        line: error.line,
        column: error.column,
    };
    let text = yaml::text(content).map_err(not_yaml)?;
    match yaml::documents(text).as_slice() {
        [] => Err(KubeconfigError::Empty),
        [document] => CheckedKubeconfig::of(document.parse().map_err(not_yaml)?, allowed),
        [_, second, ..] => Err(KubeconfigError::NotYaml {
            line: second.line,
            column: 1,
        }),
    }
}
