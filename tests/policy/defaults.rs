//! R16: requests are brought into one form before policies look at them, in the way that the mesh says.

use istiod::{
    model::Installation,
    proto::envoy::extensions::filters::network::http_connection_manager::v3::{
        HttpConnectionManager, http_connection_manager::PathWithEscapedSlashesAction,
    },
};
use libtest_mimic::Failed;

use super::bed::{Bed, unpacked};

/// Trial of R16.
pub(super) fn r16_paths_are_normalized_as_the_mesh_says() -> Result<(), Failed> {
    let (keep, unescape) = (
        PathWithEscapedSlashesAction::KeepUnchanged,
        PathWithEscapedSlashesAction::UnescapeAndForward,
    );
    // (chosen, dots are resolved, slashes merged, escaped slashes)
    let cases = [
        ("", true, false, keep),
        ("DEFAULT", true, false, keep),
        ("NONE", false, false, keep),
        ("BASE", true, false, keep),
        ("MERGE_SLASHES", true, true, keep),
        ("DECODE_AND_MERGE_SLASHES", true, true, unescape),
    ];
    for (chosen, dots, slashes, escaped) in cases {
        let mesh = match chosen {
            "" => "{}".to_owned(),
            chosen => format!("pathNormalization: {{normalization: {chosen}}}"),
        };
        let bed = Bed::new(Installation::default(), &mesh, "")?;
        let managers: Vec<HttpConnectionManager> = bed
            .names(istiod::generate::ResourceType::Listener)
            .iter()
            .filter_map(|name| bed.listener(name).ok())
            .flat_map(|listener| listener.filter_chains.into_iter().chain(listener.default_filter_chain))
            .flat_map(|chain| chain.filters)
            .filter_map(|filter| unpacked(&filter))
            .collect();
        if managers.len() < 2 {
            return Err("there is no inbound or no outbound connection manager".into());
        }
        for manager in managers {
            let found = (
                manager.normalize_path == Some(dots),
                manager.merge_slashes == slashes,
                manager.path_with_escaped_slashes_action() == escaped,
            );
            if found != (true, true, true) {
                let prefix = manager.stat_prefix;
                return Err(format!("{chosen:?}: {prefix}: as wanted: dots, slashes, escaped {found:?}").into());
            }
        }
    }
    Ok(())
}
