//! Listening sockets that the service manager keeps while no server runs: its descriptor store
//! (`FileDescriptorStoreMax=`, sd_notify(3)).
//!
//! Guarantees: between the end of a server, or its death, and the next start clients wait in the
//! backlog of the socket instead of being refused. A kept socket is used again only for its own
//! address, and that of a file only where the file at its path is still the one that was bound. A
//! socket that is no longer served, or not wanted at the next start, leaves the store. Without a
//! store (`$FDSTORE`, systemd 254) nothing is kept.
//!
//! A socket is known by its name in the store: [`PREFIX`], the device and inode of its file, and
//! its address. The inode is not used again while the socket listens.

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

use crate::process::service_manager;

/// The prefix of our sockets' names, before an equals sign, which no name of a unit has: sockets of
/// units are called after these.
const PREFIX: &str = "blockhouse-";
/// The longest name that the service manager takes.
const MAX_NAME: usize = 255;
/// Characters that a name cannot have: a colon separates names in `$LISTEN_FDNAMES`.
const ESCAPED: &AsciiSet = &CONTROLS.add(b':').add(b'%');

/// A socket that an earlier server had kept, until it is used or leaves the store.
struct Kept {
    name: String,
    socket: OwnedFd,
}

/// The sockets of this process.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Whether a descriptor of this name is one that a server has had kept.
pub(crate) fn is_name(name: &str) -> bool {
    parse(name).is_some()
}

/// Takes in a socket that the service manager has passed under a name of ours.
pub(crate) fn take_in(name: &str, socket: OwnedFd) {
    KEPT.lock().push(Kept { name: name.to_owned(), socket });
}

/// Listens at an address, by the socket that was kept for it if there is one, and has the service
/// manager keep the socket.
///
/// # Errors
/// As [`bind_for`].
pub(crate) fn bind(address: &Address, permissions: SocketPermissions) -> Result<BoundSocket> {
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

/// Has the service manager keep a socket, and its file stays at the end of the process.
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

/// Has the service manager give up a socket at which nothing is served. Its file goes with `file`.
pub(crate) fn give_up(address: &Address, file: Option<&SocketFile>) {
    let name = name_of(address, file.and_then(SocketFile::identity));
    if let Some(name) = name.filter(|_| service_manager::has_store()) {
        file.into_iter().for_each(|file| file.set_kept(false));
        service_manager::forget(&name);
    }
}

/// Has the service manager give up what it keeps for an address, where the server that listened
/// there hands over and may have had it kept. The file at the path stays.
pub(crate) fn give_up_left(address: &Address) {
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

/// Gives up what was kept and is not used, with its files.
pub(crate) fn give_up_unused() {
    for Kept { name, .. } in std::mem::take(&mut *KEPT.lock()) {
        tracing::info!("{name}: a socket that the service manager kept is no longer used");
        // Dropped, the file is removed.
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
        // Another server may have taken the path: then the socket leaves the store.
        Address::Unix(_) => Some(file_of(&shown(address), identity?)?),
    };
    let socket = kept.remove(index).socket;
    Some(BoundSocket { socket, address: address.clone(), file })
}

/// The name of a socket in the store, of device and inode of its file; `None` where it has none
/// that fits.
fn name_of(address: &Address, identity: Option<(u64, u64)>) -> Option<String> {
    let identity = match (address, identity) {
        (Address::Tcp { .. }, _) => String::new(),
        (Address::Unix(_), Some((device, inode))) => format!("{device:x}.{inode:x}"),
        // Its file belongs to another user.
        (Address::Unix(_), None) => return None,
    };
    let name = format!("{PREFIX}{identity}={}", shown(address));
    (name.len() <= MAX_NAME).then_some(name)
}

/// An address, without what a name cannot have.
fn shown(address: &Address) -> String {
    match address {
        Address::Unix(path) => percent_encode(path.as_os_str().as_bytes(), ESCAPED).to_string(),
        Address::Tcp { host, port } => {
            percent_encode(format!("{host} {port}").as_bytes(), ESCAPED).to_string()
        }
    }
}

/// The address that a name has, and device and inode of the file.
fn parse(name: &str) -> Option<(String, Option<(u64, u64)>)> {
    let (identity, address) = name.strip_prefix(PREFIX)?.split_once('=')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let identity = identity
        .split_once('.')
        .and_then(|(device, inode)| Some((number(device)?, number(inode)?)));
    Some((address.to_owned(), identity))
}

/// The file of a kept socket, if it is at its path.
fn file_of(address: &str, identity: (u64, u64)) -> Option<SocketFile> {
    let path: Vec<u8> = percent_decode_str(address).collect();
    SocketFile::find(Path::new(OsStr::from_bytes(&path)), identity)
}

#[cfg(test)]
mod tests {
    use super::*;

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
