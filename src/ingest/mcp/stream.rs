//! One stream to the server of a config source, incremental or state of the world.

use std::collections::{BTreeMap, BTreeSet};

use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

use super::{
    CONNECTION,
    connect::ConnectError,
    objects::{Answer, requested_types},
};
use crate::{
    api::Kind,
    proto::{
        envoy::{
            config::core::v3::Node,
            service::discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::rpc,
    },
};

/// The number of requests that may wait for the transport.
const REQUESTS: usize = 128;

/// The variant of ADS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Incremental.
    Delta,
    /// State of the world.
    Sotw,
}

/// An open stream.
pub(super) struct McpStream {
    half: Half,
    types: BTreeMap<String, Kind>,
    /// The types without an answer.
    unanswered: BTreeSet<String>,
}

enum Half {
    Delta(mpsc::Sender<DeltaDiscoveryRequest>, Streaming<DeltaDiscoveryResponse>),
    Sotw(mpsc::Sender<DiscoveryRequest>, Streaming<DiscoveryResponse>, Box<Node>),
}

/// A response that waits for its acknowledgement.
pub(super) struct Pending {
    /// The kind.
    pub(super) kind: Kind,
    /// The response.
    pub(super) answer: Answer,
    version: String,
    nonce: String,
}

/// The reason for which a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
    /// The server does not have this variant of ADS.
    #[error("the server does not support it")]
    Unsupported,
    /// There is no connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The server ended the stream, or the connection was lost.
    #[error("{0}")]
    Ended(String),
    /// The response is for a type that was not requested.
    #[error("the server sent type {0:?}, which was not requested")]
    WrongType(String),
}

impl StreamEnd {
    /// Returns the label of the error in metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::Connect(_) | Self::Ended(_) => "disconnected",
            Self::WrongType(_) => "wrong_type",
        }
    }
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unimplemented => Self::Unsupported,
            code => Self::Ended(format!(
                "{code:?}: {}",
                status.message().chars().take(500).collect::<String>()
            )),
        }
    }
}

impl McpStream {
    /// Opens a stream and requests all types.
    pub(super) async fn open(channel: Channel, variant: Variant, node: Node) -> Result<Self, StreamEnd> {
        let mut client =
            AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(CONNECTION.max_message_bytes);
        let types: BTreeMap<String, Kind> = requested_types().map(|(kind, type_url)| (type_url, kind)).collect();
        let order = requested_types().map(|(_, type_url)| type_url);
        let half = match variant {
            Variant::Delta => {
                let (sender, receiver) = mpsc::channel(REQUESTS);
                for (index, type_url) in order.enumerate() {
                    let request = DeltaDiscoveryRequest {
                        node: (index == 0).then(|| node.clone()),
                        type_url,
                        ..Default::default()
                    };
                    send(&sender, request).await?;
                }
                let requests = ReceiverStream::new(receiver);
                let responses = client.delta_aggregated_resources(requests).await?.into_inner();
                Half::Delta(sender, responses)
            }
            Variant::Sotw => {
                let (sender, receiver) = mpsc::channel(REQUESTS);
                for (index, type_url) in order.enumerate() {
                    let request = DiscoveryRequest {
                        node: (index == 0).then(|| node.clone()),
                        type_url,
                        ..Default::default()
                    };
                    send(&sender, request).await?;
                }
                let requests = ReceiverStream::new(receiver);
                let responses = client.stream_aggregated_resources(requests).await?.into_inner();
                Half::Sotw(sender, responses, Box::new(node))
            }
        };
        Ok(Self {
            half,
            unanswered: types.keys().cloned().collect(),
            types,
        })
    }

    /// Returns true if each type was answered.
    pub(super) fn is_answered(&self) -> bool {
        self.unanswered.is_empty()
    }

    /// Waits for the next response.
    pub(super) async fn next(&mut self) -> Result<Pending, StreamEnd> {
        let ended = || StreamEnd::Ended("the server closed the stream".to_owned());
        let (mut answer, version, nonce) = match &mut self.half {
            Half::Delta(_, responses) => {
                let response = responses.next().await.ok_or_else(ended)??;
                let resources = response.resources.into_iter();
                let answer = Answer {
                    type_url: response.type_url,
                    resources: resources
                        .map(|resource| resource.resource.unwrap_or_default())
                        .collect(),
                    removed: response.removed_resources,
                    is_complete: false,
                };
                (answer, response.system_version_info, response.nonce)
            }
            Half::Sotw(_, responses, _) => {
                let response = responses.next().await.ok_or_else(ended)??;
                let answer = Answer {
                    type_url: response.type_url,
                    resources: response.resources,
                    removed: Vec::new(),
                    is_complete: true,
                };
                (answer, response.version_info, response.nonce)
            }
        };
        let Some(kind) = self.types.get(&answer.type_url).copied() else {
            return Err(StreamEnd::WrongType(answer.type_url.chars().take(100).collect()));
        };
        // The first incremental response has all objects, since the request names none that the client holds.
        answer.is_complete |= self.unanswered.remove(&answer.type_url);
        Ok(Pending {
            kind,
            answer,
            version,
            nonce,
        })
    }

    /// Acknowledges a response, or rejects it with a reason.
    pub(super) async fn acknowledge(&self, receipt: Receipt, rejected: Option<String>) -> Result<(), StreamEnd> {
        let error_detail = rejected.map(|message| rpc::Status {
            code: Code::InvalidArgument as i32,
            message,
            ..Default::default()
        });
        match &self.half {
            Half::Delta(sender, _) => {
                let request = DeltaDiscoveryRequest {
                    type_url: receipt.type_url,
                    response_nonce: receipt.nonce,
                    error_detail,
                    ..Default::default()
                };
                send(sender, request).await
            }
            Half::Sotw(sender, _, node) => {
                let request = DiscoveryRequest {
                    // Parity (pkg/adsc/adsc.go): acknowledgements have the node.
                    node: Some((**node).clone()),
                    version_info: if error_detail.is_none() {
                        receipt.version
                    } else {
                        String::new()
                    },
                    type_url: receipt.type_url,
                    response_nonce: receipt.nonce,
                    error_detail,
                    ..Default::default()
                };
                send(sender, request).await
            }
        }
    }
}

/// The identity of a response.
pub(super) struct Receipt {
    type_url: String,
    version: String,
    nonce: String,
}

impl Pending {
    /// Returns the response, and what acknowledges it.
    pub(super) fn into_parts(self) -> (Kind, Answer, Receipt) {
        let receipt = Receipt {
            type_url: self.answer.type_url.clone(),
            version: self.version,
            nonce: self.nonce,
        };
        (self.kind, self.answer, receipt)
    }
}

async fn send<T>(sender: &mpsc::Sender<T>, request: T) -> Result<(), StreamEnd> {
    let sent = sender.send(request).await;
    sent.map_err(|_| StreamEnd::Ended("the connection was lost".to_owned()))
}
