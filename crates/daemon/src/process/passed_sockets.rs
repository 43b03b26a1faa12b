//! Listening sockets that the program which started this process has passed by the numbers of their
//! descriptors (`addr.type=fd`, `fd=` of qemu-storage-daemon).
//!
//! Such a socket has the address `/proc/self/fd/NUMBER` until its server stops. The file of a Unix
//! socket stays, because it belongs to the program that has bound the socket.

use std::io;
use std::path::PathBuf;

use blockhouse_engine::take_inherited_socket;
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BACKLOG, BoundSocket};
use parking_lot::Mutex;

/// The sockets that are not used yet.
static PASSED: Mutex<Vec<BoundSocket>> = Mutex::new(Vec::new());

/// Takes the socket with this number, for a server at the returned path.
///
/// # Errors
/// No socket was passed by this number, or it cannot listen.
pub fn take(number: i32) -> io::Result<PathBuf> {
    let socket = take_inherited_socket(number)?;
    rustix::net::listen(&socket, BACKLOG)?;
    let path = path_of(number);
    PASSED.lock().push(BoundSocket { socket, address: Address::Unix(path.clone()), file: None });
    Ok(path)
}

/// The path that stands for a passed socket.
pub fn path_of(number: i32) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

/// The passed socket with this address.
pub(crate) fn find(address: &Address) -> Option<BoundSocket> {
    let mut passed = PASSED.lock();
    let index = passed.iter().position(|bound| bound.address == *address)?;
    Some(passed.remove(index))
}
