//! `cargo xtask deny`: what our dependencies may be, by `deny.toml` and cargo-deny.
//!
//! cargo-deny is installed into `target/tools` where it is missing. Advisories need their database from
//! the network; where it cannot be reached they are skipped, and that is said.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use lab_tools::process::{cargo, run as run_command, stdout_of};
use lab_tools::workspace::Workspace;

const VERSION: &str = "0.20.2";
const DATABASE_HOST: &str = "github.com:443";
const TIMEOUT: Duration = Duration::from_secs(4);

/// Runs the checks.
pub fn run(workspace: &Workspace) -> Result<()> {
    let tool = installed(workspace)?;
    let check = |what: &[&str]| {
        let mut command = deny(&tool, workspace);
        command.arg("check").args(what);
        command
    };
    run_command(check(&["licenses", "bans", "sources"]))?;
    if let Err(why) = reach(DATABASE_HOST) {
        println!("xtask: advisories skipped: {why}");
        return Ok(());
    }
    let mut fetch = deny(&tool, workspace);
    fetch.args(["fetch", "db"]);
    if let Err(why) = run_command(fetch) {
        println!("xtask: advisories skipped: {why:#}");
        return Ok(());
    }
    run_command(check(&["--disable-fetch", "advisories"]))
}

fn deny(tool: &Path, workspace: &Workspace) -> Command {
    let mut command = Command::new(tool);
    command.arg("--workspace").current_dir(workspace.root()).stdin(Stdio::null());
    command
}

/// A cargo-deny of our version: from the search path, from `target/tools`, or built now.
fn installed(workspace: &Workspace) -> Result<PathBuf> {
    let tools = workspace.target().join("tools");
    let ours = tools.join("bin/cargo-deny");
    for candidate in [PathBuf::from("cargo-deny"), ours.clone()] {
        let mut version = Command::new(&candidate);
        version.arg("--version").stderr(Stdio::null());
        if version.output().is_ok_and(|output| {
            output.stdout.ends_with(format!("cargo-deny {VERSION}\n").as_bytes())
        }) {
            return Ok(candidate);
        }
    }
    let started = Instant::now();
    println!("xtask: installing cargo-deny {VERSION} into {}", tools.display());
    let build = tools.join("build");
    // An unoptimized build is done in a minute, and checks our few dependencies in a second.
    let mut install = cargo(["install", "cargo-deny", "--version", VERSION, "--locked", "--quiet"]);
    install.args(["--debug", "--no-default-features", "--root"]).arg(&tools);
    install.arg("--target-dir").arg(&build).env("CARGO_PROFILE_DEV_DEBUG", "0");
    stdout_of(install)?;
    std::fs::remove_dir_all(&build)
        .with_context(|| format!("cannot remove {}", build.display()))?;
    println!("xtask: installed cargo-deny in {:.1} s", started.elapsed().as_secs_f64());
    Ok(ours)
}

/// Whether a TCP connection to `host` opens within [`TIMEOUT`]; the error says why not.
fn reach(host: &'static str) -> Result<(), String> {
    let (sender, receiver) = mpsc::channel();
    // Resolving a name has no time limit of its own, so it gets a thread that we do not wait for.
    std::thread::spawn(move || {
        let attempt = host.to_socket_addrs().and_then(|mut addresses| {
            let address = addresses.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
            TcpStream::connect_timeout(&address, TIMEOUT)
        });
        // The receiver is gone after its timeout.
        let _ = sender.send(attempt.map(drop));
    });
    match receiver.recv_timeout(TIMEOUT) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("cannot reach {host}: {error}")),
        Err(_) => Err(format!("cannot reach {host} within {} s", TIMEOUT.as_secs())),
    }
}
