//! Runs commands from the documentation in a shell, in a folder of images.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::{Outcome, Scratch, blockhouse, eventually, run_within, wait_for_exit};

/// The longest time of a command on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// The lines of a page's blocks of shell commands that start with `word`.
pub fn commands<'page>(page: &'page str, word: &str) -> Vec<&'page str> {
    let blocks = page.split("```sh\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
    lines.filter(|line| line.starts_with(word)).collect()
}

/// A folder of images, in which the binary under test is called `blockhouse`.
pub struct Folder(Scratch);

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}

impl Folder {
    /// An empty folder.
    pub fn new() -> Self {
        let scratch = Scratch::new();
        let programs = scratch.short().join("programs");
        std::fs::create_dir(&programs).expect("a folder");
        std::os::unix::fs::symlink(blockhouse(), programs.join("blockhouse")).expect("a link");
        Self(scratch)
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// Runs a command, which must succeed.
    ///
    /// # Panics
    /// When it fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> Outcome {
        run_within(LONG, &mut self.shell(line)).success()
    }

    /// A command as a shell runs it.
    pub fn shell(&self, line: &str) -> Command {
        // Another server may use the port, and measurements need not take two minutes.
        let line = line.replace("127.0.0.1:10809", "127.0.0.1:0");
        let line = line.replace("bench all", "bench fua --seconds 2");
        let before = std::env::var("PATH").unwrap_or_default();
        // With the path of the program and not its name, the process is not copied by fork.
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(format!("exec {line}")).current_dir(self.path(""));
        shell.env("PATH", format!("{}/programs:{before}", self.0.short().display()));
        shell.env("XDG_RUNTIME_DIR", self.0.short());
        shell
    }
}

/// A server that a command line starts; killed when the test panics.
pub struct Serving(Child);

impl Serving {
    /// Starts it and waits until it is ready.
    ///
    /// # Panics
    /// When the server does not get ready.
    #[track_caller]
    pub fn start(folder: &Folder, line: &str) -> Self {
        let output = folder.path("ready.txt");
        let file = std::fs::File::create(&output).expect("a file for its output");
        let child = folder.shell(line).stdout(file).stderr(Stdio::null()).spawn();
        let serving = Self(child.expect("a shell"));
        let is_ready =
            || std::fs::read_to_string(&output).is_ok_and(|text| text.starts_with("ready "));
        assert!(eventually(LONG, is_ready), "{line}: is not ready");
        serving
    }

    /// Sends SIGINT; the server must exit with status 0.
    pub fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::INT).expect("it runs");
        let status = wait_for_exit(&mut self.0, LONG).expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It has ended already unless the test panics.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
