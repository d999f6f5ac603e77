//! An injected pod as a node runs it: the redirection that its init container sets, the environment and arguments of
//! its proxy container, and what istio-agent makes of them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::rules::Redirection;

/// The version that agents of the lab report.
const VERSION: &str = "1.30.3";
const METADATA: &str = "ISTIO_META_";

/// A pod that has a proxy.
pub(crate) struct Injected<'p> {
    pod: &'p Value,
    proxy: &'p Value,
}

impl<'p> Injected<'p> {
    /// Returns the parts of a pod in Kubernetes; `None` if it has no proxy.
    pub(crate) fn of(pod: &'p Value) -> Option<Injected<'p>> {
        let proxy = container(pod, "istio-proxy")?;
        Some(Injected { pod, proxy })
    }

    /// The name of the pod.
    pub(crate) fn name(&self) -> &'p str {
        self.pod["metadata"]["name"].as_str().unwrap_or_default()
    }

    /// The redirection of its traffic; gateways have none.
    pub(crate) fn redirection(&self) -> Result<Option<Redirection>, String> {
        let init = container(self.pod, "istio-init");
        init.map(|init| Redirection::parse(&arguments(init))).transpose()
    }

    /// The user of its proxy.
    pub(crate) fn user(&self) -> Result<u64, String> {
        let user = self.proxy["securityContext"]["runAsUser"].as_u64();
        user.ok_or(format!("{}: the proxy has no user", self.name()))
    }

    /// The audience of the token that its agent sends.
    pub(crate) fn audience(&self) -> Result<&'p str, String> {
        let volumes = self.pod["spec"]["volumes"].as_array().into_iter().flatten();
        let mut sources = volumes.flat_map(|volume| volume["projected"]["sources"].as_array().into_iter().flatten());
        let audience = sources.find_map(|source| source["serviceAccountToken"]["audience"].as_str());
        audience.ok_or(format!("{}: the pod has no token with an audience", self.name()))
    }

    /// The cluster that its agent names.
    pub(crate) fn cluster(&self) -> Result<String, String> {
        let cluster = self.environment()?.remove("ISTIO_META_CLUSTER_ID");
        cluster.ok_or(format!("{}: the pod has no cluster", self.name()))
    }

    /// The arguments that its agent gives to Envoy.
    pub(crate) fn envoy_arguments(&self) -> Result<Vec<String>, String> {
        let environment = self.environment()?;
        let mut out = vec!["--disable-hot-restart".to_owned()];
        out.extend(["--drain-strategy", "immediate", "--concurrency"].map(str::to_owned));
        let processors = environment.get("ISTIO_CPU_LIMIT").cloned();
        out.push(processors.unwrap_or_else(|| "1".to_owned()));
        for argument in arguments(self.proxy) {
            for (flag, of_envoy) in [
                ("--proxyLogLevel=", "--log-level"),
                ("--proxyComponentLogLevel=", "--component-log-level"),
            ] {
                if let Some(value) = argument.strip_prefix(flag) {
                    out.extend([of_envoy, value].map(str::to_owned));
                }
            }
        }
        Ok(out)
    }

    /// True if its proxy serves an application. Other proxies are the workload themselves.
    pub(crate) fn is_sidecar(&self) -> bool {
        arguments(self.proxy).get(1) == Some(&"sidecar")
    }

    /// The node of its Envoy, as its agent writes it into the bootstrap.
    pub(crate) fn node(&self) -> Result<Value, String> {
        let environment = self.environment()?;
        let get = |name: &str| environment.get(name).map(String::as_str).unwrap_or_default();
        let arguments = arguments(self.proxy);
        let [role, domain] = match arguments.as_slice() {
            ["proxy", role, "--domain", domain, ..] => [*role, *domain],
            other => return Err(format!("{}: the proxy runs {other:?}", self.name())),
        };
        let domain = expanded(domain, &environment);
        let labels = &self.pod["metadata"]["labels"];
        let (address, pod, namespace) = (get("INSTANCE_IP"), get("POD_NAME"), get("POD_NAMESPACE"));
        let mut metadata = json!({
            "NAME": pod,
            "NAMESPACE": namespace,
            "SERVICE_ACCOUNT": get("SERVICE_ACCOUNT"),
            "INSTANCE_IPS": address,
            "LABELS": labels,
            "ANNOTATIONS": self.pod["metadata"]["annotations"],
            "ISTIO_VERSION": VERSION,
        });
        // Deployed gateways have the configuration of the mesh.
        if let Some(config) = environment.get("PROXY_CONFIG") {
            metadata["PROXY_CONFIG"] = serde_json::from_str(config).map_err(|error| error.to_string())?;
        }
        for (name, value) in &environment {
            if let Some(name) = name.strip_prefix(METADATA) {
                metadata[name] = json!(value);
            }
        }
        let application = labels["app"].as_str().unwrap_or("istio-proxy");
        Ok(json!({
            "id": format!("{role}~{address}~{pod}.{namespace}~{domain}"),
            "cluster": format!("{application}.{namespace}"),
            "metadata": metadata,
        }))
    }

    /// The environment of the proxy container, as a kubelet resolves it.
    fn environment(&self) -> Result<BTreeMap<String, String>, String> {
        let mut environment = BTreeMap::new();
        for variable in self.proxy["env"].as_array().into_iter().flatten() {
            let name = variable["name"].as_str().unwrap_or_default();
            let source = &variable["valueFrom"];
            let value = if let Some(field) = source["fieldRef"]["fieldPath"].as_str() {
                let pointer = format!("/{}", field.replace('.', "/"));
                let value = self.pod.pointer(&pointer).and_then(Value::as_str);
                value.unwrap_or_default().to_owned()
            } else if let Some(resource) = source["resourceFieldRef"]["resource"].as_str() {
                let pointer = format!("/resources/{}", resource.replace('.', "/"));
                let quantity = self.proxy.pointer(&pointer).and_then(Value::as_str);
                match quantity.map(whole) {
                    Some(Some(number)) => number.to_string(),
                    // Memory has other units, and only the agent's own runtime reads it.
                    Some(None) | None => continue,
                }
            } else {
                expanded(variable["value"].as_str().unwrap_or_default(), &environment)
            };
            environment.insert(name.to_owned(), value);
        }
        if environment.is_empty() {
            return Err(format!("{}: the proxy has no environment", self.name()));
        }
        Ok(environment)
    }
}

fn container<'p>(pod: &'p Value, name: &str) -> Option<&'p Value> {
    let lists = ["initContainers", "containers"].map(|list| pod["spec"][list].as_array());
    lists
        .into_iter()
        .flatten()
        .flatten()
        .find(|container| container["name"] == name)
}

fn arguments(container: &Value) -> Vec<&str> {
    let arguments = container["args"].as_array().into_iter().flatten();
    arguments.filter_map(Value::as_str).collect()
}

/// Replaces `$(NAME)` by earlier variables.
fn expanded(text: &str, environment: &BTreeMap<String, String>) -> String {
    environment.iter().fold(text.to_owned(), |text, (name, value)| {
        text.replace(&format!("$({name})"), value)
    })
}

/// A quantity of processors, rounded up to whole ones.
fn whole(quantity: &str) -> Option<u64> {
    match quantity.strip_suffix('m') {
        Some(thousandths) => Some(thousandths.parse::<u64>().ok()?.div_ceil(1000)),
        None => quantity.parse().ok(),
    }
}
