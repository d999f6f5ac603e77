//! Child processes. Each has an owner that ends it when dropped, and an entry in one registry, so that none survives
//! the run.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use super::wait;

/// The time in which a line reaches the log.
const LOGGED: Duration = Duration::from_mins(1);

/// All running children, by process id.
static CHILDREN: Mutex<BTreeMap<u32, Child>> = Mutex::new(BTreeMap::new());

fn children() -> MutexGuard<'static, BTreeMap<u32, Child>> {
    // A test that panicked with the lock held leaves the map valid: it only inserts or removes.
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the CPU time of a process so far; none if it has ended.
pub(crate) fn cpu(id: u32) -> Duration {
    /// `USER_HZ`, which is the same on every Linux machine.
    const TICK: Duration = Duration::from_millis(10);
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    // The command name is in parentheses and may contain spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    let ticks: u32 = fields.take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    TICK * ticks
}

/// A running child. Dropping it kills it.
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

    /// Starts a command that asks the kernel to kill it when its parent ends.
    pub(crate) fn start_bound(mut command: Command, log: &Path) -> Process {
        /// A command, and where its child is sent to.
        type Order = (Command, mpsc::SyncSender<std::io::Result<Child>>);
        // Linux takes the thread that starts a child for its parent, so this thread lives as long as the run. Those of
        // a runtime do not: blocking work on one makes another one take its place.
        static ORDERS: LazyLock<mpsc::SyncSender<Order>> = LazyLock::new(|| {
            let (sender, orders) = mpsc::sync_channel::<Order>(0);
            std::thread::spawn(move || {
                for (mut command, children) in orders {
                    // The caller waits for it.
                    let _ = children.send(command.spawn());
                }
            });
            sender
        });
        write_to(&mut command, log);
        let program = command.get_program().display().to_string();
        let (sender, children) = mpsc::sync_channel(1);
        ORDERS.send((command, sender)).expect("the thread does not end");
        let child = children.recv().expect("each order is answered");
        let child = child.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
        Process::registered(child, log)
    }

    fn registered(child: Child, log: &Path) -> Process {
        let id = child.id();
        children().insert(id, child);
        Process {
            id,
            log: log.to_owned(),
        }
    }

    /// Returns the exit status, if the child has ended.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        children()
            .get_mut(&self.id)
            .and_then(|child| child.try_wait().expect("it is a child of this process"))
    }

    /// Waits until the child has ended by itself.
    pub(crate) fn end_of(&self, deadline: Duration) -> Result<ExitStatus, String> {
        wait::until(&format!("the end of process {}", self.id), deadline, || self.ended())
            .map_err(|error| format!("{error}\n{}", self.log_tail()))
    }

    /// Sends SIGTERM to the child.
    pub(crate) fn terminate(&self) {
        let status = Command::new("kill").args(["-TERM", &self.id.to_string()]).status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "cannot signal process {}",
            self.id
        );
    }

    /// Kills the child, if it still runs.
    pub(crate) fn kill(&self) {
        let child = children().remove(&self.id);
        child.into_iter().for_each(end);
    }

    /// Returns the child's output so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the child's output has all of these texts. The daemon writes its log from a thread of its own, so a
    /// line may follow what it is about.
    pub(crate) fn until_logged(&self, texts: &[&str]) -> Result<String, String> {
        wait::until(&format!("{texts:?} in the log"), LOGGED, || {
            let log = self.log();
            texts.iter().all(|text| log.contains(text)).then_some(log)
        })
        .map_err(|error| format!("{error}\n{}", self.log_tail()))
    }

    /// Returns the last lines of the child's output.
    pub(crate) fn log_tail(&self) -> String {
        let text = self.log();
        let lines: Vec<String> = text.lines().map(|line| line.chars().take(400).collect()).collect();
        let tail = lines[lines.len().saturating_sub(25)..].join("\n");
        format!("--- last lines of {}\n{tail}", self.log.display())
    }
}

fn write_to(command: &mut Command, log: &Path) {
    let output = File::create(log).expect("the test has created the log's folder");
    let errors = output.try_clone().expect("a file handle can be cloned");
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
}

fn spawn(command: &mut Command) -> Child {
    command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {}: {error}", command.get_program().display()))
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn end(mut child: Child) {
    // Both fail only for a child that has already ended.
    let _ = child.kill();
    let _ = child.wait();
}

fn end_all() {
    let running = std::mem::take(&mut *children());
    running.into_values().for_each(end);
}

/// A guard that ends all children when dropped: at the end of `main`, or while a panic unwinds it.
pub(crate) struct EndAll;

impl Drop for EndAll {
    fn drop(&mut self) {
        end_all();
    }
}

/// Returns the guard. See [`EndAll`].
pub(crate) fn end_all_on_drop() -> EndAll {
    EndAll
}

/// Installs signal handlers that end all children, and the run with the shell's usual status.
pub(crate) fn end_all_on_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be created");
        let status = runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt()).expect("SIGINT can be caught");
            let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be caught");
            tokio::select! { _ = interrupt.recv() => 130, _ = terminate.recv() => 143 }
        });
        end_all();
        std::process::exit(status);
    });
}
