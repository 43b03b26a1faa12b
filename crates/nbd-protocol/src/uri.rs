//! NBD URIs (`doc/uri.md` of the reference implementation): where an export is.
//!
//! `nbd://HOST:PORT/NAME` over TCP and `nbd+unix:///NAME?socket=PATH` over a Unix socket; with TLS
//! `nbds` and `nbds+unix`. A part of a URI that cannot be obeyed is an error, never ignored.

use std::ffi::OsString;
use std::fmt;
use std::net::Ipv6Addr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use crate::tls_parameters::TlsParameters;
use crate::{DEFAULT_PORT, MAX_STRING};

/// Characters that are percent-encoded in a path or a query value: all but unreserved characters
/// (RFC 3986, section 2.3) and the slash.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Characters that are percent-encoded in a host: those of [`ENCODED`], and the slash.
const ENCODED_HOST: &AsciiSet = &ENCODED.add(b'/');

/// An export and the address of its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Whether TLS is required.
    pub security: Security,
    /// The server.
    pub address: Address,
    /// The name of the export; empty for the default one.
    pub export: String,
}

/// Where a client finds an export, and the credentials of both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientUri {
    /// The export.
    pub export: NbdUri,
    /// The parameters of TLS; empty without TLS.
    pub tls: TlsParameters,
}

/// Whether the connections of a URI use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// `nbd`: TLS is not required.
    Plain,
    /// `nbds`: TLS is required.
    Tls,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket with this path.
    Unix(PathBuf),
}

/// Why a text is no usable URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{uri}: {reason}")]
pub struct UriError {
    uri: String,
    reason: String,
}

impl NbdUri {
    fn parse(text: &str) -> Result<Self, String> {
        let (export, beside) = parse(text)?;
        match (beside.user, beside.tls.first()) {
            ("" | ":", None) => Ok(export),
            ("" | ":", Some((key, _))) => {
                Err(format!("the parameter {key} is not supported; a server's options set up TLS"))
            }
            _ => Err("a user name is not supported; a server's options say whom TLS admits".into()),
        }
    }
}

impl ClientUri {
    fn parse(text: &str) -> Result<Self, String> {
        let (export, beside) = parse(text)?;
        let user = if beside.user == ":" { "" } else { beside.user };
        if export.security == Security::Plain {
            if let Some((key, _)) = beside.tls.first() {
                return Err(format!("the parameter {key} needs TLS (nbds)"));
            }
            if !user.is_empty() {
                return Err("a user name needs TLS (nbds)".into());
            }
        }
        Ok(Self { tls: TlsParameters::parse(user, &beside.tls)?, export })
    }
}

impl From<NbdUri> for ClientUri {
    fn from(export: NbdUri) -> Self {
        Self { export, tls: TlsParameters::default() }
    }
}

/// The parts of a URI beside the export, percent-encoded.
struct Beside<'a> {
    user: &'a str,
    /// Parameters whose names begin with `tls-`.
    tls: Vec<Parameter<'a>>,
}

fn parse(text: &str) -> Result<(NbdUri, Beside<'_>), String> {
    if text.contains(|c: char| c.is_ascii_control() || c == ' ') {
        return Err("a URI has no blanks; write them as %20".into());
    }
    let (scheme, rest) = split_scheme(text).ok_or("not a URI: it does not begin with SCHEME:, as nbd+unix:///?socket=PATH and nbd://HOST:PORT do")?;
    type Transport = fn(&Parts<'_>, Option<PathBuf>) -> Result<Address, String>;
    let (transport, security): (Transport, _) = match scheme.to_ascii_lowercase().as_str() {
        "nbd" => (tcp, Security::Plain),
        "nbd+unix" => (unix, Security::Plain),
        "nbds" => (tcp, Security::Tls),
        "nbds+unix" => (unix, Security::Tls),
        _ => return Err("not an NBD URI; it starts with nbd:// or nbd+unix://".into()),
    };
    let rest = rest.strip_prefix("//");
    let uri = Parts::of(rest.ok_or("an NBD URI starts with nbd:// or nbd+unix://")?);
    if uri.has_fragment {
        return Err("a fragment (#) means nothing here; write # as %23".into());
    }
    let (socket, tls) = parameters(uri.query)?;
    let address = transport(&uri, socket)?;
    Ok((NbdUri { security, address, export: export(uri.path)? }, Beside { user: uri.user, tls }))
}

/// The scheme (RFC 3986, section 3.1) and the text after its colon.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(':')?;
    let in_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let is_scheme =
        scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.bytes().all(in_scheme);
    is_scheme.then_some((scheme, rest))
}

/// The parts of a URI (RFC 3986, sections 3.2 to 3.5), each percent-encoded as it was written.
struct Parts<'a> {
    user: &'a str,
    host: &'a str,
    port: Option<&'a str>,
    path: &'a str,
    query: &'a str,
    has_fragment: bool,
}

impl<'a> Parts<'a> {
    /// The parts of the text that follows `SCHEME://`.
    fn of(text: &'a str) -> Self {
        let (text, fragment) = split_before(text, '#');
        let (text, query) = split_before(text, '?');
        let (authority, path) = split_before(text, '/');
        let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        // The colons of an IPv6 address are inside of its brackets.
        let brackets = host.rfind(']').map_or(0, |end| end + 1);
        let (name, port) = split_before(&host[brackets..], ':');
        Self {
            user,
            host: &host[..brackets + name.len()],
            port: port.strip_prefix(':'),
            path,
            query: query.strip_prefix('?').unwrap_or(""),
            has_fragment: !fragment.is_empty(),
        }
    }
}

/// `text` before the first `mark`, and the rest that begins with it.
fn split_before(text: &str, mark: char) -> (&str, &str) {
    text.split_at(text.find(mark).unwrap_or(text.len()))
}

fn tcp(uri: &Parts<'_>, socket: Option<PathBuf>) -> Result<Address, String> {
    if socket.is_some() {
        return Err("a socket path needs nbd+unix://".into());
    }
    if uri.host.is_empty() {
        return Err("the host is missing; nbd://localhost/ is this machine".into());
    }
    let port = match uri.port {
        None | Some("") => DEFAULT_PORT,
        Some(port) => parse_port(port).ok_or("not a URI: the port is not a number up to 65535")?,
    };
    Ok(Address::Tcp { host: parse_host(uri.host)?, port })
}

/// An IPv6 address without its brackets, or a name or an IPv4 address.
fn parse_host(text: &str) -> Result<String, String> {
    if let Some(address) = text.strip_prefix('[') {
        let address = address.strip_suffix(']').and_then(|text| text.parse::<Ipv6Addr>().ok());
        let address = address.ok_or("not a URI: no IPv6 address in the brackets of the host")?;
        return Ok(address.to_string());
    }
    if let Some(found) = text.chars().find(|c| "<>[]\\^|:".contains(*c)) {
        return Err(format!("not a URI: the host contains {found}; percent-encode it"));
    }
    let host = percent_decode_str(text).decode_utf8();
    Ok(host.map_err(|_| "the host is not UTF-8")?.into_owned())
}

fn parse_port(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn unix(uri: &Parts<'_>, socket: Option<PathBuf>) -> Result<Address, String> {
    if !uri.host.is_empty() || uri.port.is_some() {
        return Err("a Unix socket has no host; write nbd+unix:///NAME?socket=PATH".into());
    }
    let path = socket.ok_or("the socket is missing; write nbd+unix:///NAME?socket=PATH")?;
    if path.as_os_str().is_empty() {
        return Err("the path of the socket is empty".into());
    }
    if path.as_os_str().as_bytes().contains(&0) {
        return Err("the path of a socket cannot contain NUL (abstract sockets)".into());
    }
    Ok(Address::Unix(path))
}

/// A parameter and its value, percent-encoded.
type Parameter<'a> = (&'a str, &'a str);

/// The query parameter `socket`, and those of TLS.
fn parameters(query: &str) -> Result<(Option<PathBuf>, Vec<Parameter<'_>>), String> {
    let (mut socket, mut tls) = (None, Vec::new());
    for parameter in query.split('&').filter(|one| !one.is_empty()) {
        let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match key {
            "socket" if socket.is_none() => {
                let bytes = percent_decode_str(value).collect();
                socket = Some(PathBuf::from(OsString::from_vec(bytes)));
            }
            "socket" => return Err("the parameter socket is given twice".into()),
            _ if key.starts_with("tls-") => tls.push((key, value)),
            _ => return Err(format!("the parameter {key} is unknown")),
        }
    }
    Ok((socket, tls))
}

/// The name of the export that a path means. `.` and `..` have no special meaning in it.
fn export(path: &str) -> Result<String, String> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let name = percent_decode_str(path).decode_utf8();
    let name = name.map_err(|_| "the name of the export is not UTF-8")?.into_owned();
    if name.contains('\0') {
        return Err("the name of the export contains NUL".into());
    }
    if name.len() > MAX_STRING {
        return Err(format!("the name of the export is longer than {MAX_STRING} bytes"));
    }
    Ok(name)
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        Self::parse(text).map_err(|reason| UriError { uri: text.into(), reason })
    }
}

impl FromStr for ClientUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        Self::parse(text).map_err(|reason| UriError { uri: text.into(), reason })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = percent_encode(self.export.as_bytes(), ENCODED);
        let scheme = match self.security {
            Security::Plain => "nbd",
            Security::Tls => "nbds",
        };
        match &self.address {
            Address::Tcp { host, port } => {
                if is_ipv6(host) {
                    write!(f, "{scheme}://[{host}]")?;
                } else {
                    write!(f, "{scheme}://{}", percent_encode(host.as_bytes(), ENCODED_HOST))?;
                }
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")
            }
            Address::Unix(path) => {
                let path = percent_encode(path.as_os_str().as_bytes(), ENCODED);
                write!(f, "{scheme}+unix:///{export}?socket={path}")
            }
        }
    }
}

/// Whether a host is an IPv6 address, which is written in brackets. A name may have colons as well;
/// an address in another spelling counts as a name.
fn is_ipv6(host: &str) -> bool {
    host.parse::<Ipv6Addr>().is_ok_and(|address| address.to_string() == host)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn tcp_uri(host: &str, port: u16, export: &str) -> NbdUri {
        let address = Address::Tcp { host: host.into(), port };
        NbdUri { security: Security::Plain, address, export: export.into() }
    }

    fn unix_uri(path: &str, export: &str) -> NbdUri {
        let address = Address::Unix(path.into());
        NbdUri { security: Security::Plain, address, export: export.into() }
    }

    #[test]
    fn the_examples_of_the_standard_are_understood() {
        for (text, uri) in [
            ("nbd://example.com:10810/export", tcp_uri("example.com", 10810, "export")),
            ("nbd+unix:///export?socket=nbd.sock", unix_uri("nbd.sock", "export")),
            ("nbd://example.com/disk", tcp_uri("example.com", 10809, "disk")),
            ("nbd+unix:///disk?socket=sock", unix_uri("sock", "disk")),
            ("nbd+unix://?socket=sock", unix_uri("sock", "")),
            ("nbd://example.com/", tcp_uri("example.com", 10809, "")),
            ("nbd://example.com", tcp_uri("example.com", 10809, "")),
            ("nbd://example.com//disk", tcp_uri("example.com", 10809, "/disk")),
            ("nbd://example.com/hello%20world", tcp_uri("example.com", 10809, "hello world")),
            ("nbd://example.com/a/../b", tcp_uri("example.com", 10809, "a/../b")),
            ("nbd://[::1]:7/x", tcp_uri("::1", 7, "x")),
            ("nbd://127.0.0.1", tcp_uri("127.0.0.1", 10809, "")),
            ("nbd+unix:///?socket=/tmp/a+b%20c", unix_uri("/tmp/a+b c", "")),
            ("nbd+unix:///a/b@c:d?&socket=x/@y?z&", unix_uri("x/@y?z", "a/b@c:d")),
            ("NBD://example.com", tcp_uri("example.com", 10809, "")),
            ("nbd://example.com:/x", tcp_uri("example.com", 10809, "x")),
            ("nbd://ex%41mple?", tcp_uri("exAmple", 10809, "")),
            ("nbd://[0:0::1]", tcp_uri("::1", 10809, "")),
        ] {
            assert_eq!(text.parse(), Ok(uri), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_its_reason() {
        for (text, reason) in [
            ("nbd+unix:///?socket=s&tls-type=x509", "tls-type is not supported"),
            ("nbd://me@example.com/", "whom TLS admits"),
            ("nbd+unix:///disk", "the socket is missing"),
            ("nbd+unix:///disk?socket=", "is empty"),
            ("nbd+unix:///?socket=%00abstract", "NUL"),
            ("nbd+unix://host/disk?socket=s", "has no host"),
            ("nbd+unix:///?socket=a&socket=b", "given twice"),
            ("nbd://example.com/?socket=s", "needs nbd+unix"),
            ("nbd://example.com/?color=red", "color is unknown"),
            ("nbd://example.com/x#y", "fragment"),
            ("nbd://example.com/%ff", "not UTF-8"),
            ("nbd://example.com/a%00b", "NUL"),
            ("nbd:///disk", "the host is missing"),
            ("nbd:disk", "starts with nbd://"),
            ("http://example.com/", "not an NBD URI"),
            ("disk.img", "not a URI"),
            ("nbd://example.com/a b", "no blanks"),
            ("nbd://example.com:99999/", "not a URI"),
            ("nbd://example.com:+1/", "not a URI"),
            ("nbd://example.com:1:2/", "not a URI"),
            ("nbd://::1/", "the host is missing"),
            ("nbd://[::1/", "not a URI"),
            ("nbd://[::1]0/", "not a URI"),
            ("nbd://[example.com]/", "not a URI"),
            ("nbd://a|b/", "not a URI"),
            ("nbd://%ff/", "not UTF-8"),
            ("nbd://:10809/", "the host is missing"),
            ("nbds://me:secret@example.com/", "whom TLS admits"),
            ("nbd+unix://:1/?socket=s", "has no host"),
            ("1nbd://example.com/", "not a URI"),
            ("://example.com/", "not a URI"),
        ] {
            let error = text.parse::<NbdUri>().expect_err(text).to_string();
            assert!(error.starts_with(text) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_client_says_in_its_uri_who_it_is() {
        let folder =
            "nbds://h/a?tls-certificates=/etc/p%20k&tls-hostname=www&tls-verify-peer=false";
        let uri: ClientUri = folder.parse().unwrap();
        assert_eq!(uri.export.to_string(), "nbds://h/a");
        assert_eq!(uri.tls.certificates(), Some(Path::new("/etc/p k")));
        assert_eq!((uri.tls.hostname(), uri.tls.verifies_peer()), (Some("www"), false));
        let key = "nbds+unix://al%40ice@/a?socket=/s&tls-psk-file=keys";
        let uri: ClientUri = key.parse().unwrap();
        assert_eq!(uri.export, NbdUri { security: Security::Tls, ..unix_uri("/s", "a") });
        assert_eq!(uri.tls.psk(), Some(("al@ice", Path::new("keys"))));
        assert!(uri.tls.verifies_peer());
        let plain: ClientUri = "nbd://h/a".parse().unwrap();
        assert_eq!(plain, tcp_uri("h", 10809, "a").into());
    }

    #[test]
    fn a_client_that_cannot_be_who_it_says_is_refused() {
        for (text, reason) in [
            ("nbd://h/?tls-certificates=/p", "tls-certificates needs TLS"),
            ("nbd://me@h/", "a user name needs TLS"),
            ("nbds://h/?tls-type=anon", "tls-type is unknown"),
            ("nbds://h/?tls-hostname=a&tls-hostname=b", "given twice"),
            ("nbds://h/?tls-verify-peer=maybe", "true or false"),
            ("nbds://h/?tls-certificates=", "is empty"),
            ("nbds://h/?tls-psk-file=/k", "nbds://IDENTITY@"),
            ("nbds://me@h/", "tls-psk-file=FILE"),
            ("nbds://me:secret@h/?tls-psk-file=/k", "password"),
            ("nbds://me@h/?tls-psk-file=/k&tls-certificates=/p", "use one"),
            ("nbds://me@h/?tls-psk-file=/k&tls-hostname=x", "tls-hostname is for certificates"),
            ("nbds://%ff@h/?tls-psk-file=/k", "not UTF-8"),
            ("nbds://a%00b@h/?tls-psk-file=/k", "NUL"),
            ("nbds://h/?tls-certificates=a%00b", "NUL"),
        ] {
            let error = text.parse::<ClientUri>().expect_err(text).to_string();
            assert!(error.starts_with(text) && error.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(
            export in "[^\0]{0,40}",
            path in "[^\0]{1,40}",
            host in prop_oneof!["[a-z][a-z0-9.-]{0,20}", Just("::1".to_string()), Just("x/y".to_string()), Just("a,#:b".to_string()), Just("0::1".to_string())],
            port in 1u16..,
        ) {
            let plain = [tcp_uri(&host, port, &export), unix_uri(&path, &export)];
            let tls = plain.clone().map(|uri| NbdUri { security: Security::Tls, ..uri });
            for uri in plain.into_iter().chain(tls) {
                prop_assert_eq!(uri.to_string().parse(), Ok(uri));
            }
        }
    }
}
