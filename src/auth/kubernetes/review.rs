//! TokenReview: the request and the validation of its result.
//!
//! Parity (security/pkg/k8s/tokenreview/k8sauthn.go): checks the audiences, the group and the format of the user name.

use std::collections::BTreeMap;

use ::kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use smol_str::SmolStr;

use crate::{
    auth::{AuthenticationError, KubernetesInfo, token},
    base::ClusterId,
};

/// The group of all service accounts.
const GROUP: &str = "system:serviceaccounts";
/// The extra key with the name of the pod that a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// The extra key with the UID of that pod.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Reviews a token at an API server.
pub(super) async fn review(
    client: Client,
    cluster: ClusterId,
    token: String,
    audiences: &[SmolStr],
) -> Result<KubernetesInfo, AuthenticationError> {
    let review_request = TokenReview {
        metadata: ObjectMeta::default(),
        spec: TokenReviewSpec {
            audiences: Some(audiences.iter().map(ToString::to_string).collect()),
            token,
        },
        status: None,
    };
    let answer = Api::<TokenReview>::all(client)
        .create(&PostParams::default(), &review_request)
        .await
        .map_err(|error| failed(&cluster, &error))?;
    evaluate(cluster, answer.status.unwrap_or_default(), audiences)
}

/// Maps an API error. Only a rejected request (400, 422) is the caller's fault.
fn failed(cluster: &ClusterId, error: &::kube::Error) -> AuthenticationError {
    match error {
        ::kube::Error::Api(status) if matches!(status.code, 401 | 403) => AuthenticationError::Unavailable(format!(
            "the API server of cluster {cluster} forbids istiod to review tokens: {}; hint: istiod's account there \
             needs create on tokenreviews.authentication.k8s.io",
            status.message,
        )),
        ::kube::Error::Api(status) if matches!(status.code, 400 | 422) => AuthenticationError::Invalid(format!(
            "the API server of cluster {cluster} cannot review the token: {}",
            status.message
        )),
        other => {
            AuthenticationError::Unavailable(format!("the API server of cluster {cluster} is unavailable: {other}"))
        }
    }
}

/// Returns the service account of an authenticated token.
fn evaluate(
    cluster: ClusterId,
    status: TokenReviewStatus,
    audiences: &[SmolStr],
) -> Result<KubernetesInfo, AuthenticationError> {
    let invalid = |text: &str| AuthenticationError::Invalid(format!("cluster {cluster}: {text}"));
    if let Some(error) = status.error.filter(|error| !error.is_empty()) {
        return Err(invalid(&error));
    }
    if status.authenticated != Some(true) {
        return Err(invalid("the token is not authenticated"));
    }
    // A server without audience support returns none and has validated the token for its own audience.
    let accepted = status.audiences.unwrap_or_default();
    if !accepted
        .iter()
        .any(|accepted| audiences.iter().any(|audience| audience == accepted))
    {
        return Err(invalid("the token is for other audiences"));
    }
    let user = status.user.unwrap_or_default();
    if !user.groups.unwrap_or_default().iter().any(|group| group == GROUP) {
        return Err(invalid("the token does not belong to a service account"));
    }
    let name = user.username.unwrap_or_default();
    let Some((namespace, service_account)) = token::service_account(&name) else {
        return Err(invalid("the user of the token is not a service account"));
    };
    let extra = user.extra.unwrap_or_default();
    Ok(KubernetesInfo {
        pod_name: first(&extra, POD_NAME),
        pod_uid: first(&extra, POD_UID),
        cluster,
        namespace,
        service_account,
    })
}

fn first(extra: &BTreeMap<String, Vec<String>>, key: &str) -> SmolStr {
    extra
        .get(key)
        .and_then(|values| values.first())
        .map(SmolStr::new)
        .unwrap_or_default()
}
