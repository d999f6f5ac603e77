//! Review by an API server: SubjectAccessReview, `list` of `secrets`.

use std::{sync::Arc, time::Duration};

use ::kube::{Api, api::PostParams};
use futures::future::BoxFuture;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use smol_str::{SmolStr, ToSmolStr};

use super::{Review, ReviewError};
use crate::{
    api::access_review::{Access, Subject},
    kube::clients::Clients,
};

/// Timeout of an API server.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest part of an API server's reason that is kept.
const REASON_BYTES: usize = 1 << 10;

/// API servers of all clusters.
pub(super) struct ApiServers(pub(super) Clients);

impl Review for ApiServers {
    fn review(self: Arc<Self>, subject: Subject, wait: Duration) -> BoxFuture<'static, Result<Access, ReviewError>> {
        Box::pin(async move {
            tokio::time::sleep(wait).await;
            let (_, client) = self
                .0
                .get(&subject.cluster)
                .map_err(|error| ReviewError::UnknownCluster(error.to_smolstr()))?;
            let api: Api<SubjectAccessReview> = Api::all(client);
            let (parameters, review) = (PostParams::default(), access_review(&subject));
            let created = api.create(&parameters, &review);
            let answer = tokio::time::timeout(REVIEW_TIMEOUT, created)
                .await
                .map_err(|_| ReviewError::Failed("the API server does not answer".into()))?;
            match answer {
                Ok(answer) => Ok(access(&answer)),
                Err(error) => Err(ReviewError::Failed(shortened(&error.to_string()))),
            }
        })
    }
}

fn access_review(subject: &Subject) -> SubjectAccessReview {
    let Subject {
        namespace,
        service_account,
        ..
    } = subject;
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                namespace: Some(namespace.to_string()),
                verb: Some("list".to_owned()),
                resource: Some("secrets".to_owned()),
                ..ResourceAttributes::default()
            }),
            user: Some(format!("system:serviceaccount:{namespace}:{service_account}")),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

fn access(answer: &SubjectAccessReview) -> Access {
    let status = answer.status.as_ref();
    if status.is_some_and(|status| status.allowed) {
        return Access::Allowed;
    }
    let reason = status.and_then(|status| status.reason.as_deref());
    let reason = reason.filter(|reason| !reason.is_empty());
    Access::Denied(shortened(reason.unwrap_or("its roles do not permit it")))
}

fn shortened(reason: &str) -> SmolStr {
    let end = reason.floor_char_boundary(REASON_BYTES);
    reason.get(..end).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reviews_name_the_account_in_its_own_namespace() {
        let subject = Subject {
            cluster: "c".into(),
            namespace: "shop".into(),
            service_account: "gw".into(),
        };
        let spec = serde_json::to_value(access_review(&subject).spec).unwrap();
        let want = serde_json::json!({ "user": "system:serviceaccount:shop:gw",
            "resourceAttributes": { "namespace": "shop", "verb": "list", "resource": "secrets" } });
        assert_eq!(spec, want);
    }

    #[test]
    fn reviews_without_an_explicit_permission_deny() {
        let denied = access(&SubjectAccessReview::default());
        assert!(matches!(denied, Access::Denied(reason) if reason == "its roles do not permit it"));
    }
}
