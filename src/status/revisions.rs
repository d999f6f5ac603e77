//! Follows the revisions that decide which Ingresses and objects of the Gateway API belong to this control plane.

use std::collections::BTreeSet;

use ::kube::core::ApiResource;
use smol_str::SmolStr;
use tokio::sync::watch;

use super::{store::resource, watching::Watches};
use crate::{
    api::label::REVISION,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::gateway_api::status::Revisions,
    task,
};

/// The validating webhook configuration whose revision is the default one.
const DEFAULT_VALIDATOR: &str = "istiod-default-validator";

/// Runs a task with the revisions once all are known, and anew whenever they change, because this changes what belongs
/// to this control plane. Ends with the task, or if a source ends. For the sources, see [`follow`].
pub(super) async fn run_with<T: Future<Output = ()>>(
    watches: Watches,
    tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    default_tag: watch::Receiver<SmolStr>,
    task: impl Fn(Revisions) -> T,
) {
    let (out, revisions) = watch::channel(None);
    tokio::select! {
        () = Box::pin(follow(watches, tags, default_tag, out)) => {}
        () = restart(revisions, task) => {}
    }
}

async fn restart<T: Future<Output = ()>>(
    mut revisions: watch::Receiver<Option<Revisions>>,
    task: impl Fn(Revisions) -> T,
) {
    loop {
        let Some(known) = revisions.borrow_and_update().clone() else {
            if revisions.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            changed = revisions.changed() => if changed.is_err() { return },
            () = Box::pin(task(known)) => return,
        }
    }
}

/// Publishes the revisions once all are known, and whenever they change. `tags` are those of the own revision, and
/// `default_tag` is the revision that the tag `default` points to.
pub(super) async fn follow(
    watches: Watches,
    tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    default_tag: watch::Receiver<SmolStr>,
    out: watch::Sender<Option<Revisions>>,
) {
    let validators = resource(
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingWebhookConfiguration",
        "validatingwebhookconfigurations",
    );
    let (sender, default_validator) = watch::channel(SmolStr::default());
    tokio::select! {
        () = of_webhook(watches, validators, DEFAULT_VALIDATOR, sender) => {}
        () = publish(tags, default_tag, default_validator, out) => {}
    }
}

async fn publish(
    mut tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    mut default_tag: watch::Receiver<SmolStr>,
    mut default_validator: watch::Receiver<SmolStr>,
    out: watch::Sender<Option<Revisions>>,
) {
    // The first change is the first list. A tag that is not followed counts as none.
    let mut is_tag_followed = default_tag.changed().await.is_ok();
    if default_validator.changed().await.is_err() {
        return;
    }
    loop {
        let own_tags = tags.borrow_and_update().clone();
        if let Some(tags) = own_tags {
            let revisions = Revisions {
                tags,
                default_tag: default_tag.borrow_and_update().clone(),
                default_validator: default_validator.borrow_and_update().clone(),
            };
            task::publish(&out, Some(revisions));
        }
        let changed = tokio::select! {
            changed = tags.changed() => changed,
            changed = default_validator.changed() => changed,
            changed = default_tag.changed(), if is_tag_followed => {
                is_tag_followed = changed.is_ok();
                Ok(())
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Publishes the revision in the label of a webhook configuration: with each report of it, empty without one.
pub(super) async fn of_webhook(watches: Watches, resource: ApiResource, name: &str, revision: watch::Sender<SmolStr>) {
    let target = WatchTarget {
        fields: Some(format!("metadata.name={name}")),
        metadata_only: true,
        ..WatchTarget::all(resource)
    };
    let (watching, mut events) = watches.open(target, revision_of);
    let following = async {
        while let Some(event) = events.recv().await {
            let named = match event {
                WatchEvent::Restarted(all) => all.into_iter().next().unwrap_or_default(),
                WatchEvent::Applied(named) => named,
                WatchEvent::Deleted(_) => SmolStr::default(),
            };
            revision.send_replace(named);
        }
    };
    tokio::select! {
        () = watching => {}
        () = following => {}
    }
}

fn revision_of(webhook: Object) -> SmolStr {
    let labels = webhook.metadata.labels.unwrap_or_default();
    labels.get(REVISION).map(SmolStr::new).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt;

    use super::*;

    #[test]
    fn revisions_are_published_once_all_are_known() {
        let (tags_out, tags) = watch::channel(None);
        let (tag_out, default_tag) = watch::channel(SmolStr::default());
        let (validator_out, default_validator) = watch::channel(SmolStr::default());
        let (out, mut published) = watch::channel(None);
        let mut publishing = pin!(publish(tags, default_tag, default_validator, out));
        let mut next = || {
            assert!(publishing.as_mut().now_or_never().is_none(), "the sources are open");
            let is_new = published.has_changed().expect("an open channel");
            let revisions: Option<Revisions> = published.borrow_and_update().clone();
            revisions.filter(|_| is_new)
        };
        let mut expected = Revisions::default();
        validator_out.send_replace("canary".into());
        assert_eq!(next(), None);
        tags_out.send_replace(Some(BTreeSet::new()));
        assert_eq!(next(), None, "the tag `default` may be another revision's");
        tag_out.send_replace("stable".into());
        expected.default_validator = "canary".into();
        expected.default_tag = "stable".into();
        assert_eq!(next(), Some(expected.clone()));
        tag_out.send_replace("stable".into());
        assert_eq!(next(), None, "nothing is different");
        drop(tag_out);
        validator_out.send_replace(SmolStr::default());
        expected.default_validator = SmolStr::default();
        assert_eq!(next(), Some(expected));
    }
}
