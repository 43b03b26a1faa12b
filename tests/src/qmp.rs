//! A QMP client. QMP messages are JSON; those of the server are one a line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use serde_json::{Value, json};

use crate::eventually;

/// The longest time until an answer, on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Accepts the connection that a program of QEMU makes to `listener`.
///
/// Tests listen for QEMU, and not the other way round, because a monitor that listens greets a
/// client twice, or is destroyed by it, where that connects before the monitor is complete.
///
/// # Panics
/// When the program ends instead, or does not connect in time.
#[track_caller]
pub fn accept_from(listener: &UnixListener, process: &mut Child) -> UnixStream {
    listener.set_nonblocking(true).expect("a socket");
    let mut found = None;
    let is_there = || {
        found = listener.accept().ok();
        let ended = process.try_wait().expect("a child");
        assert!(ended.is_none(), "QEMU has ended: {ended:?}");
        found.is_some()
    };
    assert!(eventually(LONG, is_there), "QEMU does not connect");
    let (stream, _) = found.expect("it is there");
    stream.set_nonblocking(false).expect("a socket");
    stream
}

/// A connection.
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// The greeting.
    pub greeting: Value,
    /// Events that were received since this was emptied.
    pub events: Vec<Value>,
}

impl Qmp {
    /// Connects to a server without negotiating capabilities.
    ///
    /// # Panics
    /// When no server listens there.
    #[track_caller]
    pub fn greet(socket: &Path) -> Self {
        Self::greet_over(UnixStream::connect(socket).expect("the server listens"))
    }

    /// A client over a connection that a server has made; negotiates capabilities.
    ///
    /// # Panics
    /// When the server does not greet.
    #[track_caller]
    pub fn over(stream: UnixStream) -> Self {
        let mut qmp = Self::greet_over(stream);
        assert_eq!(qmp.ask(r#"{"execute":"qmp_capabilities"}"#), json!({ "return": {} }));
        qmp
    }

    #[track_caller]
    fn greet_over(stream: UnixStream) -> Self {
        Self::try_greet(stream).expect("a greeting")
    }

    fn try_greet(stream: UnixStream) -> Option<Self> {
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        let (stream, events) = (BufReader::new(stream), Vec::new());
        let mut qmp = Self { stream, greeting: Value::Null, events };
        qmp.greeting = qmp.receive()?;
        Some(qmp)
    }

    /// Connects to a server and negotiates capabilities.
    ///
    /// # Panics
    /// When no server listens there.
    #[track_caller]
    pub fn connect(socket: &Path) -> Self {
        let mut qmp = Self::greet(socket);
        assert_eq!(qmp.ask(r#"{"execute":"qmp_capabilities"}"#), json!({ "return": {} }));
        qmp
    }

    /// As [`connect`](Self::connect); `None` if the server has its maximum number of clients.
    ///
    /// # Panics
    /// As there.
    #[track_caller]
    pub fn try_connect(socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).expect("the server listens");
        let mut qmp = Self::try_greet(stream)?;
        assert_eq!(qmp.ask(r#"{"execute":"qmp_capabilities"}"#), json!({ "return": {} }));
        Some(qmp)
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// The same connection, for another thread.
    ///
    /// # Panics
    /// At a limit on descriptors.
    pub fn try_clone(&self) -> Self {
        let stream = self.stream.get_ref().try_clone().expect("a descriptor");
        Self { stream: BufReader::new(stream), greeting: Value::Null, events: Vec::new() }
    }

    /// Ends the connection, also for other threads.
    pub fn hang_up(self) {
        // The server may have ended the connection.
        let _ = self.stream.get_ref().shutdown(std::net::Shutdown::Both);
    }

    /// Sets a limit for the time of sending.
    ///
    /// # Panics
    /// Never: it is a socket.
    pub fn set_write_timeout(&self, limit: Duration) {
        self.stream.get_ref().set_write_timeout(Some(limit)).expect("a socket");
    }

    /// The next message; `None` when the server has closed the connection.
    ///
    /// # Panics
    /// When the message is not JSON.
    pub fn receive(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(serde_json::from_str(&line).expect("JSON")),
        }
    }

    /// Sends a message and returns the answer. Events before the answer are kept.
    ///
    /// # Panics
    /// When no answer comes.
    #[track_caller]
    pub fn ask(&mut self, message: &str) -> Value {
        self.send(message.as_bytes()).expect("the server listens");
        loop {
            let answer = self.receive().expect("the server answers");
            match answer.get("event") {
                Some(_) => self.events.push(answer),
                None => return answer,
            }
        }
    }

    /// The result of a command.
    ///
    /// # Panics
    /// When it is refused.
    #[track_caller]
    pub fn get(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        let answer = self.ask(&request.to_string());
        answer.get("return").unwrap_or_else(|| panic!("{command}: {answer}")).clone()
    }

    /// The text of the error of a command.
    ///
    /// # Panics
    /// When it is not refused.
    #[track_caller]
    pub fn refused(&mut self, command: &str, arguments: Value) -> String {
        let request = json!({ "execute": command, "arguments": arguments });
        let answer = self.ask(&request.to_string());
        let desc = answer["error"]["desc"].as_str();
        desc.unwrap_or_else(|| panic!("{command}: {answer}")).to_owned()
    }

    /// Waits until an event says that the job has the status `last`, or an event of the name `last`
    /// is about the job. Returns all events until then.
    ///
    /// # Panics
    /// When the server ends.
    #[track_caller]
    pub fn events_until(&mut self, job: &str, last: &str) -> Vec<Value> {
        loop {
            let is_last = |event: &Value| {
                let data = &event["data"];
                (data["id"] == job && data["status"] == last)
                    || (data["device"] == job && event["event"] == last)
            };
            if self.events.iter().any(is_last) {
                return std::mem::take(&mut self.events);
            }
            let event = self.receive().expect("an event");
            self.events.push(event);
        }
    }
}
