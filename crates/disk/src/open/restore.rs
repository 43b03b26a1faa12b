//! What a server that died left of an image, and what outlives the next one.
//!
//! When an image is opened, after it is locked and before anything is changed:
//!
//! 1. Its state file is looked for ([`Restore::begin`]). One of another boot of the host or of another file is void
//!    and removed. What is no state file is set aside.
//! 2. When the disk is complete, the redo log is replayed ([`Restore::finish`]): a changed image file is refused here
//!    if it was modified after its server's last write, and by the format if another program opened it for
//!    writing. What is refused is set aside, with a warning, and the image is opened as it is.
//! 3. A server gets a new state file, with the failures of flushes that the old one had, which are in force from
//!    then on. So does a tool, but only where there was one: until it closes the image the new one protects
//!    what was replayed, and the failures are told and not in force.
//!
//! A death between any two of these steps leaves a file that the next opening finds.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_core::{Error, Result, Storage};
use blockhouse_engine::HostFile;
use blockhouse_format::Replay;
use rustix::fs::{FileType, Stat, fstat};

use super::image_options::{ImageOptions, StateUse};
use super::lock::{Locked, is_being_written};
use crate::disk::Disk;
use crate::options::Access;
use crate::state::{FoundState, ImageIdentity, Owner, StateDir, StateFile, StatePage, TrackedFile};

/// How much later than the last write a file may be modified: the clock of file systems has ticks, and a write is
/// stamped a moment before and after it is made.
const MODIFICATION_SLACK: Duration = Duration::from_secs(2);

/// What an image that is being opened has to do with state files.
pub(super) enum Restore {
    /// It is opened for reading only: answered changes may be missing.
    Reader(Option<StateDir>),
    /// It is opened for writing, and no state file is used.
    Without,
    /// It is opened for writing.
    Writer(Box<Writer>),
}

/// The state of an image whose file is open and locked, and whose disk is not yet complete.
pub(super) struct Writer {
    uses: StateUse,
    dir: StateDir,
    owner: Owner,
    found: Option<StateFile>,
    /// Why the image file is not as its server left it.
    modified: Option<String>,
}

impl Restore {
    /// Looks for the state of an image.
    ///
    /// # Errors
    /// The host's: what was answered could be missing from the image.
    pub(super) fn begin(
        file: &HostFile,
        path: &Path,
        options: &ImageOptions,
        locked: Locked,
    ) -> Result<Self> {
        let dir = match &options.state {
            StateUse::Off => None,
            StateUse::Replay(dir) | StateUse::Keep(dir) | StateUse::TryKeep(dir) => Some(dir),
        };
        Ok(match (options.access, dir, locked) {
            (Access::ReadOnly, dir, _) => Self::Reader(dir.cloned()),
            (Access::ReadWrite, Some(dir), Locked::Yes) => {
                let uses = options.state.clone();
                Self::Writer(Box::new(Writer::new(file, path, dir.clone(), uses)?))
            }
            (Access::ReadWrite, _, _) => Self::Without,
        })
    }

    /// The page in which changes are stamped that the opening itself makes.
    pub(super) fn page(&self) -> Option<&StatePage> {
        match self {
            Self::Writer(writer) => writer.found.as_ref().map(StateFile::page),
            Self::Reader(_) | Self::Without => None,
        }
    }

    /// Replays what was found, and has the disk keep what it answers from now on. The disk has its data file and
    /// its backing file, and nothing was changed yet.
    ///
    /// # Errors
    /// What the storage or the host answers: the state file is still there.
    pub(super) async fn finish(self, disk: Disk<HostFile>) -> Result<Disk<HostFile>> {
        match self {
            Self::Reader(dir) => warn_of_pending(&disk, dir.as_ref()),
            Self::Without => warn_of_session(&disk, None),
            Self::Writer(writer) => return writer.finish(disk).await,
        }
        Ok(disk)
    }
}

impl Writer {
    fn new(file: &HostFile, path: &Path, dir: StateDir, uses: StateUse) -> Result<Self> {
        let owner = owner_of(file, path, &dir)?;
        let status = fstat(file.descriptor())
            .map_err(|error| Error::host("cannot examine", error.into()).on(file.name()))?;
        let found = match StateFile::find(&dir, owner.image)? {
            FoundState::Usable(found) => Some(found),
            FoundState::Nothing => None,
            FoundState::Void(void) => {
                void.remove()?;
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
        let modified = found.as_ref().and_then(|found| modified_since(&status, found.page()));
        Ok(Self { uses, dir, owner, found, modified })
    }

    async fn finish(self, disk: Disk<HostFile>) -> Result<Disk<HostFile>> {
        let Some(found) = &self.found else {
            warn_of_session(&disk, Some(&self.dir));
            return match self.uses {
                StateUse::Off | StateUse::Replay(_) => Ok(disk),
                StateUse::Keep(_) | StateUse::TryKeep(_) => self.keep(disk, [None, None]),
            };
        };
        let failures = FILES.map(|file| found.page().failure(file));
        let is_tool = matches!(self.uses, StateUse::Replay(_));
        let is_refused = match self.replay(&disk, found).await? {
            None => false,
            Some(why) => {
                self.refuse(&disk, found, &why)?;
                true
            }
        };
        for errno in failures.into_iter().flatten() {
            let error = io::Error::from_raw_os_error(errno);
            tracing::warn!(
                "{}: a flush failed before its last server's process ended ({error}): written data may be lost; \
                 check the guest's file systems",
                disk.name()
            );
        }
        if is_tool && is_refused {
            return Ok(disk);
        }
        self.keep(disk, failures)
    }

    /// Replays the redo log. Says why where it does not fit the image any more.
    async fn replay(&self, disk: &Disk<HostFile>, found: &StateFile) -> Result<Option<String>> {
        let log = found.log();
        if let Some(why) = &self.modified
            && disk.format().redo_log_len(&*log) > 0
        {
            return Ok(Some(why.clone()));
        }
        match disk.format().replay(&*log).await? {
            Replay::Nothing => Ok(None),
            Replay::Applied { changes } => {
                let how = match found.page().is_clean() {
                    true => "could not write to the image",
                    false => "died",
                };
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

    /// Sets a state file aside that does not fit the image any more.
    fn refuse(&self, disk: &Disk<HostFile>, found: &StateFile, why: &str) -> Result<()> {
        let changes = disk.format().redo_log_len(&*found.log());
        let aside = StateFile::set_aside(&self.dir, self.owner.image)?;
        tracing::warn!(
            "{}: the redo log is refused: {why}. {changes} changes that process {} had answered before it died are \
             not in the image, which is opened as it is; the log is {aside} now. Check the guest's file systems",
            disk.name(),
            found.page().owner().process
        );
        Ok(())
    }

    /// Makes the new state file, in the place of the old one.
    fn keep(self, disk: Disk<HostFile>, failures: [Option<i32>; 2]) -> Result<Disk<HostFile>> {
        match make_state(&disk, &self.dir, &self.owner, failures) {
            Ok(()) => {}
            Err(error) if !matches!(self.uses, StateUse::Keep(_)) => {
                // The old log is replayed, but not emptied: it must not be replayed again over newer changes.
                if let Some(found) = &self.found {
                    found.remove()?;
                }
                disk.restore_failures();
                tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name());
                return Ok(disk);
            }
            Err(error) => return Err(error),
        }
        // Who changes an image by a command has opened it again, and is told.
        if !matches!(self.uses, StateUse::Replay(_)) {
            disk.restore_failures();
        }
        Ok(disk)
    }
}

/// Makes the state file of a disk whose log is empty, in the place of any other one, with failures of flushes.
fn make_state(
    disk: &Disk<HostFile>,
    dir: &StateDir,
    owner: &Owner,
    failures: [Option<i32>; 2],
) -> Result<()> {
    // The image may never be written to while the log fills: a data file has the data.
    let file = disk.format().storage().storage();
    let status = fstat(file.descriptor());
    let status =
        status.map_err(|error| Error::host("cannot examine", error.into()).on(file.name()))?;
    let opened = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let unchanged_since = opened.max(modification_time(&status).unwrap_or_default());
    let fill = |page: &StatePage| {
        page.raise_last_write(unchanged_since.as_nanos() as u64);
        for (file, errno) in FILES.into_iter().zip(failures) {
            if let Some(errno) = errno {
                page.set_failure(file, errno);
            }
        }
    };
    let state = StateFile::create(dir, owner, disk.format().redo_log_words(), fill)?;
    tracing::debug!("{}: answers are kept in {}", disk.name(), state.path());
    if state.log().words() > 0 {
        disk.format().attach_redo_log(state.log());
    }
    disk.keep_state(state);
    Ok(())
}

/// The state file that the new owner of an image makes which another process hands over. Until then that process has
/// the state file, whose log is empty.
pub(super) struct FutureState {
    dir: StateDir,
    owner: Owner,
}

impl FutureState {
    /// Of a disk that is opened; `None` where none is kept.
    pub(super) fn of(disk: &Disk<HostFile>, path: &Path, uses: &StateUse) -> Option<Self> {
        let (StateUse::Keep(dir) | StateUse::TryKeep(dir)) = uses else { return None };
        if disk.access() == Access::ReadOnly {
            return None;
        }
        let owner = owner_of(disk.format().storage().storage(), path, dir);
        let owner =
            owner.inspect_err(|error| tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name()));
        Some(Self { dir: dir.clone(), owner: owner.ok()? })
    }

    /// Makes the file: it takes the name of the other process's.
    pub(super) fn take(self, disk: &Disk<HostFile>, failures: [Option<i32>; 2]) {
        if let Err(error) = make_state(disk, &self.dir, &self.owner, failures) {
            tracing::warn!("{}: {NOT_KEPT}: {error}", disk.name());
        }
    }
}

/// Whose a new state file is.
fn owner_of(file: &HostFile, path: &Path, dir: &StateDir) -> Result<Owner> {
    let image = ImageIdentity::of(file.descriptor());
    let image = image.map_err(|error| Error::host("cannot examine", error).on(file.name()))?;
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    Ok(Owner { boot: dir.boot(), image, path, process: std::process::id() })
}

/// What it means that a server keeps no state.
pub const NOT_KEPT: &str = "no state outlives the server: if its process is killed, a qcow2 image lacks what was \
                            answered and not yet flushed, and a failed flush is forgotten";

/// The files whose failures a state file has.
const FILES: [TrackedFile; 2] = [TrackedFile::Image, TrackedFile::Data];

/// Why a file is not as its server left it, by the time of its last modification. Of a block device there is none.
fn modified_since(status: &Stat, page: &StatePage) -> Option<String> {
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return None;
    }
    let modified = modification_time(status)?;
    let written = Duration::from_nanos(page.last_write());
    let later = modified.checked_sub(written)?;
    (later > MODIFICATION_SLACK).then(|| {
        let seconds = later.as_secs();
        format!("another program has modified the image since ({seconds} s after its server's last write)")
    })
}

/// Since the Unix epoch; `None` for a time before it.
fn modification_time(status: &Stat) -> Option<Duration> {
    Some(Duration::new(status.st_mtime.try_into().ok()?, status.st_mtime_nsec as u32))
}

/// Answered changes that are not in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingChanges {
    /// How many entries of the redo log there are.
    pub changes: u64,
    /// The process that answered them, which is gone.
    pub process: u32,
    /// The path of the state file.
    pub state_file: String,
}

/// Whether a process left a state file of an image there, with or without changes in it.
pub(super) fn has_state(file: &HostFile, dir: &StateDir) -> Result<bool> {
    let image = ImageIdentity::of(file.descriptor());
    let image = image.map_err(|error| Error::host("cannot examine", error).on(file.name()))?;
    Ok(matches!(StateFile::find(dir, image)?, FoundState::Usable(_)))
}

impl Disk<HostFile> {
    /// The changes that a server of this image answered before it died, and that no opening for writing has brought
    /// to the image since; `None` also while a server has the image open. `dir` is where that server kept its
    /// state. The disk is open for reading.
    ///
    /// # Errors
    /// The host's.
    pub fn pending_changes(&self, dir: &StateDir) -> Result<Option<PendingChanges>> {
        let file = self.format().storage().storage();
        let image = ImageIdentity::of(file.descriptor());
        let image = image.map_err(|error| Error::host("cannot examine", error).on(self.name()))?;
        let FoundState::Usable(found) = StateFile::find(dir, image)? else { return Ok(None) };
        let changes = self.format().redo_log_len(&*found.log());
        if changes == 0 || is_being_written(file) {
            return Ok(None);
        }
        let process = found.page().owner().process;
        Ok(Some(PendingChanges { changes, process, state_file: found.path() }))
    }
}

/// Tells of an image that is opened for reading only and lacks what its server answered.
fn warn_of_pending(disk: &Disk<HostFile>, dir: Option<&StateDir>) {
    match dir.map_or(Ok(None), |dir| disk.pending_changes(dir)) {
        Ok(None) => {}
        Ok(Some(PendingChanges { changes, process, state_file })) => tracing::warn!(
            "{}: {changes} changes are missing that process {process} had answered before it died: they are in \
             {state_file}, and come into the image when it is served or changed: 'blockhouse check --repair leaks' \
             does that as well",
            disk.name()
        ),
        Err(error) => {
            tracing::warn!("{}: cannot tell whether changes are missing: {error}", disk.name());
        }
    }
}

/// Tells of an image whose last server kept state elsewhere, if it did.
fn warn_of_session(disk: &Disk<HostFile>, dir: Option<&StateDir>) {
    if !disk.format().has_session_bit() {
        return;
    }
    let place = dir.map_or("none is looked for".to_owned(), |dir| {
        format!("there is none in {}", dir.path().display())
    });
    tracing::warn!(
        "{}: its last server kept a state file and did not close the image, and {place}: what was answered last \
         may be missing. If the host has not restarted since, stop, and serve the image with the --state \
         directory of that server; else check the guest's file systems",
        disk.name()
    );
}
