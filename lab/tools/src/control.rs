//! A client of a server's control socket: JSON-RPC, one message a line. The server may end at any
//! moment.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The longest time until an answer, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The answer to a method: its result, or the error text.
pub type Answer = Result<Value, String>;

/// A connection.
pub struct Control {
    stream: BufReader<UnixStream>,
    next_id: u64,
}

impl Control {
    /// Connects to a server that listens.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Self { stream: BufReader::new(stream), next_id: 1 })
    }

    /// Sends a request without waiting for its answer; returns the request's number.
    pub fn send(&mut self, method: &str, params: &Value) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        let line = format!("{request}\n");
        self.stream.get_mut().write_all(line.as_bytes()).context("cannot ask the server")?;
        Ok(id)
    }

    /// Waits for the answer to a request; `None` if the server ended before it answered.
    pub fn answer_to(&mut self, id: u64) -> Result<Option<Answer>> {
        loop {
            let mut line = String::new();
            match self.stream.read_line(&mut line) {
                Ok(_) if line.ends_with('\n') => {}
                // A killed server may leave half a line.
                Ok(_) => return Ok(None),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    return Ok(None);
                }
                Err(error) => return Err(error).context("no answer"),
            }
            let mut answer: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
            if answer["id"] == id {
                let error = answer.get("error").map(|error| error["message"].to_string());
                return Ok(Some(error.map_or_else(|| Ok(answer["result"].take()), Err)));
            }
        }
    }

    /// Calls a method and waits for the answer; the server must not end before.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Answer> {
        let id = self.send(method, params)?;
        self.answer_to(id)?.with_context(|| format!("the server ended before it answered {method}"))
    }
}
