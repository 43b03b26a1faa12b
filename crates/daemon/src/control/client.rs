//! The asking side of the control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

use super::{Reply, Request};

/// Asks the server at `socket`, and waits until it is done: counting a large image takes a while.
///
/// # Errors
/// When there is no server, it goes away, or it refuses: then with its reason.
pub fn ask<T: DeserializeOwned>(socket: &Path, request: &Request) -> Result<T> {
    let name = socket.display();
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!("{name}: cannot reach a server there; is 'serve --control {name}' running?")
    })?;
    let mut line = serde_json::to_vec(request).context("cannot ask for that")?;
    line.push(b'\n');
    stream.write_all(&line).with_context(|| format!("{name}: cannot ask the server"))?;
    let mut answer = String::new();
    let received = BufReader::new(stream).read_line(&mut answer);
    received.with_context(|| format!("{name}: cannot hear the server"))?;
    if !answer.ends_with('\n') {
        bail!(
            "{name}: the server ended before it answered, or has too many clients; see its log, and \
             'snapshot list' for what was done"
        );
    }
    let strange = || format!("{name}: the server answered something else than was asked");
    match serde_json::from_str(&answer).with_context(strange)? {
        Reply::Return(value) => serde_json::from_value(value).with_context(strange),
        Reply::Error { desc } => bail!(desc),
    }
}
