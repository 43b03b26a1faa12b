//! The parameters of a block device (`struct ublk_params` of `<linux/ublk_cmd.h>`): block sizes,
//! limits, its write cache.
//!
//! The kernel gets the true state of the write cache: none if writes are stable when they complete,
//! otherwise a volatile one with FUA. From the physical block size the kernel learns which requests
//! are cheaper.

use blockhouse_core::{Durability, Offload, Storage, WriteCache};
use blockhouse_disk::{Access, Disk};

/// Bytes of a sector, in which the driver counts.
pub(crate) const SECTOR: u64 = 512;
/// Maximum sectors of a discard or zero write: 1 GiB.
const MAX_SECTORS: u32 = 1 << 21;

/// `UBLK_PARAM_TYPE_BASIC` and `UBLK_PARAM_TYPE_DISCARD`.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;

/// `UBLK_ATTR_`.
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;

/// The parameters of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Whether it accepts changes.
    pub(crate) access: Access,
    /// Whether the kernel flushes.
    pub(crate) cache: WriteCache,
    /// Logical block size in bytes, 4096 at most: on some machines the kernel accepts no more.
    logical: u64,
    /// Physical block size in bytes.
    block: u64,
    /// Optimal size of a write in bytes.
    unit: u64,
    /// Bytes of the unit of discards.
    discard_granularity: u64,
    /// Maximum bytes of a request with data.
    max_io_bytes: u32,
    /// Whether the disk executes discards.
    discard: Offload,
}

impl Parameters {
    /// Bytes of the parameters in the driver's layout.
    pub(crate) const BYTES: usize = 60;

    /// The parameters of a disk.
    pub(crate) fn of<S: Storage>(disk: &Disk<S>, max_io_bytes: u32) -> Self {
        let block = disk.physical_block_size();
        let capabilities = disk.capabilities();
        Self {
            size: disk.size(),
            access: disk.image().access(),
            cache: capabilities.write_cache,
            logical: disk.logical_block_size(),
            block,
            discard_granularity: disk.discard_granularity(),
            unit: disk.image().cluster_size().unwrap_or(block).max(block),
            max_io_bytes,
            discard: capabilities.discard,
        }
    }

    /// The minimum durability of a write: a kernel to which no cache was reported does not flush.
    pub(crate) fn durability(&self) -> Durability {
        match self.cache {
            WriteCache::Volatile => Durability::None,
            WriteCache::None => Durability::Data,
        }
    }

    /// The parameters in the driver's layout.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        let mut put = |field: &[u8]| bytes.extend_from_slice(field);
        let shift = |bytes: u64| bytes.ilog2() as u8;
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
        put(&(Self::BYTES as u32).to_ne_bytes());
        put(&(BASIC | DISCARD).to_ne_bytes());
        put(&self.attributes().to_ne_bytes());
        put(&[self.logical, self.block, self.unit, self.block].map(shift));
        put(&sectors(self.max_io_bytes.into()).to_ne_bytes());
        // `chunk_sectors`: requests may cross any boundary.
        put(&[0; 4]);
        put(&(self.size / SECTOR).to_ne_bytes());
        // `virt_boundary_mask`: memory may cross any boundary.
        put(&[0; 8]);
        let is_writable = self.access == Access::ReadWrite;
        let limit = |is_offered: bool| if is_offered && is_writable { MAX_SECTORS } else { 0 };
        let discards = limit(self.discard == Offload::Available);
        put(&[0; 4]);
        put(&u32::try_from(self.discard_granularity).unwrap_or(u32::MAX).to_ne_bytes());
        put(&discards.to_ne_bytes());
        put(&limit(true).to_ne_bytes());
        // One range of a discard; the rest is padding.
        put(&u16::from(discards != 0).to_ne_bytes());
        put(&[0; 2]);
        bytes.try_into().expect("all fields have their size")
    }

    fn attributes(&self) -> u32 {
        let mut attributes = 0;
        if self.access == Access::ReadOnly {
            attributes |= READ_ONLY;
        }
        if self.cache == WriteCache::Volatile {
            attributes |= VOLATILE_CACHE | FUA;
        }
        attributes
    }

    /// These parameters, but with the size and the write cache that the kernel already has for the
    /// device.
    ///
    /// # Errors
    /// The property that the device can no longer have.
    pub(crate) fn as_known(self, bytes: &[u8; Self::BYTES]) -> Result<Self, String> {
        let attributes = u32::from_ne_bytes(bytes[8..12].try_into().expect("4 bytes"));
        let sectors = u64::from_ne_bytes(bytes[24..32].try_into().expect("8 bytes"));
        let was_read_only = attributes & READ_ONLY != 0;
        if was_read_only != (self.access == Access::ReadOnly) {
            let what = if was_read_only { "it was read-only" } else { "it is read-only now" };
            return Err(what.into());
        }
        let cache = match attributes & VOLATILE_CACHE {
            0 => WriteCache::None,
            _ => WriteCache::Volatile,
        };
        Ok(Self { size: sectors.saturating_mul(SECTOR), cache, ..self })
    }
}

#[cfg(test)]
pub(crate) fn example(size: u64) -> Parameters {
    Parameters {
        size,
        access: Access::ReadWrite,
        cache: WriteCache::Volatile,
        logical: 1024,
        block: 4096,
        unit: 65536,
        discard_granularity: 131_072,
        max_io_bytes: 512 << 10,
        discard: Offload::Available,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        example(1 << 30)
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
    }

    #[test]
    fn fields_are_where_the_driver_reads_them() {
        let bytes = parameters().to_bytes();
        assert_eq!((word(&bytes, 0), word(&bytes, 4)), (60, 3));
        assert_eq!(word(&bytes, 8), VOLATILE_CACHE | FUA);
        assert_eq!(bytes[12..16], [10, 12, 16, 12]);
        assert_eq!(word(&bytes, 16), 1024);
        assert_eq!(bytes[24..32], (1_u64 << 21).to_ne_bytes());
        assert_eq!(word(&bytes, 44), 131_072);
        assert_eq!((word(&bytes, 48), word(&bytes, 52)), (MAX_SECTORS, MAX_SECTORS));
        assert_eq!(bytes[56..58], 1_u16.to_ne_bytes());
    }

    #[test]
    fn a_disk_without_a_cache_has_neither_cache_nor_fua() {
        let stable = Parameters { cache: WriteCache::None, ..parameters() };
        assert_eq!(word(&stable.to_bytes(), 8), 0);
        assert_eq!(stable.durability(), Durability::Data);
        assert_eq!(parameters().durability(), Durability::None);
    }

    #[test]
    fn a_disk_that_is_only_read_offers_no_changes() {
        let read_only = Parameters { access: Access::ReadOnly, ..parameters() }.to_bytes();
        assert_eq!(word(&read_only, 8) & READ_ONLY, READ_ONLY);
        assert_eq!((word(&read_only, 48), word(&read_only, 52)), (0, 0));
        assert_eq!(read_only[56..58], [0, 0]);
        let no_discard = Parameters { discard: Offload::Unavailable, ..parameters() }.to_bytes();
        assert_eq!((word(&no_discard, 48), word(&no_discard, 52)), (0, MAX_SECTORS));
    }

    #[test]
    fn a_device_that_goes_on_keeps_its_cache_and_its_size() {
        let before = Parameters { cache: WriteCache::None, size: 1 << 20, ..parameters() };
        let known = parameters().as_known(&before.to_bytes()).expect("the same kind of device");
        assert_eq!((known.size, known.cache), (1 << 20, WriteCache::None));
        // The kernel will not flush, even if the disk now has a volatile cache.
        assert_eq!(known.durability(), Durability::Data);
        let read_only = Parameters { access: Access::ReadOnly, ..parameters() };
        assert!(read_only.as_known(&before.to_bytes()).is_err());
        assert!(parameters().as_known(&read_only.to_bytes()).is_err());
    }
}
