//! An overlay's data into the disk behind it.
//!
//! Until the disk behind has everything, durably, the overlay keeps all it has; and while the overlay is
//! emptied, what it gives up reads the same from behind. So a crash at any point leaves a disk that reads
//! as before, and the commit can be made again.

use blockhouse_core::{Buffer, ByteRange, Durability, Request, Result, Storage};

use crate::Disk;
use crate::transfer::Source;

impl<S: Storage> Disk<S> {
    /// Writes what this disk has itself into `base`, the disk right behind it, then empties this one.
    /// A base that is shorter is made as long. Durable when it returns. No other request may be in flight
    /// on either.
    ///
    /// # Errors
    /// `ReadOnly` for either disk, `Unsupported` for a format without backing files; or what a storage
    /// answered: nothing is lost then.
    pub async fn commit_into(&self, base: &Self) -> Result<()> {
        self.check_access(0)?;
        if base.size() < self.size() {
            base.resize(self.size()).await?;
        }
        self.for_each_piece(|piece, source| self.commit_piece(base, piece, source)).await?;
        base.flush().await?;
        self.format.make_empty().await
    }

    async fn commit_piece(&self, base: &Self, piece: ByteRange, source: Source) -> Result<()> {
        match source {
            Source::Behind => Ok(()),
            Source::Zeros => base.make_zeros(piece).await,
            Source::Own => {
                let mut buffer = Buffer::new(piece.length() as usize);
                self.read_or_zeros(piece, &mut buffer).await?;
                let (offset, from) = (piece.offset(), buffer.lend());
                base.submit(Request::Write { offset, from, durability: Durability::None }).await
            }
        }
    }
}
