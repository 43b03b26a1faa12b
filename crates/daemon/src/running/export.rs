//! An export: a disk at an address.

use std::fmt;
use std::path::{Path, PathBuf};

use blockhouse_disk::Access;
use blockhouse_nbd::uri::{NbdUri, Security};

use crate::setup::disk_options::check_absolute;

/// Where an export is served, which is also what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExportAddress {
    /// To NBD clients, under the URI's name at the URI's address.
    Nbd(NbdUri),
    /// To a guest's vhost-user-blk device, at this Unix socket.
    VhostUser(PathBuf),
    /// To this host, as the block device `/dev/ublkbN` of this number.
    Ublk(u32),
}

/// The prefix of a ublk device's path, before its number.
const UBLK_DEVICE: &str = "/dev/ublkb";

impl ExportAddress {
    /// The export that a user means by this text: a URI, the path of a ublk device, or the path of
    /// a socket.
    ///
    /// # Errors
    /// Why it is no URI.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Some(Ok(id)) = text.strip_prefix(UBLK_DEVICE).map(str::parse) {
            return Ok(Self::Ublk(id));
        }
        match text.starts_with('/') {
            true => Ok(Self::VhostUser(text.into())),
            false => text.parse().map(Self::Nbd).map_err(|error: blockhouse_nbd::uri::UriError| {
                format!("{error}; a vhost-user-blk socket is an absolute path")
            }),
        }
    }

    /// As [`parse`](Self::parse), where a path must not depend on a working directory.
    ///
    /// # Errors
    /// As [`parse`](Self::parse); a relative path.
    pub(crate) fn parse_absolute(text: &str) -> Result<Self, String> {
        let address = Self::parse(text)?;
        if let Self::Nbd(uri) = &address
            && let blockhouse_nbd::uri::Address::Unix(path) = &uri.address
        {
            check_absolute(path)?;
        }
        Ok(address)
    }

    /// The path of its Unix socket.
    pub(crate) fn unix_socket(&self) -> Option<&Path> {
        match self {
            Self::Nbd(uri) => match &uri.address {
                blockhouse_nbd::uri::Address::Unix(path) => Some(path),
                blockhouse_nbd::uri::Address::Tcp { .. } => None,
            },
            Self::VhostUser(path) => Some(path),
            Self::Ublk(_) => None,
        }
    }

    /// The address of its socket, as text: exports with the same one share the socket.
    pub(crate) fn socket(&self) -> String {
        match self {
            Self::Nbd(uri) => {
                let security = Security::Plain;
                NbdUri { security, address: uri.address.clone(), export: String::new() }.to_string()
            }
            Self::VhostUser(path) => path.display().to_string(),
            Self::Ublk(id) => format!("{UBLK_DEVICE}{id}"),
        }
    }
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(uri) => uri.fmt(f),
            Self::VhostUser(path) => path.display().fmt(f),
            Self::Ublk(id) => write!(f, "{UBLK_DEVICE}{id}"),
        }
    }
}

/// An export that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunningExport {
    /// Where.
    pub(crate) address: ExportAddress,
    /// The name of its disk.
    pub(crate) disk: String,
    /// Whether its clients may change the disk, where that may be changed.
    pub(crate) access: Access,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_called_after_their_addresses() {
        for text in
            ["nbd+unix:///a?socket=/run/s", "nbd://localhost:10809/", "/run/vu.sock", "/dev/ublkb7"]
        {
            let address = ExportAddress::parse(text).expect(text);
            assert_eq!(ExportAddress::parse(&address.to_string()), Ok(address), "{text}");
        }
        let socket = |text| ExportAddress::parse(text).expect(text).socket();
        let first = socket("nbd+unix:///a?socket=/run/s");
        assert_eq!(first, socket("nbd+unix:///b?socket=/run/s"));
        assert_ne!(first, socket("/run/s"));
        assert!(ExportAddress::parse("run/s").expect_err("relative").contains("absolute path"));
    }
}
