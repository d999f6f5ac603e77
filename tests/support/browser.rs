//! Chromium without a window, driven over the pipes of its DevTools protocol.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use super::process::Process;
use super::wait;

/// The time limit of one request.
const TIMEOUT: Duration = Duration::from_mins(1);

/// Returns the browser of this machine, if there is one.
pub(crate) fn binary() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser"];
    let paths = names.iter().map(|name| Path::new("/usr/bin").join(name));
    paths.into_iter().find(|path| path.is_file())
}

/// A browser with one page. Dropping it ends it.
pub(crate) struct Browser {
    _process: Process,
    requests: File,
    messages: Receiver<Value>,
    last: u64,
    session: Option<String>,
    /// Errors of the page: exceptions, messages in the console, and what could not be loaded.
    pub(crate) errors: Vec<String>,
}

impl Browser {
    /// Starts the browser with its files in a folder.
    pub(crate) fn start(binary: &Path, folder: &Path) -> Result<Browser, String> {
        let pipe = |name: &str| -> Result<File, String> {
            let path = folder.join(name);
            let made = Command::new("mkfifo").arg(&path).status();
            if !made.is_ok_and(|status| status.success()) {
                return Err(format!("cannot make the pipe {}", path.display()));
            }
            // Both ends, so that neither side waits for the other to open it.
            let both = OpenOptions::new().read(true).write(true).open(&path);
            both.map_err(|error| error.to_string())
        };
        let (requests, answers) = (pipe("requests")?, pipe("answers")?);
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec \"$0\" \"$@\" 3<requests 4>answers"])
            .arg(binary)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
            ])
            // Nothing but this machine is reachable.
            .args([
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ])
            .args(["--remote-debugging-pipe", "--user-data-dir=profile", "about:blank"])
            .current_dir(folder)
            .env("HOME", folder);
        let process = Process::start(&mut command, &folder.join("browser.log"));
        let (sender, messages) = sync_channel(64);
        std::thread::spawn(move || {
            let texts = BufReader::new(answers).split(0);
            for text in texts.map_while(Result::ok) {
                let message = serde_json::from_slice(&text).unwrap_or_default();
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            _process: process,
            requests,
            messages,
            last: 0,
            session: None,
            errors: Vec::new(),
        };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &attach)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol and returns its result.
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Result<Value, String> {
        self.last += 1;
        let mut request = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let text = format!("{request}\0");
        self.requests
            .write_all(text.as_bytes())
            .map_err(|error| error.to_string())?;
        let started_at = wait::now();
        while let Some(left) = TIMEOUT.checked_sub(started_at.elapsed()) {
            let Ok(mut message) = self.messages.recv_timeout(left) else {
                break;
            };
            if message["id"] != self.last {
                self.errors.extend(error_of(&message));
                continue;
            }
            return match message.get("error") {
                Some(error) => Err(format!("{method}: {error}")),
                None => Ok(message["result"].take()),
            };
        }
        Err(format!("{method}: no answer of the browser"))
    }

    /// Sets the size of the page in pixels.
    pub(crate) fn resize(&mut self, width: u32, height: u32) -> Result<(), String> {
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &metrics).map(drop)
    }

    /// Opens an address.
    pub(crate) fn open(&mut self, address: &str) -> Result<(), String> {
        let opened = self.call("Page.navigate", &json!({ "url": address }))?;
        match opened.get("errorText") {
            Some(error) => Err(format!("{address}: {error}")),
            None => Ok(()),
        }
    }

    /// Presses a key: its name, its code in Windows, and the text that it types.
    pub(crate) fn press(&mut self, key: &str, code: u32, text: &str) -> Result<(), String> {
        let mut event = json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code });
        if !text.is_empty() {
            event["text"] = json!(text);
        }
        self.call("Input.dispatchKeyEvent", &event)?;
        event["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", &event).map(drop)
    }

    /// Returns the value of a script in the page.
    pub(crate) fn value(&mut self, script: &str) -> Result<Value, String> {
        let parameters = json!({ "expression": script, "returnByValue": true });
        let mut evaluated = self.call("Runtime.evaluate", &parameters)?;
        match evaluated.get("exceptionDetails") {
            Some(details) => Err(format!("{script}: {details}")),
            None => Ok(evaluated["result"]["value"].take()),
        }
    }

    /// Waits until a script returns something other than `null` and `false`, and returns it.
    pub(crate) fn until(&mut self, script: &str) -> Result<Value, String> {
        wait::until(script, TIMEOUT, || match self.value(script) {
            Ok(Value::Null | Value::Bool(false)) => None,
            other => Some(other),
        })
        .flatten()
    }

    /// Writes a picture of the page.
    pub(crate) fn picture(&mut self, path: &Path) -> Result<(), String> {
        let picture = self.call("Page.captureScreenshot", &json!({ "format": "png" }))?;
        let bytes = BASE64_STANDARD.decode(picture["data"].as_str().unwrap_or_default());
        let bytes = bytes.map_err(|error| error.to_string())?;
        std::fs::write(path, bytes).map_err(|error| error.to_string())
    }
}

/// Returns the error that an event reports.
fn error_of(event: &Value) -> Option<String> {
    let parameters = &event["params"];
    match event["method"].as_str()? {
        "Runtime.exceptionThrown" => Some(parameters["exceptionDetails"].to_string()),
        "Runtime.consoleAPICalled" if parameters["type"] == "error" => Some(parameters["args"].to_string()),
        "Log.entryAdded" if parameters["entry"]["level"] == "error" => Some(parameters["entry"].to_string()),
        _ => None,
    }
}
