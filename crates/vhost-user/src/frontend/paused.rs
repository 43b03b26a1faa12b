//! A front-end whose device has paused: everything that another process needs to continue it.
//!
//! The state consists of the settings that the front-end's messages have made, and the descriptors
//! that came with the messages.

use std::os::fd::OwnedFd;

use blockhouse_core::WriteCache;

use crate::protocol::{InflightDescription, LogDescription, MemoryRegion, UserAddresses};
use crate::queue::Kick;

/// A front-end that has paused: no request of its queues is in flight, every request that was
/// popped is in the used ring, and no message is partly received.
#[derive(Debug)]
pub struct PausedFrontend {
    /// The connection.
    pub connection: OwnedFd,
    /// The driver's features.
    pub features: u64,
    /// The features of the protocol.
    pub protocol_features: u64,
    /// The regions of memory.
    pub memory: Vec<(MemoryRegion, OwnedFd)>,
    /// The memory for in-flight tracking.
    pub inflight: Option<(InflightDescription, OwnedFd)>,
    /// The log of changed pages.
    pub log: Option<(LogDescription, OwnedFd)>,
    /// The descriptor that notifies the front-end of a changed log.
    pub log_call: Option<OwnedFd>,
    /// The socket for messages to the front-end.
    pub backend_channel: Option<OwnedFd>,
    /// The write cache.
    pub write_cache: PausedWriteCache,
    /// The rings, one for each queue of the device.
    pub vrings: Vec<PausedVring>,
}

/// The driver's knowledge of the write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PausedWriteCache {
    /// The state that is reported to the driver.
    pub reported: WriteCache,
    /// Whether the driver flushes, or sets the state.
    pub driver_flushes: bool,
    /// Whether the state was restored from the in-flight memory, where an earlier server stored it.
    pub is_restored: bool,
}

/// A ring.
#[derive(Debug)]
pub struct PausedVring {
    /// The number of its entries.
    pub size: u16,
    /// The addresses of the ring.
    pub addresses: Option<UserAddresses>,
    /// The number of the next available entry.
    pub base: u16,
    /// The guest's kick, if set.
    pub kick: Option<Kick>,
    /// The descriptor that notifies the driver.
    pub call: Option<OwnedFd>,
    /// The descriptor that notifies the front-end of a broken ring.
    pub error: Option<OwnedFd>,
    /// Whether the front-end has enabled the ring.
    pub is_enabled: bool,
    /// Whether the ring's queue runs when the device runs.
    pub is_running: bool,
}

/// The reason why a device has not paused. The device continues.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// Requests are still in flight.
    #[error("a guest's requests did not complete in time")]
    Requests,
    /// The device's thread executes a message, or waits for the rest of one.
    #[error("a message of the front-end was not carried out in time")]
    Message,
    /// The host failed, for example because no more descriptors are available.
    #[error("a front-end's state cannot be copied: {0}")]
    Host(#[from] std::io::Error),
}
