//! The acknowledged writes that an image lacks, if it is opened for reading only or its state file
//! is missing.

use blockhouse_core::{Error, ErrorKind, Result};

use super::examine::find_state;
use super::lost_session::{refuse_lost_session, warn_of_lost_session};
use crate::open::image_disk::StoredImage;
use crate::open::image_options::StateUse;
use crate::open::lock::is_being_written;
use crate::state::{StateDir, StateFile};

/// Answered changes that are not in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingChanges {
    /// The number of entries in the redo log.
    pub changes: u64,
    /// The process that answered them, which has ended.
    pub process: u32,
    /// The path of the state file.
    pub state_file: String,
}

impl StoredImage {
    /// The acknowledged changes of a killed server that the image still lacks, because no opening
    /// for writing has replayed them. `None` also while a server has the image open, and if another
    /// program has opened the image for writing since. `dir` is the state directory of the killed
    /// server. The disk is open for reading.
    ///
    /// # Errors
    /// The host's.
    pub fn pending_changes(&self, dir: &StateDir) -> Result<Option<PendingChanges>> {
        let Some(file) = self.file() else { return Ok(None) };
        let Some(found) = find_state(file, Some(dir))? else { return Ok(None) };
        let changes = found.changes();
        if changes == 0 || is_being_written(file) || is_outdated(self, &found) {
            return Ok(None);
        }
        let process = found.page().owner().process;
        Ok(Some(PendingChanges { changes, process, state_file: found.path() }))
    }

    /// Warns if the image may lack changes because its killed server kept its state elsewhere than
    /// where `uses` looks. For a command that reports the [pending changes](Self::pending_changes)
    /// itself.
    pub fn warn_of_state_elsewhere(&self, uses: &StateUse) {
        warn_of_possible(self, uses);
    }
}

/// Fails for a read-only image that lacks acknowledged changes of its server. For a tool it also
/// fails if the image may lack some. For commands that only inspect the image it warns.
///
/// # Errors
/// As [`refuse_pending`] and [`refuse_lost_session`].
pub(crate) fn check_nothing_pending(disk: &StoredImage, uses: &StateUse) -> Result<()> {
    warn_of_outdated(disk, uses.directory());
    match uses {
        StateUse::Off => {}
        StateUse::Look(_) => warn_of_pending(disk, uses),
        StateUse::Replay(_) => {
            refuse_pending(disk, uses.directory())?;
            if may_lack_changes(disk, uses) {
                refuse_lost_session(disk, uses)?;
            }
        }
        StateUse::Keep(_) | StateUse::TryKeep(_) => {
            refuse_pending(disk, uses.directory())?;
            warn_of_possible(disk, uses);
        }
    }
    Ok(())
}

/// Warns of a read-only image that lacks answered changes of its server, or may lack them.
pub(crate) fn warn_of_pending(disk: &StoredImage, uses: &StateUse) {
    let dir = uses.directory();
    match dir.map_or(Ok(None), |dir| disk.pending_changes(dir)) {
        Ok(None) => warn_of_possible(disk, uses),
        Ok(Some(PendingChanges { changes, process, state_file })) => tracing::warn!(
            "{}: {changes} changes are missing that process {process} had answered before it died: they are in \
             {state_file}, and come into the image when it is served or changed: {} does that as well",
            disk.name(),
            repair_command(disk, dir)
        ),
        Err(error) => {
            tracing::warn!("{}: cannot tell whether changes are missing: {error}", disk.name());
        }
    }
}

/// Warns if the server of an image may have left state elsewhere. The image lacks no changes as far
/// as is known.
fn warn_of_possible(disk: &StoredImage, uses: &StateUse) {
    if !matches!(uses, StateUse::Off) && may_lack_changes(disk, uses) {
        warn_of_lost_session(disk, uses);
    }
}

/// Whether no server has the image open and the state directory has no state of it.
fn may_lack_changes(disk: &StoredImage, uses: &StateUse) -> bool {
    let Some(file) = disk.file() else { return false };
    let found = find_state(file, uses.directory()).ok().flatten();
    let has_state = found.is_some_and(|found| !is_outdated(disk, &found));
    !has_state && !is_being_written(file)
}

/// Whether another program has opened the image for writing since the process died that left this
/// state. An opening for writing refuses such a log, and what a later server of the image has left
/// is elsewhere.
fn is_outdated(disk: &StoredImage, state: &StateFile) -> bool {
    disk.format().redo().is_some_and(|redo| redo.is_outdated(&*state.log()))
}

/// Warns if the image lacks answered changes for good, because their log is outdated.
fn warn_of_outdated(disk: &StoredImage, dir: Option<&StateDir>) {
    let Some(file) = disk.file() else { return };
    let Ok(Some(found)) = find_state(file, dir) else { return };
    let changes = found.changes();
    if changes > 0 && !is_being_written(file) && is_outdated(disk, &found) {
        tracing::warn!(
            "{}: {changes} changes are lost that process {} had answered before it died: another program has opened the              image for writing since (they are in {})",
            disk.name(),
            found.page().owner().process,
            found.path()
        );
    }
}

/// Fails for an image that lacks acknowledged changes of its server, because they cannot be
/// replayed here.
///
/// # Errors
/// `InvalidInput` with a hint, or the host's.
pub(crate) fn refuse_pending(disk: &StoredImage, dir: Option<&StateDir>) -> Result<()> {
    let found = dir.map_or(Ok(None), |dir| disk.pending_changes(dir))?;
    let Some(PendingChanges { changes, process, state_file }) = found else { return Ok(()) };
    let what = format!(
        "{changes} changes are missing that process {process} had answered before it died (they are in {state_file})"
    );
    Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()).hint(format!(
        "bring them to it first: {}; --state off continues without them",
        repair_command(disk, dir)
    )))
}

/// The command that brings the changes of a state file in `dir` into the image.
fn repair_command(disk: &StoredImage, dir: Option<&StateDir>) -> String {
    let is_usual =
        |dir: &&StateDir| StateDir::default_path().is_ok_and(|usual| usual == dir.path());
    let named = dir.filter(|dir| !is_usual(dir));
    let state = named.map(|dir| format!("--state={} ", shell_word(&dir.path().to_string_lossy())));
    let (state, image) = (state.unwrap_or_default(), shell_word(disk.name()));
    format!("blockhouse check --repair leaks {state}-- {image}")
}

/// One word of a shell's command.
fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::shell_word;

    #[test]
    fn a_shell_reads_a_name_as_one_word() {
        for (name, word) in [("a b$c", "'a b$c'"), ("it's;", r"'it'\''s;'"), ("'", r"''\'''")] {
            assert_eq!(shell_word(name), word);
        }
    }
}
