//! Decodes a request from its parts.

use std::{hash::BuildHasher, sync::Arc};

use bytes::Bytes;
use prost::Message;
use rustc_hash::FxBuildHasher;
use smol_str::SmolStr;

use super::{
    IncomingRequest, MAX_UNSERVED_BYTES, MAX_UNSERVED_NAMES, RequestContent, RequestError, UnservedRequest, malformed,
};
use crate::{
    generate::ResourceType,
    proto::{
        envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
        google::rpc,
    },
    xds::{
        connection::{Request, SubscriptionChange},
        debug,
        protocol::Protocol,
        share::{initial_versions::InitialVersions, names::Names},
    },
};

/// The maximum size of a NACK's message that is kept. Envoy's may name every resource of a response.
const ERROR_BYTES: usize = 8 << 10;

impl UnservedRequest {
    fn new(nonce: String, error: Option<String>, names: &Names) -> Self {
        let mut left = MAX_UNSERVED_BYTES;
        let first = names.iter().take(MAX_UNSERVED_NAMES).map_while(|name| {
            left = left.checked_sub(name.len())?;
            Some(String::from(name))
        });
        Self {
            nonce: nonce.into(),
            error,
            names: first.collect(),
            names_hash: FxBuildHasher.hash_one(names.iter().collect::<Vec<_>>()),
        }
    }
}

impl IncomingRequest {
    /// Decodes a request from the fields that were decoded before and the rest.
    pub(super) fn decode(
        protocol: Protocol,
        DecodedFields {
            names,
            initial_versions,
        }: DecodedFields,
        rest: Bytes,
        size_bytes: usize,
    ) -> Result<Self, RequestError> {
        let (node, type_url, nonce, error, change) = match protocol {
            Protocol::Sotw => {
                let request = DiscoveryRequest::decode(rest).map_err(malformed)?;
                let (nonce, error) = (request.response_nonce, request.error_detail);
                (
                    request.node,
                    request.type_url,
                    nonce,
                    error,
                    SubscriptionChange::Names(names),
                )
            }
            Protocol::Delta => {
                let request = DeltaDiscoveryRequest::decode(rest).map_err(malformed)?;
                let unsubscribe = request.resource_names_unsubscribe.into_iter();
                let change = SubscriptionChange::Change {
                    subscribe: names,
                    unsubscribe: unsubscribe.map(SmolStr::from).collect(),
                    initial_versions,
                };
                let (nonce, error) = (request.response_nonce, request.error_detail);
                (request.node, request.type_url, nonce, error, change)
            }
        };
        let error_code = error.as_ref().map_or(0, |status| status.code);
        let error = error.map(shortened);
        let content = if let Some(resource_type) = ResourceType::of_url(&type_url) {
            RequestContent::Configuration(Request {
                resource_type,
                nonce: nonce.into(),
                error,
                change,
            })
        } else {
            let (SubscriptionChange::Names(names) | SubscriptionChange::Change { subscribe: names, .. }) = change;
            if debug::is_debug(&type_url) {
                RequestContent::Debug(names.iter().take(debug::MAX_NAMES).collect())
            } else {
                RequestContent::Unserved(UnservedRequest::new(nonce, error, &names))
            }
        };
        Ok(Self {
            node,
            type_url,
            error_code,
            content,
            size_bytes,
            permit: None,
            turn: None,
        })
    }
}

/// The fields of a request that are not decoded by prost.
pub(super) struct DecodedFields {
    pub(super) names: Arc<Names>,
    pub(super) initial_versions: InitialVersions,
}

fn shortened(status: rpc::Status) -> String {
    let mut message = status.message;
    if message.len() > ERROR_BYTES {
        let end = (0..=ERROR_BYTES).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or_default());
        message.push('…');
    }
    message
}
