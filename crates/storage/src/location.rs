//! The location of an image, as a user writes it: a path, the URI of an NBD server's export, the
//! name of an image in Ceph, or that of a null device.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_nbd_protocol::uri::ClientUri;

use crate::null::NullLocation;
use crate::rbd::{RbdLocation, SCHEME};

/// Maximum time that requests may wait for a server that is gone.
const MAX_RECONNECT: Duration = Duration::from_secs(24 * 60 * 60);

/// The location of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or block device.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd {
        /// The server and the export, and its TLS parameters.
        uri: ClientUri,
        /// How long requests wait for the server after the connection fails. Zero: they fail at
        /// once.
        reconnect: Duration,
    },
    /// An image in Ceph.
    Rbd(RbdLocation),
    /// A null device: reads return zeros, and writes are dropped.
    Null(NullLocation),
}

impl Location {
    /// Parses a name. `nbd://`, `nbd+unix://`, `nbds://` and `nbds+unix://` begin the URI of an
    /// export, which may have the parameter `reconnect=SECONDS`. `rbd:` begins the name of an image
    /// in Ceph, `null-co://` or `null-aio://` that of a null device. Everything else is a path. The
    /// prefix `./` makes any name a path.
    ///
    /// # Errors
    /// `InvalidInput` if a URI or a name is invalid.
    pub fn of(name: &Path) -> Result<Self> {
        let bytes = name.as_os_str().as_bytes();
        if bytes.starts_with(SCHEME.as_bytes()) {
            let text = name.to_str().ok_or_else(|| invalid(name, "it is not UTF-8".into()))?;
            return Ok(Self::Rbd(text.parse().map_err(|why| invalid(name, why))?));
        }
        if NullLocation::driver_of(bytes).is_some() {
            let text = name.to_string_lossy();
            return Ok(Self::Null(text.parse().map_err(|why| invalid(name, why))?));
        }
        let is_uri =
            [&b"nbd://"[..], b"nbd+unix://", b"nbds://", b"nbds+unix://"].iter().any(|scheme| {
                bytes.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme))
            });
        if !is_uri {
            return Ok(Self::File(name.to_owned()));
        }
        let text = name.to_str().ok_or_else(|| invalid(name, "a URI is UTF-8".into()))?;
        let (text, reconnect) = split_reconnect(text).map_err(|why| invalid(name, why))?;
        let uri = text.parse::<ClientUri>();
        let uri = uri.map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))?;
        Ok(Self::Nbd { uri, reconnect })
    }

    /// The image's base name: the last part of its path or of its export's name, its name in Ceph,
    /// or the null driver's name. `None` if the path or the export's name has no last part.
    pub fn base_name(name: &Path) -> Option<OsString> {
        match Self::of(name) {
            Ok(Self::Nbd { uri, .. }) => {
                Path::new(&uri.export.export).file_name().map(OsStr::to_owned)
            }
            Ok(Self::Rbd(rbd)) => Some(rbd.image().into()),
            Ok(Self::Null(null)) => Some(null.driver().into()),
            _ => name.file_name().map(OsStr::to_owned),
        }
    }

    /// The default name of a disk: its image's [base name](Self::base_name), or the part after the
    /// last slash if the URI names no export. `None` if there is neither.
    pub fn label(name: &Path) -> Option<String> {
        let name = Self::base_name(name).or_else(|| name.file_name().map(OsStr::to_owned))?;
        Some(name.to_string_lossy().into_owned())
    }

    /// The local path that is read to open the image: the path of the image, or of the files for
    /// TLS.
    pub fn local_path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Nbd { uri, .. } => uri.tls.local_path(),
            Self::Rbd(_) | Self::Null(_) => None,
        }
    }

    /// Whether an image's reference to another image (`name`) is not a path.
    pub fn is_remote(name: &[u8]) -> bool {
        !matches!(Self::of(Path::new(OsStr::from_bytes(name))), Ok(Self::File(_)))
    }
}

fn invalid(name: &Path, why: String) -> Error {
    Error::new(ErrorKind::InvalidInput, why).on(&name.to_string_lossy())
}

/// The URI without the parameter `reconnect`, and its value.
fn split_reconnect(text: &str) -> Result<(String, Duration), String> {
    let Some((before, query)) = text.split_once('?') else {
        return Ok((text.into(), Duration::ZERO));
    };
    let (query, fragment) = query.split_at(query.find('#').unwrap_or(query.len()));
    let mut reconnect = None;
    let mut rest = Vec::new();
    for parameter in query.split('&') {
        let Some(value) = parameter.strip_prefix("reconnect=") else {
            rest.push(parameter);
            continue;
        };
        let seconds =
            value.parse().ok().map(Duration::from_secs).filter(|time| *time <= MAX_RECONNECT);
        let seconds = seconds.ok_or("reconnect is a number of seconds, a day at most")?;
        if reconnect.replace(seconds).is_some() {
            return Err("the parameter reconnect is given twice".into());
        }
    }
    let mark = if rest.is_empty() { "" } else { "?" };
    let text = format!("{before}{mark}{}{fragment}", rest.join("&"));
    Ok((text, reconnect.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nbd(name: &str) -> (String, u64) {
        match Location::of(Path::new(name)).unwrap() {
            Location::Nbd { uri, reconnect } => (uri.export.to_string(), reconnect.as_secs()),
            other => panic!("{other:?} is no export"),
        }
    }

    #[test]
    fn uris_are_exports_and_everything_else_is_a_path() {
        assert_eq!(nbd("nbd://localhost/a"), ("nbd://localhost/a".into(), 0));
        assert_eq!(nbd("NBD://localhost/a?reconnect=7"), ("nbd://localhost/a".into(), 7));
        let unix = "nbd+unix:///a?socket=/tmp/s";
        assert_eq!(nbd(&format!("{unix}&reconnect=1")), (unix.into(), 1));
        assert_eq!(nbd("nbds://h/a?tls-certificates=/pki&reconnect=7"), ("nbds://h/a".into(), 7));
        let rbd = Location::of(Path::new("rbd:pool/image")).unwrap();
        assert_eq!(rbd, Location::Rbd("rbd:pool/image".parse().unwrap()));
        for path in ["disk.img", "./nbd://x", "nbd:localhost:10809", "/a/nbd://b", "file:x"] {
            assert_eq!(Location::of(Path::new(path)).unwrap(), Location::File(path.into()));
        }
    }

    #[test]
    fn nothing_has_a_name_by_its_driver() {
        let null = "null-aio://?size=1M";
        let location = Location::of(Path::new(null)).unwrap();
        assert_eq!(location, Location::Null(null.parse().unwrap()));
        assert_eq!(Location::label(Path::new(null)).as_deref(), Some("null-aio"));
        assert!(Location::of(Path::new("null-co://?size=-1")).is_err());
    }

    #[test]
    fn images_are_called_after_their_last_part() {
        let name = |name: &str| {
            Location::base_name(Path::new(name)).map(|name| name.into_string().unwrap())
        };
        assert_eq!(name("a/disk.img"), Some("disk.img".into()));
        assert_eq!(name("nbd+unix:///a/base?socket=/tmp/s.sock"), Some("base".into()));
        assert_eq!(name("nbd://localhost"), None);
        let label = |name| Location::label(Path::new(name));
        assert_eq!(label("nbd+unix:///disk9?socket=/tmp/s.sock").as_deref(), Some("disk9"));
        assert_eq!(label("nbd://localhost").as_deref(), Some("localhost"));
        assert_eq!(label("a/disk.img").as_deref(), Some("disk.img"));
        assert_eq!(name("rbd:pool/disk.qcow2@monday?id=vm"), Some("disk.qcow2".into()));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (name, why) in [
            ("nbd://h/a?reconnect=soon", "seconds"),
            ("nbd://h/a?reconnect=86401", "a day"),
            ("nbd://h/a?reconnect=1&reconnect=2", "twice"),
            ("nbd://h/a?other=1", "other"),
            ("nbds://me@h/a", "tls-psk-file"),
            ("nbd://", "host"),
            ("rbd:image", "Ceph"),
        ] {
            let line = Location::of(Path::new(name)).unwrap_err().to_string();
            assert!(line.contains(why) && line.contains(name), "{line}");
        }
    }
}
