//! `--configDir`: a folder as the whole mesh, or as configuration in addition to the services of a cluster.

use crate::{
    ingest::{
        diagnostics::Report,
        file::{FileError, FileSettings, FileSource, Objects},
    },
    kube::client::Access,
    model::Installation,
    settings::Settings,
};

/// Returns true if the folder or file flags replace the mesh config and the networks of the config cluster.
pub(super) fn replaces_mesh_config(settings: &Settings) -> bool {
    let flags = &settings.flags;
    let holds = |name: &str| {
        flags
            .config_dir
            .as_ref()
            .is_some_and(|folder| folder.join(name).is_file())
    };
    flags.config_dir.is_some() && (flags.mesh_config.is_some() || holds("mesh.yaml"))
}

/// Opens and reads the folder, if there is one. Services come from `cluster`, if there is one.
pub(super) fn open(
    settings: &Settings,
    installation: &Installation,
    cluster: Option<&Access>,
    report: Report,
) -> Result<Option<FileSource>, FileError> {
    let Some(folder) = settings.flags.config_dir.clone() else {
        return Ok(None);
    };
    let objects = match cluster {
        None => Objects::All,
        Some(_) if replaces_mesh_config(settings) => Objects::IstioOnly,
        Some(_) => Objects::ConfigOnly,
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
