//! Images in Ceph through librbd. Only this module, the engine and core's buffers have unsafe code.
//!
//! Guarantees:
//! - [`Image`] is safe to use from any thread.
//! - An operation in flight owns its memory until librbd has completed it, even if its caller's
//!   future is dropped, and an image is closed after its last operation.
//! - No function of Ceph is called on a closed object, and no panic crosses a callback.

mod cluster;
mod image;
mod library;
mod operation;
mod pool;
mod snapshots;
mod waiter;

use std::ffi::{CString, c_int};
use std::io;

pub(super) use cluster::Cluster;
pub(super) use image::{Extent, Image, LockHolder};
pub(super) use operation::Command;
pub(super) use waiter::{Completion, Waiter};

/// The call that failed, and the errno of Ceph.
pub(super) struct CallError {
    pub(super) what: &'static str,
    pub(super) source: io::Error,
}

/// Decodes a count or an errno, which Ceph returns in one number.
fn check(code: c_int) -> io::Result<u32> {
    u32::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

fn c_string(text: &str) -> io::Result<CString> {
    // A location has no zero bytes.
    CString::new(text).map_err(|_| io::ErrorKind::InvalidInput.into())
}
