//! Eventfds that a front-end sends.

use std::os::fd::OwnedFd;

use blockhouse_engine::is_eventfd;

use crate::protocol::{Result, refused};
use crate::queue::Call;

/// Checks that a descriptor is an eventfd, which can be signalled and watched. Allocates nothing,
/// because a front-end can send any number of descriptors.
pub fn check_eventfd(descriptor: Option<&OwnedFd>, purpose: &str) -> Result<()> {
    if descriptor.is_none_or(is_eventfd) {
        Ok(())
    } else {
        Err(refused(format_args!("a descriptor for {purpose} that is no eventfd")))
    }
}

/// Another handle of an eventfd, to be signalled.
pub fn duplicate_call(descriptor: Option<&OwnedFd>) -> Result<Option<Call>> {
    let duplicate = |descriptor: &OwnedFd| descriptor.try_clone().and_then(Call::new);
    descriptor.map(duplicate).transpose().map_err(refused)
}
