//! Finds the config cluster, in the order of client-go.
//!
//! Parity (pkg/kube/util.go, ConfigLoadingRules): the kubeconfig of a flag, which must exist; else the files of
//! `KUBECONFIG`, those that exist; without that variable `~/.kube/config`; else the service account of the pod. A file
//! without clusters counts as missing.

use std::path::{Path, PathBuf};

use ::kube::config::Kubeconfig;

use super::client::{Access, ClientError};

/// The token of a pod's service account.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Inputs of the search.
#[derive(Clone, Debug, Default)]
pub struct Search<'a> {
    /// `--kubeconfig`.
    pub flag: Option<&'a Path>,
    /// `KUBECONFIG`: files separated by colons.
    pub variable: Option<&'a str>,
    /// `HOME`.
    pub home: Option<&'a str>,
    /// True if `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT` are set.
    pub has_service: bool,
}

impl Search<'_> {
    /// Returns the credentials of the config cluster; `None` if there are none anywhere.
    pub fn find(&self) -> Result<Option<Access>, ClientError> {
        if let Some(flag) = self.flag.filter(|flag| !flag.as_os_str().is_empty()) {
            return Ok(Some(Access::Kubeconfig(flag.to_owned())));
        }
        let files = self.files();
        if let Some(access) = merged(&files)? {
            return Ok(Some(access));
        }
        if self.variable.is_some() {
            // The charts of Istio set the variable always.
            tracing::debug!(?files, "KUBECONFIG names no file with a cluster");
        }
        let in_pod = self.has_service && Path::new(TOKEN).is_file();
        Ok(in_pod.then_some(Access::InCluster))
    }

    fn files(&self) -> Vec<PathBuf> {
        match (self.variable, self.home) {
            (Some(list), _) => std::env::split_paths(list)
                .filter(|path| !path.as_os_str().is_empty())
                .collect(),
            (None, Some(home)) => vec![Path::new(home).join(".kube/config")],
            (None, None) => Vec::new(),
        }
    }
}

/// Merges the files that exist; `None` if none of them has a cluster. The first file wins.
fn merged(files: &[PathBuf]) -> Result<Option<Access>, ClientError> {
    let mut merged = Kubeconfig::default();
    let mut read = Vec::new();
    for path in files.iter().filter(|path| path.exists()) {
        let failed = |error| ClientError::Kubeconfig {
            path: path.clone(),
            error: Box::new(error),
        };
        let file = Kubeconfig::read_from(path).map_err(failed)?;
        merged = merged.merge(file).map_err(failed)?;
        read.push(path.clone());
    }
    let has_cluster = !merged.clusters.is_empty();
    Ok(has_cluster.then(|| Access::Files(read, Box::new(merged))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "apiVersion: v1\nkind: Config\ncurrent-context: NAME\n\
        clusters: [{name: NAME, cluster: {server: 'http://NAME:1'}}]\n\
        contexts: [{name: NAME, context: {cluster: NAME, user: ''}}]\n";

    fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder is writable");
        std::fs::write(&path, text).expect("the folder is writable");
        path
    }

    fn server(search: &Search) -> Option<String> {
        match search.find().expect("readable files") {
            Some(Access::Files(_, config)) => config.current_context,
            Some(Access::Kubeconfig(path)) => Some(path.display().to_string()),
            Some(other) => Some(format!("{other:?}")),
            None => None,
        }
    }

    #[test]
    fn the_order_is_that_of_client_go() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let one = write(folder.path(), "one", &CONFIG.replace("NAME", "one"));
        let two = write(folder.path(), "two", &CONFIG.replace("NAME", "two"));
        let empty = write(folder.path(), "empty", "apiVersion: v1\nkind: Config\n");
        write(folder.path(), ".kube/config", &CONFIG.replace("NAME", "home"));
        let home = folder.path().to_str();
        let list = |files: &[&Path]| {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            files.join(":")
        };
        let missing = folder.path().join("missing");
        let of = |flag: Option<&Path>, variable: Option<&str>, home: Option<&str>| {
            server(&Search {
                flag,
                variable,
                home,
                has_service: false,
            })
        };
        let both = list(&[&missing, &one, &two]);
        assert_eq!(of(Some(&two), Some(&both), home), Some(two.display().to_string()));
        assert_eq!(of(None, Some(&both), home), Some("one".to_owned()));
        assert_eq!(of(None, Some(&list(&[&empty, &two])), home), Some("two".to_owned()));
        assert_eq!(of(None, None, home), Some("home".to_owned()));
        // A variable whose files are missing hides the file of the home folder.
        assert_eq!(of(None, Some(&list(&[&missing])), home), None);
        assert_eq!(of(None, Some(&list(&[&empty])), home), None);
        assert_eq!(of(None, None, None), None);
    }

    #[test]
    fn an_unreadable_file_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let bad = write(folder.path(), "bad", "clusters: 7");
        let search = Search {
            variable: bad.to_str(),
            ..Search::default()
        };
        let error = search.find().map(drop).expect_err("an invalid file").to_string();
        assert!(error.contains("bad"), "{error}");
    }
}
