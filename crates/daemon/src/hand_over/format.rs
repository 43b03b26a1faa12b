//! The messages of a hand-over's socket pair: all of them are here, disks in [`disk`], their
//! counters in [`counters`].
//!
//! A frame is a header of 32 bytes, one byte for each batch of descriptors, a message as JSON, and
//! bytes:
//!
//! | offset | length | contents (integers are little-endian) |
//! | --- | --- | --- |
//! | 0 | 8 | `BHANDOVR` |
//! | 8 | 4 | the version of the format: [`VERSION`] |
//! | 12 | 4 | how many descriptors come with the frame |
//! | 16 | 8 | how many bytes of JSON |
//! | 24 | 8 | how many bytes after it |
//!
//! After the header come the descriptors (`SCM_RIGHTS`), in batches of up to [`BATCH`], each with
//! one byte of any value. Then the JSON, then the bytes. The header is the same in all versions, so
//! that each can refuse another. A change of anything else is another version, but for a field that
//! is left out unless it says something: a program that does not know it refuses the offer, because
//! fields are never ignored. A test holds the frames of each version as bytes. Version 1 had no
//! vhost-user-blk devices, version 2 no bitmaps; version 3 had no description of disks, so that a
//! destination could serve only what its command line names, and no counters; version 4 no ublk
//! devices.
//!
//! Order of the descriptors. [`Message::Offer`]: for each file of each disk the file, then its
//! second open file for the last block and the one that is flushed, as far as it has them; for each
//! socket the socket, then its file (`O_PATH`) if it has one; the same for each device's socket,
//! and for the control socket. [`Message::Yours`]: one for each connection; then for each front-end
//! its connection, the file of each region of memory, of the in-flight memory and of the log, the
//! eventfd for changes of the log, the socket for messages to it, and for each ring those for the
//! guest's kicks, for notifying the driver and for errors, as far as it has them.

use blockhouse_nbd::handshake::{MetaContext, NegotiatedOptions};
use blockhouse_nbd::proto::Framing;
use blockhouse_vhost_user::{InflightDescription, LogDescription, MemoryRegion, UserAddresses};
use serde::{Deserialize, Serialize};

use self::counters::Counts;
use self::disk::{Configured, Disk};
use crate::endpoints::sockets::AddedSocket;

pub mod counters;
pub mod disk;

/// The first bytes of a frame.
pub const MAGIC: [u8; 8] = *b"BHANDOVR";
/// The version of the format.
pub const VERSION: u32 = 5;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// Descriptors that come together: fewer than the kernel takes (`SCM_MAX_FD`, 253).
pub const BATCH: usize = 128;

/// A message; the order is Offer, Ready or Refused, Yours, Mine or Refused.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The source has this, and goes on to serve it.
    Offer(Offer),
    /// The destination can take it, and has its loops.
    Ready,
    /// The destination cannot take over, changes nothing, and ends.
    Refused {
        /// Why, in one line.
        why: String,
    },
    /// The source executes nothing. The destination may take over.
    Yours(Yours),
    /// The destination owns images and connections from now on.
    Mine,
}

/// The source's disks and exports, as they are now.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Offer {
    /// The disks that are open.
    pub disks: Vec<Disk>,
    /// The disks that the command line or the configuration asks for.
    pub configured: Vec<Configured>,
    /// The listening sockets of NBD clients.
    pub sockets: Vec<Socket>,
    /// The sockets of vhost-user-blk devices.
    pub devices: Vec<Device>,
    /// The block devices of this host. Their driver gives them to the destination when the source
    /// has ended.
    pub ublk: Vec<Ublk>,
    /// The control socket.
    pub control: Option<Listening>,
    /// The start of the disks' counters, in seconds since 1970.
    pub measured_since: u64,
}

/// A listening socket.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Socket {
    /// Where it listens.
    pub address: Address,
    /// Whether its file is removed at the end.
    pub has_file: bool,
    /// Whether its clients must use TLS.
    pub needs_tls: bool,
    /// The names that its clients find, and the places of disks.
    pub exports: Vec<(String, usize)>,
    /// The names of those that are read-only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub read_only: Vec<String>,
    /// The names of those whose clients may not ask which image of the chain has the data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_depth: Vec<String>,
    /// The options of `socket.add`, if control has added the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added: Option<AddedSocket>,
}

/// A vhost-user-blk device.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Device {
    /// Its socket.
    pub socket: Listening,
    /// The place of its disk.
    pub disk: usize,
    /// Whether its guests may not change the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// A block device of this host, by the kernel's ublk driver.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Ublk {
    /// Its number, N of `/dev/ublkbN`.
    pub id: u32,
    /// The place of its disk.
    pub disk: usize,
    /// The identity of its image: bytes of text.
    pub image: Vec<u8>,
}

/// A listening socket by which a device is found, or control.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Listening {
    /// Where it listens.
    pub address: Address,
    /// Whether its file is removed at the end.
    pub has_file: bool,
}

/// The address of a socket.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Address {
    /// A Unix socket: the bytes of its path.
    Unix(Vec<u8>),
    /// TCP.
    Tcp {
        /// The host, as it was named.
        host: String,
        /// The port, never 0.
        port: u16,
    },
}

/// The exports that the source stopped to serve.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Yours {
    /// For each disk the errno of the failed flush that is remembered, of the image and of its
    /// data file.
    pub flush_failures: Vec<[Option<i32>; 2]>,
    /// For each disk what was counted.
    pub counts: Vec<Counts>,
    /// The connections that have paused.
    pub connections: Vec<Connection>,
    /// For each device the front-end that has paused, if it has one.
    pub frontends: Vec<Option<Frontend>>,
}

/// A connection. Its bytes are those of the frame, after the bytes of the connections before it.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Connection {
    /// The place of its listening socket.
    pub socket: usize,
    /// The canonical name of its export.
    pub export: String,
    /// How requests and replies are framed.
    pub framing: Framing,
    /// The metadata contexts that were negotiated, with the ids that replies have.
    pub contexts: Vec<(u32, MetaContext)>,
    /// Whether it has ever sent a request.
    pub is_used: bool,
    /// Bytes that were received, and belong to no request that was executed.
    pub received: u64,
}

/// A front-end of a vhost-user-blk device: what its messages have set, in the words of the
/// vhost-user specification.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Frontend {
    /// `SET_FEATURES`.
    pub features: u64,
    /// `SET_PROTOCOL_FEATURES`.
    pub protocol_features: u64,
    /// `SET_MEM_TABLE`, `ADD_MEM_REG`, `REM_MEM_REG`.
    pub memory: Vec<MemoryRegion>,
    /// `SET_INFLIGHT_FD`.
    pub inflight: Option<InflightDescription>,
    /// `SET_LOG_BASE`.
    pub log: Option<LogDescription>,
    /// Whether there was `SET_LOG_FD`.
    pub has_log_call: bool,
    /// Whether there was `SET_BACKEND_REQ_FD`.
    pub has_backend_channel: bool,
    /// The write cache, as `SET_CONFIG` and `SET_FEATURES` have left it.
    pub write_cache: Cache,
    /// One for each queue of the device.
    pub vrings: Vec<Vring>,
}

/// A write cache.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Cache {
    /// Whether the driver is notified that it is volatile.
    pub is_volatile: bool,
    /// Whether the driver flushes, or sets the state.
    pub driver_flushes: bool,
    /// Whether the state is that which an earlier server left in the in-flight memory.
    pub is_restored: bool,
}

/// A ring. No request of it is in flight.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Vring {
    /// `SET_VRING_NUM`.
    pub size: u16,
    /// `SET_VRING_ADDR`.
    pub addresses: Option<UserAddresses>,
    /// The number of the next available entry, and of the next used one.
    pub base: u16,
    /// `SET_VRING_KICK`.
    pub kick: Option<KickName>,
    /// Whether there was `SET_VRING_CALL` with a descriptor.
    pub has_call: bool,
    /// Whether there was `SET_VRING_ERR` with a descriptor.
    pub has_error: bool,
    /// `SET_VRING_ENABLE`.
    pub is_enabled: bool,
    /// Whether its queue is to run.
    pub is_running: bool,
}

/// How a guest kicks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KickName {
    /// By an eventfd.
    Event,
    /// It does not: the ring is polled.
    Polled,
}

impl Connection {
    /// The options of the handshake.
    pub fn options(&self) -> NegotiatedOptions {
        NegotiatedOptions {
            export: self.export.clone(),
            framing: self.framing,
            contexts: self.contexts.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
