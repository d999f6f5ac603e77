//! Patches of one resource by kind, with the notes of their application.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fmt::Display,
};

use smol_str::{SmolStr, format_smolstr};

use super::{PatchContext, PatchRef, resolve};
use crate::{
    generate::{BuildContext, resource::Note},
    model::{
        MeshSnapshot,
        envoy_filter::{ApplyTo, Patch},
    },
    table::Cx,
};

/// Code of the note that a patch had an effect; also the name of the metric built from it.
pub const STATUS: &str = "pilot_envoy_filter_status";
/// Code of the note that a matching patch could not be applied.
pub const PROBLEM: &str = "envoy_filter_problem";

/// Code of the note that a patch changes nothing.
pub const UNUSED: &str = "envoy_filter_unused";

/// The number of notes about patches of which a resource keeps each, by code.
const MOST_NOTES: usize = 256;

/// Sorts the notes of a resource and removes repeated ones. Of many about patches, some remain, and one note for each
/// object and kind of patch: all would take memory for each pair of a resource and a patch, and a tenant may write
/// thousands of patches.
pub fn compact(notes: &mut Vec<Note>) {
    notes.sort_unstable();
    notes.dedup();
    for code in [STATUS, PROBLEM] {
        let of_code = notes.iter_mut().filter(|note| note.code == code);
        for note in of_code.skip(MOST_NOTES) {
            let common = place_of_kind(place(note));
            note.detail = if code == PROBLEM {
                format_smolstr!("{common}: other patches")
            } else {
                common
            };
        }
    }
    notes.sort_unstable();
    notes.dedup();
    notes.shrink_to_fit();
}

/// Returns the place of the patch that a note is about.
fn place(note: &Note) -> &str {
    note.detail.split(':').next().unwrap_or_default()
}

/// Returns the common place of an object's patches of one kind.
fn place_of_kind(place: &str) -> SmolStr {
    let object = place.split(' ').next().unwrap_or_default();
    let kind = place.rsplit(' ').next().unwrap_or_default();
    format_smolstr!("{object} configPatches {kind}")
}

/// Returns the note that a patch had an effect.
pub fn applied(patch: &Patch) -> Note {
    Note {
        code: STATUS,
        detail: patch.place.clone(),
    }
}

/// Returns the note that a matching patch could not be applied.
pub fn problem(patch: &Patch, reason: impl Display) -> Note {
    Note {
        code: PROBLEM,
        detail: format_smolstr!("{}: {reason}", patch.place),
    }
}

/// Returns notes of patches that change nothing in the present configuration: they match nothing, or no proxy that they
/// select is connected. Patches with a [`PROBLEM`] are excluded, and those that may be among the many of a resource
/// ([`compact`]).
pub fn unused<'a>(mesh: &'a MeshSnapshot, notes: &BTreeSet<Note>) -> Vec<Note> {
    let cx = Cx::untracked();
    let rows = mesh.envoy_filter_patches.iter(&cx);
    let patches = rows.flat_map(|(_, row)| &row.patches);
    let problems = notes.iter().filter(|note| note.code == PROBLEM);
    let with_problem: BTreeSet<&str> = problems.map(place).collect();
    let with_effect: BTreeSet<&str> = notes.iter().filter(|note| note.code == STATUS).map(place).collect();
    let is_noted = |place: &str| with_problem.contains(place) || with_effect.contains(place);
    let is_unused = |patch: &&'a Patch| {
        patch.class().is_some() && !is_noted(&patch.place) && !is_noted(&place_of_kind(&patch.place))
    };
    let note = |patch: &Patch| Note {
        code: UNUSED,
        detail: patch.place.clone(),
    };
    patches.filter(is_unused).map(note).collect()
}

/// Returns notes of all patches that change nothing, and of all that could not be applied to something.
pub fn without_effect(mesh: &MeshSnapshot, notes: &BTreeSet<Note>) -> Vec<Note> {
    let problems = notes.iter().filter(|note| note.code == PROBLEM).cloned();
    problems.chain(unused(mesh, notes)).collect()
}

/// Returns the labels of the metric [`STATUS`] for a note: the EnvoyFilter as `namespace/name`, the patched object in
/// Istio's words, and the result.
pub fn status(note: &Note) -> Option<(&str, &'static str, &'static str)> {
    let result = match note.code {
        STATUS => "applied",
        PROBLEM => "error",
        _ => return None,
    };
    let (name, rest) = place(note).split_once(' ')?;
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

/// Returns the note that a patch is omitted because the proxy lacks an extension.
pub fn missing(patch: &Patch, extension: &str) -> Note {
    problem(patch, format_args!("the proxy lacks the extension {extension}"))
}

/// Patches of one resource.
pub struct PatchSet<'a> {
    patches: Vec<&'a Patch>,
    stopped: Cell<bool>,
    /// Each once: a patch may change thousands of filters.
    notes: RefCell<BTreeSet<Note>>,
}

impl<'a> PatchSet<'a> {
    /// Returns the patches that apply in a context.
    pub fn new(ctx: &BuildContext<'a>, refs: &[PatchRef], context: PatchContext) -> Self {
        let mut patches = resolve(ctx, refs);
        patches.retain(|patch| patch.is_for(context));
        Self {
            patches,
            stopped: Cell::new(false),
            notes: RefCell::default(),
        }
    }

    /// Returns true if there is nothing to apply.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// Returns the patches of one kind of object, in the order of application; none once patching has stopped.
    pub fn of(&self, apply_to: ApplyTo) -> impl Iterator<Item = &'a Patch> + use<'a, '_> {
        self.patches
            .iter()
            .copied()
            .filter(move |patch| patch.apply_to == apply_to && !self.is_stopped())
    }

    /// Notes that a patch cannot be merged, and ends the patching: earlier patches stay, later ones are lost.
    ///
    /// Parity (pilot/pkg/networking/core/envoyfilter/listener_patch.go): a panic in a merge ends the patching of all
    /// listeners of a direction.
    pub fn stop(&self, patch: &Patch, reason: impl Display) {
        self.problem(patch, reason);
        self.stopped.set(true);
    }

    /// Returns true if patching has stopped.
    pub fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// Notes that a patch had an effect.
    pub fn applied(&self, patch: &Patch) {
        self.push(applied(patch));
    }

    /// Notes that a matching patch could not be applied to this resource.
    pub fn problem(&self, patch: &Patch, reason: impl Display) {
        self.push(problem(patch, reason));
    }

    /// Adds a note.
    pub fn push(&self, note: Note) {
        self.notes.borrow_mut().insert(note);
    }

    /// Adds the notes to those of the resource, which stay sorted and unique.
    pub fn into_notes(self, notes: &mut Vec<Note>) {
        let own = self.notes.into_inner();
        if !own.is_empty() {
            notes.extend(own);
            compact(notes);
        }
    }
}
