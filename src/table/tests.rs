//! The engine against its specification: incremental equals from scratch, equal rows stop the propagation.

use std::{cell::Cell, collections::BTreeMap, hash::BuildHasher};

use proptest::prelude::*;
use rustc_hash::FxBuildHasher;

use super::*;

const NUMBERS: RelationId = RelationId(1);
const BY_PARITY: RelationId = RelationId(2);
const SUMS: RelationId = RelationId(3);
const PARITIES: RelationId = RelationId(5);

struct Rig {
    numbers: TableWriter<u8, i64>,
    by_parity: IndexWriter<bool, u8, i64>,
    parities: Distinct<bool, u8, i64>,
    sums: Derived<bool, i64>,
    evaluations: Cell<usize>,
}

impl Rig {
    fn new() -> Self {
        Self {
            numbers: TableWriter::new(NUMBERS),
            by_parity: IndexWriter::new(BY_PARITY, |_, value, emit| emit(value % 2 == 0)),
            parities: Distinct::new(PARITIES, |_, value, emit| emit(value % 2 == 0)),
            sums: Derived::new(SUMS),
            evaluations: Cell::new(0),
        }
    }

    fn commit(&mut self, batch: &[(u8, Option<i64>)]) -> ChangeSet {
        let mut tx = Transaction::default();
        self.numbers.begin();
        for (key, value) in batch {
            match value {
                Some(value) => self.numbers.put(&mut tx, *key, Shared::new(*value)),
                None => self.numbers.remove(&mut tx, key),
            };
        }
        self.by_parity.update(&mut tx, &self.numbers);
        self.parities.update(&mut tx, &self.numbers);
        let (index, evaluations) = (self.by_parity.index().clone(), &self.evaluations);
        self.sums.update(&mut tx, self.by_parity.changed(), |cx, parity| {
            evaluations.set(evaluations.get() + 1);
            let mut rows = index.get(cx, parity).peekable();
            rows.peek()?;
            Some(rows.map(|(_, value)| **value).sum())
        });
        tx.finish()
    }

    fn content(&self) -> BTreeMap<bool, i64> {
        self.sums
            .table()
            .iter(&Cx::untracked())
            .map(|(k, v)| (*k, **v))
            .collect()
    }
}

/// A key that counts its copies. A map copies one key when it splits a leaf.
struct CountedKey<'a>(u32, &'a Cell<usize>);

impl Clone for CountedKey<'_> {
    fn clone(&self) -> Self {
        self.1.set(self.1.get() + 1);
        Self(self.0, self.1)
    }
}

impl PartialEq for CountedKey<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for CountedKey<'_> {}

impl PartialOrd for CountedKey<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for CountedKey<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

#[test]
fn the_filling_order_makes_half_as_many_nodes() {
    let leaves = |keys: Vec<u32>| {
        let copies = Cell::new(0);
        let mut map = OrdMap::new();
        for key in keys {
            map.insert(CountedKey(key, &copies), ());
        }
        assert_eq!(map.len(), 1000);
        1 + copies.get()
    };
    let sorted: Vec<u32> = (0..1000).collect();
    let (in_order, filling) = (leaves(sorted.clone()), leaves(filling_order(sorted)));
    assert!(in_order >= 100, "{in_order} leaves");
    assert!(filling * 10 <= in_order * 6, "{filling} leaves instead of {in_order}");
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "rows of a union have one key")]
fn rows_of_a_union_have_keys_of_their_own() {
    let mut tx = Transaction::default();
    let mut source: TableWriter<u8, i64> = TableWriter::new(NUMBERS);
    for key in [1, 2] {
        source.put(&mut tx, key, Shared::new(5));
    }
    let mut union: Union<i64, i64> = Union::new(RelationId(4));
    union.put(&mut tx, &source, |value| *value);
    union.check(source.table().len());
}

proptest! {
    #[test]
    fn incremental_equals_from_scratch(batches in prop::collection::vec(
        prop::collection::vec((0u8..12, prop::option::of(-5i64..5)), 1..6), 1..30)) {
        let mut rig = Rig::new();
        let mut model = BTreeMap::new();
        for batch in &batches {
            rig.commit(batch);
            for (key, value) in batch {
                match value {
                    Some(value) => model.insert(*key, *value),
                    None => model.remove(key),
                };
            }
        }
        let mut scratch = Rig::new();
        scratch.commit(&model.iter().map(|(k, v)| (*k, Some(*v))).collect::<Vec<_>>());
        prop_assert_eq!(rig.content(), scratch.content());
        let cx = Cx::untracked();
        let indexed: Vec<&bool> = rig.by_parity.index().keys(&cx).collect();
        prop_assert_eq!(rig.parities.table().keys(&cx).collect::<Vec<_>>(), indexed);
        prop_assert!(rig.sums.recorded_reads() <= 2, "one read for each evaluated key");
        prop_assert_eq!(rig.sums.recorded_reads(), rig.sums.counted_reads());
    }
}

#[test]
fn an_equal_row_stops_the_propagation() {
    let mut rig = Rig::new();
    rig.commit(&[(1, Some(2)), (2, Some(4)), (3, Some(1))]);
    let before = rig.evaluations.get();
    assert!(rig.commit(&[(1, Some(2))]).is_empty());
    assert_eq!(rig.evaluations.get(), before, "nothing changed, nothing is evaluated");
    let changes = rig.commit(&[(1, Some(4)), (2, Some(2))]);
    assert_eq!(rig.evaluations.get(), before + 1, "only the even sum is evaluated");
    assert!(
        !changes.touches(&[ReadKey::of(SUMS, &true)]),
        "an equal sum is not a change"
    );
    assert!(changes.touches(&[ReadKey::of(NUMBERS, &1u8)]));
}

#[test]
fn distinct_keys_change_with_their_first_and_last_rows() {
    let mut rig = Rig::new();
    let even = [ReadKey::of(PARITIES, &true)];
    assert!(rig.commit(&[(1, Some(2))]).touches(&even));
    assert!(
        !rig.commit(&[(2, Some(4)), (1, Some(6))]).touches(&even),
        "it exists already"
    );
    assert!(!rig.commit(&[(1, None)]).touches(&even), "another row has it");
    assert!(
        !rig.commit(&[(2, None), (3, Some(8))]).touches(&even),
        "it passes to another row"
    );
    assert!(rig.parities.table().get(&Cx::untracked(), &true).is_some());
    assert!(rig.commit(&[(3, Some(7))]).touches(&even));
    assert!(rig.parities.table().get(&Cx::untracked(), &true).is_none());
}

#[test]
fn an_undone_transaction_does_not_cost_the_last_good_row() {
    let mut sums: Derived<u8, i64> = Derived::new(SUMS);
    let mut numbers: TableWriter<u8, i64> = TableWriter::new(NUMBERS);
    let mut commit = |mut tx: Transaction, value: Option<i64>| {
        numbers.begin();
        match value {
            Some(value) => numbers.put(&mut tx, 7, Shared::new(value)),
            None => numbers.remove(&mut tx, &7),
        };
        let table = numbers.table().clone();
        sums.update(&mut tx, [&7], |cx, key| {
            let value = table.get(cx, key).map_or(0, |row| **row);
            assert!(value < 10, "a defect of the derivation");
            Some(value)
        });
        let row = sums.table().get(&Cx::untracked(), &7).map(|row| **row);
        (row, tx.take_panics().len())
    };
    assert_eq!(commit(Transaction::default(), Some(1)), (Some(1), 0));
    assert_eq!(commit(Transaction::default(), Some(10)), (Some(1), 1));
    assert_eq!(commit(Transaction::default(), None), (Some(0), 0));
    assert_eq!(commit(Transaction::undoing_last(), Some(10)), (Some(1), 1));
}

#[test]
fn an_evaluation_is_repeated_after_a_panic_in_a_shared_value() {
    let mut sums: Derived<u8, i64> = Derived::new(SUMS);
    let mut numbers: TableWriter<u8, i64> = TableWriter::new(NUMBERS);
    let mut commit = |value: i64, candidates: &[u8]| {
        let mut tx = Transaction::default();
        numbers.begin();
        numbers.put(&mut tx, 7, Shared::new(value));
        let (table, memo) = (numbers.table().clone(), Memo::default());
        sums.update(&mut tx, candidates, |cx, _| {
            let shared = memo.get(cx, (), |cx| {
                let value = table.get(cx, &7).map_or(0, |row| **row);
                assert!(value < 10, "a defect of the shared value");
                value
            });
            Some(*shared)
        });
        let row = sums.table().get(&Cx::untracked(), &1).map(|row| **row);
        (row, tx.take_panics().len())
    };
    assert_eq!(commit(1, &[1]), (Some(1), 0));
    assert_eq!(commit(10, &[]), (Some(1), 1));
    assert_eq!(
        commit(2, &[]),
        (Some(2), 0),
        "nothing but the shared value reads the number"
    );
}

/// A key that counts how often it is compared.
struct ComparedKey<'c> {
    number: u64,
    comparisons: &'c Cell<usize>,
}

impl PartialEq for ComparedKey<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.comparisons.set(self.comparisons.get() + 1);
        self.number == other.number
    }
}

impl Eq for ComparedKey<'_> {}

impl Hash for ComparedKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

/// Tenants choose names in keys. With a hash that they can compute, each key would be compared with all others.
#[test]
fn r21_keys_of_a_memo_do_not_collide() {
    // A map takes the bucket from the lowest bits of a hash, and compares the highest seven before it compares keys.
    let collides = |number: &u64| FxBuildHasher.hash_one(number).rotate_left(7).trailing_zeros() >= 15;
    let comparisons = Cell::new(0);
    let (cx, memo) = (Cx::untracked(), Memo::default());
    for number in (0..).filter(collides).take(100) {
        let key = ComparedKey {
            number,
            comparisons: &comparisons,
        };
        memo.get(&cx, key, |_| number);
    }
    assert_eq!(memo.sum(|_| 1), 100);
    assert!(comparisons.get() < 1000, "{}", comparisons.get());
}

#[test]
fn readers_of_missing_rows_are_notified() {
    let mut sums: Derived<u8, i64> = Derived::new(SUMS);
    let mut numbers: TableWriter<u8, i64> = TableWriter::new(NUMBERS);
    let mut tx = Transaction::default();
    let table = numbers.table().clone();
    sums.update(&mut tx, [&7], |cx, key| table.get(cx, key).map(|row| **row));
    assert!(sums.table().is_empty());
    let mut tx = Transaction::default();
    numbers.put(&mut tx, 7, Shared::new(70));
    let table = numbers.table().clone();
    sums.update(&mut tx, [], |cx, key| table.get(cx, key).map(|row| **row));
    assert_eq!(sums.table().get(&Cx::untracked(), &7).map(|row| **row), Some(70));
}
