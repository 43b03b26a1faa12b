//! An image whose server kept state and was killed, and whose state file is not found.
//!
//! The session bit of such an image is set. Either the state file is in another directory, and has
//! the last acknowledged changes; or the host has rebooted, and no state file of that session
//! exists. The image file's mtime decides: if the mtime is before this boot, no server of this boot
//! has written to the image. A file system with another host's clock (NFS) tells nothing.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::StoredImage;
use rustix::fs::FileType;
use rustix::time::{ClockId, clock_gettime};

use super::examine::status_of;
use super::modification::{Clock, clock_of, modification_time};
use crate::image_options::StateUse;

/// The time at which a session ended without a close.
enum LostSession {
    /// Perhaps in this boot of the host: the session's state file may be in another directory.
    ThisBoot,
    /// In an earlier boot.
    EarlierBoot,
}

impl LostSession {
    /// The lost session of an image; `None` if the image has no session, or is on another host.
    fn of(disk: &StoredImage) -> Option<Self> {
        disk.format().redo().filter(|redo| redo.has_session_bit())?;
        // An image on another server has no state here.
        let file = disk.file()?;
        // A block device has no modification time of its content.
        let status = status_of(file).ok();
        let status =
            status.filter(|one| FileType::from_raw_mode(one.st_mode) == FileType::RegularFile);
        let modified = status.and_then(|status| modification_time(&status));
        let clock = clock_of(file).unwrap_or(Clock::Unknown);
        Some(match modified {
            Some(modified) if is_before_boot(modified, clock, time_of_boot()) => Self::EarlierBoot,
            _ => Self::ThisBoot,
        })
    }
}

/// Tolerance of the calculated time of the boot, which is inexact because it is calculated from two
/// clocks. A file counts as modified before the boot if its mtime is earlier by more than this.
const TICKS: Duration = Duration::from_secs(2);

fn is_before_boot(modified: Duration, clock: Clock, boot: Duration) -> bool {
    clock == Clock::ThisHost && modified + TICKS < boot
}

/// The time of the host's boot since the Unix epoch, by the present setting of the clock.
fn time_of_boot() -> Duration {
    let read = |clock| {
        let now = clock_gettime(clock);
        Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec as u32)
    };
    read(ClockId::Realtime).saturating_sub(read(ClockId::Boottime))
}

/// Warns of an image that may lack answered changes of its last server.
pub(crate) fn warn_of_lost_session(disk: &StoredImage, uses: &StateUse) {
    match LostSession::of(disk) {
        None => {}
        Some(LostSession::ThisBoot) => tracing::warn!(
            "{}: {KEPT}, and {}: what was answered last may be missing. If the host has not restarted since, stop, and \
             serve the image with the --state directory of that server; else check the guest's file systems",
            disk.name(),
            place(uses)
        ),
        Some(LostSession::EarlierBoot) => tracing::warn!(
            "{}: {KEPT}, and the host has restarted since: what no flush covered is lost. Check the guest's file systems",
            disk.name()
        ),
    }
}

/// Fails for an image whose state file may be in another directory: after a change of the image the
/// state file would no longer fit, and a copy would lack the last answered changes. Only warns if
/// the session ended in an earlier boot.
///
/// # Errors
/// `InvalidInput` with a hint.
pub(crate) fn refuse_lost_session(disk: &StoredImage, uses: &StateUse) -> Result<()> {
    let Some(LostSession::ThisBoot) = LostSession::of(disk) else {
        warn_of_lost_session(disk, uses);
        return Ok(());
    };
    let what = format!("{KEPT}, and {}: what was answered last would be lost", place(uses));
    Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()).hint(
        "name the --state directory of that server; where that is gone, or the host has restarted since, --state off \
         goes on without it",
    ))
}

/// The known facts about the last server.
const KEPT: &str = "its last server kept a state file and did not close the image";

fn place(uses: &StateUse) -> String {
    match (uses, uses.directory()) {
        (StateUse::Off, _) => "none is looked for".to_owned(),
        (_, None) => "there is no state directory".to_owned(),
        (_, Some(dir)) => format!("{} has no such file", dir.path().display()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_file_of_an_earlier_boot_is_known_by_its_time() {
        let boot = time_of_boot();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the present");
        assert!(boot < now && boot.abs_diff(time_of_boot()) < TICKS);
        let before = boot - TICKS - Duration::from_millis(1);
        assert!(is_before_boot(before, Clock::ThisHost, boot));
        assert!(!is_before_boot(before, Clock::Unknown, boot), "its clock may be slow");
        assert!(!is_before_boot(boot - TICKS, Clock::ThisHost, boot));
        assert!(!is_before_boot(now, Clock::ThisHost, boot));
    }
}
