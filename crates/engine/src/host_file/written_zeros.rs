//! Zeros that are written without being sent: `FALLOC_FL_WRITE_ZEROES` (Linux 6.17).
//!
//! A file system marks space from any other `fallocate` as unwritten, so that the first write to it
//! is a change of its journal, too. This mode leaves *written* extents. The kernel supports the
//! mode only if the disk itself makes zeros without being sent them (`write_zeroes_unmap_max_bytes`
//! of its queue), so it is never slow. The first use shows whether the mode is supported; the
//! result is remembered for the file, and logged.

use std::sync::Arc;

use blockhouse_core::{ByteRange, IoVector};
use rustix::io::Errno;

use crate::driver::file::File;
use crate::driver::operation::Operation;
use crate::driver::thread_pool::blocking;
use crate::event_loop::submit::submit;

/// `FALLOC_FL_WRITE_ZEROES` from `<linux/falloc.h>`.
const WRITE_ZEROES: i32 = 0x80;

/// The log's line after a refusal.
pub(super) const REFUSED: &str = "the kernel, its file system or its disk writes no zeros without being sent them \
    (FALLOC_FL_WRITE_ZEROES): first durable writes to new space change the file system's journal, too";

/// Fills the range; the operation owns `held` until it ends.
pub(super) async fn write(file: &Arc<File>, range: ByteRange, held: IoVector) -> Result<(), Errno> {
    let mut held = Some(held);
    loop {
        let (file, mode) = (Arc::clone(file), WRITE_ZEROES);
        let operation = Operation::Allocate { file, mode, range, held: held.take() };
        match submit(operation).await {
            (Err(Errno::AGAIN | Errno::INTR), Operation::Allocate { held: back, .. }) => {
                held = back;
            }
            (result, _) => return result.map(drop),
        }
    }
}

/// Whether an error means that the mode is not supported here.
pub(super) fn is_refusal(error: Errno) -> bool {
    matches!(error, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV | Errno::INVAL)
}

/// The free space of the file system for this user.
pub(super) async fn free_space(file: &Arc<File>) -> Result<u64, Errno> {
    file_system(file).await.map(|(left, _)| left)
}

/// The free and the whole space of the file's file system.
pub(super) async fn file_system(file: &Arc<File>) -> Result<(u64, u64), Errno> {
    let file = Arc::clone(file);
    blocking(move || room_of(&file)).await
}

/// As [`file_system`], on the calling thread.
pub(super) fn room_of(file: &File) -> Result<(u64, u64), Errno> {
    let status = rustix::fs::fstatvfs(file)?;
    let bytes = |blocks: u64| blocks.saturating_mul(status.f_frsize);
    Ok((bytes(status.f_bavail), bytes(status.f_blocks)))
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Storage;

    use crate::host_file::HostFile;
    use crate::{EngineChoice, EventLoop, OpenMode, PageCache};

    #[test]
    fn a_file_system_says_what_is_left() {
        let file = tempfile::NamedTempFile::new().unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let file = HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used).unwrap();
            assert!(file.free_space().await.unwrap().is_some_and(|left| left > 0));
        });
    }
}
