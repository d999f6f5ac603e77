//! A parsed object of any kind.

use super::{Kind, hidden_gateway::HiddenGateway, kinds::with_kinds, meta::Keyed};
use crate::base::{ObjectKey, Shared};

/// The row type of each kind, named after the kind.
pub mod types {
    use crate::{
        api::{
            Config, access_review, fetched_keys, gateway_api, hidden_gateway, invalid_route, kinds::with_kinds, kube,
            mcs, resolved_host, trust_anchors,
        },
        proto::istio::{
            extensions::v1alpha1 as extensions, mesh::v1alpha1 as mesh, networking::v1alpha3 as networking,
            networking::v1beta1 as networking_v1beta1, security::v1beta1 as security, telemetry::v1alpha1 as telemetry,
        },
    };

    macro_rules! row_types {
        ($($(#[$doc:meta])* $kind:ident: $row:ty { $($column:tt)* })*) => {
            $($(#[$doc])* pub type $kind = $row;)*
        };
    }

    with_kinds!(row_types);
}

macro_rules! row_enum {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { $($column:tt)* })*) => {
        /// A row of any kind.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Row {
            $($(#[$doc])* $kind(Shared<types::$kind>),)*
        }

        impl Row {
            /// The row's kind.
            pub fn kind(&self) -> Kind {
                match self { $(Self::$kind(_) => Kind::$kind,)* }
            }

            /// The row's key.
            pub fn key(&self) -> &ObjectKey {
                match self { $(Self::$kind(row) => Keyed::key(&**row),)* }
            }
        }

        $(impl From<types::$kind> for Row {
            fn from(row: types::$kind) -> Self {
                Self::$kind(Shared::new(row))
            }
        })*
    };
}

with_kinds!(row_enum);

impl Row {
    /// Returns the row that counts if this row does not: that of a Gateway to another network.
    ///
    /// Parity (pilot/pkg/serviceregistry/kube/controller/network.go): such Gateways count in all namespaces.
    pub fn hidden_gateway(&self) -> Option<Self> {
        match self {
            Self::KubeGateway(gateway) => HiddenGateway::of(gateway).map(Self::from),
            _ => None,
        }
    }
}
