//! The client side of the control socket.

use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

/// Connects to the control socket of a server.
///
/// # Errors
/// The connection failed; the message says why, and what to do.
fn connect(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).map_err(|error| {
        let name = socket.display();
        let hint = match error.kind() {
            ErrorKind::NotFound if is_address(socket) => {
                "that is an address; name the path that the server has in --control".into()
            }
            ErrorKind::NotFound => format!("there is none; 'serve --control {name}' makes it"),
            ErrorKind::PermissionDenied => {
                let owner = std::fs::metadata(socket).map(|found| found.uid());
                let owner = owner.map_or_else(|_| "its user".into(), |id| format!("user {id}"));
                format!(
                    "run this as {owner} or root, or let a group in: 'serve --control {name},group=GROUP'"
                )
            }
            ErrorKind::ConnectionRefused if !is_socket(socket) => {
                "that is no socket; name the one that the server has in --control".into()
            }
            ErrorKind::ConnectionRefused => "no server listens there any longer; start it again".into(),
            _ => format!("is 'serve --control {name}' running?"),
        };
        anyhow!("{name}: cannot reach a server there: {error}; {hint}")
    })
}

/// Whether the path is written as HOST:PORT.
fn is_address(path: &Path) -> bool {
    let parts = path.to_str().and_then(|text| text.rsplit_once(':'));
    parts.is_some_and(|(host, port)| !host.contains('/') && port.parse::<u16>().is_ok())
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// The kind of a socket that is not a control socket, derived from the first line that it sends.
fn other_kind(line: &str) -> Option<&'static str> {
    let kinds = [("NBDMAGIC", "serves a disk by NBD"), ("HTTP/", "serves metrics")];
    kinds.iter().find(|(begin, _)| line.starts_with(begin)).map(|(_, kind)| *kind)
}

/// Refuses a first line that no control socket sends.
fn check_kind(name: &dyn fmt::Display, line: &str) -> Result<()> {
    match other_kind(line) {
        Some(kind) => bail!("{name}: {kind}, and takes no requests; name the socket of --control"),
        None => Ok(()),
    }
}

/// A connection to a control socket.
pub struct Connection {
    /// The socket's path, for messages.
    name: String,
    stream: BufReader<UnixStream>,
    next_id: u64,
}

/// A server's refusal: one line.
#[derive(Debug)]
pub struct RpcError {
    /// The error code of JSON-RPC.
    pub code: i64,
    /// The reason.
    pub message: String,
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RpcError {}

impl Connection {
    /// Connects to the server at `socket`.
    ///
    /// # Errors
    /// The connection failed.
    pub fn open(socket: &Path) -> Result<Self> {
        let name = socket.display().to_string();
        let stream = connect(socket)?;
        Ok(Self { name, stream: BufReader::new(stream), next_id: 1 })
    }

    /// Calls a method, and waits for its result.
    ///
    /// # Errors
    /// The server closed the connection. If the server refuses the call, the error is an
    /// [`RpcError`].
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        let mut line = serde_json::to_vec(&request).context("cannot ask for that")?;
        line.push(b'\n');
        let sent = self.stream.get_mut().write_all(&line);
        sent.with_context(|| cannot_ask(&self.name))?;
        loop {
            let mut message = self.receive()?;
            if message["id"] != id {
                // An event, or an error that answers no request.
                if message["id"].is_null() && message.get("error").is_some() {
                    return Err(refusal(&message["error"]).into());
                }
                continue;
            }
            return match message.get("error") {
                Some(error) => Err(refusal(error).into()),
                None => Ok(message["result"].take()),
            };
        }
    }

    /// Waits for the next event that was subscribed to.
    ///
    /// # Errors
    /// The server closed the connection.
    pub fn next_event(&mut self) -> Result<Value> {
        loop {
            let mut message = self.receive()?;
            if message["method"] == "event" {
                return Ok(message["params"].take());
            }
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        let received = self.stream.read_line(&mut line);
        received.with_context(|| format!("{}: cannot hear the server", self.name))?;
        check_kind(&self.name, &line)?;
        if !line.ends_with('\n') {
            bail!("{}: the server has ended, or has too many clients; see its log", self.name);
        }
        let strange = || format!("{}: the server answered something that is no JSON", self.name);
        serde_json::from_str(&line).with_context(strange)
    }
}

/// The server has executed nothing, because it executes a request only when the whole line has
/// arrived.
fn cannot_ask(name: &dyn fmt::Display) -> String {
    format!("{name}: the server ended the connection before it was asked; ask again")
}

fn refusal(error: &Value) -> RpcError {
    let message = error["message"].as_str().unwrap_or("the server refuses and does not say why");
    RpcError { code: error["code"].as_i64().unwrap_or_default(), message: message.to_owned() }
}
