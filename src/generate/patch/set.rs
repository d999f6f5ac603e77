//! The patches for one resource, by kind, and what is noted while they are applied.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fmt::Display,
};

use smol_str::format_smolstr;

use super::{PatchContext, PatchRef, resolve};
use crate::{
    generate::{BuildContext, resource::Note},
    model::{
        MeshSnapshot,
        envoy_filter::{ApplyTo, Patch},
    },
    table::Cx,
};

/// Tells which patches had an effect; the metric of the same name is made of it.
pub const STATUS: &str = "pilot_envoy_filter_status";
/// Tells why a patch that was meant for a resource has no effect.
pub const PROBLEM: &str = "envoy_filter_problem";

/// Names a patch that changes nothing.
pub const UNUSED: &str = "envoy_filter_unused";

/// The remark that a patch had an effect.
pub fn applied(patch: &Patch) -> Note {
    Note {
        code: STATUS,
        detail: patch.place.clone(),
    }
}

/// The remark that a patch has no effect although it was meant for a resource.
pub fn problem(patch: &Patch, reason: impl Display) -> Note {
    Note {
        code: PROBLEM,
        detail: format_smolstr!("{}: {reason}", patch.place),
    }
}

/// Patches that changed nothing of what proxies hold now: they match nothing, or no proxy that they are for is here.
/// Those with a [`PROBLEM`] are told of by that.
pub fn unused<'a>(mesh: &'a MeshSnapshot, notes: &BTreeSet<Note>) -> Vec<Note> {
    let cx = Cx::untracked();
    let rows = mesh.envoy_filter_patches.iter(&cx);
    let patches = rows.flat_map(|(_, row)| &row.patches);
    let problems = notes.iter().filter(|note| note.code == PROBLEM);
    let told: BTreeSet<&str> = problems.filter_map(|note| note.detail.split(':').next()).collect();
    let is_unused = |patch: &&'a Patch| {
        patch.class().is_some() && !notes.contains(&applied(patch)) && !told.contains(patch.place.as_str())
    };
    let note = |patch: &Patch| Note {
        code: UNUSED,
        detail: patch.place.clone(),
    };
    patches.filter(is_unused).map(note).collect()
}

/// Every patch that changes nothing, and every one that could not be applied to something.
pub fn troubles(mesh: &MeshSnapshot, notes: &BTreeSet<Note>) -> Vec<Note> {
    let problems = notes.iter().filter(|note| note.code == PROBLEM).cloned();
    problems.chain(unused(mesh, notes)).collect()
}

/// What the metric [`STATUS`] tells of a remark: the EnvoyFilter as `namespace/name`, what is patched in Istio's words,
/// and the result.
pub fn status(note: &Note) -> Option<(&str, &'static str, &'static str)> {
    let result = match note.code {
        STATUS => "applied",
        PROBLEM => "error",
        _ => return None,
    };
    let place = note.detail.split(':').next()?;
    let (name, rest) = place.split_once(' ')?;
    let patched = match ApplyTo::from_str_name(rest.rsplit_once(' ')?.1)? {
        ApplyTo::Cluster => "cluster",
        ApplyTo::Listener => "listener",
        ApplyTo::ListenerFilter => "listenerfilter",
        ApplyTo::FilterChain => "filterchain",
        ApplyTo::NetworkFilter => "networkfilter",
        ApplyTo::HttpFilter => "httpfilter",
        ApplyTo::RouteConfiguration | ApplyTo::HttpRoute => "route",
        ApplyTo::VirtualHost => "vhost",
        ApplyTo::ExtensionConfig | ApplyTo::Bootstrap | ApplyTo::Invalid => return None,
    };
    Some((name, patched, result))
}

/// The remark that a patch is left out because the client lacks an extension.
pub fn missing(patch: &Patch, extension: &str) -> Note {
    problem(patch, format_args!("the proxy lacks the extension {extension}"))
}

/// The patches for one resource.
pub struct PatchSet<'a> {
    patches: Vec<&'a Patch>,
    stopped: Cell<bool>,
    notes: RefCell<Vec<Note>>,
}

impl<'a> PatchSet<'a> {
    /// The patches that count in a context.
    pub fn new(ctx: &BuildContext<'a>, refs: &[PatchRef], context: PatchContext) -> Self {
        let mut patches = resolve(ctx, refs);
        patches.retain(|patch| patch.is_for(context));
        Self {
            patches,
            stopped: Cell::new(false),
            notes: RefCell::default(),
        }
    }

    /// True if there is nothing to apply.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// The patches of one kind of object, in the order of application; none any more once it is stopped.
    pub fn of(&self, apply_to: ApplyTo) -> impl Iterator<Item = &'a Patch> + use<'a, '_> {
        self.patches
            .iter()
            .copied()
            .filter(move |patch| patch.apply_to == apply_to && !self.is_stopped())
    }

    /// Notes that a patch cannot be merged, and ends it all: what came before stays, what comes after is lost. Parity:
    /// so it is in Istio, for all listeners of a direction together.
    pub fn stop(&self, patch: &Patch, reason: impl Display) {
        self.problem(patch, reason);
        self.stopped.set(true);
    }

    /// True if no more patches are to be applied.
    pub fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// Notes that a patch had an effect.
    pub fn applied(&self, patch: &Patch) {
        self.push(applied(patch));
    }

    /// Notes that a patch has no effect although it was meant for this resource.
    pub fn problem(&self, patch: &Patch, reason: impl Display) {
        self.push(problem(patch, reason));
    }

    /// Adds a remark.
    pub fn push(&self, note: Note) {
        self.notes.borrow_mut().push(note);
    }

    /// Adds what was noted to the remarks of the resource, which stay sorted and unique.
    pub fn into_notes(self, notes: &mut Vec<Note>) {
        let own = self.notes.into_inner();
        if !own.is_empty() {
            notes.extend(own);
            notes.sort_unstable();
            notes.dedup();
        }
    }
}
