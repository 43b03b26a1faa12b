//! README.md: the commands of everyday use, as they are typed, one after the other in an empty folder.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::{Scratch, blockhouse, eventually, run_within, wait_for_exit};
use rustix::process::{Pid, Signal, kill_process};

const README: &str = include_str!("../../../README.md");
/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// The lines of the README's blocks of shell commands that start the binary.
fn commands() -> Vec<&'static str> {
    let blocks = README.split("```sh\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
    lines.filter(|line| line.starts_with("blockhouse ")).collect()
}

/// A folder of images, in which the binary under test is called `blockhouse`.
struct Folder(Scratch);

impl Folder {
    fn new() -> Self {
        let scratch = Scratch::new();
        let programs = scratch.short().join("programs");
        std::fs::create_dir(&programs).expect("a folder");
        std::os::unix::fs::symlink(blockhouse(), programs.join("blockhouse")).expect("a link");
        Self(scratch)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// A command as a shell runs it.
    fn shell(&self, line: &str) -> Command {
        // Another server may have the port, and measurements need not take two minutes.
        let line = line.replace("127.0.0.1:10809", "127.0.0.1:0");
        let line = line.replace("bench all", "bench fua --seconds 2");
        let before = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("exec {line}")).current_dir(self.path(""));
        shell.env("PATH", format!("{}/programs:{before}", self.0.short().display()));
        shell.env("XDG_RUNTIME_DIR", self.0.short());
        shell
    }
}

/// A server that a line of the README starts; killed when the test panics.
struct Serving(Child);

impl Serving {
    /// Starts it and waits until it is ready.
    fn start(folder: &Folder, line: &str) -> Self {
        let output = folder.path("ready.txt");
        let file = std::fs::File::create(&output).expect("a file for its output");
        let child = folder.shell(line).stdout(file).stderr(Stdio::null()).spawn();
        let serving = Self(child.expect("a shell"));
        let is_ready =
            || std::fs::read_to_string(&output).is_ok_and(|text| text.starts_with("ready "));
        assert!(eventually(LONG, is_ready), "{line}: is not ready");
        serving
    }

    /// Ctrl-C.
    fn stop(mut self) {
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

#[test]
fn every_command_of_the_readme_works_as_typed() {
    let folder = Folder::new();
    let commands = commands();
    assert!(commands.len() > 15, "{commands:?}");
    let mut serving: Option<Serving> = None;
    for line in commands {
        // A client of the control socket needs the server of the line before.
        if !line.starts_with("blockhouse snapshot create --control") {
            serving.take().into_iter().for_each(Serving::stop);
        }
        if line.starts_with("blockhouse serve") {
            serving = Some(Serving::start(&folder, line));
        } else {
            run_within(LONG, &mut folder.shell(line)).success();
        }
    }
    assert!(folder.path("report.html").exists());
}
