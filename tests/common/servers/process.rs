//! The process of a server, and a shell that kills it when the test process ends.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tokio::runtime::Handle;

#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    watchdog: Child,
}

impl Process {
    /// Starts the process. `packages` are the packages to install if the program is missing.
    pub(crate) fn start(command: &mut Command, packages: &str) -> Self {
        let mut child = match command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => panic!(
                "cannot start {command:?}: {error}\nthese tests need real servers; scripts/test installs them, or\n    \
                 apt-get install -y --no-install-recommends {packages}"
            ),
        };
        // The watchdog reads until the test process closes the pipe. `PR_SET_PDEATHSIG` would kill
        // the server when the thread that started it ends.
        let watch = format!("read _; kill -9 {}", child.id());
        match Command::new("sh").args(["-c", &watch]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn() {
            Ok(watchdog) => Self { child, watchdog },
            Err(error) => {
                let _ = child.kill();
                panic!("cannot start sh: {error}");
            }
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Suspends the process (SIGSTOP), and waits until all of its threads are suspended.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.id());
        super::wait_until("the process is suspended", || {
            let Ok(tasks) = fs::read_dir(&tasks) else { return true };
            let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            tasks.flatten().all(|task| stat(task).rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        });
    }

    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    /// Ends the process (SIGTERM), and waits until it has ended.
    pub(crate) fn end(mut self) {
        self.signal("TERM");
        super::wait_until("the process ends", || self.has_ended());
    }

    /// Kills the process (SIGKILL), and waits until it has ended.
    pub(crate) fn kill(&mut self) {
        // The watchdog first, as the process ID of a reaped child may be reused.
        for child in [&mut self.watchdog, &mut self.child] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, name: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }
}

/// A folder that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Folder(pub(crate) PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Drops the processes of a server, then its files.
///
/// That takes tens of milliseconds, in which the other tasks of the thread would not run. So a test
/// with a runtime does it on another thread. The runtime waits for that thread when it is dropped.
pub(crate) fn discard(remains: impl Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(move || drop(remains))),
        Err(_) => drop(remains),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
