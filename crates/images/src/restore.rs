//! Restores the state that a killed server left of an image, and creates the state file of the next
//! server.
//!
//! When an image is opened, after it is locked and before anything is changed:
//!
//! 1. Its state file is looked for ([`Restore::begin`]). A file of an earlier boot of the host is
//!    void and removed. A file of another image (for example this device before it was detached and
//!    attached) is set aside with a warning, unless it is empty, and so is a file that is no state
//!    file.
//! 2. When the disk is complete, the redo log is replayed ([`Restore::finish`]). The log of a
//!    changed image is refused: here if the file was modified at another time than its server's
//!    last write (`modification`), and by the format if another program opened the image for
//!    writing. A refused log is set aside with a warning, and the image is opened as it is.
//! 3. A server gets a new state file. The new file has the flush failures of the old one, so that
//!    all later flushes fail. A tool gets a new file only if the log of an old one was not refused:
//!    until the tool closes the image, the new file protects the replayed changes, and flush
//!    failures are only logged.
//!
//! If an image's server was killed and no state file is found, a new server warns. A command fails:
//! a state file may be in another directory, and would not fit the image after a change. Exception:
//! after a reboot of the host there is no state file to find (`lost_session`).
//!
//! Opening for reading does not change an image, so an image that lacks answered changes is
//! refused. A backup or a copy would lack these changes too, and a bitmap that the backup clears
//! would no longer show them. Commands that read only metadata warn ([`StateUse::Look`]). If
//! another program has opened the image for writing since, no opening can replay the changes, and
//! all of them warn.
//!
//! A backing file is opened for reading only, so no changes can be replayed to it (exception: the
//! layer of a fork, `left_layer`). If a killed server has left changes of the backing file in a
//! state file, images above the backing file are not opened for writing
//! ([`Restore::finish_backing`]), because a later replay would change the content below them.
//!
//! A crash between any two of these steps leaves a state file that the next opening finds.

mod examine;
mod keep;
mod lost_session;
mod modification;
mod pending;

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_core::{Result, Storage, rare};
use blockhouse_disk::{
    Access, FoundState, ImageIdentity, Owner, StateDir, StateFile, StatePage, StoredImage,
};
use blockhouse_engine::HostFile;
use blockhouse_format::Replay;

use crate::image_options::{ImageOptions, StateUse};
use crate::lock::Locked;
use examine::owner_of;
use keep::{FILES, NOTHING_TELLS, make_state, tells_of_changes};
use lost_session::warn_of_lost_session;
use modification::Modification;
use pending::{check_nothing_pending, refuse_pending};

pub(crate) use examine::{find_state, identity_of, status_of};
pub use keep::NOT_KEPT;
pub(crate) use keep::{FutureState, LogSession};
pub(crate) use lost_session::refuse_lost_session;
pub(crate) use modification::{Clock, change_time, clock_of};
pub use pending::{PendingChanges, pending_changes, warn_of_state_elsewhere};

/// The use of state files by an image that is being opened.
pub(crate) enum Restore {
    /// The image is opened for reading only: no answered change may be missing.
    Reader(StateUse),
    /// The image is opened for writing, and no state file is used.
    Without(StateUse),
    /// The image is opened for writing, with state files.
    Writer(Box<Writer>),
}

/// The state of an image whose file is open and locked, and whose disk is not yet complete.
pub(crate) struct Writer {
    uses: StateUse,
    dir: StateDir,
    owner: Owner,
    found: Option<StateFile>,
    /// The mtime of the image's file before the opening changed anything.
    modification: Option<Modification>,
}

impl Restore {
    /// Looks for the state of an image.
    ///
    /// # Errors
    /// Host errors: answered changes could be missing from the image.
    pub(crate) fn begin(
        file: &HostFile,
        path: &Path,
        options: &ImageOptions,
        locked: Locked,
    ) -> Result<Self> {
        Ok(match (options.access, options.state.directory(), locked) {
            (Access::ReadOnly, ..) => Self::Reader(options.state.clone()),
            (Access::ReadWrite, Some(dir), Locked::Yes) => {
                let uses = options.state.clone();
                Self::Writer(Box::new(Writer::new(file, path, dir.clone(), uses)?))
            }
            (Access::ReadWrite, ..) => Self::Without(options.state.clone()),
        })
    }

    /// For an image on another server, which keeps no state here.
    pub(crate) fn of_remote() -> Self {
        Self::Reader(StateUse::Off)
    }

    /// The state file of an ended process. The opening records the time of its own changes in the
    /// file's page.
    pub(crate) fn found(&self) -> Option<&StateFile> {
        match self {
            Self::Writer(writer) => writer.found.as_ref(),
            Self::Reader(_) | Self::Without(_) => None,
        }
    }

    /// Records that the opening itself changes the image's file now, so that the next process does
    /// not take this change for another program's.
    pub(crate) fn stamp_change(&self) {
        self.stamp(StatePage::raise_last_write);
    }

    /// As [`stamp_change`](Self::stamp_change), for the file with the image's data.
    pub(crate) fn stamp_data_change(&self) {
        self.stamp(StatePage::raise_last_data_write);
    }

    fn stamp(&self, raise: fn(&StatePage, u64)) {
        if let Some(found) = self.found() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            raise(found.page(), now.as_nanos() as u64);
        }
    }

    /// Replays the state that was found, and makes the state file in which the disk keeps its
    /// acknowledged changes from now on. The disk must have its data file and its backing file, and
    /// be unchanged.
    ///
    /// # Errors
    /// Errors of the storage or the host; the state file stays.
    pub(crate) async fn finish(self, disk: StoredImage) -> Result<StoredImage> {
        match self {
            Self::Reader(uses) => check_nothing_pending(&disk, &uses)?,
            Self::Without(uses @ StateUse::Replay(None)) => refuse_lost_session(&disk, &uses)?,
            Self::Without(uses) => warn_of_lost_session(&disk, &uses),
            Self::Writer(writer) => return rare(writer.finish(disk)).await,
        }
        Ok(disk)
    }

    /// Refuses a backing file, which is opened for reading only, if it lacks answered changes of
    /// its server. If the image above is open for writing, commands that otherwise only warn refuse
    /// it, too.
    ///
    /// # Errors
    /// `InvalidInput` with a hint, or the host's.
    pub(crate) fn finish_backing(&self, disk: &StoredImage, above: Access) -> Result<()> {
        let Self::Reader(uses) = self else { return Ok(()) };
        if above == Access::ReadWrite {
            if refuse_pending(disk, uses)? {
                warn_of_lost_session(disk, uses);
            }
            return Ok(());
        }
        check_nothing_pending(disk, uses)
    }
}

impl Writer {
    fn new(file: &HostFile, path: &Path, dir: StateDir, uses: StateUse) -> Result<Self> {
        let owner = owner_of(file, path, &dir)?;
        let found = match StateFile::find(&dir, owner.image)? {
            FoundState::Usable(found) => Some(found),
            FoundState::Nothing => None,
            FoundState::OtherBoot(void) => {
                tracing::debug!("{}: is of another boot of the host", void.path());
                void.remove()?;
                None
            }
            FoundState::OtherImage(other) => {
                set_other_aside(file, &dir, owner.image, &other)?;
                None
            }
            FoundState::Foreign { why } => {
                let aside = StateFile::set_aside(&dir, owner.image)?;
                tracing::warn!(
                    "{}: the state file is refused: {why}; it is {aside} now. If a server of this image died, what \
                     it answered last may be missing: check the guest's file systems",
                    file.name()
                );
                None
            }
        };
        let modification = found.as_ref().map(|found| Modification::of(file, found.page()));
        let modification = modification.transpose()?.flatten();
        Ok(Self { uses, dir, owner, found, modification })
    }

    async fn finish(self, disk: StoredImage) -> Result<StoredImage> {
        let Some(found) = &self.found else {
            return match self.uses {
                StateUse::Off | StateUse::Look(_) | StateUse::Replay(_) => {
                    refuse_lost_session(&disk, &self.uses)?;
                    Ok(disk)
                }
                StateUse::Keep(_) | StateUse::TryKeep(_) => {
                    warn_of_lost_session(&disk, &self.uses);
                    self.keep(disk, [None, None]).await
                }
            };
        };
        let failures = failures_of(found);
        if found.changes() > 0 && disk.format().redo().is_none() {
            // The file has an image of another format, and is opened as a raw disk. The log stays
            // for an opening in that format, which refuses the log if the file has changed
            // meanwhile.
            warn_of_failures(disk.name(), failures);
            tracing::info!(
                "{}: {} changes that its last server had answered are not in it; they stay in {}, for an opening in its \
                 format",
                disk.name(),
                found.changes(),
                found.path()
            );
            return Ok(disk);
        }
        let is_tool = matches!(self.uses, StateUse::Replay(_));
        let is_refused = match self.replay(&disk, found).await? {
            None => false,
            Some(why) => {
                refuse(disk.name(), &self.dir, found, &why)?;
                true
            }
        };
        warn_of_failures(disk.name(), failures);
        if is_tool && is_refused {
            return Ok(disk);
        }
        self.keep(disk, failures).await
    }

    /// Replays the redo log. Returns the reason if it no longer fits the image.
    async fn replay(&self, disk: &StoredImage, found: &StateFile) -> Result<Option<String>> {
        let log = found.log();
        let has_session = disk.format().redo().is_some_and(|redo| redo.has_session_bit());
        if let Some(modification) = self.modification
            && let Some(why) = modification.contradiction(has_session)
            && found.changes() > 0
        {
            return Ok(Some(why));
        }
        if found.changes() > 0 && !tells_of_changes(disk)? {
            return Ok(Some(NOTHING_TELLS.to_owned()));
        }
        match disk.replay(&*log).await? {
            Replay::Nothing => Ok(None),
            Replay::Applied { changes } => {
                let how =
                    if found.page().is_clean() { "could not write to the image" } else { "died" };
                tracing::info!(
                    "{}: {changes} changes are in the image now that process {} had answered before it {how}",
                    disk.name(),
                    found.page().owner().process
                );
                Ok(None)
            }
            Replay::Refused { why } => Ok(Some(why)),
        }
    }

    /// Makes the new state file, which replaces the old one.
    async fn keep(self, disk: StoredImage, failures: [Option<i32>; 2]) -> Result<StoredImage> {
        let vouched = self.found.as_ref().map_or(0, |found| found.page().last_data_write());
        let vouched = Duration::from_nanos(vouched);
        // Another server may have kept the state of the last session elsewhere.
        let is_complete = self.found.as_ref().is_some_and(|found| {
            disk.format().redo().is_some_and(|redo| !redo.is_outdated(&*found.log()))
        });
        let session = if is_complete { LogSession::OfComplete } else { LogSession::New };
        match make_state(&disk, &self.dir, &self.owner, session, failures, vouched).await {
            Ok(()) => {}
            Err(error) if !matches!(self.uses, StateUse::Keep(_)) => {
                // The old log is replayed, but not emptied. It is removed, because a second replay
                // would overwrite newer changes.
                if let Some(found) = &self.found {
                    found.remove()?;
                }
                restore_failures(&disk);
                tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name());
                return Ok(disk);
            }
            Err(error) => return Err(error),
        }
        // For a command that changes the image, the flush failure is only logged.
        if !matches!(self.uses, StateUse::Replay(_)) {
            restore_failures(&disk);
        }
        Ok(disk)
    }
}

/// Restores the flush failures of an earlier process from the state file.
fn restore_failures(image: &StoredImage) {
    let format = image.format();
    for tracker in [format.storage(), format.data()] {
        tracker.restore_failure();
    }
}

/// The errno of the failed flush of the image, and of its data file.
fn failures_of(found: &StateFile) -> [Option<i32>; 2] {
    FILES.map(|file| found.page().failure(file))
}

/// Warns of flushes that failed: users of the image have no other sign of this.
fn warn_of_failures(name: &str, failures: [Option<i32>; 2]) {
    for errno in failures.into_iter().flatten() {
        let error = io::Error::from_raw_os_error(errno);
        tracing::warn!(
            "{name}: a flush failed before its last server's process ended ({error}): written data may be lost; check \
             the guest's file systems"
        );
    }
}

/// Sets aside a state file that no longer fits the image.
fn refuse(name: &str, dir: &StateDir, found: &StateFile, why: &str) -> Result<()> {
    let Owner { image, process, .. } = found.page().owner();
    let changes = found.changes();
    let aside = StateFile::set_aside(dir, image)?;
    tracing::warn!(
        "{name}: the redo log is refused: {why}. {changes} changes that process {process} had answered before it died \
         are not in the image, which is opened as it is; the log is {aside} now. Check the guest's file systems"
    );
    Ok(())
}

/// Renames the state file of an image, if there is one, and warns with the reason. The image is
/// locked.
///
/// # Errors
/// The host's.
pub(crate) fn set_state_aside(file: &HostFile, dir: Option<&StateDir>, why: &str) -> Result<()> {
    if let Some((found, dir)) = find_state(file, dir)?.zip(dir) {
        refuse(file.name(), dir, &found, why)?;
        warn_of_failures(file.name(), failures_of(&found));
    }
    Ok(())
}

/// Sets aside the state file of another image that had the same device and inode, unless the file
/// has neither changes nor flush failures.
fn set_other_aside(
    file: &HostFile,
    dir: &StateDir,
    image: ImageIdentity,
    other: &StateFile,
) -> Result<()> {
    if other.is_empty() {
        return other.remove();
    }
    let aside = StateFile::set_aside(dir, image)?;
    let Owner { path, process, .. } = other.page().owner();
    tracing::warn!(
        "{}: its state file is that of another image, or of this device before it was attached again: process \
         {process} had {} open and died, with {} answered changes that may be missing from it. The file is {aside} \
         now. If that was this image, check the guest's file systems",
        file.name(),
        path.display(),
        other.changes()
    );
    Ok(())
}
