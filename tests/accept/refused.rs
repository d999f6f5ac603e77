//! The list of what Envoy does not accept, and why: `refused.txt`.

use std::collections::BTreeMap;

/// What is expected of the proxies that the list names.
pub(super) struct Refused(BTreeMap<String, Entry>);

struct Entry {
    /// A part of what Envoy says.
    complaint: String,
    reason: String,
}

impl Refused {
    /// Reads the list: `GROUP/SCENARIO/PROXY | part of the complaint | reason`, a line each.
    pub(super) fn read() -> Result<Refused, String> {
        let mut entries = BTreeMap::new();
        let lines = include_str!("refused.txt").lines().map(str::trim);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let parts: Vec<&str> = line.split('|').map(str::trim).collect();
            let [name, complaint, reason] = parts.as_slice() else {
                return Err(format!(
                    "refused.txt: not of the form NAME | COMPLAINT | REASON: {line}"
                ));
            };
            let entry = Entry {
                complaint: (*complaint).to_owned(),
                reason: (*reason).to_owned(),
            };
            if reason.is_empty() || entries.insert((*name).to_owned(), entry).is_some() {
                return Err(format!(
                    "refused.txt: no reason, or the second line for that proxy: {line}"
                ));
            }
        }
        Ok(Refused(entries))
    }

    /// Fails for a proxy that did not accept its configuration and is not listed, or is listed for something else, or is
    /// listed and did.
    pub(super) fn judge(&self, name: &str, verdict: Result<(), String>) -> Result<(), String> {
        match (self.0.get(name), verdict) {
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => Err(format!("{name}: not accepted: {error}")),
            (Some(entry), Ok(())) => Err(format!(
                "{name}: accepted, so its line in tests/accept/refused.txt can go ({})",
                entry.reason
            )),
            (Some(entry), Err(error)) if error.contains(&entry.complaint) => {
                println!("accept: {name} is not accepted: {}", entry.reason);
                Ok(())
            }
            (Some(entry), Err(error)) => Err(format!(
                "{name}: tests/accept/refused.txt expects {:?} ({}), not: {error}",
                entry.complaint, entry.reason
            )),
        }
    }
}
