//! Strategic merge patches of Kubernetes, for pods and the overlays that templates render.
//!
//! Parity (k8s.io/apimachinery/pkg/util/strategicpatch/patch.go): elements of the patch come before others of the
//! original that are not ahead of them, nulls delete, and directives begin with `$`.

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
            .find(|key| !key.starts_with('$') && !retained.contains(&key.as_str()))
        {
            return Err(MergeError::new(format!("{key} is not in {RETAIN_KEYS}")));
        }
        original.retain(|key, _| retained.contains(&key.as_str()));
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
            (original, Value::Array(items)) if matches!(rule, Merge::Key(_) | Merge::Scalars) => {
                let original = match original {
                    Some(Value::Array(original)) => original,
                    _ => Vec::new(),
                };
                lists(target, rule, original, items).map(Value::Array)
            }
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
            items.retain(|item| !deleted.contains(item));
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
        let order: Vec<&Value> = order.iter().filter_map(|item| identity(item, merge_key)).collect();
        let rank = |item: &Value| {
            let id = identity(item, merge_key);
            order.iter().position(|other| Some(*other) == id)
        };
        let before = identities(items, merge_key);
        let (mut listed, others): (Vec<Value>, Vec<Value>) =
            std::mem::take(items).into_iter().partition(|item| rank(item).is_some());
        listed.sort_by_key(rank);
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
    let before = identities(&original, merge_key);
    let mut merged = original;
    let mut patched: Vec<Value> = Vec::new();
    let mut replaces = false;
    let mut items = Vec::new();
    for (index, item) in patch.into_iter().enumerate() {
        match directive(&item) {
            Some("delete") => {
                let id = identity(&item, merge_key);
                merged.retain(|other| id.is_none() || identity(other, merge_key) != id);
            }
            Some("replace") => replaces = true,
            _ => items.push((index, item)),
        }
    }
    if replaces {
        return Ok(items.into_iter().map(|(_, item)| cleaned(item)).collect());
    }
    for (index, item) in items {
        let at = |error: MergeError| error.within(&format!("[{index}]"));
        let Some(id) = identity(&item, merge_key).cloned() else {
            let key = merge_key.unwrap_or_default();
            return Err(at(MergeError::new(format!("the element has no merge key {key:?}"))));
        };
        let is_same = |other: &Value| identity(other, merge_key) == Some(&id);
        let position = merged.iter().position(is_same);
        if let Some(position) = position {
            let present = merged.remove(position);
            patched.push(match (present, item) {
                (Value::Object(present), Value::Object(item)) => {
                    objects(element, present, item).map(Value::Object).map_err(at)?
                }
                (_, item) => item,
            });
        } else if let Some(present) = patched.iter_mut().find(|other| is_same(other)) {
            // The patch names the element twice.
            if let (Value::Object(earlier), Value::Object(item)) = (present, item) {
                *earlier = objects(element, std::mem::take(earlier), item).map_err(at)?;
            }
        } else {
            patched.push(cleaned(item));
        }
    }
    Ok(interleaved(merged, patched, &before, merge_key))
}

/// Merges elements that only the original has with those of the patch: the former go first only where they are ahead of
/// the latter in the original, which `before` has the identities of.
fn interleaved(
    others: Vec<Value>,
    patched: Vec<Value>,
    before: &[Option<Value>],
    merge_key: Option<&str>,
) -> Vec<Value> {
    let rank = |item: &Value| {
        let id = identity(item, merge_key);
        before.iter().position(|other| other.as_ref() == id)
    };
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

fn identities(items: &[Value], merge_key: Option<&str>) -> Vec<Option<Value>> {
    items.iter().map(|item| identity(item, merge_key).cloned()).collect()
}

fn directive(item: &Value) -> Option<&str> {
    item.get(PATCH).and_then(Value::as_str)
}

fn strings(value: &Value) -> Option<Vec<&str>> {
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
            let stays = directive(item) != Some("delete");
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
    fn errors_name_the_element() {
        let error = merge(
            "PodSpec",
            json!({}),
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
