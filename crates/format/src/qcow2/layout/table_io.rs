//! Reads and writes of tables on the storage.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

pub(crate) use crate::aligned_write::write;

use super::header::{self, Header, HeaderError, HeaderErrorKind, SECTOR};
pub(crate) use crate::aligned_read::read;

/// Reads the header of the image in `storage`.
///
/// # Errors
/// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
pub(crate) async fn read_header<S: Storage>(storage: &S) -> Result<Header> {
    let refuse = |refusal: HeaderError| {
        let kind = match refusal.reason {
            HeaderErrorKind::Corrupt => ErrorKind::Corrupt,
            HeaderErrorKind::Unsupported => ErrorKind::Unsupported,
        };
        let error = Error::new(kind, refusal.what).on(storage.name()).at(refusal.offset);
        match refusal.offset {
            0 => error.hint(
                "say which format it has (--format, of a backing file -F), or restore it from a copy if that is its format",
            ),
            _ => error,
        }
    };
    let first = read(storage, 0, SECTOR).await?;
    let bits = header::cluster_bits(&first).map_err(refuse)?;
    if storage.size() < header::LENGTH_3 as u64 {
        let what = format!(
            "the file ends after {} bytes, within the header of a qcow2 image: it was truncated",
            storage.size()
        );
        let error = Error::new(ErrorKind::Corrupt, what).on(storage.name());
        return Err(error.hint("get the whole file again, or restore it from a copy"));
    }
    let block = storage.capabilities().alignment.offset;
    if 1 << bits < u64::from(block) {
        let what = format!("clusters of {} bytes in a storage of blocks of {block}", 1u64 << bits);
        return Err(Error::new(ErrorKind::Unsupported, what)
            .on(storage.name())
            .hint(SMALL_CLUSTERS));
    }
    let bytes = read(storage, 0, 1 << bits).await?;
    Header::parse(&bytes, block).map_err(refuse)
}

/// Hint for an image whose clusters are smaller than the blocks of its storage.
pub(crate) const SMALL_CLUSTERS: &str = "a file or device of this host is opened through the page cache (--cache \
     writeback); an export of another server needs one that takes smaller blocks, or a copy of the image with larger \
     clusters";

/// The part of a range of whole clusters that lies in the file, in whole blocks: for a discard.
pub(crate) fn whole_blocks<S: Storage>(storage: &S, range: ByteRange) -> Option<ByteRange> {
    let inside = range.truncate(storage.size().saturating_sub(range.offset()));
    inside.align_inward(u64::from(storage.capabilities().alignment.offset))
}
