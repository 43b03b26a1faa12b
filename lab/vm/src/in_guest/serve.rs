//! A server in the guest that our own client drives.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::server::{Export, Server};

const SOCKET: &str = "/tmp/nbd.sock";

/// Serves `image` to NBD clients, with state; `options` are more words for the server.
pub fn serve(image: &Path, options: &[&str]) -> Result<Server> {
    start(image, options, "/tmp/state")
}

/// The same without state, for images that are inspected later as after a loss of power. Only a
/// boot would make the state void, and the host has not booted since.
pub fn serve_without_state(image: &Path, options: &[&str]) -> Result<Server> {
    start(image, options, "off")
}

fn start(image: &Path, options: &[&str], state: &str) -> Result<Server> {
    let mut command = Command::new("blockhouse");
    command.arg("serve").arg(image).args(options).args(["--state", state]);
    Server::start(command, Export::Nbd, Path::new(SOCKET))
}
