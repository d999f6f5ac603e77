//! The list of configurations that Envoy rejects, with reasons: `refused.txt`.

use std::collections::BTreeMap;

/// The expected results of the listed proxies.
pub(super) struct ExpectedRejections(BTreeMap<String, Entry>);

struct Entry {
    /// A part of Envoy's error message.
    complaint: String,
    reason: String,
}

impl ExpectedRejections {
    /// Reads the list, whose lines are `GROUP/SCENARIO/PROXY | part of the message | reason`.
    pub(super) fn read() -> Result<ExpectedRejections, String> {
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
                    "refused.txt: a line without a reason, or a second line for one proxy: {line}"
                ));
            }
        }
        Ok(ExpectedRejections(entries))
    }

    /// Fails for a proxy whose configuration was rejected and that is not listed, or listed with another message, and
    /// for a listed proxy whose configuration was accepted.
    pub(super) fn judge(&self, name: &str, verdict: Result<(), String>) -> Result<(), String> {
        match (self.0.get(name), verdict) {
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => Err(format!("{name}: not accepted: {error}")),
            (Some(entry), Ok(())) => Err(format!(
                "{name}: accepted; remove its line from tests/accept/refused.txt ({})",
                entry.reason
            )),
            (Some(entry), Err(error)) if error.contains(&entry.complaint) => {
                println!("accept: {name}: rejected as listed: {}", entry.reason);
                Ok(())
            }
            (Some(entry), Err(error)) => Err(format!(
                "{name}: tests/accept/refused.txt expects {:?} ({}), but the error is: {error}",
                entry.complaint, entry.reason
            )),
        }
    }
}
