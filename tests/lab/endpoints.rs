//! The endpoints of a cluster in a proxy, as `istioctl proxy-config endpoints` shows them.

use std::fmt;
use std::net::Ipv4Addr;

use serde_json::Value;

use super::proxy::Proxy;

/// One endpoint.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Endpoint {
    /// Address and port.
    pub(crate) address: String,
    /// The health status set by the control plane.
    status: String,
    is_outlier: bool,
    pub(crate) weight: u64,
}

/// The endpoints of one cluster of an Envoy, ordered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Endpoints {
    cluster: String,
    pub(crate) rows: Vec<Endpoint>,
}

impl Endpoints {
    /// The expected endpoints of a healthy cluster: addresses with ports and weights.
    pub(crate) fn expected(cluster: &str, rows: &[(Ipv4Addr, u16, u64)]) -> Endpoints {
        let row = |(address, port, weight): &(Ipv4Addr, u16, u64)| Endpoint {
            address: format!("{address}:{port}"),
            status: "HEALTHY".to_owned(),
            is_outlier: false,
            weight: *weight,
        };
        Endpoints::ordered(cluster, rows.iter().map(row).collect())
    }

    /// Returns the endpoints in a proxy.
    pub(crate) fn of(proxy: &Proxy, cluster: &str) -> Result<Endpoints, String> {
        let text = proxy.ask("/clusters?format=json")?;
        let page: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let clusters = page["cluster_statuses"].as_array().into_iter().flatten();
        let hosts = clusters
            .filter(|status| status["name"] == cluster)
            .filter_map(|status| status["host_statuses"].as_array());
        let row = |host: &Value| {
            let socket = &host["address"]["socket_address"];
            let health = &host["health_status"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            Endpoint {
                address: format!("{}:{}", text(&socket["address"]), socket["port_value"]),
                status: text(&health["eds_health_status"]),
                is_outlier: health["failed_outlier_check"] == true,
                weight: host["weight"].as_u64().unwrap_or_default(),
            }
        };
        Ok(Endpoints::ordered(cluster, hosts.flatten().map(row).collect()))
    }

    fn ordered(cluster: &str, mut rows: Vec<Endpoint>) -> Endpoints {
        rows.sort();
        let cluster = cluster.to_owned();
        Endpoints { cluster, rows }
    }

    /// The table.
    pub(crate) fn table(&self) -> String {
        let line = |cells: [&str; 5]| {
            let [address, status, outlier, weight, cluster] = cells;
            format!("{address:<26}{status:<12}{outlier:<18}{weight:<9}{cluster}\n")
        };
        let row = |row: &Endpoint| {
            let outlier = if row.is_outlier { "FAILED" } else { "OK" };
            line([
                &row.address,
                &row.status,
                outlier,
                &row.weight.to_string(),
                &self.cluster,
            ])
        };
        let rows: String = self.rows.iter().map(row).collect();
        line(["ENDPOINT", "STATUS", "OUTLIER CHECK", "WEIGHT", "CLUSTER"]) + &rows
    }
}

/// One line. Health is included only where an endpoint is not healthy.
impl fmt::Display for Endpoints {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return formatter.write_str("none");
        }
        for (index, row) in self.rows.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{} (weight {})", row.address, row.weight)?;
            if row.status != "HEALTHY" {
                write!(formatter, " {}", row.status)?;
            }
            if row.is_outlier {
                formatter.write_str(" ejected")?;
            }
        }
        Ok(())
    }
}
