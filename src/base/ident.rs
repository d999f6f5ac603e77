//! Names as types. All are cheap strings: up to 23 bytes are inline, longer ones are shared.

use std::{cmp::Ordering, fmt};

use smol_str::SmolStr;

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, Default)]
        pub struct $name(SmolStr);

        impl $name {
            /// Returns the name without any check.
            pub fn new(text: impl AsRef<str>) -> Self {
                Self(SmolStr::new(text))
            }

            /// Returns the name from static text, without allocation.
            pub const fn new_static(text: &'static str) -> Self {
                Self(SmolStr::new_static(text))
            }

            /// Returns the text.
            pub fn as_str(&self) -> &str {
                self.0.as_str()
            }

            /// Returns the name as a cheap string.
            pub fn text(&self) -> &SmolStr {
                &self.0
            }

            /// Returns true for an empty name.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.0.as_str(), f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self::new(text)
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(SmolStr::from(text))
            }
        }

        impl From<SmolStr> for $name {
            fn from(text: SmolStr) -> Self {
                Self(text)
            }
        }

        impl std::ops::Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }
    };
}

/// Order for names that are nearly always equal when compared: equal short ones are detected without a call.
macro_rules! order_of_equals {
    ($name:ident) => {
        impl Ord for $name {
            fn cmp(&self, other: &Self) -> Ordering {
                if self.0 == other.0 {
                    Ordering::Equal
                } else {
                    self.0.cmp(&other.0)
                }
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
    };
}

name_type! {
    /// A Kubernetes namespace; empty for cluster-scoped objects.
    Namespace
}
order_of_equals!(Namespace);
name_type! {
    /// A fully qualified service host name, possibly a wildcard (`*.example.com`).
    #[derive(PartialOrd, Ord)]
    Hostname
}
name_type! {
    /// The id of a Kubernetes cluster, as in `CLUSTER_ID` or the key of a remote Secret.
    ClusterId
}
order_of_equals!(ClusterId);
name_type! {
    /// The id of a network (`topology.istio.io/network`); empty means unknown.
    #[derive(PartialOrd, Ord)]
    NetworkId
}

/// Key of one object of a kind in one cluster. Ordered by namespace, name, then cluster.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ObjectKey {
    /// The namespace, empty for cluster-scoped kinds.
    pub namespace: Namespace,
    /// `metadata.name`.
    pub name: SmolStr,
    /// Cluster of the object.
    pub cluster: ClusterId,
}

impl ObjectKey {
    /// Returns a key.
    pub fn new(cluster: &ClusterId, namespace: impl Into<Namespace>, name: impl Into<SmolStr>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            cluster: cluster.clone(),
        }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}
