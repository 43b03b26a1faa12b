//! The address of an export.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use blockhouse_nbd::uri::{Address, NbdUri, Security};

use crate::text_fields::check_absolute;

/// The address of an export, which also identifies the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportAddress {
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
    /// The path of its Unix socket.
    pub fn unix_socket(&self) -> Option<&Path> {
        match self {
            Self::Nbd(uri) => match &uri.address {
                Address::Unix(path) => Some(path),
                Address::Tcp { .. } => None,
            },
            Self::VhostUser(path) => Some(path),
            Self::Ublk(_) => None,
        }
    }

    /// The address of its socket, as text. Exports with the same text share the socket.
    pub fn socket(&self) -> String {
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

impl FromStr for ExportAddress {
    type Err = String;

    /// Parses a URI, the path of a ublk device, or the path of a vhost-user-blk socket. A path must
    /// not depend on a working directory.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(Ok(id)) = text.strip_prefix(UBLK_DEVICE).map(str::parse) {
            return Ok(Self::Ublk(id));
        }
        if text.starts_with('/') {
            return Ok(Self::VhostUser(text.into()));
        }
        let uri: NbdUri = text
            .parse()
            .map_err(|error| format!("{error}; a vhost-user-blk socket is an absolute path"))?;
        if let Address::Unix(path) = &uri.address {
            check_absolute(path)?;
        }
        Ok(Self::Nbd(uri))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_called_after_their_addresses() {
        for text in
            ["nbd+unix:///a?socket=/run/s", "nbd://localhost:10809/", "/run/vu.sock", "/dev/ublkb7"]
        {
            let address = text.parse::<ExportAddress>().expect(text);
            assert_eq!(address.to_string().parse(), Ok(address), "{text}");
        }
        let socket = |text: &str| text.parse::<ExportAddress>().expect(text).socket();
        let first = socket("nbd+unix:///a?socket=/run/s");
        assert_eq!(first, socket("nbd+unix:///b?socket=/run/s"));
        assert_ne!(first, socket("/run/s"));
        assert!("run/s".parse::<ExportAddress>().expect_err("relative").contains("absolute path"));
    }
}
