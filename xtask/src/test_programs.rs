//! The test programs of the workspace, built by one cargo command and run in parallel.
//!
//! The black-box tests wait for other processes for half of their time, and the simulator's
//! explorations compute: with one thread, they use the processor time that the others do not need.
//! Each program writes to its own log in `target/test-logs`; the log of a program that fails is
//! printed.
//!
//! Foreign programs have races of their own, and a busy machine has delays. So before a change
//! lands, a few black-box tests that failed are run again, alone, and all is said: a test that then
//! passes three times does not fail the step. `cargo xtask test` does not do so.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use lab_tools::build::Built;
use lab_tools::workers;
use lab_tools::workspace::Workspace;

/// The package of the tests that wait for other processes for more than half of their time.
const BLACK_BOX: &str = "blockhouse-tests";
/// At most so many black-box tests may be repeated: more are no chance.
const MAX_REPEATED: usize = 3;
/// How often a repeated test must pass.
const REPETITIONS: usize = 3;
/// The packages whose programs take minutes. They start first.
const LONGEST: [&str; 2] = [BLACK_BOX, "blockhouse-disk"];

/// Something that can fail, and that runs beside test programs.
pub type Work<'a> = Box<dyn Fn() -> Result<()> + Sync + 'a>;

/// A test program.
struct Program {
    package: String,
    target: String,
    file: PathBuf,
    /// The folder of the package, in which its tests run.
    folder: PathBuf,
}

/// Runs all test programs with the additional `environment`, and `others` beside the shorter ones.
/// With `repeat`, black-box tests may fail once, if they pass when they are repeated.
///
/// # Errors
/// A program or one of `others` failed. What runs at that time is waited for, and nothing else is
/// started.
pub fn run(
    workspace: &Workspace,
    built: &Built,
    environment: &[(&'static str, OsString)],
    repeat: bool,
    others: Vec<Work<'_>>,
) -> Result<()> {
    let mut programs: Vec<_> =
        built.artifacts().iter().filter_map(|artifact| Program::of(artifact, workspace)).collect();
    ensure!(!programs.is_empty(), "cargo built no test program");
    programs.sort_by_key(|program| {
        LONGEST.iter().position(|package| *package == program.package).unwrap_or(LONGEST.len())
    });
    let logs = workspace.target().join("test-logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    println!("xtask: {} test programs; their logs are in {}", programs.len(), logs.display());
    let logs = &logs;
    let mut work: Vec<Work<'_>> = Vec::new();
    for program in &programs {
        work.push(Box::new(move || program.run(logs, environment, repeat)));
    }
    let longest = programs.partition_point(|program| LONGEST.contains(&&*program.package));
    work.splice(longest..longest, others);
    workers::side_by_side(&work, |work| work())
}

/// Makes `tests` run `for_two` tests at once for each pair of processors, unless the user sets a
/// number.
pub fn set_threads(tests: &mut Command, for_two: usize) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        let threads = (for_two * processors).div_ceil(2);
        tests.env("RUST_TEST_THREADS", threads.to_string());
    }
}

impl Program {
    /// The test program that a message of cargo describes, if it describes one.
    fn of(artifact: &Value, workspace: &Workspace) -> Option<Self> {
        let file = PathBuf::from(artifact["executable"].as_str()?);
        let is_test = artifact["profile"]["test"].as_bool()?;
        let of_artifact = |package: &&Value| package["id"] == artifact["package_id"];
        let package = workspace.packages().iter().find(of_artifact)?;
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?;
        is_test.then_some(Self {
            package: package["name"].as_str()?.to_owned(),
            target: artifact["target"]["name"].as_str()?.to_owned(),
            file,
            folder: folder.to_owned(),
        })
    }

    fn run(&self, logs: &Path, env: &[(&'static str, OsString)], repeat: bool) -> Result<()> {
        let Self { package, target, .. } = self;
        let log = logs.join(format!("{package}-{target}.log"));
        let is_black_box = package == BLACK_BOX;
        let mut program = self.command(env);
        set_threads(&mut program, if is_black_box { 4 } else { 1 });
        let started = Instant::now();
        let status = logged(&mut program, &log)?;
        let text = std::fs::read_to_string(&log)
            .with_context(|| format!("cannot read {}", log.display()))?;
        let seconds = started.elapsed().as_secs_f64();
        if !status.success() {
            print!("{text}");
            let failed = format!("{target} of {package} failed after {seconds:.1} s: {status}");
            ensure!(repeat && is_black_box, failed);
            self.repeat(logs, env, &failures(&text)).context(failed)?;
        }
        let passed: usize = text.lines().filter(|line| line.ends_with("... ok")).count();
        println!("test: {target} of {package}: {passed} passed in {seconds:.1} s");
        Ok(())
    }

    /// Runs tests again, one at a time.
    fn repeat(&self, logs: &Path, env: &[(&'static str, OsString)], tests: &[&str]) -> Result<()> {
        ensure!((1..=MAX_REPEATED).contains(&tests.len()), "{} tests failed", tests.len());
        let log = logs.join(format!("{}-repeated.log", self.package));
        for test in tests {
            for _ in 0..REPETITIONS {
                let status = logged(self.command(env).args(["--exact", test]), &log)?;
                ensure!(
                    status.success(),
                    "{test} failed again; its output is in {}",
                    log.display()
                );
            }
            println!("test: {test} FAILED ONCE, and passed {REPETITIONS} times alone");
        }
        Ok(())
    }

    fn command(&self, environment: &[(&'static str, OsString)]) -> Command {
        let mut program = Command::new(&self.file);
        program.current_dir(&self.folder).envs(environment.iter().cloned()).stdin(Stdio::null());
        program
    }
}

/// Runs a program with its output in the file `log`.
fn logged(program: &mut Command, log: &Path) -> Result<ExitStatus> {
    let to = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    program.stdout(to.try_clone()?).stderr(to);
    program.status().with_context(|| format!("cannot start {program:?}"))
}

/// The names in the list of failures with which a test program ends; none, if it did not get there.
fn failures(output: &str) -> Vec<&str> {
    let list = output.rsplit_once("\nfailures:\n").map_or("", |(_, list)| list);
    list.lines().map_while(|line| line.strip_prefix("    ")).collect()
}

#[cfg(test)]
mod tests {
    use super::failures;

    #[test]
    fn failures_are_in_the_last_list() {
        let output = "failures:\n\n---- a::b stdout ----\n    no name\n\nfailures:\n    a::b\n    c\n\n\
                      test result: FAILED.\n";
        assert_eq!(failures(output), ["a::b", "c"]);
        assert_eq!(failures("failures:\n\n---- a::b stdout ----\nfailures:\n"), [""; 0]);
    }
}
