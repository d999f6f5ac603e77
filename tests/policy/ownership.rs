//! R17: hosts and VirtualServices of other namespaces. By default, a VirtualService of any visible namespace may
//! redirect any host, as in Istio. With strict ownership, its namespace must own the host.

use istiod::{
    generate::ResourceType,
    model::{Installation, features::Features},
    proto::json,
};
use libtest_mimic::Failed;

use super::fixture::Fixture;

/// `httpbin` is in namespace `foo`, like the client; `other` is in `bar`.
const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: other, namespace: bar}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere, namespace: evil}
spec: {clusterIP: 10.0.0.4, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: pretends, namespace: evil}
spec: {hosts: [other.bar.svc.cluster.local], ports: [{name: http, number: 80, protocol: HTTP}], resolution: STATIC}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: covers, namespace: evil}
spec:
  hosts: ['*.bar.svc.cluster.local', '*er.bar.svc.cluster.local']
  ports: [{name: http, number: 80, protocol: HTTP}]
  resolution: NONE
---
";

fn redirect(namespace: &str, host: &str, to: &str) -> String {
    format!(
        "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: v, namespace: {namespace}}}
spec:
  hosts: ['{host}']
  http: [{{route: [{{destination: {{host: {to}}}}}]}}]
---
"
    )
}

/// Returns true if the client's requests to port 80 may reach a cluster through this virtual host.
fn leads(strict: bool, rule: &str, host: &str, to: &str) -> Result<bool, Failed> {
    let installation = Installation {
        features: Features {
            pilot_strict_host_ownership: strict,
            ..Features::default()
        },
        ..Installation::default()
    };
    let fixture = Fixture::new(installation, "{}", &format!("{OBJECTS}{rule}"))?;
    let routes = fixture.resource(ResourceType::Route, "80").ok_or("no routes")?;
    let routes = json::any_to_json(&routes);
    let hosts = routes["virtualHosts"].as_array().ok_or("no virtual hosts")?;
    let found = hosts.iter().find(|it| it["name"] == format!("{host}:80"));
    let cluster = format!("outbound|80||{to}");
    Ok(found.is_some_and(|found| found["routes"].to_string().contains(&cluster)))
}

/// The test of R17.
pub(super) fn r17_strict_ownership_limits_virtual_services() -> Result<(), Failed> {
    let (other, evil) = ("other.bar.svc.cluster.local", "elsewhere.evil.svc.cluster.local");
    // (namespace of the VirtualService, host, destination, still allowed if strict)
    let cases = [
        ("evil", other, evil, false),
        ("evil", "httpbin.foo.svc.cluster.local", evil, false),
        ("evil", "*.bar.svc.cluster.local", evil, false),
        ("evil", "*er.bar.svc.cluster.local", evil, false),
        ("bar", other, evil, true),
        ("istio-system", other, evil, true),
        // A VirtualService in the clients' own namespace may redirect them.
        ("foo", other, evil, true),
    ];
    for (namespace, host, to, still) in cases {
        let rule = redirect(namespace, host, to);
        let seen = if host.starts_with('*') { other } else { host };
        for (strict, expected) in [(false, true), (true, still)] {
            if leads(strict, &rule, seen, to)? != expected {
                return Err(format!("strict: {strict}, of {namespace} about {host}: want {expected}").into());
            }
        }
    }
    Ok(())
}
