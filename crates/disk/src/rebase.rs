//! An overlay over another disk than before, with the same content.
//!
//! What the new disk behind would change is first written into the overlay, durably; only then is the
//! overlay told its new backing file, with one write of its header. A crash before that leaves an overlay
//! of the old file that has more clusters of its own than it needs. What block status shows as zeros
//! behind the overlay, before and after, is not read.

use blockhouse_core::{Buffer, Durability, ExtentState, Request, Result, Storage};
use blockhouse_format::{Backing, Intent};
use futures_util::stream;

use crate::Disk;
use crate::convert::{Piece, Walk, read};
use crate::transfer::together;

/// Bytes that are compared and copied as a whole where clusters are smaller.
const MIN_UNIT: u64 = 64 << 10;
/// Bytes of a piece of the walk where clusters are smaller.
const PIECE: u64 = 1 << 20;

impl<S: Storage> Disk<S> {
    /// Copies into this disk what it would read otherwise if `new` were behind it; with `None`, what it
    /// would lose if nothing were. Durable when it returns. No other request may be in flight.
    ///
    /// # Errors
    /// `ReadOnly`, or what a storage answered; the content is the same as before in any case.
    pub async fn prepare_rebase(&self, new: Option<&Self>) -> Result<()> {
        self.check_access(0)?;
        // Zeros behind the end of the file behind have to be stored as well: the new one may be longer.
        self.format.set_backing_size(u64::MAX);
        let piece = self.cluster_size().unwrap_or(PIECE).max(PIECE);
        let walk = Walk::new([self].into_iter().chain(new), piece, self.size());
        let pieces = stream::unfold(Some(walk), |walk| async move {
            let mut walk = walk?;
            match walk.next().await {
                Ok(piece) => Some((Ok(piece?), Some(walk))),
                Err(error) => Some((Err(error), None)),
            }
        });
        together(pieces, |piece| self.keep_piece(new, piece)).await?;
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

    /// Copies of a piece what this disk leaves to the one behind it.
    async fn keep_piece(&self, new: Option<&Self>, piece: Piece) -> Result<()> {
        let mut rest = piece.range;
        while !rest.is_empty() {
            let extent = self.format.map(rest, Intent::Read).await?;
            rest = rest.skip(extent.guest.length());
            let part = piece.part(extent.guest);
            let is_behind = matches!(extent.state, ExtentState::Hole | ExtentState::Backing);
            if is_behind && !part.data.is_empty() {
                self.keep_part(new, &part).await?;
            }
        }
        Ok(())
    }

    async fn keep_part(&self, new: Option<&Self>, part: &Piece) -> Result<()> {
        let [mut old, mut other] = [(); 2].map(|()| Buffer::new(part.range.length() as usize));
        read(self, part, &mut old).await?;
        match new {
            Some(new) => read(new, part, &mut other).await?,
            None => other.bytes_mut().fill(0),
        }
        let unit = self.cluster_size().unwrap_or(MIN_UNIT).max(MIN_UNIT);
        let mut rest = part.range;
        while !rest.is_empty() {
            let range = rest.truncate(unit - rest.offset() % unit);
            rest = rest.skip(range.length());
            let start = (range.offset() - part.range.offset()) as usize;
            let bytes = start..start + range.length() as usize;
            let wanted = &old.bytes()[bytes.clone()];
            if *wanted == other.bytes()[bytes] {
                continue;
            }
            if wanted.iter().all(|&byte| byte == 0) {
                self.make_zeros(range).await?;
                continue;
            }
            let mut copy = Buffer::new(wanted.len());
            copy.bytes_mut().copy_from_slice(wanted);
            let (offset, from) = (range.offset(), copy.lend());
            self.submit(Request::Write { offset, from, durability: Durability::None }).await?;
        }
        Ok(())
    }
}
