//! `--configDir`: a folder as the whole mesh, or as configuration in addition to the services of a cluster.

use crate::{
    ingest::{
        diagnostics::Report,
        file::{FileError, FileSettings, FileSource, Objects},
    },
    model::Installation,
    settings::Settings,
};

/// Returns true if the folder or file flags provide mesh config and networks.
pub(super) fn gives_mesh_config(settings: &Settings) -> bool {
    let flags = &settings.flags;
    let holds = |name: &str| {
        flags
            .config_dir
            .as_ref()
            .is_some_and(|folder| folder.join(name).is_file())
    };
    settings.is_folder_only() || flags.config_dir.is_some() && (flags.mesh_config.is_some() || holds("mesh.yaml"))
}

/// Opens and reads the folder, if there is one.
pub(super) fn open(
    settings: &Settings,
    installation: &Installation,
    report: Report,
) -> Result<Option<FileSource>, FileError> {
    let Some(folder) = settings.flags.config_dir.clone() else {
        return Ok(None);
    };
    let objects = match (settings.is_folder_only(), gives_mesh_config(settings)) {
        (true, _) => Objects::All,
        (false, true) => Objects::IstioOnly,
        (false, false) => Objects::ConfigOnly,
    };
    let file_settings = FileSettings {
        folder,
        cluster: installation.cluster.clone(),
        mesh_key: installation.mesh_config_key(),
        objects,
        mesh_file: settings.flags.mesh_config.clone(),
        networks_file: settings.flags.networks_config.clone(),
    };
    FileSource::open(file_settings, report).map(Some)
}
