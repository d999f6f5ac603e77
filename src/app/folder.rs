//! `--configDir`: a folder as the whole mesh, or as configuration in addition to the services of a cluster.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::mpsc;

use crate::{
    environment::Environment,
    ingest::{
        diagnostics::Report,
        file::{FileError, FileSettings, FileSource, Objects},
    },
    model::{Change, Installation},
    settings::Settings,
};

/// An open folder and its initial state.
pub(super) struct Folder {
    source: FileSource,
    first: Vec<Change>,
}

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

impl Folder {
    /// Reads the folder, if there is one.
    pub(super) fn open(
        settings: &Settings,
        installation: &Installation,
        report: Report,
    ) -> Result<Option<Self>, FileError> {
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
        let (source, first) = FileSource::open(file_settings, report)?;
        Ok(Some(Self { source, first }))
    }

    /// Returns the variables of `env.yaml`.
    pub(super) fn env(&self) -> &BTreeMap<String, String> {
        self.source.env()
    }

    /// Sends the initial state, then watches the folder.
    pub(super) async fn start(self, environment: &Arc<Environment>, changes: mpsc::Sender<Vec<Change>>) {
        // An error means that the push loop ended, and then the process ends.
        if changes.send(self.first).await.is_ok() {
            let following = self.source.run(changes);
            environment.tasks.spawn_until_shutdown("folder", following);
        }
    }
}
