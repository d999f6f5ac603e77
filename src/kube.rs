//! The Kubernetes API: clients, objects as JSON, list and watch. It does not depend on Istio and stores no objects.

pub mod client;
pub mod clients;
pub mod config_cluster;
pub mod health;
pub mod kubeconfig;
pub mod object;
pub mod requests;
pub mod watch;

pub use object::Object;
