//! The time of a file's last change (`st_ctime`), by which later changes are detected.
//!
//! Guarantee, if the file system stamps with this host's clock and stores times at least as fine as
//! its ticks: a change that begins after the return has another time. File systems stamp with a
//! clock that has ticks, so two changes in one tick may have the same time. (Since Linux 6.13, the
//! second change gets its own time if the time of the first was read before it.) So this waits
//! until the tick is over. It returns `None` for a file system that keeps whole seconds (ext4 with
//! small inodes) or has a clock that is ahead of this host's.
//!
//! A block device has no such time. The amount written to it is used instead (`device_writes`).

use std::time::Duration;

use blockhouse_core::{Error, Result};
use rustix::fs::fstat;
use rustix::time::{ClockId, clock_gettime};

use super::{DeviceWrites, FileKind, HostFile};
use crate::event_loop::sleep::sleep;

/// Length of one wait.
const PAUSE: Duration = Duration::from_millis(1);
/// The number of waits after which it gives up, because the file system then uses another host's
/// clock.
const MAX_PAUSES: usize = 50;

pub(super) async fn last_change(file: &HostFile) -> Result<Option<Duration>> {
    if file.kind == FileKind::BlockDevice {
        return Ok(file.device_writes().await?.map(DeviceWrites::to_time));
    }
    let status = fstat(&*file.file)
        .map_err(|error| Error::host("cannot examine", error.into()).on(&file.name))?;
    let Ok(seconds) = status.st_ctime.try_into() else { return Ok(None) };
    let changed = Duration::new(seconds, status.st_ctime_nsec as u32);
    for _ in 0..MAX_PAUSES {
        if now() > changed {
            return Ok(Some(changed).filter(|time| time.subsec_nanos() != 0));
        }
        sleep(PAUSE).await;
    }
    Ok(None)
}

/// The time by which file systems stamp changes.
fn now() -> Duration {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Storage;

    use super::*;
    use crate::{EngineChoice, EventLoop, OpenMode, PageCache};

    #[test]
    fn each_change_after_it_has_another_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let storage =
                HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used).unwrap();
            let mut last = storage.last_change().await.unwrap().expect("a file has one");
            assert_eq!(storage.last_change().await.unwrap(), Some(last), "nothing changed it");
            for round in 0..100_u64 {
                std::os::unix::fs::FileExt::write_at(file.as_file(), b"x", round).unwrap();
                let next = storage.last_change().await.unwrap().expect("a file has one");
                assert!(next > last, "round {round}: {next:?} after {last:?}");
                last = next;
            }
        });
    }
}
