//! An overlay over another disk than before, with the same content.
//!
//! What the new disk behind would change is first written into the overlay, durably; only then is the
//! overlay told its new backing file, with one write of its header. A crash before that leaves an overlay
//! of the old file that has more clusters of its own than it needs.

use blockhouse_core::{Buffer, ByteRange, Durability, Request, Result, Storage};
use blockhouse_format::qcow2::Backing;

use crate::Disk;
use crate::transfer::Source;

/// What is compared and copied as a whole where clusters are smaller.
const LEAST_UNIT: u64 = 64 << 10;

impl<S: Storage> Disk<S> {
    /// Copies into this disk what it would read otherwise if `new` were behind it; with `None`, what it
    /// would lose if nothing were. Durable when it returns. No other request may be in flight.
    ///
    /// # Errors
    /// `ReadOnly`, or what a storage answered; the content is the same as before in any case.
    pub async fn prepare_rebase(&self, new: Option<&Self>) -> Result<()> {
        self.check_access(0)?;
        self.for_each_piece(|piece, source| self.keep_piece(new, piece, source)).await?;
        self.flush().await
    }

    /// Tells the image its new backing file, or that it has none, durably: see
    /// [`Qcow2::set_backing`](blockhouse_format::Qcow2::set_backing). Without
    /// [`prepare_rebase`](Self::prepare_rebase) the content may change. The disk is to be closed and opened
    /// anew after this.
    ///
    /// # Errors
    /// As there; `ReadOnly`; `Unsupported` for a format without backing files.
    pub async fn set_backing_file(&self, backing: Option<Backing>) -> Result<()> {
        self.check_access(0)?;
        self.format.set_backing(backing).await
    }

    async fn keep_piece(&self, new: Option<&Self>, piece: ByteRange, source: Source) -> Result<()> {
        if source != Source::Behind {
            return Ok(());
        }
        let [mut old, mut other] = [(); 2].map(|()| Buffer::new(piece.length() as usize));
        self.read_or_zeros(piece, &mut old).await?;
        match new {
            Some(new) => new.read_or_zeros(piece, &mut other).await?,
            None => other.bytes_mut().fill(0),
        }
        let unit = self.cluster_size().unwrap_or(LEAST_UNIT).max(LEAST_UNIT);
        let mut rest = piece;
        while !rest.is_empty() {
            let part = rest.truncate(unit - rest.offset() % unit);
            rest = rest.skip(part.length());
            let start = (part.offset() - piece.offset()) as usize;
            let bytes = start..start + part.length() as usize;
            let wanted = &old.bytes()[bytes.clone()];
            if *wanted == other.bytes()[bytes] {
                continue;
            }
            if wanted.iter().all(|&byte| byte == 0) {
                self.make_zeros(part).await?;
                continue;
            }
            let mut copy = Buffer::new(wanted.len());
            copy.bytes_mut().copy_from_slice(wanted);
            let (offset, from) = (part.offset(), copy.lend());
            self.submit(Request::Write { offset, from, durability: Durability::None }).await?;
        }
        Ok(())
    }
}
