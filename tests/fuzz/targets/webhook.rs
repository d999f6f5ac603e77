//! Requests to the admission webhooks, whose clients send no credentials.

use istiod::webhook::{review::Review, validation};

use super::{Target, class_of};

/// The body of a request to `/validate`.
pub(super) const REVIEW: Target = Target {
    name: "review",
    run: review,
    words: &[
        b"admission.k8s.io/v1",
        b"admission.k8s.io/v1beta1",
        b"AdmissionReview",
        b"\"request\"",
        b"\"object\"",
        b"\"operation\": \"CREATE\"",
        b"generateName",
        b"istio.io/dry-run",
        b"networking.istio.io/v1",
        b"VirtualService",
        b"null",
        b"{}",
        b"[]",
        b"[[[[[[[[",
        b"{\"a\":",
    ],
};

fn review(bytes: &[u8]) -> u64 {
    match Review::parse(bytes) {
        Ok(mut review) => {
            let outcome = validation::validate(&mut review.request);
            let response = review.response(&outcome.verdict);
            assert_eq!(response["response"]["allowed"], outcome.verdict.refusal.is_none());
            class_of(&response.to_string())
        }
        Err(error) => class_of(&error),
    }
}
