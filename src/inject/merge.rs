//! Strategic merge patches of Kubernetes, for pods and the overlays that templates render.
//!
//! Parity (k8s.io/apimachinery/pkg/util/strategicpatch/patch.go): elements of the patch come before others of the
//! original that are not ahead of them, nulls delete, and directives begin with `$`.
//!
//! Elements are found by ordered maps: pods of users have lists of many thousand elements.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::schema::{self, Merge, Struct};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const SET_ORDER: &str = "$setElementOrder/";
const DELETE_SCALARS: &str = "$deleteFromPrimitiveList/";

/// The reason why a patch cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{message}", .path, if .path.is_empty() { "" } else { ": " })]
pub(super) struct MergeError {
    /// Path of the value in the patch.
    path: String,
    /// Reason.
    message: String,
}

impl MergeError {
    fn new(message: impl Into<String>) -> Self {
        Self {
            path: String::new(),
            message: message.into(),
        }
    }

    fn within(mut self, parent: &str) -> Self {
        let separator = if self.path.is_empty() || self.path.starts_with('[') {
            ""
        } else {
            "."
        };
        self.path = format!("{parent}{separator}{}", self.path);
        self
    }
}

/// Merges a patch into an object of a struct of the table.
pub(super) fn merge(type_name: &str, original: Value, patch: Value) -> Result<Value, MergeError> {
    let (Value::Object(original), Value::Object(patch)) = (original, patch) else {
        return Err(MergeError::new("a patch must be an object"));
    };
    objects(schema::find(type_name), original, patch).map(Value::Object)
}

type Object = Map<String, Value>;

fn objects(kind: Option<&'static Struct>, mut original: Object, mut patch: Object) -> Result<Object, MergeError> {
    match patch.remove(PATCH) {
        None => {}
        Some(Value::String(directive)) if directive == "merge" => {}
        Some(Value::String(directive)) if directive == "replace" => return Ok(without_directives(patch)),
        Some(Value::String(directive)) if directive == "delete" => return Ok(Object::new()),
        Some(other) => return Err(MergeError::new(format!("unknown {PATCH} directive {other}"))),
    }
    if let Some(retained) = patch.remove(RETAIN_KEYS) {
        let retained = strings(&retained).ok_or_else(|| MergeError::new("$retainKeys must be a list of strings"))?;
        if let Some(key) = patch
            .keys()
            .find(|key| !key.starts_with('$') && !retained.contains(key.as_str()))
        {
            return Err(MergeError::new(format!("{key} is not in {RETAIN_KEYS}")));
        }
        original.retain(|key, _| retained.contains(key.as_str()));
    }
    let (directives, members): (Object, Object) = if patch.keys().any(|key| key.starts_with('$')) {
        patch.into_iter().partition(|(key, _)| key.starts_with('$'))
    } else {
        (Object::new(), patch)
    };
    delete_scalars(&mut original, &directives);
    for (key, value) in members {
        if value.is_null() {
            original.remove(&key);
            continue;
        }
        let field = kind.and_then(|kind| kind.field(&key));
        let target = field.and_then(|field| field.of.target());
        let rule = field.map_or(Merge::Replace, |field| field.merge);
        let merged = match (original.remove(&key), value) {
            (Some(Value::Object(original)), Value::Object(value)) if rule != Merge::Whole => {
                objects(target, original, value).map(Value::Object)
            }
            (Some(Value::Array(original)), Value::Array(items)) if matches!(rule, Merge::Key(_) | Merge::Scalars) => {
                lists(target, rule, original, items).map(Value::Array)
            }
            // A list that only the patch has stays as it is, even if several elements have the same key.
            (_, value) => Ok(cleaned(value)),
        };
        original.insert(key.clone(), merged.map_err(|error| error.within(&key))?);
    }
    set_orders(kind, &mut original, &directives);
    Ok(original)
}

/// Applies `$deleteFromPrimitiveList/FIELD`.
fn delete_scalars(original: &mut Object, directives: &Object) {
    for (key, deleted) in directives {
        if let Some(Value::Array(items)) = key.strip_prefix(DELETE_SCALARS).and_then(|key| original.get_mut(key))
            && let Value::Array(deleted) = deleted
        {
            let deleted = positions(deleted.iter().map(Some));
            items.retain(|item| !deleted.contains_key(&Identity::from(Some(item))));
        }
    }
}

/// Applies `$setElementOrder/FIELD`: listed elements take the given order, others keep theirs behind what they follow.
fn set_orders(kind: Option<&'static Struct>, original: &mut Object, directives: &Object) {
    for (key, order) in directives {
        let Some(name) = key.strip_prefix(SET_ORDER) else {
            continue;
        };
        let (Some(Value::Array(items)), Value::Array(order)) = (original.get_mut(name), order) else {
            continue;
        };
        let merge_key = match kind.and_then(|kind| kind.field(name)).map(|field| field.merge) {
            Some(Merge::Key(key)) => Some(key),
            _ => None,
        };
        let order = positions(order.iter().filter_map(|item| identity(item, merge_key)).map(Some));
        let rank = |item: &Value| order.get(&Identity::of(item, merge_key)).copied();
        let before = identities(items.iter(), merge_key);
        let before = positions(before.iter().map(Option::as_ref));
        let (mut listed, others): (Vec<Value>, Vec<Value>) =
            std::mem::take(items).into_iter().partition(|item| rank(item).is_some());
        listed.sort_by_cached_key(rank);
        *items = interleaved(others, listed, &before, merge_key);
    }
}

/// Merges lists with a merge rule.
fn lists(
    element: Option<&'static Struct>,
    rule: Merge,
    original: Vec<Value>,
    patch: Vec<Value>,
) -> Result<Vec<Value>, MergeError> {
    let merge_key = match rule {
        Merge::Key(key) => Some(key),
        _ => None,
    };
    let before = identities(original.iter(), merge_key);
    let before = positions(before.iter().map(Option::as_ref));
    let mut rest = RemainingElements::new(original, &before, merge_key);
    let mut replaces = false;
    let mut items = Vec::new();
    for (index, item) in patch.into_iter().enumerate() {
        match directive(&item) {
            Some("delete") => {
                if let Some(id) = identity(&item, merge_key) {
                    rest.remove(before.get(&Identity::from(Some(id))).copied());
                }
            }
            Some("replace") => replaces = true,
            _ => items.push((index, item)),
        }
    }
    if replaces {
        return Ok(items.into_iter().map(|(_, item)| cleaned(item)).collect());
    }
    let ids = identities(items.iter().map(|(_, item)| item), merge_key);
    let mut patched: Vec<Value> = Vec::new();
    let mut places: BTreeMap<Identity<'_>, usize> = BTreeMap::new();
    for ((index, item), id) in items.into_iter().zip(&ids) {
        let at = |error: MergeError| error.within(&format!("[{index}]"));
        if id.is_none() {
            let key = merge_key.unwrap_or_default();
            return Err(at(MergeError::new(format!("the element has no merge key {key:?}"))));
        }
        let id = Identity::from(id.as_ref());
        if let Some(present) = rest.take(before.get(&id).copied()) {
            places.entry(id).or_insert(patched.len());
            patched.push(match (present, item) {
                (Value::Object(present), Value::Object(item)) => {
                    objects(element, present, item).map(Value::Object).map_err(at)?
                }
                (_, item) => item,
            });
        } else if let Some(place) = places.get(&id) {
            // The patch names the element twice.
            if let (Value::Object(earlier), Value::Object(item)) = (&mut patched[*place], item) {
                *earlier = objects(element, std::mem::take(earlier), item).map_err(at)?;
            }
        } else {
            places.insert(id, patched.len());
            patched.push(cleaned(item));
        }
    }
    let others = rest.elements.into_iter().flatten().collect();
    Ok(interleaved(others, patched, &before, merge_key))
}

/// The elements of a list that a patch has not named yet. An element is named by the position of the first one of its
/// identity; several elements may have the same.
struct RemainingElements {
    elements: Vec<Option<Value>>,
    /// For the first element of an identity: the first one that is left.
    left: Vec<Option<usize>>,
    /// For each element: the next one of its identity.
    next: Vec<Option<usize>>,
}

impl RemainingElements {
    fn new(elements: Vec<Value>, positions: &Positions<'_>, merge_key: Option<&str>) -> Self {
        let (mut left, mut next) = (vec![None; elements.len()], vec![None; elements.len()]);
        for (index, element) in elements.iter().enumerate().rev() {
            let first = positions[&Identity::of(element, merge_key)];
            next[index] = left[first].replace(index);
        }
        Self {
            elements: elements.into_iter().map(Some).collect(),
            left,
            next,
        }
    }

    /// Removes the first element that is left of those with the identity of this one.
    fn take(&mut self, first: Option<usize>) -> Option<Value> {
        let first = first?;
        let index = self.left[first]?;
        self.left[first] = self.next[index];
        self.elements[index].take()
    }

    /// Removes all elements with the identity of this one.
    fn remove(&mut self, first: Option<usize>) {
        while self.take(first).is_some() {}
    }
}

/// Merges elements that only the original has with those of the patch: the former go first only where they are ahead of
/// the latter in the original, which `before` has the positions of.
fn interleaved(others: Vec<Value>, patched: Vec<Value>, before: &Positions<'_>, merge_key: Option<&str>) -> Vec<Value> {
    let rank = |item: &Value| before.get(&Identity::of(item, merge_key)).copied();
    let mut result = Vec::with_capacity(others.len() + patched.len());
    let mut others = others.into_iter().peekable();
    for item in patched {
        let own = rank(&item);
        while let Some(other) =
            others.next_if(|other| matches!((rank(other), own), (Some(left), Some(right)) if left < right))
        {
            result.push(other);
        }
        result.push(item);
    }
    result.extend(others);
    result
}

/// Returns the merge key of an element, or the element itself in lists of scalars.
fn identity<'a>(item: &'a Value, merge_key: Option<&str>) -> Option<&'a Value> {
    match merge_key {
        Some(key) => item.get(key).filter(|value| !value.is_null()),
        None => Some(item),
    }
}

fn identities<'a>(items: impl Iterator<Item = &'a Value>, merge_key: Option<&str>) -> Vec<Option<Value>> {
    items.map(|item| identity(item, merge_key).cloned()).collect()
}

/// An identity as a key of ordered maps.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Identity<'a> {
    /// That of elements without a merge key.
    Missing,
    Text(&'a str),
    /// The JSON text of another value.
    Other(String),
}

impl<'a> Identity<'a> {
    fn of(item: &'a Value, merge_key: Option<&str>) -> Self {
        identity(item, merge_key).into()
    }
}

impl<'a> From<Option<&'a Value>> for Identity<'a> {
    fn from(id: Option<&'a Value>) -> Self {
        match id {
            None => Self::Missing,
            Some(Value::String(text)) => Self::Text(text),
            Some(other) => Self::Other(other.to_string()),
        }
    }
}

type Positions<'a> = BTreeMap<Identity<'a>, usize>;

/// Returns the position of the first element of each identity.
fn positions<'a>(ids: impl Iterator<Item = Option<&'a Value>>) -> Positions<'a> {
    let mut positions = Positions::new();
    for (index, id) in ids.enumerate() {
        positions.entry(id.into()).or_insert(index);
    }
    positions
}

fn directive(item: &Value) -> Option<&str> {
    item.get(PATCH).and_then(Value::as_str)
}

fn strings(value: &Value) -> Option<BTreeSet<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}

fn without_directives(mut object: Object) -> Object {
    object.retain(|key, _| !key.starts_with('$'));
    object.values_mut().for_each(clean);
    object
}

/// Returns a value of a patch that nothing in the original corresponds to: without nulls and directives.
fn cleaned(mut value: Value) -> Value {
    clean(&mut value);
    value
}

fn clean(value: &mut Value) {
    match value {
        Value::Object(entries) => entries.retain(|key, value| {
            let stays = !value.is_null() && !key.starts_with('$');
            if stays {
                clean(value);
            }
            stays
        }),
        Value::Array(items) => items.retain_mut(|item| {
            let stays = directive(item).is_none();
            if stays {
                clean(item);
            }
            stays
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(original: Value, patch: Value) -> Value {
        merge("PodSpec", original, patch).expect("the patch applies")
    }

    fn names(value: &Value) -> Vec<&str> {
        let items = value.as_array().into_iter().flatten();
        items.filter_map(|item| item["name"].as_str()).collect()
    }

    #[test]
    fn elements_merge_by_key() {
        let merged = spec(
            json!({"containers": [{"name": "app", "image": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}),
            json!({"containers": [{"name": "istio-proxy"},
                {"name": "app", "env": [{"name": "Y"}, {"name": "X", "value": "2"}]}]}),
        );
        assert_eq!(names(&merged["containers"]), ["istio-proxy", "app", "b"]);
        let env = &merged["containers"][1]["env"];
        assert_eq!(*env, json!([{"name": "Y"}, {"name": "X", "value": "2"}]));
    }

    #[test]
    fn elements_ahead_in_the_original_stay_ahead() {
        let merged = spec(
            json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}),
            json!({"containers": [{"name": "b", "image": "x"}, {"name": "new"}]}),
        );
        assert_eq!(names(&merged["containers"]), ["a", "b", "new", "c"]);
    }

    #[test]
    fn nulls_delete_and_are_not_added() {
        let merged = spec(
            json!({"hostname": "h", "securityContext": {"runAsUser": 1, "runAsGroup": 1}}),
            json!({"hostname": null, "securityContext": {"runAsUser": null},
                "volumes": [{"name": "v", "emptyDir": null}]}),
        );
        assert_eq!(
            merged,
            json!({"securityContext": {"runAsGroup": 1}, "volumes": [{"name": "v"}]})
        );
    }

    #[test]
    fn directives_apply() {
        let original = || {
            json!({
                "containers": [{"name": "a", "ports": [{"containerPort": 1}]}, {"name": "b"}],
                "nodeSelector": {"x": "1"},
                "volumes": [{"name": "v", "emptyDir": {}}],
            })
        };
        let merged = spec(original(), json!({"containers": [{"name": "a", "$patch": "delete"}]}));
        assert_eq!(names(&merged["containers"]), ["b"]);
        let merged = spec(
            original(),
            json!({"containers": [{"$patch": "replace"}, {"name": "c"}]}),
        );
        assert_eq!(names(&merged["containers"]), ["c"]);
        let merged = spec(original(), json!({"nodeSelector": {"$patch": "replace", "y": "2"}}));
        assert_eq!(merged["nodeSelector"], json!({"y": "2"}));
        let merged = spec(original(), json!({"nodeSelector": {"$patch": "delete"}}));
        assert_eq!(merged["nodeSelector"], json!({}));
        let merged = spec(
            original(),
            json!({"volumes": [{"$retainKeys": ["name", "configMap"], "name": "v", "configMap": {"name": "c"}}]}),
        );
        assert_eq!(merged["volumes"], json!([{"name": "v", "configMap": {"name": "c"}}]));
        let merged = spec(
            original(),
            json!({"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
                "containers": [{"name": "b", "image": "i"}]}),
        );
        assert_eq!(names(&merged["containers"]), ["b", "a"]);
    }

    #[test]
    fn scalars_are_united_and_deleted() {
        let merged = merge(
            "ObjectMeta",
            json!({"finalizers": ["a", "b"]}),
            json!({"finalizers": ["c", "a"], "$deleteFromPrimitiveList/finalizers": ["b"]}),
        );
        assert_eq!(merged, Ok(json!({"finalizers": ["c", "a"]})));
    }

    #[test]
    fn atomic_lists_are_replaced() {
        let merged = spec(
            json!({"tolerations": [{"key": "a"}], "containers": [{"name": "a", "args": ["x"]}]}),
            json!({"tolerations": [{"key": "b"}], "containers": [{"name": "a", "args": ["y"]}]}),
        );
        assert_eq!(merged["tolerations"], json!([{"key": "b"}]));
        assert_eq!(merged["containers"][0]["args"], json!(["y"]));
    }

    #[test]
    fn elements_with_equal_keys_merge_in_order() {
        let original =
            || json!({"volumes": [{"name": "a", "x": 1}, {"name": "b"}, {"name": "a", "x": 2}, {"name": "a", "x": 3}]});
        let merged = spec(
            original(),
            json!({"volumes": [{"name": "a", "y": 1}, {"name": "a", "y": 2}]}),
        );
        assert_eq!(
            merged["volumes"],
            json!([{"name": "a", "x": 1, "y": 1}, {"name": "a", "x": 2, "y": 2}, {"name": "b"}, {"name": "a", "x": 3}])
        );
        let merged = spec(original(), json!({"volumes": [{"name": "c"}, {"name": "c", "y": 1}]}));
        assert_eq!(names(&merged["volumes"]), ["c", "a", "b", "a", "a"]);
        let merged = spec(original(), json!({"volumes": [{"name": "a", "$patch": "delete"}]}));
        assert_eq!(names(&merged["volumes"]), ["b"]);
    }

    #[test]
    fn lists_of_the_patch_alone_keep_equal_keys() {
        let field = || json!({"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}});
        let merged = spec(
            json!({"containers": [{"name": "a"}]}),
            json!({"containers": [{"name": "a", "env": [field(), {"name": "X", "value": "1"}]}],
                "volumes": [{"$patch": "replace"}, {"name": "v"}]}),
        );
        assert_eq!(
            merged["containers"][0]["env"],
            json!([field(), {"name": "X", "value": "1"}])
        );
        assert_eq!(merged["volumes"], json!([{"name": "v"}]));
    }

    #[test]
    fn keys_are_compared_with_their_type() {
        let merged = merge(
            "Container",
            json!({"ports": [{"containerPort": 80, "name": "a"}, {"containerPort": "80"}, {"name": "b"}]}),
            json!({"ports": [{"containerPort": "80", "name": "c"}]}),
        );
        let expected = json!({"ports": [{"containerPort": 80, "name": "a"}, {"containerPort": "80", "name": "c"},
            {"name": "b"}]});
        assert_eq!(merged, Ok(expected));
    }

    /// A comparison of each element with each other one would take minutes.
    #[test]
    fn long_lists_are_merged_fast() {
        const LENGTH: usize = 50_000;
        let volumes = |field: &str| {
            let volume = |number: usize| json!({"name": number.to_string(), field: "x"});
            json!({"volumes": (0..LENGTH).map(volume).collect::<Vec<_>>()})
        };
        let mut patch = volumes("patched");
        let order = (0..LENGTH).rev().map(|number| json!({"name": number.to_string()}));
        patch["$setElementOrder/volumes"] = order.collect();
        let merged = spec(volumes("original"), patch);
        assert_eq!(
            merged["volumes"][0],
            json!({"name": "49999", "original": "x", "patched": "x"})
        );
        assert_eq!(merged["volumes"].as_array().map(Vec::len), Some(LENGTH));
    }

    #[test]
    fn errors_name_the_element() {
        let error = merge(
            "PodSpec",
            json!({"containers": [{"name": "c"}]}),
            json!({"containers": [{"name": "a"}, {"image": "b"}]}),
        );
        assert_eq!(
            error.map_err(|error| error.to_string()),
            Err("containers[1]: the element has no merge key \"name\"".to_owned())
        );
        let error = merge(
            "PodSpec",
            json!({"nodeSelector": {}}),
            json!({"nodeSelector": {"$patch": "move"}}),
        );
        assert_eq!(
            error.map_err(|error| error.to_string()),
            Err("nodeSelector: unknown $patch directive \"move\"".to_owned())
        );
    }
}
