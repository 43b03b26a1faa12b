//! `blockhouse upgrade`: another process takes over the disks and clients of a server.

use std::path::PathBuf;

use anyhow::{Context, Result};

use blockhouse_daemon::control::{Connection, UpgradeReply};
use serde_json::json;

use crate::output;

/// Arguments of `upgrade`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The server's control socket, as given to its --control.
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// The program that takes over, with the server's own command line: one that the server's
    /// --upgrade-to names. Left out: the first of these, or the running program if there is none.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// First complete the requests of TLS clients and disconnect them: their connections cannot be
    /// handed over. When they reconnect, they use the new process. Without this option, an upgrade
    /// is refused while there are such clients.
    #[arg(long)]
    disconnect_tls: bool,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    // The server may have another working directory.
    let binary = arguments.binary.map(std::path::absolute).transpose();
    let binary = binary.context("cannot find the program")?;
    let params = json!({ "binary": binary, "disconnect-tls": arguments.disconnect_tls });
    let result = Connection::open(&arguments.control)?.call("server.upgrade", params)?;
    let UpgradeReply { process, gap_us } = serde_json::from_value(result)?;
    output::print(&format!(
        "process {process} serves now; requests waited for {:.1} ms",
        gap_us as f64 / 1000.0
    ))
}
