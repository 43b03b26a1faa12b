//! Limits on the sizes in an image, each defined once. The limits are QEMU's, so that QEMU accepts
//! every new image.

/// Host offsets are less than this: table entries have bits 9 to 55 of an offset.
pub(crate) const MAX_OFFSET: u64 = 1 << 56;
/// Bytes of an L1 table, of the active disk or of a snapshot.
pub(crate) const MAX_L1_BYTES: u64 = 32 << 20;
/// Bytes of the refcount table.
pub(crate) const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Bytes of the name of a backing file or a data file.
pub(crate) const MAX_FILE_NAME: usize = 1023;
/// Snapshots of an image.
pub(crate) const MAX_SNAPSHOTS: u32 = 65_536;
/// Bytes of the snapshot table.
pub(crate) const MAX_SNAPSHOT_TABLE: usize = 64 << 20;
/// Bytes of extra data of a snapshot.
pub(crate) const MAX_SNAPSHOT_EXTRA: usize = 1024;
/// Bytes of the name of a snapshot. QEMU truncates longer names when it lists them.
pub(crate) const MAX_SNAPSHOT_NAME: usize = 255;
/// Persistent bitmaps of an image.
pub(crate) const MAX_BITMAPS: u32 = 65_535;
/// Bytes of the directory of bitmaps.
pub(crate) const MAX_BITMAP_DIRECTORY: u64 = 1024 * MAX_BITMAPS as u64;
/// Bytes of the table of one bitmap. With clusters of 512 bytes, such a table refers to
/// [`MAX_BITMAP_BYTES`] of bits.
pub(crate) const MAX_BITMAP_TABLE: u64 = 8 << 20;
/// Bytes of the bits of one bitmap.
pub(crate) const MAX_BITMAP_BYTES: u64 = 512 << 20;
/// Bytes of the name of a bitmap.
pub(crate) const MAX_BITMAP_NAME: usize = 1023;
/// The granularity of a bitmap, as a power of two: 512 B to 2 GiB.
pub(crate) const MIN_GRANULARITY_BITS: u32 = 9;
pub(crate) const MAX_GRANULARITY_BITS: u32 = 31;
