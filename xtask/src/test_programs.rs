//! The test programs of the workspace, built by one cargo command and run in parallel.
//!
//! The black-box tests wait for other processes for half of their time, and the simulator's
//! explorations compute: with one thread, they use the processor time that the others do not need.
//! Each program writes to its own log in `target/test-logs`; the log of a program that fails is
//! printed.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use lab_tools::build::Built;
use lab_tools::workers;
use lab_tools::workspace::Workspace;

/// The package of the tests that wait for other processes for more than half of their time.
const BLACK_BOX: &str = "blockhouse-tests";
/// The packages whose programs take minutes. They start first.
const LONGEST: [&str; 2] = [BLACK_BOX, "blockhouse-disk"];

/// A test program.
struct Program {
    package: String,
    target: String,
    file: PathBuf,
    /// The folder of the package, in which its tests run.
    folder: PathBuf,
}

/// Runs all test programs with the additional `environment`.
///
/// # Errors
/// A program failed. Programs that run at that time are waited for, and no other is started.
pub fn run(
    workspace: &Workspace,
    built: &Built,
    environment: &[(&'static str, OsString)],
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
    workers::side_by_side(&programs, |program| program.run(&logs, environment))
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

    fn run(&self, logs: &Path, environment: &[(&'static str, OsString)]) -> Result<()> {
        let Self { package, target, file, folder } = self;
        let log = logs.join(format!("{package}-{target}.log"));
        let to = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut program = Command::new(file);
        program.current_dir(folder).envs(environment.iter().cloned());
        set_threads(&mut program, if package == BLACK_BOX { 4 } else { 1 });
        program.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
        let started = Instant::now();
        let status = program.status().with_context(|| format!("cannot start {package}'s tests"))?;
        let text = std::fs::read_to_string(&log)
            .with_context(|| format!("cannot read {}", log.display()))?;
        let seconds = started.elapsed().as_secs_f64();
        if !status.success() {
            print!("{text}");
            bail!("{target} of {package} failed after {seconds:.1} s: {status}");
        }
        let passed: usize = text.lines().filter(|line| line.ends_with("... ok")).count();
        println!("test: {target} of {package}: {passed} passed in {seconds:.1} s");
        Ok(())
    }
}
