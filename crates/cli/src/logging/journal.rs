//! Sends log lines to systemd's journal, with their fields (systemd.io/JOURNAL_NATIVE_PROTOCOL).
//!
//! The thread that writes the log gets lines of JSON and sends each as a datagram. A line that
//! the journal does not accept is written to standard error, which the journal reads as well, with
//! a priority in front (sd-daemon(3)).

use std::os::linux::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use rustix::fs::fstat;
use serde_json::{Map, Value};

use super::queue::write_to_standard_error;

const SOCKET: &str = "/run/systemd/journal/socket";

/// A connection to the journal.
pub struct Journal(UnixDatagram);

impl Journal {
    /// The journal, if standard error is a stream to it.
    pub fn of_standard_error() -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let stat = fstat(rustix::stdio::stderr()).ok()?;
        (stream == format!("{}:{}", stat.st_dev, stat.st_ino)).then_some(())?;
        Self::at(Path::new(SOCKET))
    }

    fn at(path: &Path) -> Option<Self> {
        // The path must be a socket. On a host without a journal it may be any file.
        std::fs::metadata(path).ok().filter(|file| file.st_mode() & 0o170_000 == 0o140_000)?;
        let socket = UnixDatagram::unbound().ok()?;
        socket.connect(path).ok()?;
        Some(Self(socket))
    }

    /// Sends complete lines.
    pub fn send(&self, lines: &[u8]) {
        for line in lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            let object = serde_json::from_slice(line).unwrap_or_else(|_| {
                let message = String::from_utf8_lossy(line).into_owned();
                Map::from_iter([("message".to_owned(), message.into())])
            });
            if self.0.send(&datagram(&object)).is_err() {
                let message = object.get("message").and_then(Value::as_str).unwrap_or_default();
                let text = format!("<{}>{message}\n", priority(&object));
                write_to_standard_error(text.as_bytes());
            }
        }
    }
}

/// The priorities of syslog(3).
fn priority(object: &Map<String, Value>) -> u32 {
    match object.get("level").and_then(Value::as_str) {
        Some("error") => 3,
        Some("warning") => 4,
        Some("debug") => 7,
        _ => 6,
    }
}

/// The fields of an entry. Fields that this program defines begin with `BLOCKHOUSE_`.
fn datagram(object: &Map<String, Value>) -> Vec<u8> {
    let mut datagram = Vec::new();
    add(&mut datagram, "SYSLOG_IDENTIFIER", "blockhouse");
    add(&mut datagram, "PRIORITY", &priority(object).to_string());
    for (name, value) in object {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        match &name[..] {
            "message" => add(&mut datagram, "MESSAGE", &text),
            // The journal records time and priority itself.
            "time" | "level" => {}
            name => {
                let is_word = |c: char| c.is_ascii_alphanumeric();
                let name = name.replace(|c| !is_word(c), "_").to_uppercase();
                add(&mut datagram, &format!("BLOCKHOUSE_{name}"), &text);
            }
        }
    }
    datagram
}

/// Adds a field as `NAME=value`. If the value has several lines, adds the name, the value's length
/// and the value instead.
fn add(datagram: &mut Vec<u8>, name: &str, value: &str) {
    datagram.extend(name.as_bytes());
    if value.contains('\n') {
        datagram.push(b'\n');
        datagram.extend((value.len() as u64).to_le_bytes());
    } else {
        datagram.push(b'=');
    }
    datagram.extend(value.as_bytes());
    datagram.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_entry_with_fields() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        assert!(Journal::at(&path).is_none(), "nothing is there");
        let receiver = UnixDatagram::bind(&path).expect("a socket");
        let journal = Journal::at(&path).expect("it is there");
        let lines = concat!(
            r#"{"level":"warning","message":"two\nlines","target":"blockhouse_disk","time":"x","disk-name":"a","n":7}"#,
            "\nplain words\n"
        );
        journal.send(lines.as_bytes());
        let receive = || {
            let mut bytes = [0; 1000];
            let length = receiver.recv(&mut bytes).expect("a datagram");
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        let entry = receive();
        for field in [
            "SYSLOG_IDENTIFIER=blockhouse\n",
            "PRIORITY=4\n",
            "MESSAGE\n\u{9}\0\0\0\0\0\0\0two\nlines\n",
            "BLOCKHOUSE_TARGET=blockhouse_disk\n",
            "BLOCKHOUSE_DISK_NAME=a\n",
            "BLOCKHOUSE_N=7\n",
        ] {
            assert!(entry.contains(field), "{field:?}: {entry:?}");
        }
        assert!(!entry.contains("TIME"), "{entry:?}");
        assert_eq!(receive(), "SYSLOG_IDENTIFIER=blockhouse\nPRIORITY=6\nMESSAGE=plain words\n");
    }
}
