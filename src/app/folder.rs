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

/// Opens and reads the folder, if there is one. Services come from `cluster`, if there is one. Without a folder and a
/// cluster, mesh config and networks come from their files.
pub(super) fn open(
    settings: &Settings,
    installation: &Installation,
    cluster: Option<&Access>,
    report: Report,
) -> Result<Option<FileSource>, FileError> {
    let objects = match cluster {
        None => Objects::All,
        Some(_) if settings.flags.config_dir.is_none() => return Ok(None),
        Some(_) if replaces_mesh_config(settings) => Objects::IstioOnly,
        Some(_) => Objects::ConfigOnly,
    };
    FileSource::open(file_settings(settings, installation, objects), report).map(Some)
}

/// Opens the folder of [`open`] again, where its objects do not count: only mesh config and networks.
pub(super) fn open_mesh(
    settings: &Settings,
    installation: &Installation,
    report: Report,
) -> Result<FileSource, FileError> {
    FileSource::open(file_settings(settings, installation, Objects::MeshOnly), report)
}

fn file_settings(settings: &Settings, installation: &Installation, objects: Objects) -> FileSettings {
    FileSettings {
        folder: settings.flags.config_dir.clone(),
        only: None,
        cluster: installation.cluster.clone(),
        mesh_key: installation.mesh_config_key(),
        objects,
        mesh_file: settings.flags.mesh_config.clone(),
        networks_file: settings.flags.networks_config.clone(),
    }
}
