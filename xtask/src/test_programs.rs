//! The test programs of the workspace, built by one cargo command and run in parallel.
//!
//! The black-box tests wait for other processes for half of their time, and the simulator's
//! explorations compute: with one thread, they use the processor time that the others do not need.
//! Each program writes to its own log in `target/test-logs`; the log of a program that fails is
//! printed.
//!
//! Foreign programs have races of their own, and a busy machine has delays. So before a change
//! lands, black-box tests that failed may be repeated when all else has ended ([`OnFailure`]). The
//! result then names them. `cargo xtask test` never repeats a test.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use lab_tools::build::Built;
use lab_tools::workers;
use lab_tools::workspace::Workspace;

/// The variable with the seed of a black-box test's random numbers.
const SEED: &str = "BLOCKHOUSE_SEED";

/// The package of the tests that wait for other processes for more than half of their time.
const BLACK_BOX: &str = "blockhouse-tests";
/// The maximum number of black-box tests that are repeated. More failures have a common cause.
const MAX_REPEATED: usize = 3;
/// How often a repeated test must pass.
const REPETITIONS: usize = 3;
/// The exit status of a test program that ran to its end, and in which tests failed.
const TESTS_FAILED: i32 = 101;
/// The packages whose programs take minutes. They start first.
const LONGEST: [&str; 2] = [BLACK_BOX, "blockhouse-disk"];

/// The C library keeps freed memory. The simulator copies disks of some MiB for each crash, and a
/// quarter of its time is page faults if each copy is mapped anew.
const KEPT_MEMORY: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TOP_PAD_", "16777216"),
    ("MALLOC_TRIM_THRESHOLD_", "1000000000"),
];

/// Work that runs in parallel with the test programs.
pub type Work<'a> = Box<dyn Fn() -> Result<()> + Sync + 'a>;

/// The consequence of a failed black-box test.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The run fails.
    Fail,
    /// The run fails if the test fails again. The first repetition has the seed of the failure, if
    /// that is known.
    Repeat,
}

/// A black-box test that failed.
struct Failed<'a> {
    program: &'a Program,
    test: String,
    /// The value of [`SEED`] with which it failed, if it has one generator of random numbers.
    seed: Option<String>,
}

/// A test program.
struct Program {
    package: String,
    target: String,
    file: PathBuf,
    /// The folder of the package, in which its tests run.
    folder: PathBuf,
}

/// Runs all test programs with the additional `environment`, and `others` beside the shorter ones.
/// Returns the names of the tests that failed at first and passed when they were repeated.
///
/// # Errors
/// A program or one of `others` failed. What runs at that time is waited for, and nothing else is
/// started.
pub fn run(
    workspace: &Workspace,
    built: &Built,
    environment: &[(&'static str, OsString)],
    on_failure: OnFailure,
    others: Vec<Work<'_>>,
) -> Result<Vec<String>> {
    let mut programs: Vec<_> =
        built.artifacts().iter().filter_map(|artifact| Program::of(artifact, workspace)).collect();
    ensure!(!programs.is_empty(), "cargo built no test program");
    programs.sort_by_key(|program| {
        LONGEST.iter().position(|package| *package == program.package).unwrap_or(LONGEST.len())
    });
    let logs = workspace.target().join("test-logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    println!("xtask: {} test programs; their logs are in {}", programs.len(), logs.display());
    let failed = Mutex::new(Vec::new());
    let (logs, found) = (&logs, &failed);
    let mut work: Vec<Work<'_>> = Vec::new();
    for program in &programs {
        work.push(Box::new(move || {
            let of_program = program.run(logs, environment, on_failure)?;
            found.lock().expect("no panic").extend(of_program);
            Ok(())
        }));
    }
    let longest = programs.partition_point(|program| LONGEST.contains(&&*program.package));
    work.splice(longest..longest, others);
    // The black-box tests, which are the first, need half a processor.
    let threads = 1 + std::thread::available_parallelism()?.get();
    workers::in_threads(threads, &work, |work| work())?;
    drop(work);
    let failed = failed.into_inner().expect("no panic");
    ensure!(failed.len() <= MAX_REPEATED, "{} black-box tests failed", failed.len());
    failed.iter().try_for_each(|failed| failed.repeat(logs, environment))?;
    Ok(failed.into_iter().map(|failed| failed.test).collect())
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

    /// Runs all tests. Returns the failed tests that are to be repeated.
    fn run(
        &self,
        logs: &Path,
        environment: &[(&'static str, OsString)],
        on_failure: OnFailure,
    ) -> Result<Vec<Failed<'_>>> {
        let Self { package, target, .. } = self;
        let is_black_box = package == BLACK_BOX;
        let mut program = self.command(environment);
        set_threads(&mut program, if is_black_box { 4 } else { 1 });
        let started = Instant::now();
        let (status, text) = logged(&mut program, &logs.join(format!("{package}-{target}.log")))?;
        let seconds = started.elapsed().as_secs_f64();
        let passed: usize = text.lines().filter(|line| line.ends_with("... ok")).count();
        println!("test: {target} of {package}: {passed} passed in {seconds:.1} s");
        if status.success() {
            return Ok(Vec::new());
        }
        print!("{text}");
        if on_failure == OnFailure::Repeat
            && is_black_box
            && status.code() == Some(TESTS_FAILED)
            && let Some(tests) = failures(&text)
        {
            let failed = |test: &str| {
                let (test, seed) = (test.to_owned(), seed_of(test, &text));
                Failed { program: self, test, seed }
            };
            return Ok(tests.into_iter().map(failed).collect());
        }
        bail!("{target} of {package} failed after {seconds:.1} s: {status}")
    }

    fn command(&self, environment: &[(&'static str, OsString)]) -> Command {
        let mut program = Command::new(&self.file);
        program.current_dir(&self.folder).envs(environment.iter().cloned()).stdin(Stdio::null());
        if self.package != BLACK_BOX {
            program.envs(KEPT_MEMORY);
        }
        program
    }
}

impl Failed<'_> {
    /// Runs the test again, [`REPETITIONS`] times.
    fn repeat(&self, logs: &Path, environment: &[(&'static str, OsString)]) -> Result<()> {
        let Self { program, test, seed } = self;
        let log = logs.join(format!("repeated-{}.log", test.replace("::", "-")));
        for number in 0..REPETITIONS {
            let mut command = program.command(environment);
            let seed = seed.iter().filter(|_| number == 0);
            command.args(["--exact", test]).envs(seed.map(|seed| (SEED, seed)));
            let (status, text) = logged(&mut command, &log)?;
            // A name that no test has would succeed as well.
            if !status.success() || !text.contains("test result: ok. 1 passed;") {
                print!("{text}");
                bail!("{test} failed again");
            }
        }
        println!("test: {test} FAILED ONCE, and then passed {REPETITIONS} times");
        Ok(())
    }
}

/// Runs a program with its output in the file `log`. Returns that output, too.
fn logged(program: &mut Command, log: &Path) -> Result<(ExitStatus, String)> {
    let to = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    program.stdout(to.try_clone()?).stderr(to);
    let status = program.status().with_context(|| format!("cannot start {program:?}"))?;
    let text = std::fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

/// The names in the list with which a test program ends, if the list is as long as the line after
/// it says.
fn failures(output: &str) -> Option<Vec<&str>> {
    let (_, list) = output.rsplit_once("\nfailures:\n")?;
    let names: Vec<_> = list.lines().map_while(|line| line.strip_prefix("    ")).collect();
    let (_, counts) = list.rsplit_once("test result: FAILED. ")?;
    let count = counts.split_once(" passed; ")?.1.split_once(" failed;")?.0;
    (count.parse() == Ok(names.len()) && !names.is_empty()).then_some(names)
}

/// The seed in the line with which a test says how to repeat it; `None` if it has several.
fn seed_of(test: &str, output: &str) -> Option<String> {
    let seed = |line: &str| {
        let (_, after) = line.split_once(SEED)?;
        let (seed, command) = after.strip_prefix('=')?.split_once(' ')?;
        (command.split_whitespace().last() == Some(test)).then(|| seed.to_owned())
    };
    let mut seeds = output.lines().filter_map(seed);
    // A seed given from outside is the seed of all generators of a test.
    seeds.next().filter(|_| seeds.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::{failures, seed_of};

    const END: &str = "failures:\n\n---- a::b stdout ----\n    no name\n\
                       replay: BLOCKHOUSE_SEED=7 cargo test --package p -- --exact a::b\n\n\
                       failures:\n    a::b\n    c\n\n";

    #[test]
    fn failures_are_in_the_last_list_and_as_many_as_are_counted() {
        let counted =
            |count| format!("{END}test result: FAILED. 9 passed; {count} failed; 0 ignored");
        assert_eq!(failures(&counted("2")), Some(vec!["a::b", "c"]));
        assert_eq!(failures(&counted("3")), None, "a child wrote between the lines");
        assert_eq!(failures(END), None, "the program did not come to its end");
    }

    #[test]
    fn seeds_are_those_of_the_test() {
        assert_eq!(seed_of("a::b", END).as_deref(), Some("7"));
        assert_eq!(seed_of("b", END), None);
    }
}
