//! The device's features and configuration space (virtio 1.2, section 5.2.4).

use blockhouse_core::{Offload, Storage, WriteCache};
use blockhouse_disk::{Access, Disk};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

use super::header::SECTOR;
use super::limits::{SEG_MAX, SIZE_MAX};
use super::request::{MAX_RANGES, MAX_SECTORS};

/// `VHOST_F_LOG_ALL` of `<linux/vhost_types.h>`: changes of the guest's memory are logged.
pub const LOG_ALL: u64 = 1 << 26;
/// `VHOST_USER_F_PROTOCOL_FEATURES` of the vhost-user specification.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The offset of the one byte that a driver may write: whether the write cache is volatile.
pub const WRITEBACK: u32 = 32;

/// Bytes of the configuration space; bytes beyond read as zeros.
const LENGTH: usize = 60;
/// Bytes that a front-end may read (`VHOST_USER_MAX_CONFIG_SIZE`).
const READABLE: usize = 256;

const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// The bit of `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_INDEX: u64 = bit(VIRTIO_RING_F_EVENT_IDX);
/// The bit for a read-only disk.
const READ_ONLY: u64 = bit(VIRTIO_BLK_F_RO);
/// A driver that accepted neither of these expects every write to be durable.
pub const KNOWS_WRITE_CACHE: u64 = bit(VIRTIO_BLK_F_FLUSH) | bit(VIRTIO_BLK_F_CONFIG_WCE);

/// Whether the initial mode of the write cache is writethrough for a driver with these features,
/// because the driver may change the mode but cannot flush (virtio 1.2, section 5.2.5.2).
pub fn starts_writethrough(features: u64) -> bool {
    features & KNOWS_WRITE_CACHE == bit(VIRTIO_BLK_F_CONFIG_WCE)
}

/// The current features of a device for this disk. Features for changing the disk are not offered
/// if the export is read-only, or if the disk became read-only while it is served.
pub fn features<S: Storage>(disk: &Disk<S>, export: Access) -> u64 {
    match (disk.access(), export) {
        (Access::ReadWrite, Access::ReadWrite) => basic_features() | change_features(disk),
        _ => basic_features() | READ_ONLY,
    }
}

/// All features that a driver may ever have negotiated, whether the disk was read-only at that time
/// or not. A front-end that reconnects with older features of its driver is accepted.
pub fn acceptable_features<S: Storage>(disk: &Disk<S>) -> u64 {
    basic_features() | change_features(disk) | READ_ONLY
}

fn basic_features() -> u64 {
    [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_CONFIG_WCE,
    ]
    .into_iter()
    .fold(LOG_ALL | PROTOCOL_FEATURES, |all, feature| all | bit(feature))
}

/// The features for discards and zero writes, if the image is writable.
fn change_features<S: Storage>(disk: &Disk<S>) -> u64 {
    match (disk.image().access(), disk.capabilities().discard) {
        (Access::ReadOnly, _) => 0,
        (_, Offload::Unavailable) => bit(VIRTIO_BLK_F_WRITE_ZEROES),
        (_, Offload::Available) => bit(VIRTIO_BLK_F_WRITE_ZEROES) | bit(VIRTIO_BLK_F_DISCARD),
    }
}

/// Bytes of the configuration space; `None` if the range ends beyond `READABLE`.
pub fn read<S: Storage>(
    disk: &Disk<S>,
    queues: u16,
    cache: WriteCache,
    offset: u32,
    length: u32,
) -> Option<Vec<u8>> {
    let start = offset as usize;
    let end = start.checked_add(length as usize).filter(|&end| end <= READABLE)?;
    let mut bytes = space(disk, queues, cache);
    bytes.resize(READABLE, 0);
    Some(bytes[start..end].to_vec())
}

fn space<S: Storage>(disk: &Disk<S>, queues: u16, cache: WriteCache) -> Vec<u8> {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    let logical = disk.logical_block_size();
    let block = disk.physical_block_size();
    let mut bytes = Vec::with_capacity(READABLE);
    let mut put = |field: &[u8]| bytes.extend_from_slice(field);
    put(&(disk.size() / SECTOR).to_le_bytes());
    put(&SIZE_MAX.to_le_bytes());
    put(&SEG_MAX.to_le_bytes());
    // The geometry (cylinders, heads, sectors) is not reported.
    put(&[0; 4]);
    // The minimum request is one logical block. The topology fields report the alignment that
    // avoids read-modify-write, in logical blocks.
    put(&(logical as u32).to_le_bytes());
    let exponent = (block / logical).ilog2() as u8;
    put(&[exponent, 0]);
    let blocks = |bytes: u64| u32::try_from(bytes / logical).unwrap_or(u32::MAX);
    put(&(blocks(block) as u16).to_le_bytes());
    put(&disk.image().cluster_size().map_or(0, blocks).to_le_bytes());
    put(&[u8::from(cache == WriteCache::Volatile), 0]);
    put(&queues.to_le_bytes());
    for field in [MAX_SECTORS, MAX_RANGES, sectors(disk.discard_granularity())] {
        put(&field.to_le_bytes());
    }
    for field in [MAX_SECTORS, MAX_RANGES] {
        put(&field.to_le_bytes());
    }
    let may_unmap = disk.capabilities().discard == Offload::Available;
    put(&[u8::from(may_unmap), 0, 0, 0]);
    debug_assert_eq!(bytes.len(), LENGTH);
    bytes
}
