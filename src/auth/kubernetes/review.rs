//! TokenReview: the question and what its answer is worth.

use std::collections::BTreeMap;

use ::kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use smol_str::SmolStr;

use crate::{
    auth::{KubernetesInfo, Refusal, token},
    base::ClusterId,
};

/// The group that every service account is in.
const GROUP: &str = "system:serviceaccounts";
/// Where the pod stands that a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// As above, its uid.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Asks an API server whom a token stands for.
pub(super) async fn review(
    client: Client,
    cluster: ClusterId,
    token: String,
    audiences: &[SmolStr],
) -> Result<KubernetesInfo, Refusal> {
    let question = TokenReview {
        metadata: ObjectMeta::default(),
        spec: TokenReviewSpec {
            audiences: (!audiences.is_empty()).then(|| audiences.iter().map(ToString::to_string).collect()),
            token,
        },
        status: None,
    };
    let answer = Api::<TokenReview>::all(client)
        .create(&PostParams::default(), &question)
        .await
        .map_err(|error| failed(&cluster, &error))?;
    judge(cluster, answer.status.unwrap_or_default(), audiences)
}

/// What a failed question means. Only where the API server finds fault with the question is it the caller's.
fn failed(cluster: &ClusterId, error: &::kube::Error) -> Refusal {
    match error {
        ::kube::Error::Api(status) if matches!(status.code, 401 | 403) => Refusal::Unavailable(format!(
            "the API server of cluster {cluster} does not let istiod review tokens: {}; hint: istiod's account there \
             needs create on tokenreviews.authentication.k8s.io",
            status.message,
        )),
        ::kube::Error::Api(status) if matches!(status.code, 400 | 422) => Refusal::Invalid(format!(
            "the API server of cluster {cluster} cannot review the token: {}",
            status.message
        )),
        other => Refusal::Unavailable(format!("the API server of cluster {cluster} cannot be asked: {other}")),
    }
}

/// Who is meant, if the answer is good.
fn judge(cluster: ClusterId, status: TokenReviewStatus, audiences: &[SmolStr]) -> Result<KubernetesInfo, Refusal> {
    let invalid = |text: &str| Refusal::Invalid(format!("cluster {cluster}: {text}"));
    if let Some(error) = status.error.filter(|error| !error.is_empty()) {
        return Err(invalid(&error));
    }
    if status.authenticated != Some(true) {
        return Err(invalid("the token is not authenticated"));
    }
    // A server that knows nothing of audiences names none, and has judged the token as one for itself.
    let meant = status.audiences.unwrap_or_default();
    if !audiences.is_empty()
        && !meant
            .iter()
            .any(|meant| audiences.iter().any(|audience| audience == meant))
    {
        return Err(invalid("the token is for other audiences"));
    }
    let user = status.user.unwrap_or_default();
    if !user.groups.unwrap_or_default().iter().any(|group| group == GROUP) {
        return Err(invalid("the token is not of a service account"));
    }
    let name = user.username.unwrap_or_default();
    let Some((namespace, service_account)) = token::service_account(&name) else {
        return Err(invalid("the user of the token is no service account"));
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
