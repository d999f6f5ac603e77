//! Certificates that a signer of Kubernetes signs: this process checks who asks for what, and approves.

pub mod request;
