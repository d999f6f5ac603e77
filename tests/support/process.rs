//! Child processes. Each has an owner that ends it when dropped, and a line in one registry, so that none survives the
//! run whichever way the run ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{http, wait};

/// All children that run now, by process id.
static CHILDREN: Mutex<BTreeMap<u32, Child>> = Mutex::new(BTreeMap::new());

fn children() -> MutexGuard<'static, BTreeMap<u32, Child>> {
    // A trial that panicked with the lock held leaves the map whole: it is only ever inserted into or removed from.
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running child; dropping it kills it.
pub(crate) struct Process {
    /// The process id.
    pub(crate) id: u32,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in the file `log`.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Process {
        write_to(command, log);
        Process::registered(spawn(command), log)
    }

    /// Starts a command that asks the kernel to end it when its parent ends. Linux takes the thread that starts a child
    /// for the parent, so this is left to a thread that lives as long as the run.
    pub(crate) fn start_bound(mut command: Command, log: &Path) -> Process {
        write_to(&mut command, log);
        let child = http::RUNTIME.spawn(async move { spawn(&mut command) });
        Process::registered(http::RUNTIME.block_on(child).expect("it is nobody else's to end"), log)
    }

    fn registered(child: Child, log: &Path) -> Process {
        let id = child.id();
        children().insert(id, child);
        Process {
            id,
            log: log.to_owned(),
        }
    }

    /// How the child ended, if it did.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        children()
            .get_mut(&self.id)
            .and_then(|child| child.try_wait().expect("the child is ours to wait for"))
    }

    /// Waits until the child has ended by itself.
    pub(crate) fn end_of(&self, deadline: Duration) -> Result<ExitStatus, String> {
        wait::until(&format!("the end of process {}", self.id), deadline, || self.ended())
            .map_err(|error| format!("{error}\n{}", self.log_tail()))
    }

    /// Asks the child to end, as `kill` does without options.
    pub(crate) fn terminate(&self) {
        let status = Command::new("kill").args(["-TERM", &self.id.to_string()]).status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "process {} cannot be signalled",
            self.id
        );
    }

    /// Ends the child at once, if it still runs.
    pub(crate) fn kill(&self) {
        let child = children().remove(&self.id);
        child.into_iter().for_each(end);
    }

    /// What the child has written so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines of the child's output.
    pub(crate) fn log_tail(&self) -> String {
        let text = self.log();
        let lines: Vec<String> = text.lines().map(|line| line.chars().take(400).collect()).collect();
        let tail = lines[lines.len().saturating_sub(25)..].join("\n");
        format!("--- last lines of {}\n{tail}", self.log.display())
    }
}

fn write_to(command: &mut Command, log: &Path) {
    let output = File::create(log).expect("the log's folder was made by the trial");
    let errors = output.try_clone().expect("a file handle can be doubled");
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
}

fn spawn(command: &mut Command) -> Child {
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{} does not start: {error}", command.get_program().display()))
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn end(mut child: Child) {
    // Both fail only for a child that has ended already, which is what is wanted.
    let _ = child.kill();
    let _ = child.wait();
}

fn end_all() {
    let running = std::mem::take(&mut *children());
    running.into_values().for_each(end);
}

/// Ends what is left when dropped: at the end of `main`, or while a panic unwinds it.
pub(crate) struct EndAll;

impl Drop for EndAll {
    fn drop(&mut self) {
        end_all();
    }
}

/// See [`EndAll`].
pub(crate) fn end_all_on_drop() -> EndAll {
    EndAll
}

/// Ends all children, and the run with the shell's usual status, when the run is interrupted.
pub(crate) fn end_all_on_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be made");
        let status = runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt()).expect("SIGINT can be caught");
            let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be caught");
            tokio::select! { _ = interrupt.recv() => 130, _ = terminate.recv() => 143 }
        });
        end_all();
        std::process::exit(status);
    });
}
