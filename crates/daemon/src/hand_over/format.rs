//! The messages of a hand-over's socket pair. Disks are in [`disk`], their counters in
//! [`counters`].
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
//! that each version can refuse another. Any other change needs a new version, except a new field
//! that is left out while it has its default. Reason: a program that does not know the field
//! refuses a message that has it. A test has the frames of each version as bytes. Version 1 had no
//! vhost-user-blk devices, version 2 no bitmaps; version 3 had no counters and no description of
//! disks, so that a destination could serve only the disks of its command line; version 4 had no
//! ublk devices.
//!
//! Order of the descriptors. [`Message::Offer`]: for each file of each disk the file, then its
//! further descriptors for the last block and for flushes, if it has them; for each socket the
//! socket, then its file (`O_PATH`) if it has one; the same for each device's socket, and for the
//! control socket. [`Message::Yours`]: one for each connection; then for each front-end its
//! connection, the file of each region of memory, of the in-flight memory and of the log, the
//! eventfd for changes of the log, the socket for messages to it, and for each ring the eventfds
//! for the guest's kicks, for notifying the driver and for errors, if it has them.

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
/// The maximum number of descriptors sent together, below the kernel's limit (`SCM_MAX_FD`, 253).
pub const BATCH: usize = 128;

/// A message; the order is Offer, Ready or Refused, Yours, Mine or Refused.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The source's disks and exports, which it still serves.
    Offer(Offer),
    /// The destination can take the offer, and has started its event loops.
    Ready,
    /// The destination cannot take over, changes nothing, and ends. From the source: the source
    /// keeps everything.
    Refused {
        /// Why, in one line.
        why: String,
    },
    /// The source has stopped executing requests. The destination may take over.
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
    /// The ublk devices. The kernel's driver gives them to the destination when the source has
    /// ended.
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
    /// The address at which it listens.
    pub address: Address,
    /// Whether its file is removed at the end.
    pub has_file: bool,
    /// Whether its clients must use TLS.
    pub needs_tls: bool,
    /// The names of its exports, each with the index of its disk.
    pub exports: Vec<(String, usize)>,
    /// The names of read-only exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub read_only: Vec<String>,
    /// The names of exports whose clients may not query which image of the chain has the data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_depth: Vec<String>,
    /// The names of exports that have descriptions, each with its description.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptions: Vec<(String, String)>,
    /// The options of `socket.add`, if control has added the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added: Option<AddedSocket>,
}

/// A vhost-user-blk device.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Device {
    /// The socket.
    pub socket: Listening,
    /// The index of its disk.
    pub disk: usize,
    /// Whether the export is read-only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// A block device of this host, by the kernel's ublk driver.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Ublk {
    /// The device's number, N of `/dev/ublkbN`.
    pub id: u32,
    /// The index of its disk.
    pub disk: usize,
    /// The identity of its image: the bytes of a UTF-8 text.
    pub image: Vec<u8>,
}

/// A listening socket of a vhost-user-blk device or of control.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Listening {
    /// The address at which it listens.
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

/// The state of the exports that the source has stopped serving.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Yours {
    /// For each disk the remembered errno of a failed flush: of the image, and of its data file.
    pub flush_failures: Vec<[Option<i32>; 2]>,
    /// For each disk the values of its counters.
    pub counts: Vec<Counts>,
    /// The connections that have paused.
    pub connections: Vec<Connection>,
    /// For each device the front-end that has paused, if it has one.
    pub frontends: Vec<Option<Frontend>>,
}

/// A connection. Its received bytes are in the frame's bytes, after the received bytes of the
/// connections before it.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Connection {
    /// The index of its listening socket.
    pub socket: usize,
    /// The canonical name of its export.
    pub export: String,
    /// How requests and replies are framed.
    pub framing: Framing,
    /// The negotiated metadata contexts, with their ids in replies.
    pub contexts: Vec<(u32, MetaContext)>,
    /// Whether it has ever sent a request.
    pub is_used: bool,
    /// The count of bytes that were received and do not belong to an executed request.
    pub received: u64,
}

/// A front-end of a vhost-user-blk device: the values that its messages have set, in the terms of
/// the vhost-user specification.
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
    /// Whether the driver is told that the cache is volatile.
    pub is_volatile: bool,
    /// Whether the driver flushes, or sets the cache's state.
    pub driver_flushes: bool,
    /// Whether the state was read from the in-flight memory, where an earlier server had stored it.
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
    /// The index of the next available entry, which is also the index of the next used entry.
    pub base: u16,
    /// `SET_VRING_KICK`.
    pub kick: Option<KickName>,
    /// Whether there was `SET_VRING_CALL` with a descriptor.
    pub has_call: bool,
    /// Whether there was `SET_VRING_ERR` with a descriptor.
    pub has_error: bool,
    /// `SET_VRING_ENABLE`.
    pub is_enabled: bool,
    /// Whether the ring's queue must run.
    pub is_running: bool,
}

/// How a guest kicks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KickName {
    /// The guest signals an eventfd.
    Event,
    /// The guest does not kick: the ring is polled.
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
