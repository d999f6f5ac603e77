use serde_json::json;

use super::*;
use crate::{
    api::Kind,
    generate::fixture,
    model::{Batch, Change, Installation, World, fixture as model},
};

/// One more service beside [`fixture::APP`].
const MORE: &str = "
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, selector: {app: b}, ports: [{name: http, port: 80}]}
";

/// A world with a store that follows it.
struct Bed {
    world: World,
    store: Store,
}

impl Bed {
    fn commit(&mut self, batch: Batch) {
        let commit = self.world.commit(batch);
        self.update(&commit.snapshot, &commit.changes, Membership::default());
    }

    fn joins(&mut self, number: u64, namespace: &str) {
        let node = format!("sidecar~10.9.0.{number}~p-{number}.{namespace}~{namespace}.svc.cluster.local");
        let proxy = Arc::new(fixture::client(&node, &json!({})));
        self.membership(Membership {
            joined: vec![(MemberId(number), proxy)],
            ..Membership::default()
        });
    }

    fn leaves(&mut self, number: u64) {
        self.membership(Membership {
            left: vec![MemberId(number)],
            ..Membership::default()
        });
    }

    fn membership(&mut self, membership: Membership) {
        let mesh = self.world.snapshot();
        self.update(&mesh, &ChangeSet::default(), membership);
    }

    /// The totals that are kept are those that are counted.
    fn update(&mut self, mesh: &MeshSnapshot, changes: &ChangeSet, membership: Membership) {
        self.store.update(mesh, changes, membership, &Serial);
        let rows = self.store.resources.table().rows(&Cx::untracked()).clone();
        let counted: usize = rows.iter().map(|(_, built)| built.bytes()).sum();
        let size = self.store.size();
        assert_eq!((size.resources, size.bytes), (rows.len(), counted));
    }
}

fn rows(file: &str) -> Batch {
    let rows = model::folder(&Installation::default(), &[("file.yaml", file)]);
    rows.into_iter().map(Change::Upsert).collect()
}

#[test]
fn totals_follow_what_comes_changes_and_goes() {
    let mut bed = Bed {
        world: World::new(Installation::default()),
        store: Store::default(),
    };
    bed.commit(rows(fixture::APP));
    assert_eq!(bed.store.size(), Size::default(), "nobody wants anything");
    bed.joins(1, "default");
    let one = bed.store.size();
    assert!(one.bytes > 0 && one.reads > 0, "{one:?}");
    bed.joins(2, "default");
    bed.joins(3, "elsewhere");
    bed.commit(rows(MORE));
    let more = bed.store.size();
    assert!(more.bytes > one.bytes && more.groups > one.groups, "{more:?}");
    bed.commit(rows(&MORE.replace("port: 80", "port: 8080, appProtocol: http2")));
    let gone = rows(MORE).into_iter().filter_map(|change| match change {
        Change::Upsert(row) if row.kind() == Kind::Service => Some(Change::Remove(row.kind(), row.key().clone())),
        _ => None,
    });
    bed.commit(gone.collect());
    bed.leaves(3);
    bed.leaves(2);
    assert_eq!(bed.store.size(), one, "as it was");
    bed.leaves(1);
    assert_eq!(bed.store.size(), Size::default(), "nothing is left");
}
