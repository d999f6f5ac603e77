//! Tags of the own revision: webhook configurations with the label `istio.io/tag`, and Services of the control plane's
//! namespace with that label. Their label `istio.io/rev` is the tag's revision.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::sync::{mpsc, watch};

use super::{context::IngestContext, kinds::resource};
use crate::{
    api::label::REVISION,
    base::{ClusterId, Namespace, SmolStr},
    kube::{
        Object,
        health::WatchHealth,
        watch::{WatchEvent, WatchTarget, watch_as},
    },
    task,
};

/// Label with a tag.
const TAG: &str = "istio.io/tag";

/// A tag object.
struct Tag {
    /// The name of the object.
    object: SmolStr,
    tag: SmolStr,
    /// The revision that the tag points to.
    revision: SmolStr,
}

/// Watches the tags until the receiver is closed. `None` means unknown.
pub async fn follow(
    cluster: ClusterId,
    client: ::kube::Client,
    system_namespace: Namespace,
    revision: SmolStr,
    shared: Arc<IngestContext>,
    out: watch::Sender<Option<BTreeSet<SmolStr>>>,
) {
    let webhooks = resource(
        "MutatingWebhookConfiguration",
        "mutatingwebhookconfigurations",
        "admissionregistration.k8s.io",
        "v1",
    );
    let targets = [
        WatchTarget::all(webhooks),
        WatchTarget {
            namespace: Some(system_namespace.to_string()),
            ..WatchTarget::all(resource("Service", "services", "", "v1"))
        },
    ];
    let start = |target: WatchTarget| {
        let target = WatchTarget {
            labels: Some(TAG.to_owned()),
            metadata_only: true,
            ..target
        };
        let health = WatchHealth::new(&cluster, &target.name(), &shared.watch_metrics);
        let (sender, receiver) = mpsc::channel(8);
        let watching = watch_as(client.clone(), target, health, tag_of, sender);
        shared.environment.tasks.spawn_until_shutdown("watch", watching);
        receiver
    };
    let [mut webhooks, mut services] = targets.map(start);
    let mut known: [Option<BTreeMap<SmolStr, Tag>>; 2] = [None, None];
    loop {
        let (source, event) = tokio::select! {
            () = out.closed() => return,
            event = webhooks.recv() => (0, event),
            event = services.recv() => (1, event),
        };
        let Some(event) = event else { return };
        apply_event(&mut known[source], event);
        if let [Some(webhooks), Some(services)] = &known {
            let all = webhooks.values().chain(services.values());
            let own = all.filter(|tag| tag.revision == revision);
            let tags = own.map(|tag| tag.tag.clone()).collect();
            task::publish(&out, Some(tags));
        }
    }
}

fn tag_of(object: Object) -> Tag {
    let label = |name: &str| {
        let labels = object.metadata.labels.as_ref();
        SmolStr::new(labels.and_then(|labels| labels.get(name)).map_or("", String::as_str))
    };
    Tag {
        object: SmolStr::new(object.name()),
        tag: label(TAG),
        revision: label(REVISION),
    }
}

fn apply_event(known: &mut Option<BTreeMap<SmolStr, Tag>>, event: WatchEvent<Tag>) {
    match event {
        WatchEvent::Restarted(all) => *known = Some(all.into_iter().map(|tag| (tag.object.clone(), tag)).collect()),
        WatchEvent::Applied(tag) => drop(known.get_or_insert_default().insert(tag.object.clone(), tag)),
        WatchEvent::Deleted(tag) => drop(known.get_or_insert_default().remove(&tag.object)),
    }
}
