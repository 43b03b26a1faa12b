//! The endpoints of disks: listening sockets with their TLS, vhost-user and ublk devices.

pub(crate) mod sockets;
pub(crate) mod tls;
pub(crate) mod ublk;
pub(crate) mod vhost_user;
