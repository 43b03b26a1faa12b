//! The address of the metrics server, as users write it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use blockhouse_nbd::SocketPermissions;
use blockhouse_nbd::uri::Address;

use crate::socket_options::{PrivatePermissions, split_options};

/// The address of the metrics server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP port on a loopback address.
    Loopback(SocketAddr),
    /// A Unix socket.
    Unix {
        /// The socket's path.
        path: PathBuf,
        /// The users that may connect.
        permissions: SocketPermissions,
    },
}

impl std::str::FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(text) = text.strip_prefix("unix:") {
            let (path, options) = split_options(text);
            if path.is_empty() {
                return Err("a path is missing: unix:PATH".into());
            }
            let mut permissions = PrivatePermissions::default();
            for option in options {
                if !permissions.take(&option)? {
                    return Err(format!(
                        "there is no option '{option}'; use mode=0660 or group=GROUP, and ',,' for a comma in the path"
                    ));
                }
            }
            return Ok(Self::Unix { path: path.into(), permissions: permissions.get() });
        }
        let what = "use 127.0.0.1:PORT, [::1]:PORT or unix:PATH";
        let address: SocketAddr = text.parse().map_err(|_| what.to_owned())?;
        if address.ip().is_loopback() {
            Ok(Self::Loopback(address))
        } else {
            Err(format!("{what}; for other machines put a server with TLS before it"))
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback(address) => write!(f, "http://{address}/metrics"),
            Self::Unix { path, .. } => write!(f, "unix:{}", path.display()),
        }
    }
}

impl MetricsAddress {
    /// The users that may connect.
    pub fn permissions(&self) -> SocketPermissions {
        match self {
            Self::Unix { permissions, .. } => *permissions,
            Self::Loopback(_) => SocketPermissions::default(),
        }
    }

    /// The socket's address.
    pub fn address(&self) -> Address {
        match self {
            Self::Unix { path, .. } => Address::Unix(path.clone()),
            Self::Loopback(address) => {
                Address::Tcp { host: address.ip().to_string(), port: address.port() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_can_be_asked_for() {
        let unix = |mode, group| {
            let permissions = SocketPermissions { mode: Some(mode), group };
            Ok(MetricsAddress::Unix { path: "/run/x".into(), permissions })
        };
        assert_eq!("unix:/run/x".parse(), unix(0o600, None));
        assert_eq!("unix:/run/x,group=7".parse(), unix(0o660, Some(7)));
        for address in ["127.0.0.1:9100", "[::1]:0"] {
            assert!(address.parse::<MetricsAddress>().is_ok(), "{address}");
        }
        for address in ["0.0.0.0:1", "10.0.0.1:80", "localhost:1", "9100", "unix:", ""] {
            let error = address.parse::<MetricsAddress>().expect_err(address);
            assert!(error.contains("unix:PATH"), "{error}");
        }
    }
}
