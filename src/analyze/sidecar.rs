//! Objects of which a pod or a namespace has one: Sidecars, and also Telemetries.

use std::collections::BTreeMap;

use super::{
    json::{labels, selector_text},
    membership::{is_ambient, is_ambient_namespace},
    mesh::Mesh,
    message::{
        CONFLICTING_SIDECARS, Code, INEFFECTIVE_POLICY, REFERENCE_NOT_FOUND, Report, SEVERAL_DEFAULT_SIDECARS, listed,
    },
    object::Object,
};
use crate::{api::Kind, base::Labels};

/// Reports Sidecars that select nothing, that compete, or that ambient workloads ignore.
///
/// Parity (pkg/config/analysis/analyzers/sidecar/selector.go).
pub(super) fn sidecars(mesh: &Mesh, report: &mut Report) {
    let (selecting, general): (Vec<_>, Vec<_>) = mesh
        .of(Kind::Sidecar)
        .iter()
        .map(|sidecar| (sidecar, labels(&sidecar.spec("workloadSelector")["labels"])))
        .partition(|(_, selector)| !selector.is_empty());
    for (pod, sidecars) in selected(mesh, &selecting, "spec.workloadSelector", report) {
        if is_ambient(pod) {
            for sidecar in sidecars {
                let text = "has no effect on its workloads, which are in ambient mode";
                report.add(INEFFECTIVE_POLICY, sidecar, text);
            }
        } else {
            conflict(CONFLICTING_SIDECARS, pod, &sidecars, report);
        }
    }
    for (namespace, sidecars) in by_namespace(general.into_iter().map(|(sidecar, _)| sidecar)) {
        if mesh
            .find(Kind::Namespace, "", namespace)
            .is_some_and(is_ambient_namespace)
        {
            for sidecar in sidecars {
                let text = "has no effect, because its namespace is in ambient mode";
                report.add(INEFFECTIVE_POLICY, sidecar, text);
            }
        } else {
            several(SEVERAL_DEFAULT_SIDECARS, &sidecars, report);
        }
    }
}

/// Returns the pods that objects of their namespace select, with those objects. Reports objects without pods.
pub(super) fn selected<'a>(
    mesh: &'a Mesh,
    objects: &'a [(&'a Object, Labels)],
    field: &str,
    report: &mut Report,
) -> Vec<(&'a Object, Vec<&'a Object>)> {
    let mut selected: BTreeMap<(&str, &str), (&Object, Vec<&Object>)> = BTreeMap::new();
    for (object, selector) in objects {
        let mut pods = mesh.pods(Some(&object.namespace), selector).peekable();
        if pods.peek().is_none() {
            let text = format!(
                "{field}: no pod of the namespace has the labels {}",
                selector_text(selector)
            );
            report.add(REFERENCE_NOT_FOUND, object, text);
        }
        for pod in pods {
            let key = (pod.namespace.as_str(), pod.name.as_str());
            selected.entry(key).or_insert_with(|| (pod, Vec::new())).1.push(object);
        }
    }
    selected.into_values().collect()
}

/// Reports several objects that select one pod.
pub(super) fn conflict(code: Code, pod: &Object, objects: &[&Object], report: &mut Report) {
    if objects.len() < 2 {
        return;
    }
    let names = listed(objects.iter().map(|object| &object.name));
    for object in objects {
        let text = format!("pod {} is selected by several: {names}", pod.name);
        report.add(code, object, text);
    }
}

/// Reports several objects without a selector in one namespace.
pub(super) fn several(code: Code, objects: &[&Object], report: &mut Report) {
    if objects.len() < 2 {
        return;
    }
    let names = listed(objects.iter().map(|object| &object.name));
    for object in objects {
        let text = format!("several of the namespace have no selector: {names}");
        report.add(code, object, text);
    }
}

/// Groups objects by namespace.
pub(super) fn by_namespace<'a>(objects: impl Iterator<Item = &'a Object>) -> BTreeMap<&'a str, Vec<&'a Object>> {
    let mut grouped: BTreeMap<&str, Vec<&Object>> = BTreeMap::new();
    for object in objects {
        grouped.entry(&object.namespace).or_default().push(object);
    }
    grouped
}
