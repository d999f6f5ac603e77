//! Operations on filter lists, common to listener filters, network filters and HTTP filters.

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
    /// Returns the name.
    fn name(&self) -> &str;
    /// Sets the name.
    fn rename(&mut self, name: String);
    /// Returns the inline configuration, if there is one.
    fn config(&self) -> Option<&Any>;
    /// Returns the source of the configuration, if it is discovered.
    fn discovery(&self) -> Option<&ExtensionConfigSource>;
    /// Sets the configuration.
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

/// Adds, removes or replaces filters; returns true if the list changed. `matched_name` is the filter name that the
/// patch matches. An insertion without a name uses the corresponding end of the list, and a removal without a name does
/// nothing.
pub fn rearrange<F: Patched>(
    filters: &mut Vec<F>,
    patch: &Patch,
    value: Option<F>,
    matched_name: Option<&str>,
) -> bool {
    let found = matched_name.map(|name| filters.iter().position(|filter| filter.name() == name));
    match (patch.operation, value, found) {
        (Operation::Add, Some(value), _) | (Operation::InsertAfter, Some(value), None) => filters.push(value),
        (Operation::InsertFirst, Some(value), _) | (Operation::InsertBefore, Some(value), None) => {
            filters.insert(0, value);
        }
        (Operation::InsertAfter, Some(value), Some(Some(index))) => filters.insert(index + 1, value),
        (Operation::InsertBefore, Some(value), Some(Some(index))) => filters.insert(index, value),
        (Operation::Replace, Some(value), Some(Some(index))) => filters[index] = value,
        (Operation::Remove, _, Some(Some(_))) => filters.retain(|filter| Some(filter.name()) != matched_name),
        _ => return false,
    }
    true
}

/// Effect of a merge on the filter's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// The patch's name replaces the filter's.
    OfPatch,
    /// The filter keeps its name.
    Kept,
}

/// Merges a patch into a filter with inline configuration, inside the packed message. A type mismatch ends the patching
/// ([`PatchSet::stop`]).
pub fn merge_filter<F: Patched>(set: &PatchSet, patch: &Patch, filter: &mut F, naming: Naming) {
    let (Some(config), Some(value)) = (filter.config(), patch.read::<F>()) else {
        return;
    };
    match value.config().map(|from_patch| merge_any(config, from_patch)) {
        Some(Ok(merged)) => filter.configure(merged),
        Some(Err(error @ MergeError::TypeMismatch { .. })) => return set.stop(patch, error),
        // The configuration stays; a new name still counts.
        Some(Err(error)) => set.problem(patch, error),
        None => {}
    }
    if naming == Naming::OfPatch && !value.name().is_empty() {
        filter.rename(value.name().to_owned());
    }
    set.applied(patch);
}

/// Filters that are sent whatever extensions the proxy lists: omitting one would allow traffic that it denies.
const SECURITY: [&str; 5] = [
    "envoy.filters.http.ext_authz",
    "envoy.filters.http.jwt_authn",
    "envoy.filters.http.rbac",
    "envoy.filters.network.ext_authz",
    "envoy.filters.network.rbac",
];

/// Returns the filter that a patch adds or replaces with. If the proxy lists its extensions and lacks this one, returns
/// `None` and adds a note: a proxy refuses the whole listener if it has an unknown filter.
pub fn runnable<F: Patched>(set: &PatchSet, extensions: &Extensions, patch: &Patch) -> Option<F> {
    let filter: F = patch.read()?;
    if can_run(extensions, &filter) {
        return Some(filter);
    }
    set.push(missing(patch, filter.name()));
    is_security(&filter).then_some(filter)
}

/// Returns true if omitting the filter would allow traffic that it denies.
pub fn is_security<F: Patched>(filter: &F) -> bool {
    names(filter).iter().any(|name| SECURITY.contains(&name.as_str()))
}

/// Returns true if a proxy can run a filter.
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

/// Returns a filter that the value of a patch configures and that the proxy cannot run; `None` also for security
/// filters.
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

/// Returns all names under which a proxy may list a filter.
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

/// Returns the names of a configuration type and of its extension in Envoy: `envoy.extensions.filters.http.lua.v3.Lua`
/// belongs to `envoy.filters.http.lua`.
fn type_names(name: &str) -> Vec<String> {
    let mut names = vec![name.to_owned()];
    if let Some(rest) = name.strip_prefix("envoy.extensions.") {
        let mut parts: Vec<&str> = rest.split('.').collect();
        parts.truncate(parts.len().saturating_sub(2));
        names.push(format!("envoy.{}", parts.join(".")));
    }
    names
}
