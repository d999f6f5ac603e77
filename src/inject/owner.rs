//! The workload that owns a pod, as far as the pod tells.

use serde_json::Value as Json;

use super::pod::{label, metadata, text};

/// The workload of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) namespace: String,
}

impl Owner {
    /// Returns the workload of an object that is one itself.
    pub(super) fn itself(object: &Json) -> Self {
        Self {
            api_version: text(object, "apiVersion").to_owned(),
            kind: text(object, "kind").to_owned(),
            name: metadata(object, "name").to_owned(),
            namespace: metadata(object, "namespace").to_owned(),
        }
    }

    /// Returns the workload of a pod: its controller, or what the names of controllers say about theirs.
    ///
    /// Parity (pkg/kube/util.go, GetDeployMetaFromPod).
    pub(super) fn of_pod(pod: &Json) -> Self {
        let mut owner = Self {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: metadata(pod, "name").to_owned(),
            namespace: metadata(pod, "namespace").to_owned(),
        };
        let references = pod.pointer("/metadata/ownerReferences").and_then(Json::as_array);
        let mut references = references.into_iter().flatten();
        let controller = references.find(|reference| reference.get("controller") == Some(&Json::Bool(true)));
        if let Some(controller) = controller.filter(|_| !metadata(pod, "generateName").is_empty()) {
            owner.api_version = text(controller, "apiVersion").to_owned();
            owner.kind = text(controller, "kind").to_owned();
            owner.name = text(controller, "name").to_owned();
            owner.ascend(pod);
        }
        owner
    }

    /// Replaces a controller by the workload that owns it.
    fn ascend(&mut self, pod: &Json) {
        let without_hash = |name: &str, key: &str| {
            let hash = label(pod, key).filter(|hash| !hash.is_empty())?;
            let name = name.strip_suffix(hash)?.strip_suffix('-')?;
            Some(name.to_owned())
        };
        match self.kind.as_str() {
            "ReplicaSet" => {
                if let Some(name) = without_hash(&self.name, "pod-template-hash") {
                    self.name = name;
                    "Deployment".clone_into(&mut self.kind);
                } else if let Some(name) = without_hash(&self.name, "rollouts-pod-template-hash") {
                    self.name = name;
                    "Rollout".clone_into(&mut self.kind);
                    "v1alpha1".clone_into(&mut self.api_version);
                }
            }
            "ReplicationController" => {
                if let Some(name) = label(pod, "deploymentconfig").filter(|name| !name.is_empty()) {
                    name.clone_into(&mut self.name);
                    "DeploymentConfig".clone_into(&mut self.kind);
                }
            }
            "Job" => {
                if let Some(name) = cron_job(&self.name) {
                    self.name = name.to_owned();
                    "CronJob".clone_into(&mut self.kind);
                    "batch/v1".clone_into(&mut self.api_version);
                }
            }
            _ => {}
        }
    }
}

/// Returns the name of the CronJob that names its jobs after their time: eight to ten digits.
fn cron_job(job: &str) -> Option<&str> {
    let (name, time) = job.rsplit_once('-')?;
    let is_time = (8..=10).contains(&time.len()) && time.bytes().all(|byte| byte.is_ascii_digit());
    (is_time && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn owner(kind: &str, name: &str, labels: Json) -> String {
        let owner = Owner::of_pod(&json!({"metadata": {
            "generateName": "web-", "namespace": "ns", "labels": labels,
            "ownerReferences": [{"controller": true, "apiVersion": "apps/v1", "kind": kind, "name": name}],
        }}));
        format!(
            "{} {} {}/{}",
            owner.api_version, owner.kind, owner.namespace, owner.name
        )
    }

    #[test]
    fn controllers_lead_to_workloads() {
        let hash = json!({"pod-template-hash": "5d9"});
        assert_eq!(
            owner("ReplicaSet", "web-5d9", hash.clone()),
            "apps/v1 Deployment ns/web"
        );
        assert_eq!(owner("ReplicaSet", "web", hash), "apps/v1 ReplicaSet ns/web");
        assert_eq!(
            owner("ReplicaSet", "web-5d9", json!({"rollouts-pod-template-hash": "5d9"})),
            "v1alpha1 Rollout ns/web"
        );
        let both = |deployment: &str| json!({"pod-template-hash": deployment, "rollouts-pod-template-hash": "5d9"});
        assert_eq!(owner("ReplicaSet", "web-5d9", both("5d9")), "apps/v1 Deployment ns/web");
        assert_eq!(owner("ReplicaSet", "web-5d9", both("x")), "v1alpha1 Rollout ns/web");
        assert_eq!(
            owner("ReplicationController", "web-1", json!({"deploymentconfig": "web"})),
            "apps/v1 DeploymentConfig ns/web"
        );
        assert_eq!(
            owner("ReplicationController", "web-1", json!({"deploymentconfig": ""})),
            "apps/v1 ReplicationController ns/web-1"
        );
        assert_eq!(owner("Job", "report-28123456", json!({})), "batch/v1 CronJob ns/report");
        assert_eq!(owner("Job", "report-1", json!({})), "apps/v1 Job ns/report-1");
        assert_eq!(owner("StatefulSet", "db", json!({})), "apps/v1 StatefulSet ns/db");
    }

    #[test]
    fn pods_own_themselves() {
        let owner = Owner::of_pod(&json!({"metadata": {"name": "a", "namespace": "ns"}}));
        assert_eq!((owner.kind.as_str(), owner.name.as_str()), ("Pod", "a"));
    }
}
