//! The block size options of `serve` and `ctl open`.

use blockhouse_config::size;
use blockhouse_disk::BlockSizes;

/// The block sizes that a disk announces.
#[derive(clap::Args, Clone, Copy)]
pub struct BlockSizeArgs {
    /// The size of the disk's sectors, 512 to 4096. Partition tables count in sectors, so a disk
    /// must keep the size that it was written with. Left out: as the image says (VHDX), otherwise
    /// 512.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub logical_block_size: Option<u64>,
    /// The block size that is best for a guest's writes, up to 2M. Left out: that of the host's
    /// storage.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub physical_block_size: Option<u64>,
    /// The discard granularity that vhost-user-blk and ublk devices announce. Left out: a cluster
    /// of the image, at least 64K: Windows discards nothing if it is one sector. NBD cannot
    /// announce it.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub discard_granularity: Option<u64>,
}

impl BlockSizeArgs {
    /// The block sizes, checked.
    ///
    /// # Errors
    /// A text that says why no disk has such sizes.
    pub fn sizes(self) -> Result<BlockSizes, String> {
        BlockSizes::new(self.logical_block_size, self.physical_block_size, self.discard_granularity)
    }
}
