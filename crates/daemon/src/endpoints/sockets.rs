//! The sockets that a server listens at: from URIs of the command line or configuration file, from
//! systemd, or one named after the image.

use std::fs;
use std::net::{IpAddr, ToSocketAddrs};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_config::offers::Offer;
use blockhouse_config::server::TlsSetup;
use blockhouse_engine::Stream;
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_nbd::{BoundSocket, PausedSession, SocketPermissions, TlsMode};
use blockhouse_storage::Location;
use listenfd::ListenFd;
use serde::{Deserialize, Serialize};

use crate::process::kept_sockets;

/// A listening socket and its exports.
pub struct ListenSocket {
    /// The socket.
    pub bound: BoundSocket,
    /// Whether its clients must use TLS, even if the setup makes TLS optional.
    pub security: Security,
    /// The exports of the socket. Empty only if a control request has added the socket.
    pub offers: Vec<Offer>,
    /// The paused connections of a hand-over.
    pub connections: Vec<(Stream, PausedSession)>,
    /// The options of `socket.add`, if a control request has added the socket.
    pub added: Option<AddedSocket>,
}

/// Options of a socket that also listens while it has no exports.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct AddedSocket {
    /// The maximum number of connections at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<NonZeroUsize>,
}

impl ListenSocket {
    fn new(bound: BoundSocket, security: Security, offers: Vec<Offer>) -> Self {
        Self { bound, security, offers, connections: Vec::new(), added: None }
    }
}

/// Whether TLS is required at an address as the user wrote it. The socket's own address may not
/// match the TLS rules: a host name is resolved there, and port 0 is replaced.
fn security_at(tls: Option<&TlsSetup>, address: &Address) -> Security {
    security(tls.map(|tls| tls.mode_at(address)))
}

/// Whether the clients of a socket with this TLS rule must use TLS.
pub(crate) fn security(mode: Option<TlsMode>) -> Security {
    match mode {
        Some(TlsMode::Required) => Security::Tls,
        Some(TlsMode::Optional) | None => Security::Plain,
    }
}

/// Listens at every address.
pub fn bind_uris(
    plan: Vec<(Address, Vec<Offer>)>,
    permissions: SocketPermissions,
    tls: Option<&TlsSetup>,
) -> Result<Vec<ListenSocket>> {
    let listen = |(address, offers)| {
        let bound = kept_sockets::bind(&address, permissions)?;
        Ok(ListenSocket::new(bound, security_at(tls, &address), offers))
    };
    plan.into_iter().map(listen).collect()
}

/// The listening sockets that systemd passed to this process (`sd_listen_fds(3)`). Sockets that an
/// earlier server stored in systemd's fd store go to [`kept_sockets`] instead.
pub fn from_systemd() -> Result<Vec<BoundSocket>> {
    // LISTEN_FDNAMES has one name for each descriptor, in the order of the descriptors.
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<_> = names.split(':').collect();
    let mut passed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for index in 0..passed.len() {
        let name = names.get(index).copied().unwrap_or_default();
        let bound = take(&mut passed, index);
        if kept_sockets::is_name(name) {
            match bound {
                Ok(bound) => kept_sockets::take_in(name, bound.socket),
                Err(error) => tracing::warn!("{name}: was kept, and cannot be used: {error:#}"),
            }
        } else {
            sockets.push(bound?)
        }
    }
    Ok(sockets)
}

/// Serves all images at every passed socket.
pub fn passed_for_all(
    passed: Vec<BoundSocket>,
    offers: &[Offer],
) -> Result<Vec<ListenSocket>, String> {
    let socket = |bound| Ok(ListenSocket::new(bound, Security::Plain, offers.to_vec()));
    passed.into_iter().map(socket).collect()
}

/// Serves each address of the plan at the passed socket that has this address.
///
/// # Errors
/// A passed socket is not in the plan, or an address of the plan has no passed socket.
pub fn passed_for(
    mut passed: Vec<BoundSocket>,
    plan: Vec<(Address, Vec<Offer>)>,
    tls: Option<&TlsSetup>,
) -> Result<Vec<ListenSocket>, String> {
    let shown = |address: &Address| {
        NbdUri { security: Security::Plain, address: address.clone(), export: String::new() }
            .to_string()
    };
    let mut sockets = Vec::new();
    for (address, offers) in plan {
        let Some(index) = passed.iter().position(|bound| is_same(&bound.address, &address)) else {
            return Err(format!(
                "--nbd {}: the service manager passed its own sockets to listen at, and this is not one of \
                 them; leave --nbd out to serve at those, or add the address to the socket unit",
                shown(&address)
            ));
        };
        let security = security_at(tls, &address);
        sockets.push(ListenSocket::new(passed.remove(index), security, offers));
    }
    match passed.first() {
        None => Ok(sockets),
        Some(bound) => Err(format!(
            "{}: the service manager passed this socket, and no --nbd says what to serve there; add one, \
             or leave all --nbd out to serve every image at every passed socket",
            shown(&bound.address)
        )),
    }
}

/// Whether `wanted`, whose host may be a name, resolves to the socket address `passed`.
fn is_same(passed: &Address, wanted: &Address) -> bool {
    match (passed, wanted) {
        (Address::Tcp { host, port }, Address::Tcp { host: name, port: wanted })
            if port == wanted =>
        {
            let address = host.parse::<IpAddr>();
            let Ok(mut found) = (name.as_str(), *wanted).to_socket_addrs() else { return false };
            address.is_ok_and(|address| found.any(|found| found.ip() == address))
        }
        _ => passed == wanted,
    }
}

fn take(passed: &mut ListenFd, index: usize) -> Result<BoundSocket> {
    let refused = || format!("socket {index} from systemd is no listening stream socket");
    let (socket, address) = match passed.take_unix_listener(index) {
        Ok(Some(listener)) => {
            let path = listener.local_addr().with_context(refused)?;
            let path = path.as_pathname().with_context(refused)?.to_owned();
            (OwnedFd::from(listener), Address::Unix(path))
        }
        _ => {
            let listener = passed.take_tcp_listener(index).with_context(refused)?;
            let listener = listener.with_context(refused)?;
            let local = listener.local_addr().with_context(refused)?;
            let (host, port) = (local.ip().to_string(), local.port());
            (OwnedFd::from(listener), Address::Tcp { host, port })
        }
    };
    Ok(BoundSocket { socket, address, file: None })
}

/// Listens at a Unix socket named after the image, in a folder that only this user can enter.
pub fn at_default(
    image: &Path,
    permissions: SocketPermissions,
    offers: Vec<Offer>,
) -> Result<ListenSocket> {
    if image.is_dir() {
        bail!("{}: is a folder, and no image; name the file or device in it", image.display());
    }
    let folder = runtime_folder()?;
    let name = Location::base_name(image).with_context(|| {
        format!(
            "{}: has no name to call a socket after; name one: --nbd nbd+unix:///?socket=PATH",
            image.display()
        )
    })?;
    let path = folder.join(name).with_added_extension("sock");
    Ok(ListenSocket::new(
        kept_sockets::bind(&Address::Unix(path), permissions)?,
        Security::Plain,
        offers,
    ))
}

/// The folder for sockets that only this user may use: `$XDG_RUNTIME_DIR/blockhouse`, or
/// `blockhouse-UID` in the folder of temporary files. A missing folder is created.
///
/// # Errors
/// The folder cannot be created, or other users have access to it.
pub fn runtime_folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(base) if !base.is_empty() => PathBuf::from(base).join("blockhouse"),
        _ => std::env::temp_dir().join(format!("blockhouse-{user}")),
    };
    let cannot = || format!("{}: cannot make the folder for sockets", folder.display());
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            bail!("{}: {error}; name a socket with --nbd nbd+unix:///?socket=PATH", cannot());
        }
        _ => {}
    }
    // Another user may have created the folder first, to receive the data of our disks.
    let found = fs::symlink_metadata(&folder).with_context(cannot)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        bail!(
            "{}: not a folder of this user alone; remove it or name a socket with --nbd",
            folder.display()
        );
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use blockhouse_nbd::TlsFiles;

    use super::*;

    #[test]
    fn a_passed_socket_asks_for_tls_as_its_uri_does_whatever_its_host_is_called() {
        let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
        for (is_only, expected) in [(true, Security::Tls), (false, Security::Plain)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let written = tcp("localhost", port);
            let (socket, address) = (listener.into(), tcp("127.0.0.1", port));
            let only = if is_only { vec![written.clone()] } else { Vec::new() };
            let (files, mode) = (TlsFiles::Psk("keys".into()), TlsMode::Optional);
            let tls = TlsSetup { mode, files, allowed: Vec::new(), only };
            let passed = vec![BoundSocket { socket, address, file: None }];
            let sockets = passed_for(passed, vec![(written, Vec::new())], Some(&tls)).unwrap();
            assert_eq!(sockets[0].security, expected);
        }
    }
}
