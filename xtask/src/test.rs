//! `cargo xtask test`: everything that shows that Blockhouse works, from a bare checkout.
//!
//! The black-box tests find the binary under test in the environment variable `BLOCKHOUSE_BIN`.

use anyhow::Result;

use lab_tools::apt;
use lab_tools::build::{Profile, build_binary};
use lab_tools::process::{self, cargo};
use lab_tools::qemu_driver;
use lab_tools::workspace::Workspace;

use crate::loom;

/// Runs all tests, or what `args` (for `cargo test`) select of them; without any, the loom models
/// too.
pub fn run(workspace: &Workspace, args: &[String]) -> Result<()> {
    apt::require(apt::FOR_TESTS)?;
    if let Err(error) = apt::require(apt::FOR_CEPH) {
        // The tests that need it are skipped, and say so.
        println!("xtask: no cluster of Ceph: {error:#}");
    }
    let release = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--release");
    let binary = build_binary(workspace, if release { Profile::Release } else { Profile::Dev })?;
    let mut tests = cargo(["test"]);
    if !args.iter().any(|arg| arg == "-p" || arg.starts_with("--package")) {
        tests.arg("--workspace");
    }
    tests.args(args).current_dir(workspace.root()).env("BLOCKHOUSE_BIN", binary);
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        // Black-box tests wait for other processes for more than half of their time.
        let processors = std::thread::available_parallelism()?.get();
        tests.env("RUST_TEST_THREADS", (2 * processors).to_string());
    }
    let tools = workspace.root().join("target/tools");
    match apt::unpack("prometheus", "usr/bin/promtool", &tools) {
        Ok(promtool) => drop(tests.env("BLOCKHOUSE_PROMTOOL", promtool)),
        // The tests that need it are skipped, and say so.
        Err(error) => println!("xtask: no promtool: {error:#}"),
    }
    match apt::unpack_apparmor(&tools) {
        Ok(parser) => drop(tests.env("BLOCKHOUSE_APPARMOR_PARSER", parser)),
        // As above.
        Err(error) => println!("xtask: no parser of AppArmor's profiles: {error:#}"),
    }
    match qemu_driver::find("rbd", &tools) {
        Ok(None) => {}
        Ok(Some(modules)) => drop(tests.env(qemu_driver::MODULE_FOLDER, modules)),
        // As above.
        Err(error) => println!("xtask: QEMU has no driver for Ceph: {error:#}"),
    }
    process::run(tests)?;
    if args.is_empty() {
        loom::run(workspace)?;
    }
    Ok(())
}
