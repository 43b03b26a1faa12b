//! `cargo xtask deny`: checks our dependencies by the rules of `deny.toml`, with cargo-deny.
//!
//! cargo-deny is installed into `target/tools` if it is missing. The check of advisories needs a
//! database from the network; if that cannot be reached, the check is skipped with a message.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;

use lab_tools::process::run as run_command;
use lab_tools::workspace::Workspace;

use crate::tools;

const VERSION: &str = "0.20.2";
const DATABASE_HOST: &str = "github.com:443";
const TIMEOUT: Duration = Duration::from_secs(4);

/// Runs the checks.
pub fn run(workspace: &Workspace) -> Result<()> {
    let tool = tools::installed(workspace, "cargo-deny", VERSION)?;
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

/// Whether a TCP connection to `host` opens within [`TIMEOUT`]; the error says why not.
fn reach(host: &'static str) -> Result<(), String> {
    let (sender, receiver) = mpsc::channel();
    // Name resolution has no timeout, so it runs in a thread that we do not wait for.
    std::thread::spawn(move || {
        let attempt = host.to_socket_addrs().and_then(|mut addresses| {
            let address = addresses.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
            TcpStream::connect_timeout(&address, TIMEOUT)
        });
        // The receiver is dropped after its timeout.
        let _ = sender.send(attempt.map(drop));
    });
    match receiver.recv_timeout(TIMEOUT) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("cannot reach {host}: {error}")),
        Err(_) => Err(format!("cannot reach {host} within {} s", TIMEOUT.as_secs())),
    }
}
