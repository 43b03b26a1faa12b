//! Replays the log of an image into its file, as the next program that writes to the image would,
//! and empties the log (\[MS-VHDX\] 2.3.3).
//!
//! Guarantees: the changes are durable at their offsets before a header states that the log is
//! empty. After a crash at any step, the log is replayed again, or is no longer needed.

use blockhouse_core::{Durability, Result, Storage, SyncMode};

use super::Vhdx;
use super::guid::{Guid, NIL};
use super::header::{Header, OFFSETS};
use crate::aligned_write::write;
use crate::foreign::refusal::corrupt;

/// The end of the headers, which no log may change.
const END: u64 = 192 << 10;

impl Vhdx {
    /// Replays the log into the image in `storage`, which no other program may have open, and
    /// empties the log. `write_id` is the new random GUID of the file's writer. Returns whether
    /// there was a log.
    ///
    /// # Errors
    /// As [`open`](Self::open); `Corrupt` if the log changes the headers, or if their sequence
    /// number cannot be incremented twice; `NoSpace`; errors of the storage. After an error the log
    /// remains.
    pub(in crate::foreign) async fn repair<S: Storage>(
        storage: &S,
        write_id: Guid,
    ) -> Result<bool> {
        if Header::find(storage).await?.log_guid == NIL {
            return Ok(false);
        }
        let image = Self::open(storage).await?;
        if image.patches.change_before(END) {
            return Err(corrupt("a log that changes the headers, which say where it is", 0));
        }
        Header::check_can_follow(storage).await?;
        image.patches.write_to(storage).await?;
        storage.flush(SyncMode::Full).await?;
        // Each write replaces the header that is not current.
        for _ in OFFSETS {
            let (offset, bytes) = Header::without_log(storage, write_id).await?;
            write(storage, offset, &bytes, Durability::None).await?;
            storage.flush(SyncMode::Full).await?;
        }
        Ok(true)
    }
}
