//! Places where guests and clients find disks: listening sockets with their TLS, devices of
//! vhost-user and ublk.

pub(crate) mod sockets;
pub(crate) mod tls;
pub(crate) mod ublk;
pub(crate) mod vhost_user;
