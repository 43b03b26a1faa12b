//! The acknowledged writes that an image lacks, if it is opened for reading only or its state file
//! is missing.

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{StateDir, StoredImage};

use super::examine::find_state;
use super::lost_session::{refuse_lost_session, warn_of_lost_session};
use crate::image_options::StateUse;
use crate::lock::is_being_written;

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

/// The changes that an image, open for reading, lacks by its state file.
enum LeftState {
    /// A server has the image open, or the server that left a state file left no changes.
    Complete,
    /// Changes are missing, and can be replayed.
    Pending(PendingChanges),
    /// No state file, or one that is outdated: a later server may have left state elsewhere. With
    /// the changes that no replay can bring back, because another program has opened the image for
    /// writing since.
    Unknown(Option<PendingChanges>),
}

impl LeftState {
    /// Looks for the state file of an image, once.
    ///
    /// # Errors
    /// The host's.
    fn find(disk: &StoredImage, dir: Option<&StateDir>) -> Result<Self> {
        let Some(file) = disk.file() else { return Ok(Self::Complete) };
        let found = find_state(file, dir)?;
        if is_being_written(file) {
            return Ok(Self::Complete);
        }
        let Some(found) = found else { return Ok(Self::Unknown(None)) };
        let process = found.page().owner().process;
        let pending =
            PendingChanges { changes: found.changes(), process, state_file: found.path() };
        let left = Some(pending).filter(|pending| pending.changes > 0);
        // An opening for writing refuses an outdated log.
        let is_outdated = disk.format().redo().is_some_and(|redo| redo.is_outdated(&*found.log()));
        Ok(match left {
            lost if is_outdated => Self::Unknown(lost),
            Some(pending) => Self::Pending(pending),
            None => Self::Complete,
        })
    }

    /// As [`find`](Self::find), where `uses` looks; `Complete` if no state is used.
    fn of(disk: &StoredImage, uses: &StateUse) -> Result<Self> {
        match uses {
            StateUse::Off => Ok(Self::Complete),
            _ => Self::find(disk, uses.directory()),
        }
    }

    /// Warns of changes that are lost, and returns whether a server may have left state elsewhere.
    fn warn_of_lost(&self, disk: &StoredImage) -> bool {
        if let Self::Unknown(Some(PendingChanges { changes, process, state_file })) = self {
            tracing::warn!(
                "{}: {changes} changes are lost that process {process} had answered before it died: another program \
                 has opened the image for writing since (they are in {state_file})",
                disk.name()
            );
        }
        matches!(self, Self::Unknown(_))
    }
}

/// The acknowledged changes of a killed server that the image still lacks, because no opening
/// for writing has replayed them. `None` also while a server has the image open, and if another
/// program has opened the image for writing since. `dir` is the state directory of the killed
/// server. The disk is open for reading.
///
/// # Errors
/// The host's.
pub fn pending_changes(disk: &StoredImage, dir: &StateDir) -> Result<Option<PendingChanges>> {
    Ok(match LeftState::find(disk, Some(dir))? {
        LeftState::Pending(pending) => Some(pending),
        LeftState::Complete | LeftState::Unknown(_) => None,
    })
}

/// Warns if the image may lack changes because its killed server kept its state elsewhere than
/// where `uses` looks. For a command that reports the [pending changes](pending_changes)
/// itself.
pub fn warn_of_state_elsewhere(disk: &StoredImage, uses: &StateUse) {
    if matches!(LeftState::of(disk, uses), Ok(LeftState::Unknown(_)) | Err(_)) {
        warn_of_lost_session(disk, uses);
    }
}

/// Fails for a read-only image that lacks acknowledged changes of its server. For a tool it also
/// fails if the image may lack some. For commands that only inspect the image it warns.
///
/// # Errors
/// As [`refuse_pending`] and [`refuse_lost_session`].
pub(crate) fn check_nothing_pending(disk: &StoredImage, uses: &StateUse) -> Result<()> {
    match uses {
        StateUse::Off => {}
        StateUse::Look(_) => warn_of_pending(disk, uses),
        StateUse::Replay(_) => {
            if refuse_pending(disk, uses)? {
                refuse_lost_session(disk, uses)?;
            }
        }
        StateUse::Keep(_) | StateUse::TryKeep(_) => {
            if refuse_pending(disk, uses)? {
                warn_of_lost_session(disk, uses);
            }
        }
    }
    Ok(())
}

/// Warns of a read-only image that lacks answered changes of its server, or may lack them.
fn warn_of_pending(disk: &StoredImage, uses: &StateUse) {
    match LeftState::of(disk, uses) {
        Ok(LeftState::Pending(PendingChanges { changes, process, state_file })) => tracing::warn!(
            "{}: {changes} changes are missing that process {process} had answered before it died: they are in \
             {state_file}, and come into the image when it is served or changed: {} does that as well",
            disk.name(),
            repair_command(disk, uses.directory())
        ),
        Ok(left) => {
            if left.warn_of_lost(disk) {
                warn_of_lost_session(disk, uses);
            }
        }
        Err(error) => {
            tracing::warn!("{}: cannot tell whether changes are missing: {error}", disk.name());
        }
    }
}

/// Fails for an image that lacks acknowledged changes of its server, because they cannot be
/// replayed here. Returns whether a server may have left state elsewhere.
///
/// # Errors
/// `InvalidInput` with a hint, or the host's.
pub(crate) fn refuse_pending(disk: &StoredImage, uses: &StateUse) -> Result<bool> {
    let left = LeftState::of(disk, uses)?;
    let LeftState::Pending(PendingChanges { changes, process, state_file }) = left else {
        return Ok(left.warn_of_lost(disk));
    };
    let what = format!(
        "{changes} changes are missing that process {process} had answered before it died (they are in {state_file})"
    );
    Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()).hint(format!(
        "bring them to it first: {}; --state off continues without them",
        repair_command(disk, uses.directory())
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
