//! Objects whose configuration proxies refuse, for writers of Events.

use std::sync::Arc;

use crate::{
    api::Kind,
    base::ObjectKey,
    xds::{registry::ConnectionRegistry, share::quarantine::Refusal},
};

/// The number of proxies that a message names.
const NAMED: usize = 3;

/// An object that is blamed for a refused resource.
pub struct RefusedObject {
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub key: ObjectKey,
    pub(super) refusal: Arc<Refusal>,
    pub(super) connections: Arc<ConnectionRegistry>,
}

impl RefusedObject {
    /// Returns the identity of the refused content.
    pub fn content(&self) -> String {
        let refusal = &self.refusal;
        format!(
            "{}/{}/{}",
            refusal.resource_type.short_name(),
            refusal.name,
            refusal.version
        )
    }

    /// Describes the refusal: the resource, the proxies that refuse it now, and the reason.
    pub fn message(&self) -> String {
        let refusal = &self.refusal;
        let refuses = |refused: Vec<Arc<Refusal>>| {
            let mut refused = refused.iter();
            refused.any(|other| {
                (other.resource_type, other.version, &other.name)
                    == (refusal.resource_type, refusal.version, &refusal.name)
            })
        };
        let live = self.connections.connections();
        let proxies = live.iter().filter(|live| refuses(live.refusals().0));
        let mut proxies: Vec<&str> = proxies.map(|live| live.proxy.id.as_str()).collect();
        proxies.sort_unstable();
        let (resource_type, name) = (refusal.resource_type.short_name(), &refusal.name);
        format!("{}: {resource_type} {name}: {}", refusers(&proxies), refusal.reason)
    }
}

/// Returns the subject of a message about these proxies.
fn refusers(proxies: &[&str]) -> String {
    match proxies {
        [] => "Proxies refused it".to_owned(),
        [proxy] => format!("Proxy {proxy} refused it and keeps what it had"),
        several => {
            let named = several[..several.len().min(NAMED)].join(", ");
            let more = match several.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!(
                "{} proxies refused it and keep what they had ({named}{more})",
                several.len()
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_few_proxies() {
        assert_eq!(refusers(&["a.shop"]), "Proxy a.shop refused it and keeps what it had");
        assert_eq!(
            refusers(&["a", "b"]),
            "2 proxies refused it and keep what they had (a, b)"
        );
        assert_eq!(
            refusers(&["a", "b", "c", "d", "e"]),
            "5 proxies refused it and keep what they had (a, b, c and 2 more)"
        );
    }
}
