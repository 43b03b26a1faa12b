//! A client of a control socket: JSON-RPC, a message a line.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// The longest time until an answer, on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A connection.
pub struct Control {
    stream: BufReader<UnixStream>,
    next_id: u64,
}

impl Control {
    /// Connects to a server.
    ///
    /// # Panics
    /// When no server listens there.
    #[track_caller]
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the server listens");
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        Self { stream: BufReader::new(stream), next_id: 1 }
    }

    /// Calls a method. Returns its result, or the code and the message of its error.
    ///
    /// # Panics
    /// When the server ends, or its answer is not JSON-RPC.
    #[track_caller]
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value, (i64, String)> {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        self.send(request.to_string().as_bytes()).expect("the server listens");
        loop {
            let mut answer = self.receive().expect("the server answers");
            // An event, or the answer to a line that was sent before.
            if answer["id"] != id {
                continue;
            }
            return match answer.get("error") {
                None => Ok(answer["result"].take()),
                Some(error) => {
                    let message = error["message"].as_str().expect("a message").to_owned();
                    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
                    Err((error["code"].as_i64().expect("a code"), message))
                }
            };
        }
    }

    /// As [`call`](Self::call), which must succeed.
    ///
    /// # Panics
    /// When it fails.
    #[track_caller]
    pub fn get(&mut self, method: &str, params: Value) -> Value {
        self.call(method, params).unwrap_or_else(|error| panic!("{method}: {error:?}"))
    }

    /// As [`call`](Self::call), which must be refused with this code and all these words.
    ///
    /// # Panics
    /// When it is not.
    #[track_caller]
    pub fn refused(&mut self, method: &str, params: Value, code: i64, words: &[&str]) {
        let (found, message) = self.call(method, params).expect_err("it must be refused");
        assert_eq!(found, code, "{message}");
        for word in words {
            assert!(message.contains(word), "{word:?} is expected: {message}");
        }
    }

    /// Sends a line.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(&[line, b"\n"].concat())
    }

    /// The next message; `None` at the end of the connection.
    ///
    /// # Panics
    /// When the message is not JSON, or none comes in time.
    pub fn receive(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => {
                let message = serde_json::from_str(&line);
                Some(message.unwrap_or_else(|error| panic!("{line:?}: {error}")))
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no message: {error}"),
        }
    }

    /// The content of the next event.
    ///
    /// # Panics
    /// When none comes.
    pub fn event(&mut self) -> Value {
        loop {
            let mut message = self.receive().expect("the server goes on");
            if message["method"] == "event" {
                return message["params"].take();
            }
        }
    }
}
