//! Reads a server's metrics as JSON: by HTTP from its metrics address, or from its control socket.

use std::fmt;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use super::model::Snapshot;

/// The message for a socket of another kind, usually the socket of an NBD export.
const NO_JSON: &str = "the answer is not JSON; start the server with --metrics unix:PATH or --control PATH, and \
                       name that path here";
/// How long the server may take to receive the request, and to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of an answer, which suffice for some ten thousand disks.
const MAX_ANSWER: u64 = 256 << 20;
const HTTP_REQUEST: &[u8] =
    b"GET /metrics.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
const CONTROL_REQUEST: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"stats.get\"}\n";

/// Where a server's metrics are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// HOST:PORT.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("http://").unwrap_or(text);
        // Drops the path of a URL, as the server's ready line and a browser show it.
        let address = text.split_once('/').map(|(address, _)| address);
        let text = address.filter(|address| is_address(address)).unwrap_or(text);
        match text.strip_prefix("unix:") {
            Some(path) => Ok(Self::Unix(path.into())),
            None if text.is_empty() => Err("use HOST:PORT or the path of a Unix socket".into()),
            None if is_address(text) => Ok(Self::Tcp(text.into())),
            None => Ok(Self::Unix(text.into())),
        }
    }
}

/// Whether the text is HOST:PORT rather than a path.
fn is_address(text: &str) -> bool {
    let parts = text.rsplit_once(':');
    parts.is_some_and(|(host, port)| !host.contains('/') && port.parse::<u16>().is_ok())
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A connection.
trait Connection: Read + Write {}
impl<T: Read + Write> Connection for T {}

impl Source {
    /// The server's metrics at this moment.
    ///
    /// # Errors
    /// No server answers there, or the answer is not a server's metrics.
    pub fn read(&self) -> Result<Snapshot> {
        let read = || match self.ask_http()? {
            Some(answer) => Snapshot::parse(&answer),
            None => Snapshot::parse(&self.ask_control()?),
        };
        read().with_context(|| format!("{self}: cannot read metrics"))
    }

    fn connect(&self) -> Result<Box<dyn Connection>> {
        let failed = |error: std::io::Error| {
            anyhow!("{error}; name what a running server has in --metrics or --control")
        };
        match self {
            Self::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                Ok(Box::new(stream))
            }
            Self::Tcp(address) => {
                let address = address.to_socket_addrs()?.next().context("no such address")?;
                let stream = TcpStream::connect_timeout(&address, TIMEOUT).map_err(failed)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                Ok(Box::new(stream))
            }
        }
    }

    /// The answer to an HTTP request; `None` if the server does not speak HTTP.
    fn ask_http(&self) -> Result<Option<Value>> {
        let mut stream = self.connect()?;
        stream.write_all(HTTP_REQUEST)?;
        let mut answer = vec![0; 1];
        stream.read_exact(&mut answer).context("the server closed the connection")?;
        if answer != b"H" {
            return Ok(None);
        }
        stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
        let text = String::from_utf8(answer).context("the answer is no text")?;
        let (head, body) = text.split_once("\r\n\r\n").context("the answer is incomplete")?;
        let status = head.lines().next().unwrap_or_default();
        if status.split(' ').nth(1) != Some("200") {
            bail!("the server answered '{}'", status.escape_debug());
        }
        Ok(Some(serde_json::from_str(body).map_err(|_| anyhow!(NO_JSON))?))
    }

    fn ask_control(&self) -> Result<Value> {
        let mut stream = self.connect()?;
        stream.write_all(CONTROL_REQUEST)?;
        let mut line = Vec::new();
        let mut reader = std::io::BufReader::new(stream.take(MAX_ANSWER));
        std::io::BufRead::read_until(&mut reader, b'\n', &mut line)?;
        let mut answer: Value = serde_json::from_slice(&line).map_err(|_| anyhow!(NO_JSON))?;
        match answer.get_mut("result") {
            Some(result) => Ok(result.take()),
            None => Err(anyhow!(
                "this socket answers no 'stats.get'; use the address of 'serve --metrics'"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_paths_are_told_apart() {
        let tcp = |address: &str| Ok(Source::Tcp(address.to_owned()));
        let unix = |path: &str| Ok(Source::Unix(path.into()));
        assert_eq!("127.0.0.1:9100".parse(), tcp("127.0.0.1:9100"));
        assert_eq!("[::1]:9100".parse(), tcp("[::1]:9100"));
        assert_eq!("http://localhost:9100/metrics".parse(), tcp("localhost:9100"));
        assert_eq!("http://127.0.0.1:9100/".parse(), tcp("127.0.0.1:9100"));
        assert_eq!("unix:a:1".parse(), unix("a:1"));
        assert_eq!("./a:1".parse(), unix("./a:1"));
        assert_eq!("run/metrics".parse(), unix("run/metrics"));
        assert!("".parse::<Source>().is_err());
    }
}
