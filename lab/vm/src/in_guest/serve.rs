//! A server in the guest that our own client drives.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::server::{Export, Server};

const SOCKET: &str = "/tmp/nbd.sock";

/// Serves `image` to NBD clients; `options` are more words for the server.
pub fn serve(image: &Path, options: &[&str]) -> Result<Server> {
    let mut command = Command::new("blockhouse");
    // The small system has no directory in memory that would outlive a server, and nothing is killed.
    command.arg("serve").arg(image).args(options).args(["--state", "off"]);
    Server::start(command, Export::Nbd, Path::new(SOCKET))
}
