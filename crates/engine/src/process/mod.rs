//! The process at its host: rights, users, descriptors, other users of a device, the local time.

#[cfg(debug_assertions)]
pub mod attempts;
pub(crate) mod confinement;
pub(crate) mod descriptors;
pub(crate) mod device_user;
pub(crate) mod local_time;
pub(crate) mod user;
pub(crate) mod wait_readable;
