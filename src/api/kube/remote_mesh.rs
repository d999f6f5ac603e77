//! The mesh config of a remote cluster: key `mesh` of its ConfigMap, reduced to the trust domain.

use serde_json::Value;

use super::secret::bare;
use crate::{
    api::{Config, FieldError, Meta, mesh_config, yaml},
    base::Shared,
    proto::istio::mesh::v1alpha1::MeshConfig,
};

/// Spellings of the only field that is read.
const TRUST_DOMAIN: [&str; 2] = ["trustDomain", "trust_domain"];

impl Config<MeshConfig> {
    /// Parses the ConfigMap of a remote cluster. Other fields than the trust domain may be invalid, or of a later
    /// release.
    pub fn parse(meta: Shared<Meta>, map: &Value) -> Result<Self, Vec<FieldError>> {
        let text = map["data"]["mesh"].as_str().unwrap_or_default();
        let mut file = match yaml::documents(text).first().map(yaml::Document::parse) {
            None => Value::Null,
            Some(Ok(file)) => file,
            Some(Err(error)) => {
                return Err(vec![FieldError {
                    field: String::new(),
                    message: error.to_string(),
                }]);
            }
        };
        if let Some(fields) = file.as_object_mut() {
            fields.retain(|name, _| TRUST_DOMAIN.contains(&name.as_str()));
        }
        let parsed = mesh_config::parse(&file)?;
        Ok(Self {
            meta: bare(meta),
            spec: MeshConfig {
                trust_domain: parsed.config.trust_domain,
                ..MeshConfig::default()
            },
            status: None,
        })
    }
}
