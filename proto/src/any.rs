//! `google.protobuf.Any` with shared bytes: copying an encoded resource only adds a reference.

use bytes::Bytes;
use prost::{DecodeError, Message, Name};

/// An encoded message and the URL of its type.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Any {
    /// `type.googleapis.com/` and the full name of the message.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// The encoded message.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

impl Name for Any {
    const NAME: &'static str = "Any";
    const PACKAGE: &'static str = "google.protobuf";

    fn type_url() -> String {
        "type.googleapis.com/google.protobuf.Any".to_owned()
    }
}

impl Any {
    /// Encodes a message.
    pub fn pack<M: Message + Name>(message: &M) -> Self {
        Self {
            type_url: M::type_url(),
            value: message.encode_to_vec().into(),
        }
    }

    /// Decodes the message if it is an `M`. Another type is `None`, not an error.
    ///
    /// # Errors
    /// If the bytes are not a valid `M`.
    pub fn unpack<M: Message + Name + Default>(&self) -> Result<Option<M>, DecodeError> {
        if self.is::<M>() {
            M::decode(self.value.clone()).map(Some)
        } else {
            Ok(None)
        }
    }

    /// True if the message is an `M`. Only the name after the last slash counts, as in all protobuf libraries.
    pub fn is<M: Name>(&self) -> bool {
        self.type_name() == M::full_name()
    }

    /// Returns the full name of the message's type.
    pub fn type_name(&self) -> &str {
        self.type_url
            .rsplit_once('/')
            .map_or(self.type_url.as_str(), |(_, name)| name)
    }
}
