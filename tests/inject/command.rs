//! `istiod inject` as a process: files in, files out, differences and errors.

use std::{fs, path::Path};

use libtest_mimic::{Failed, Trial};

use crate::support::{daemon::istiod, scratch};

const CONFIG: &str = "
policy: enabled
templates:
  sidecar: |
    spec:
      containers:
      - name: istio-proxy
        image: {{ .ProxyImage }}
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: web
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: kept
";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("inject::command::files_are_injected", files_are_injected),
        Trial::test("inject::command::errors_end_the_command", errors_end_the_command),
    ]
}

/// Runs `istiod inject` with files of a folder. Returns the exit code, the output, and the errors.
fn inject(folder: &Path, more: &[&str]) -> Result<(Option<i32>, String, String), Failed> {
    let mut command = istiod();
    command
        .arg("inject")
        .env_remove("ENABLE_NATIVE_SIDECARS")
        .env_remove("PLATFORM");
    for (flag, file) in [
        ("-f", "pod.yaml"),
        ("--injectConfigFile", "config.yaml"),
        ("--valuesFile", "values.yaml"),
        ("--meshConfigFile", "mesh.yaml"),
    ] {
        command.arg(flag).arg(folder.join(file));
    }
    let output = command.args(more).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// Writes the files of an injection.
fn write(folder: &Path, config: &str) -> Result<(), Failed> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("pod.yaml"), POD)?;
    fs::write(folder.join("config.yaml"), config)?;
    fs::write(folder.join("values.yaml"), "global: {hub: example.com, tag: v1}")?;
    fs::write(folder.join("mesh.yaml"), "{}")?;
    Ok(())
}

fn files_are_injected() -> Result<(), Failed> {
    let folder = scratch("inject-command");
    write(&folder, CONFIG)?;
    let (code, output, errors) = inject(&folder, &[])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("image: \"example.com/proxyv2:v1\""), "{output}");
    assert!(
        output.ends_with("---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: kept\n---\n"),
        "{output}"
    );
    let (code, difference, errors) = inject(&folder, &["--diff"])?;
    assert_eq!(code, Some(0), "{errors}");
    assert!(
        difference.contains("\n+  - image: \"example.com/proxyv2:v1\"\n"),
        "{difference}"
    );
    assert!(!difference.contains("kept"), "{difference}");
    let file = folder.join("injected.yaml");
    let (code, printed, errors) = inject(&folder, &["-o", &file.display().to_string()])?;
    assert_eq!((code, printed.as_str()), (Some(0), ""), "{errors}");
    assert_eq!(fs::read_to_string(file)?, output);
    Ok(())
}

fn errors_end_the_command() -> Result<(), Failed> {
    let folder = scratch("inject-command-errors");
    for (template, expected) in [
        (
            "{{ nothing . }}",
            "templates.sidecar: template: sidecar:1: function \"nothing\" not defined (line 1)",
        ),
        (
            "{{ range until 100000 }}{{ range until 100000 }}{{ end }}{{ end }}",
            "template: sidecar:1:",
        ),
        ("{{ .Spec.Nothing }}", "can't evaluate field Nothing in type"),
    ] {
        write(
            &folder,
            &format!("policy: enabled\ntemplates:\n  sidecar: |\n    {template}\n"),
        )?;
        let (code, _, errors) = inject(&folder, &[])?;
        assert_eq!(code, Some(255), "{errors}");
        assert!(errors.contains(expected), "{errors}");
    }
    Ok(())
}
