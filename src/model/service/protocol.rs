//! Application protocols of ports, and their declaration by Kubernetes ports.

use crate::api::kube::service::Port;

/// A port's application protocol (`protocol.Instance`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Not declared: sniffed.
    Unsupported,
    /// HTTP/1.1.
    Http,
    /// HTTP proxy (egress listener).
    HttpProxy,
    /// HTTP/2.
    Http2,
    /// HTTPS passed through (SNI routing).
    Https,
    /// gRPC.
    Grpc,
    /// gRPC-Web.
    GrpcWeb,
    /// Opaque TCP.
    Tcp,
    /// TLS passed through (SNI routing).
    Tls,
    /// UDP: not served.
    Udp,
    /// MongoDB.
    Mongo,
    /// Redis.
    Redis,
    /// MySQL.
    Mysql,
}

impl Protocol {
    /// Returns true for HTTP, HTTP/2, gRPC and variants.
    pub fn is_http(self) -> bool {
        matches!(
            self,
            Self::Http | Self::Http2 | Self::HttpProxy | Self::Grpc | Self::GrpcWeb
        )
    }

    /// Returns true for HTTP/2 on the wire.
    pub fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// Returns true for HTTPS and TLS, routed by SNI.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Https | Self::Tls)
    }

    /// Returns true for TCP-like protocols, including TLS, whose bytes are passed through.
    pub fn is_tcp(self) -> bool {
        matches!(
            self,
            Self::Tcp | Self::Https | Self::Tls | Self::Mongo | Self::Redis | Self::Mysql
        )
    }

    /// Returns true for undeclared protocols, which the proxy must sniff.
    pub fn is_unsupported(self) -> bool {
        self == Self::Unsupported
    }

    /// Parses a protocol name (`http`, `GRPC`, `grpc-web`, …), ignoring case; unknown names are
    /// [`Protocol::Unsupported`].
    pub fn parse(name: &str) -> Self {
        match name.to_ascii_lowercase().as_str() {
            "tcp" => Self::Tcp,
            "udp" => Self::Udp,
            "grpc" => Self::Grpc,
            "grpc-web" => Self::GrpcWeb,
            "http" => Self::Http,
            "http_proxy" => Self::HttpProxy,
            "http2" => Self::Http2,
            "https" => Self::Https,
            "tls" => Self::Tls,
            "mongo" => Self::Mongo,
            "redis" => Self::Redis,
            "mysql" => Self::Mysql,
            _ => Self::Unsupported,
        }
    }

    /// Returns the protocol of a Kubernetes port: UDP first, then `appProtocol`, then the port's name up to the first
    /// `-`. Undeclared well-known ports of protocols in which the server speaks first are TCP.
    #[doc(alias = "ConvertProtocol")]
    pub fn of_kube_port(port: &Port) -> Self {
        if port.protocol == "UDP" {
            return Self::Udp;
        }
        match port.app_protocol.as_deref() {
            Some("kubernetes.io/h2c") => return Self::Http2,
            Some("kubernetes.io/ws") => return Self::Http,
            Some("kubernetes.io/wss") => return Self::Https,
            _ => {}
        }
        let name = port.app_protocol.as_ref().unwrap_or(&port.name);
        if name
            .get(..8)
            .is_some_and(|start| start.eq_ignore_ascii_case("grpc-web"))
        {
            return Self::GrpcWeb;
        }
        let declared = name.split('-').next().map_or(Self::Unsupported, Self::parse);
        match declared {
            Self::Unsupported if matches!(port.number, 25 | 53 | 3306 | 27017) => Self::Tcp,
            declared => declared,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::kube::service::TargetPort;

    fn declared(name: &str, app_protocol: Option<&str>, number: u32) -> Protocol {
        Protocol::of_kube_port(&Port {
            name: name.into(),
            number,
            protocol: "TCP".into(),
            app_protocol: app_protocol.map(Into::into),
            target: TargetPort::Number(0),
            node_port: 0,
        })
    }

    #[test]
    fn ports_declare_protocols() {
        assert_eq!(declared("http-web", None, 80), Protocol::Http);
        assert_eq!(declared("GRPC-WEB-x", None, 80), Protocol::GrpcWeb);
        assert_eq!(declared("grpc", Some("tcp"), 80), Protocol::Tcp);
        assert_eq!(declared("http", Some("kubernetes.io/h2c"), 80), Protocol::Http2);
        assert_eq!(declared("", Some("kubernetes.io/wss"), 80), Protocol::Https);
        assert_eq!(declared("web", None, 80), Protocol::Unsupported);
        assert_eq!(declared("", None, 3306), Protocol::Tcp);
        assert_eq!(declared("mysql", None, 3306), Protocol::Mysql);
        assert_eq!(declared("http", Some("unknown"), 80), Protocol::Unsupported);
    }
}
