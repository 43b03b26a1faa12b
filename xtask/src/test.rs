//! `cargo xtask test`: runs all tests of Blockhouse, from a bare checkout.
//!
//! The black-box tests find the binary under test in the environment variable `BLOCKHOUSE_BIN`.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;

use lab_tools::apt;
use lab_tools::build::{BINARY, Built, Profile, build_binary};
use lab_tools::process::{self, cargo};
use lab_tools::qemu_driver;
use lab_tools::workspace::Workspace;

use crate::test_programs::{self, OnFailure, Work};

/// The variable by which tests explore fewer of their seeds than they say.
const ONE_SEED_IN: &str = "BLOCKHOUSE_SIM_ONE_SEED_IN";

/// How many of their own numbers of random seeds the tests explore.
#[derive(Clone, Copy)]
pub enum Seeds {
    /// A quarter of them, at least 20, others each time: a run takes minutes, not half an hour.
    Quarter,
    /// As many as each test says.
    All,
}

/// Variables, and their values.
type Environment = Vec<(&'static str, OsString)>;

/// Runs all tests. Returns the names of the tests that failed at first and
/// passed when they were repeated.
pub fn run(workspace: &Workspace, seeds: Seeds, on_failure: OnFailure) -> Result<Vec<String>> {
    let mut environment = prepare(workspace)?;
    let built = Built::all(workspace)?;
    environment.push((BINARY, built.program("blockhouse")?.into()));
    if matches!(seeds, Seeds::Quarter) && std::env::var_os(ONE_SEED_IN).is_none() {
        environment.push((ONE_SEED_IN, "4".into()));
    }
    let doc = || cargo_test(workspace, &["--doc".to_owned()], &environment);
    let others: Vec<Work<'_>> = vec![Box::new(|| process::run(doc()))];
    test_programs::run(workspace, &built, &environment, on_failure, others)
}

/// Runs the tests that `args` (for `cargo test`) select, with all their seeds.
pub fn run_some(workspace: &Workspace, args: &[String]) -> Result<()> {
    let mut environment = prepare(workspace)?;
    let release = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--release");
    let binary = build_binary(workspace, if release { Profile::Release } else { Profile::Dev })?;
    environment.push((BINARY, binary.into()));
    process::run(cargo_test(workspace, args, &environment))
}

/// Installs what the tests need, and returns their variables.
fn prepare(workspace: &Workspace) -> Result<Environment> {
    apt::require(apt::FOR_TESTS)?;
    if let Err(error) = apt::require(apt::FOR_CEPH) {
        // The tests that need it are skipped with a message.
        println!("xtask: no cluster of Ceph: {error:#}");
    }
    environment(workspace)
}

fn cargo_test(workspace: &Workspace, args: &[String], environment: &Environment) -> Command {
    let mut tests = cargo(["test"]);
    if !args.iter().any(|arg| arg == "-p" || arg.starts_with("--package")) {
        tests.arg("--workspace");
    }
    tests.args(args).current_dir(workspace.root()).envs(environment.iter().cloned());
    // More threads than processors: black-box tests wait for other processes for more than half of
    // their time.
    test_programs::set_threads(&mut tests, 4);
    tests
}

/// The variables with the paths of tools that are unpacked for the tests.
fn environment(workspace: &Workspace) -> Result<Environment> {
    let mut environment = Environment::new();
    let tools = workspace.root().join("target/tools");
    match apt::unpack("prometheus", "usr/bin/promtool", &tools) {
        Ok(promtool) => environment.push(("BLOCKHOUSE_PROMTOOL", promtool.into())),
        // The tests that need it are skipped with a message.
        Err(error) => println!("xtask: no promtool: {error:#}"),
    }
    match apt::unpack_apparmor(&tools) {
        Ok(parser) => environment.push(("BLOCKHOUSE_APPARMOR_PARSER", parser.into())),
        // As above.
        Err(error) => println!("xtask: no parser of AppArmor's profiles: {error:#}"),
    }
    match qemu_driver::find("rbd", &tools) {
        Ok(None) => {}
        Ok(Some(modules)) => environment.push((qemu_driver::MODULE_FOLDER, modules.into())),
        // As above.
        Err(error) => println!("xtask: QEMU has no driver for Ceph: {error:#}"),
    }
    Ok(environment)
}
