//! Character devices: how QMP clients connect.
//!
//! A listening socket serves several clients at once (QEMU: one after the other), and startup does
//! not wait for a client. A connecting socket has one client, as do standard input and output.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use super::keyval::split;

/// How long the process waits at its end for a standard output that blocks.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

/// A character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chardev {
    /// The name for monitors.
    pub id: String,
    /// The kind.
    pub kind: Kind,
}

/// The kinds of character devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A socket that clients connect to.
    Listening(PathBuf),
    /// A socket with this descriptor that clients connect to.
    PassedListening(i32),
    /// A connection with this descriptor.
    PassedConnection(i32),
    /// A socket that a client listens at.
    Connecting(PathBuf),
    /// Standard input and output.
    Stdio,
}

/// Parses `socket,id=ID,path=PATH[,server=on|off][,wait=on|off]`, the same with `fd=N` instead of
/// the path, or `stdio,id=ID`.
///
/// # Errors
/// The reason why `text` describes no device.
pub fn parse(text: &str) -> Result<Chardev, String> {
    let mut parts = split(text).into_iter();
    let backend = parts.next().unwrap_or_default();
    let backend = backend.strip_prefix("backend=").unwrap_or(&backend);
    let (mut id, mut path, mut number, mut is_server) = (None, None, None, false);
    for part in parts {
        // The old form of switches: NAME or noNAME.
        let (key, value) = part.split_once('=').unwrap_or(match part.strip_prefix("no") {
            Some(key) => (key, "off"),
            None => (&part, "on"),
        });
        match (key, backend) {
            ("id", _) => id = Some(value.to_owned()),
            ("path", "socket") => path = Some(PathBuf::from(value)),
            ("server", "socket") => is_server = switch(key, value)?,
            // These values are checked but have no effect: startup never waits for a client, and a
            // terminal's signals stay as they are.
            ("wait", "socket") | ("signal", "stdio") => _ = switch(key, value)?,
            ("fd", "socket") => {
                let wrong = |_| format!("Unable to parse FD number {value}");
                number = Some(value.parse().map_err(wrong)?);
            }
            ("host" | "port", "socket") => {
                return Err(format!(
                    "'{key}' is not possible here: clients of QMP are at Unix sockets (path=)"
                ));
            }
            _ => return Err(format!("Invalid parameter '{key}'")),
        }
    }
    let id = id.ok_or("Parameter 'id' is missing")?;
    let kind = match (backend, path, number) {
        ("stdio", ..) => Kind::Stdio,
        ("socket", None, None) => return Err("Parameter 'path' is missing".into()),
        ("socket", Some(_), Some(_)) => {
            return Err("None or one of 'path', 'fd' or 'host' option required.".into());
        }
        ("socket", Some(path), None) if is_server => Kind::Listening(path),
        ("socket", Some(path), None) => Kind::Connecting(path),
        ("socket", None, Some(number)) if is_server => Kind::PassedListening(number),
        ("socket", None, Some(number)) => Kind::PassedConnection(number),
        _ => {
            return Err(format!("Character devices of the kind '{backend}' are not possible here"));
        }
    };
    Ok(Chardev { id, kind })
}

fn switch(key: &str, value: &str) -> Result<bool, String> {
    let wrong = || format!("Parameter '{key}' expects 'on' or 'off'");
    blockhouse_config::switch::parse(value).ok_or_else(wrong)
}

/// Standard input and output as a socket. [`finish`](Self::finish) waits until all output is
/// written.
pub struct Stdio(Receiver<()>);

impl Stdio {
    /// Starts to copy, and returns the socket.
    ///
    /// # Errors
    /// A socket or thread cannot be created.
    pub fn start() -> io::Result<(OwnedFd, Self)> {
        let (own, given) = UnixStream::pair()?;
        let (input, mut output) = (own.try_clone()?, own);
        thread::Builder::new().name("blockhouse-stdin".into()).spawn(move || {
            // An error is ignored, because the server may have closed its end.
            let _ = io::copy(&mut io::stdin().lock(), &mut &input);
            let _ = input.shutdown(Shutdown::Write);
        })?;
        let (told, written) = channel();
        thread::Builder::new().name("blockhouse-stdout".into()).spawn(move || {
            let mut stdout = io::stdout();
            // An error is ignored, because the reader of standard output may have closed it.
            let _ = io::copy(&mut output, &mut stdout).and_then(|_| stdout.flush());
            let _ = told.send(());
        })?;
        Ok((given.into(), Self(written)))
    }

    /// Waits until all output is written, for at most `EXIT_LIMIT`. The caller has closed every
    /// other copy of the socket.
    pub fn finish(self) {
        let _ = self.0.recv_timeout(EXIT_LIMIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_sockets_and_standard_input() {
        for (text, kind) in [
            ("socket,id=c,path=/s,server=on,wait=off", Kind::Listening("/s".into())),
            ("socket,id=c,path=/s,server,nowait", Kind::Listening("/s".into())),
            ("socket,id=c,fd=3,server=on,wait=off", Kind::PassedListening(3)),
            ("socket,id=c,fd=4", Kind::PassedConnection(4)),
            ("socket,path=a,,b,id=c", Kind::Connecting("a,b".into())),
            ("stdio,id=c", Kind::Stdio),
            ("backend=stdio,id=c,signal=off", Kind::Stdio),
        ] {
            assert_eq!(parse(text), Ok(Chardev { id: "c".into(), kind }), "{text}");
        }
        for (text, words) in [
            ("socket,path=/s", "'id' is missing"),
            ("socket,id=c", "'path' is missing"),
            ("socket,id=c,fd=x", "Unable to parse FD number x"),
            ("socket,id=c,fd=3,path=/s", "None or one of"),
            ("socket,id=c,host=h,port=1", "'host' is not possible"),
            ("socket,id=c,path=/s,server=maybe", "expects 'on' or 'off'"),
            ("pty,id=c", "'pty' are not possible"),
            ("stdio,id=c,mux=on", "Invalid parameter 'mux'"),
        ] {
            assert!(parse(text).is_err_and(|why| why.contains(words)), "{text}");
        }
    }
}
