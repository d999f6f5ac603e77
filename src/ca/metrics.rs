//! Expiry metrics of the CA's certificates.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus::{
    Gauge, Opts, Registry,
    core::{Collector, Desc},
    proto::MetricFamily,
};
use tokio::sync::watch;

use super::authority::Authority;

/// The remaining lifetime below which expiry is logged.
pub const WARN_BEFORE: Duration = Duration::from_hours(30 * 24);

/// The metrics `citadel_server_{root_cert,cert_chain}_expiry_{timestamp,seconds}`, computed at collection.
pub struct ExpiryMetrics {
    authority: watch::Receiver<Option<Arc<Authority>>>,
    clock: fn() -> SystemTime,
    root: [Gauge; 2],
    chain: [Gauge; 2],
}

impl ExpiryMetrics {
    /// Registers the metrics. Fails if a name is already registered.
    pub fn register(
        registry: &Registry,
        authority: watch::Receiver<Option<Arc<Authority>>>,
        clock: fn() -> SystemTime,
    ) -> Result<(), prometheus::Error> {
        let gauge = |name: &str, help: &str| Gauge::with_opts(Opts::new(name, help));
        registry.register(Box::new(Self {
            authority,
            clock,
            root: [
                gauge(
                    "citadel_server_root_cert_expiry_timestamp",
                    "Expiry time of the root certificate, in seconds since 1970.",
                )?,
                gauge(
                    "citadel_server_root_cert_expiry_seconds",
                    "Seconds until the root certificate expires; negative if expired.",
                )?,
            ],
            chain: [
                gauge(
                    "citadel_server_cert_chain_expiry_timestamp",
                    "Expiry time of the CA certificate chain, in seconds since 1970.",
                )?,
                gauge(
                    "citadel_server_cert_chain_expiry_seconds",
                    "Seconds until the CA certificate chain expires; negative if expired.",
                )?,
            ],
        }))
    }
}

impl Collector for ExpiryMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.root.iter().chain(&self.chain).flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let authority = self.authority.borrow().clone();
        let Some(authority) = authority else {
            return Vec::new();
        };
        let now = seconds((self.clock)());
        let ends = [
            (&self.root, Some(authority.root_expires_at())),
            (&self.chain, authority.chain_expires_at()),
        ];
        let mut families = Vec::new();
        for ([timestamp, left], end) in ends {
            let Some(end) = end.map(seconds) else { continue };
            timestamp.set(end);
            left.set(end - now);
            families.extend(timestamp.collect());
            families.extend(left.collect());
        }
        families
    }
}

fn seconds(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as f64
}

/// Returns a warning if a CA expires soon.
pub fn warning(authority: &Authority, now: SystemTime) -> Option<String> {
    let until = authority.path_expires_at();
    let left = until.duration_since(now).unwrap_or_default();
    (left < WARN_BEFORE).then(|| {
        let days = left.as_secs() / (24 * 3600);
        format!(
            "CA certificate {} expires in {days} days; hint: renew it before workload certificates expire",
            authority.certificate().name
        )
    })
}
