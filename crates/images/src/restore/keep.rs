//! The state file of an image that is open: its initial content.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_core::Result;
use blockhouse_disk::{Access, Owner, StateDir, StateFile, StatePage, StoredImage, TrackedFile};
use blockhouse_engine::{DeviceWrites, FileKind};
use rustix::fs::FileType;

use super::examine::{identity_of, owner_of, status_of};
use super::modification::{Clock, clock_of, modification_time};
use crate::image_options::StateUse;

/// The consequence of keeping no state.
pub const NOT_KEPT: &str = "no state outlives the server: if its process is killed, a qcow2 image lacks what was \
                            answered and not yet flushed, and a failed flush is forgotten";

/// The consequence of an inode number that may change.
const MAY_NOT_BE_FOUND: &str = "if its file system (FUSE) changes inode numbers, as sshfs does, the next server may not find what \
                                a killed one had answered and not flushed";

/// The files whose flush failures a state file records.
pub(crate) const FILES: [TrackedFile; 2] = [TrackedFile::Image, TrackedFile::Data];

/// The session of a redo log. The header of a qcow2 image names the session while the image is
/// changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogSession {
    /// A new session.
    New,
    /// A new session, of an image that has all changes of the session before.
    OfComplete,
    /// The session of the process that has handed the image over.
    GoesOn,
}

/// Makes the state file of a disk, with an empty log and these failures of flushes; replaces any
/// other state file. `vouched` is the time of the last write to the data file, as an earlier
/// process recorded it in its state file. The data file's mtime is not used, because it may be the
/// time of another program's write.
pub(crate) async fn make_state(
    disk: &StoredImage,
    dir: &StateDir,
    owner: &Owner,
    session: LogSession,
    failures: [Option<i32>; 2],
    vouched: Duration,
) -> Result<()> {
    // With a data file, the image file may get no write while the log fills, so the times of its
    // opening are recorded.
    let Some(file) = disk.file() else { return Ok(()) };
    let status = status_of(file)?;
    let opened = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let modified = modification_time(&status).unwrap_or_default();
    let mark = disk.format().header().data_file_mark();
    let data = disk.format().data().storage().as_file();
    // For a device the mark is the amount written to the device, not a time.
    let writes = match data.filter(|_| mark.is_some()) {
        Some(device) => device.device_writes().await?,
        None => None,
    };
    let is_file = data.is_some_and(|file| file.kind() == FileKind::Regular);
    let marked = mark.filter(|_| is_file).map(|mark| mark.changed).unwrap_or_default();
    let fill = |page: &StatePage| {
        page.raise_last_data_write(vouched.max(marked).as_nanos() as u64);
        page.set_device_writes(writes.map_or(0, DeviceWrites::to_word));
        page.set_opened(opened.as_nanos() as u64, modified.as_nanos() as u64);
        for (file, errno) in FILES.into_iter().zip(failures) {
            if let Some(errno) = errno {
                page.set_failure(file, errno);
            }
        }
    };
    let words = disk.redo_log_words();
    let has_log = words > 0 && tells_of_changes(disk)?;
    if words > 0 && !has_log {
        tracing::warn!(
            "{}: no redo log is kept, because {NOTHING_TELLS}: if the server's process is killed, the image lacks what \
             was answered and not yet flushed. Images of version 3 have one",
            disk.name()
        );
    }
    let state = StateFile::create(dir, owner, if has_log { words } else { 0 }, fill)?;
    tracing::debug!("{}: answers are kept in {}", disk.name(), state.path());
    if let Some(file) = disk.file()
        && identity_of(file)?.may_change(file.descriptor()).unwrap_or(false)
    {
        tracing::info!("{}: {MAY_NOT_BE_FOUND}", disk.name());
    }
    if state.log().words() > 0
        && let Some(redo) = disk.format().redo()
    {
        match session {
            LogSession::New => redo.attach(state.log()),
            LogSession::OfComplete => redo.attach_to_complete(state.log()),
            LogSession::GoesOn => redo.take_over(state.log()),
        }
    }
    disk.keep_state(state);
    Ok(())
}

/// Whether the next opening can detect changes of the image by another program: by the image
/// itself, or by its file's modification time.
///
/// # Errors
/// The host's.
pub(crate) fn tells_of_changes(disk: &StoredImage) -> Result<bool> {
    let Some(file) = disk.file() else { return Ok(false) };
    let status = status_of(file)?;
    let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    let detects_changes = disk.format().redo().is_some_and(|redo| redo.detects_changes());
    Ok(detects_changes || is_file && clock_of(file)? == Clock::ThisHost)
}

/// The reason why an image has no redo log.
pub(crate) const NOTHING_TELLS: &str = "nothing tells whether other programs change an image of version 2 on a block device, or on a file system with \
     another host's clock (NFS)";

/// The state file that the new owner of an image makes after a hand-over. Until then the other
/// process has the state file, whose log is empty.
pub(crate) struct FutureState {
    dir: StateDir,
    owner: Owner,
}

impl FutureState {
    /// For a disk that is opened; `None` if the disk keeps no state.
    pub(crate) fn of(disk: &StoredImage, path: &Path, uses: &StateUse) -> Option<Self> {
        let (StateUse::Keep(dir) | StateUse::TryKeep(dir)) = uses else { return None };
        if disk.access() == Access::ReadOnly {
            return None;
        }
        let owner = owner_of(disk.file()?, path, dir);
        let owner =
            owner.inspect_err(|error| tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name()));
        Some(Self { dir: dir.clone(), owner: owner.ok()? })
    }

    /// Makes the file, which replaces the state file of the other process.
    pub(crate) async fn take(
        self,
        disk: &StoredImage,
        session: LogSession,
        failures: [Option<i32>; 2],
    ) {
        let Self { dir, owner } = self;
        if let Err(error) = make_state(disk, &dir, &owner, session, failures, Duration::ZERO).await
        {
            tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name());
        }
    }
}
