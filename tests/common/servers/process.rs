//! A server's process, and the shell that kills it when this one is no more.

use std::fs;
use std::process::{Child, Command, Stdio};

#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    watchdog: Child,
}

impl Process {
    /// Starts it; `packages` are what has to be installed for that.
    pub(crate) fn start(command: &mut Command, packages: &str) -> Self {
        let mut child = match command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => panic!(
                "cannot start {command:?}: {error}\nthese tests need real servers; scripts/test installs them, or\n    \
                 apt-get install -y --no-install-recommends {packages}"
            ),
        };
        // Ends when its input does. To be killed by the kernel would mean by the end of a thread.
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

    /// Returns when all of its threads stand still, which may take a moment on a machine with more to do.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.id());
        super::wait_until("the process stands still", || {
            let Ok(tasks) = fs::read_dir(&tasks) else { return true };
            let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            tasks.flatten().all(|task| stat(task).rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        });
    }

    pub(crate) fn go_on(&self) {
        self.signal("CONT");
    }

    /// Returns when it has ended by itself.
    pub(crate) fn end(mut self) {
        self.signal("TERM");
        super::wait_until("the process ends", || self.has_ended());
    }

    fn signal(&self, name: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // First the watchdog: the number of a child that was waited for may soon be another's.
        for child in [&mut self.watchdog, &mut self.child] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
