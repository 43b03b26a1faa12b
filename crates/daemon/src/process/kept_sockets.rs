//! Listening sockets that the service manager keeps in its file descriptor store while no server
//! runs (`FileDescriptorStoreMax=`, sd_notify(3)).
//!
//! Guarantees: between the end or crash of a server and the next start, clients wait in the
//! socket's backlog and are not refused. A kept socket is used again only for its own address; a
//! Unix socket only if the file at its path is still the one that was bound. A socket that is no
//! longer served, or not used after the next start, is removed from the store. Without a store
//! (`$FDSTORE`, systemd 254) nothing is kept.
//!
//! A socket's name in the store identifies it: `blockhouse-`, the device and inode of its file, and
//! its address. The inode number is not reused while the socket listens.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blockhouse_core::Result;
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketFile, SocketPermissions, bind_for};
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

use crate::process::{passed_sockets, service_manager};

/// The prefix of our sockets' names. The names also have an equals sign, which names of units
/// cannot have: sockets that systemd passes from socket units are named after the units.
const PREFIX: &str = "blockhouse-";
/// The maximum length of a name in the store.
const MAX_NAME: usize = 255;
/// Characters that a name cannot have: a colon separates names in `$LISTEN_FDNAMES`.
const ESCAPED: &AsciiSet = &CONTROLS.add(b':').add(b'%');

/// A socket that an earlier server stored, until it is used or removed from the store.
struct Kept {
    name: String,
    socket: OwnedFd,
}

/// The kept sockets that this process has received and not used.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Whether a server of this program has stored the descriptor with this name.
pub(crate) fn is_name(name: &str) -> bool {
    parse(name).is_some()
}

/// Records a socket that the service manager has passed under one of our names.
pub(crate) fn take_in(name: &str, socket: OwnedFd) {
    KEPT.lock().push(Kept { name: name.to_owned(), socket });
}

/// Listens at an address, with the socket that was passed or kept for it if there is one. A new
/// socket is stored at the service manager.
///
/// # Errors
/// The errors of [`bind_for`].
pub fn bind(address: &Address, permissions: SocketPermissions) -> Result<BoundSocket> {
    if let Some(bound) = passed_sockets::find(address) {
        return Ok(bound);
    }
    if let Some(bound) = find(address) {
        if let Some(file) = &bound.file {
            file.permit(permissions)?;
            file.set_kept(true);
        }
        return Ok(bound);
    }
    let bound = bind_for(address, permissions)?;
    keep(&bound);
    Ok(bound)
}

/// Stores a socket at the service manager; its file then stays at the end of the process.
pub(crate) fn keep(bound: &BoundSocket) {
    if !service_manager::has_store() {
        return;
    }
    let identity = bound.file.as_ref().and_then(SocketFile::identity);
    if let Some(name) = name_of(&bound.address, identity)
        && service_manager::store(&name, bound.socket.as_fd())
    {
        bound.file.iter().for_each(|file| file.set_kept(true));
    }
}

/// Removes from the store a socket at which nothing is served. Dropping `file` then removes the
/// socket's file.
pub(crate) fn give_up(address: &Address, file: Option<&SocketFile>) {
    let name = name_of(address, file.and_then(SocketFile::identity));
    if let Some(name) = name.filter(|_| service_manager::has_store()) {
        file.into_iter().for_each(|file| file.set_kept(false));
        service_manager::forget(&name);
    }
}

/// Serves at a socket that [`bind`] has returned. If that fails, removes the socket from the store,
/// and its file.
///
/// # Errors
/// The errors of `serve`.
pub(crate) fn serve_or_give_up<T, E>(
    bound: BoundSocket,
    serve: impl FnOnce(BoundSocket) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    if service_manager::has_store() {
        serve_or_remove(bound, serve)
    } else {
        // Nothing is kept, so `serve` removes the file with the socket.
        serve(bound)
    }
}

/// As [`serve_or_give_up`], of a socket that may be in the store.
fn serve_or_remove<T, E>(
    bound: BoundSocket,
    serve: impl FnOnce(BoundSocket) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    let address = bound.address.clone();
    let identity = bound.file.as_ref().and_then(SocketFile::identity);
    serve(bound).inspect_err(|_| {
        let file = identity.and_then(|identity| file_of(&shown(&address), identity));
        give_up(&address, file.as_ref());
    })
}

/// Removes the socket of an address from the store, if an earlier server, which hands over, has
/// stored it. The file at the path stays.
pub fn give_up_left(address: &Address) {
    if !service_manager::has_store() {
        return;
    }
    let identity = match address {
        Address::Tcp { .. } => None,
        Address::Unix(path) => {
            let found = std::fs::symlink_metadata(path).ok();
            found.map(|found| (found.dev(), found.ino()))
        }
    };
    name_of(address, identity).iter().for_each(|name| service_manager::forget(name));
}

/// Removes from the store the kept sockets that this process has not used, and removes their files.
pub(crate) fn give_up_unused() {
    for Kept { name, .. } in std::mem::take(&mut *KEPT.lock()) {
        tracing::info!("{name}: a socket that the service manager kept is no longer used");
        // Dropping the `SocketFile` removes the file.
        drop(parse(&name).and_then(|(address, identity)| file_of(&address, identity?)));
        service_manager::forget(&name);
    }
}

/// The socket that was kept for an address.
fn find(address: &Address) -> Option<BoundSocket> {
    let mut kept = KEPT.lock();
    let is_it = |kept: &Kept| parse(&kept.name).is_some_and(|(of, _)| of == shown(address));
    let index = kept.iter().position(is_it)?;
    let identity = parse(&kept[index].name).and_then(|(_, identity)| identity);
    let file = match address {
        Address::Tcp { .. } => None,
        // If another server has replaced the file at the path, the socket is not used, and is later
        // removed from the store.
        Address::Unix(_) => Some(file_of(&shown(address), identity?)?),
    };
    let socket = kept.remove(index).socket;
    Some(BoundSocket { socket, address: address.clone(), file })
}

/// The name of a socket in the store, from its address and its file's device and inode; `None` if
/// it has no file or the name is too long.
fn name_of(address: &Address, identity: Option<(u64, u64)>) -> Option<String> {
    let identity = match (address, identity) {
        (Address::Tcp { .. }, _) => String::new(),
        (Address::Unix(_), Some((device, inode))) => format!("{device:x}.{inode:x}"),
        // Without an identity the file is not ours.
        (Address::Unix(_), None) => return None,
    };
    let name = format!("{PREFIX}{identity}={}", shown(address));
    (name.len() <= MAX_NAME).then_some(name)
}

/// An address, with the characters escaped that a name cannot have.
fn shown(address: &Address) -> String {
    match address {
        Address::Unix(path) => percent_encode(path.as_os_str().as_bytes(), ESCAPED).to_string(),
        Address::Tcp { host, port } => {
            percent_encode(format!("{host} {port}").as_bytes(), ESCAPED).to_string()
        }
    }
}

/// The address in a name, and the file's device and inode.
fn parse(name: &str) -> Option<(String, Option<(u64, u64)>)> {
    let (identity, address) = name.strip_prefix(PREFIX)?.split_once('=')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let identity = identity
        .split_once('.')
        .and_then(|(device, inode)| Some((number(device)?, number(inode)?)));
    Some((address.to_owned(), identity))
}

/// The file of a kept socket, if it is still at its path.
fn file_of(address: &str, identity: (u64, u64)) -> Option<SocketFile> {
    let path: Vec<u8> = percent_decode_str(address).collect();
    SocketFile::find(Path::new(OsStr::from_bytes(&path)), identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_socket_goes_when_nothing_is_served_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let bind = || {
            let unix = Address::Unix(path.clone());
            let bound = bind_for(&unix, SocketPermissions::default()).expect("a socket");
            // As if a service manager had it in its store.
            bound.file.as_ref().expect("its file").set_kept(true);
            bound
        };
        assert!(serve_or_remove(bind(), |_| Err::<(), _>("refused")).is_err());
        assert!(!path.exists());
        serve_or_remove(bind(), |_| Ok::<_, ()>(())).expect("it is served");
        assert!(path.exists());
        // Without a store, only `serve` decides about the file.
        std::fs::remove_file(&path).expect("it is there");
        assert!(serve_or_give_up(bind(), |_| Err::<(), _>("refused")).is_err());
        assert!(path.exists());
    }

    #[test]
    fn a_name_tells_the_address_and_the_file() {
        let tcp = Address::Tcp { host: "::1".into(), port: 10809 };
        let name = name_of(&tcp, None).expect("a name");
        assert_eq!(name, "blockhouse-=%3A%3A1 10809");
        assert_eq!(parse(&name), Some((shown(&tcp), None)));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a:b=%é");
        let unix = Address::Unix(path.clone());
        let bound = bind_for(&unix, SocketPermissions::default()).expect("a socket");
        let file = bound.file.as_ref().expect("its file");
        let name = name_of(&unix, file.identity()).expect("a name");
        assert!(!name.contains(':') && name.is_ascii(), "{name}");
        let (address, identity) = parse(&name).expect("it is ours");
        assert_eq!(address, shown(&unix));
        let identity = identity.expect("it has a file");
        let found = file_of(&address, identity).expect("it is there");
        found.set_kept(true);
        drop(found);
        // Another socket at the path is not the kept one.
        drop(bound);
        let _other = bind_for(&unix, SocketPermissions::default()).expect("a socket");
        std::fs::rename(&path, folder.path().join("c")).expect("it is there");
        let _third = bind_for(&unix, SocketPermissions::default()).expect("a socket");
        assert!(file_of(&address, identity).is_none());
        assert_eq!(name_of(&unix, None), None, "of a socket unit");
        assert!(is_name(&name) && !is_name("blockhouse-web.socket") && !is_name("unknown"));
    }
}
