//! Delta debugging: the smallest series of steps that fails in the same way.

use super::check::Failure;
use super::steps::Mesh;
use serde_json::{Value, json};

/// Limit of attempts, each of which costs as much as a check.
const ATTEMPTS: usize = 600;

/// Removes steps and settings while the mesh still fails. `fails` checks the rule that the mesh breaks.
pub(super) fn smallest(mesh: &Mesh, failure: Failure, fails: impl Fn(&Mesh) -> Option<Failure>) -> (Mesh, Failure) {
    let mut best = (mesh.clone(), failure);
    let mut attempts = 0;
    let mut keep = |candidate: Mesh, best: &mut (Mesh, Failure)| {
        attempts += 1;
        match fails(&candidate).filter(|_| attempts <= ATTEMPTS) {
            Some(failure) => {
                *best = (candidate, failure);
                true
            }
            None => false,
        }
    };
    let mut piece = mesh.steps.len().div_ceil(2);
    while piece > 0 {
        let mut start = 0;
        let mut removed = false;
        while start < best.0.steps.len() {
            let mut candidate = best.0.clone();
            let end = (start + piece).min(candidate.steps.len());
            candidate.steps.drain(start..end);
            if keep(candidate, &mut best) {
                removed = true;
            } else {
                start = end;
            }
        }
        // Single steps are tried until none can go: one may depend on a later one.
        if piece > 1 || !removed {
            piece /= 2;
        }
    }
    let both: [fn(&mut Mesh) -> &mut Value; 2] = [|mesh| &mut mesh.config, |mesh| &mut mesh.variables];
    for settings in both {
        for key in keys(settings(&mut best.0)) {
            let mut candidate = best.0.clone();
            remove(settings(&mut candidate), &key);
            keep(candidate, &mut best);
        }
    }
    best
}

fn keys(settings: &Value) -> Vec<String> {
    settings
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, _)| key.clone())
        .collect()
}

fn remove(settings: &mut Value, key: &str) {
    match settings.as_object_mut() {
        Some(map) => drop(map.remove(key)),
        None => *settings = json!({}),
    }
}
