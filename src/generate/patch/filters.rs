//! Lists of filters, whatever kind: listener filters, network filters, HTTP filters are patched alike.

use prost::{Message, Name};
use smol_str::SmolStr;

use super::{
    merge::{MergeError, merge_any},
    set::{PatchSet, missing},
};
use crate::{
    generate::proxy::Extensions,
    model::envoy_filter::{Operation, Patch, packed_type},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::ExtensionConfigSource,
                listener::v3::{Filter, ListenerFilter, filter, listener_filter},
            },
            extensions::filters::network::http_connection_manager::v3::{HttpFilter, http_filter},
        },
    },
};

/// A filter with a name and a typed configuration.
pub trait Patched: Message + Name + Default + Clone {
    /// Its name.
    fn name(&self) -> &str;
    /// Gives it another name.
    fn rename(&mut self, name: String);
    /// Its configuration, if it stands here.
    fn config(&self) -> Option<&Any>;
    /// Where its configuration comes from, if it does not stand here.
    fn discovery(&self) -> Option<&ExtensionConfigSource>;
    /// Gives it another configuration.
    fn configure(&mut self, config: Any);
}

macro_rules! patched {
    ($($filter:ident, $module:ident;)*) => { $(
        impl Patched for $filter {
            fn name(&self) -> &str {
                &self.name
            }
            fn rename(&mut self, name: String) {
                self.name = name;
            }
            fn config(&self) -> Option<&Any> {
                match &self.config_type {
                    Some($module::ConfigType::TypedConfig(config)) => Some(config),
                    _ => None,
                }
            }
            fn discovery(&self) -> Option<&ExtensionConfigSource> {
                match &self.config_type {
                    Some($module::ConfigType::ConfigDiscovery(source)) => Some(source),
                    _ => None,
                }
            }
            fn configure(&mut self, config: Any) {
                self.config_type = Some($module::ConfigType::TypedConfig(config));
            }
        }
    )* };
}

patched! {
    ListenerFilter, listener_filter;
    Filter, filter;
    HttpFilter, http_filter;
}

/// Adds to a list of filters, takes away or puts others in place. `wanted` is the name of the filter that the patch is
/// about, if it says so: an insertion without one goes to the end of the list that it names, and without one nothing is
/// taken away. True if the list is another.
pub fn rearrange<F: Patched>(filters: &mut Vec<F>, patch: &Patch, value: Option<F>, wanted: Option<&str>) -> bool {
    let found = wanted.map(|name| filters.iter().position(|filter| filter.name() == name));
    match (patch.operation, value, found) {
        (Operation::Add, Some(value), _) | (Operation::InsertAfter, Some(value), None) => filters.push(value),
        (Operation::InsertFirst, Some(value), _) | (Operation::InsertBefore, Some(value), None) => {
            filters.insert(0, value);
        }
        (Operation::InsertAfter, Some(value), Some(Some(index))) => filters.insert(index + 1, value),
        (Operation::InsertBefore, Some(value), Some(Some(index))) => filters.insert(index, value),
        (Operation::Replace, Some(value), Some(Some(index))) => filters[index] = value,
        (Operation::Remove, _, Some(Some(_))) => filters.retain(|filter| Some(filter.name()) != wanted),
        _ => return false,
    }
    true
}

/// Whether a merge changes a filter's name too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// The patch's name takes the place of the filter's.
    OfPatch,
    /// The filter keeps its name.
    Kept,
}

/// Merges a patch into a filter whose configuration stands in it: by the rule of messages, inside of what is packed. A
/// configuration of another type ends it all ([`PatchSet::stop`]).
pub fn merge_filter<F: Patched>(set: &PatchSet, patch: &Patch, filter: &mut F, naming: Naming) {
    let (Some(config), Some(value)) = (filter.config(), patch.read::<F>()) else {
        return;
    };
    match value.config().map(|from_patch| merge_any(config, from_patch)) {
        Some(Ok(merged)) => filter.configure(merged),
        Some(Err(error @ MergeError::TypeMismatch { .. })) => return set.stop(patch, error),
        // The configuration stays; a new name counts nevertheless.
        Some(Err(error)) => set.problem(patch, error),
        None => {}
    }
    if naming == Naming::OfPatch && !value.name().is_empty() {
        filter.rename(value.name().to_owned());
    }
    set.applied(patch);
}

/// Filters that are sent whatever the client says: without them something would be let through.
const SECURITY: [&str; 5] = [
    "envoy.filters.http.ext_authz",
    "envoy.filters.http.jwt_authn",
    "envoy.filters.http.rbac",
    "envoy.filters.network.ext_authz",
    "envoy.filters.network.rbac",
];

/// The filter that a patch adds or puts in place; `None` (and a note) if the client lists what it can run and this is
/// not among it: a client that is sent what it cannot run refuses the whole listener.
pub fn runnable<F: Patched>(set: &PatchSet, extensions: &Extensions, patch: &Patch) -> Option<F> {
    let filter: F = patch.read()?;
    if can_run(extensions, &filter) {
        return Some(filter);
    }
    set.push(missing(patch, filter.name()));
    is_security(&filter).then_some(filter)
}

/// True if something would be let through without the filter.
pub fn is_security<F: Patched>(filter: &F) -> bool {
    names(filter).iter().any(|name| SECURITY.contains(&name.as_str()))
}

/// True if a client can run a filter.
pub fn can_run<F: Patched>(extensions: &Extensions, filter: &F) -> bool {
    if extensions.listed.is_none() {
        return true;
    }
    if let Some(source) = filter.discovery() {
        let runs = |url: &String| type_names(type_name(url)).iter().any(|name| extensions.has(name));
        return source.type_urls.iter().all(runs);
    }
    names(filter).iter().any(|name| extensions.has(name))
}

/// A filter that the value of a patch configures and that a client cannot run; `None` too if something would be let
/// through without the patch.
pub fn absent(extensions: &Extensions, patch: &Patch) -> Option<SmolStr> {
    let value = patch.value.as_ref().filter(|_| extensions.listed.is_some())?;
    let mut filters = value
        .packed
        .iter()
        .filter(|name| name.starts_with("envoy.extensions.filters."));
    let cannot = |name: &&SmolStr| {
        let names = type_names(name);
        !names
            .iter()
            .any(|name| extensions.has(name) || SECURITY.contains(&name.as_str()))
    };
    filters.find(cannot).cloned()
}

/// All names by which a client may list what a filter is.
fn names<F: Patched>(filter: &F) -> Vec<String> {
    let mut names = vec![filter.name().to_owned()];
    if let Some(config) = filter.config() {
        names.extend(type_names(&packed_type(config)));
    }
    names
}

fn type_name(url: &str) -> &str {
    url.rsplit_once('/').map_or(url, |(_, name)| name)
}

/// A type and the extension that Envoy has for it: `envoy.extensions.filters.http.lua.v3.Lua` is of
/// `envoy.filters.http.lua`.
fn type_names(name: &str) -> Vec<String> {
    let mut names = vec![name.to_owned()];
    if let Some(rest) = name.strip_prefix("envoy.extensions.") {
        let mut parts: Vec<&str> = rest.split('.').collect();
        parts.truncate(parts.len().saturating_sub(2));
        names.push(format!("envoy.{}", parts.join(".")));
    }
    names
}
