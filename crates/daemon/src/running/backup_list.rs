//! The backups that have begun, by name.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use blockhouse_jobs::FrozenDisk;
use blockhouse_storage::ImageStorage;
use parking_lot::Mutex;

use super::disk::RunningDisk;

/// The maximum number of bytes in a backup's name.
const MAX_NAME: usize = 255;

/// A backup that has begun.
pub(crate) struct RunningBackup {
    /// The unique name.
    pub(crate) name: String,
    /// The bitmap that has begun on each disk, if its setup names one.
    pub(crate) bitmap: Option<String>,
    /// The bitmap that clients may query for changes, if its setup names one.
    pub(crate) since: Option<String>,
    /// The time for which changes were paused.
    pub(crate) pause: Duration,
    /// The disks, in the order of the setup.
    pub(crate) disks: Vec<BackupDisk>,
}

/// A disk of a backup.
#[derive(Clone)]
pub(crate) struct BackupDisk {
    /// The disk that stays in use.
    pub(super) source: Arc<RunningDisk>,
    /// The frozen disk, which is served.
    pub(crate) frozen: Arc<RunningDisk>,
    /// The bitmap with the changes; `None`: a full backup of the disk.
    pub(crate) since: Option<String>,
    /// The backup's view of the disk.
    pub(crate) view: Arc<FrozenDisk<ImageStorage>>,
    /// Bytes that its scratch file may take.
    pub(crate) scratch_limit: u64,
}

impl BackupDisk {
    /// The name of the disk that stays in use.
    pub(crate) fn source(&self) -> &str {
        self.source.name()
    }
}

/// The backups of a server.
#[derive(Default)]
pub(crate) struct Backups(Mutex<State>);

#[derive(Default)]
struct State {
    /// The backups, in the order in which they began.
    backups: Vec<Arc<RunningBackup>>,
    /// The names of backups that are about to begin.
    beginning: Vec<String>,
    begun: u64,
}

impl State {
    fn has(&self, name: &str) -> bool {
        self.beginning.iter().any(|other| other == name)
            || self.backups.iter().any(|backup| backup.name == name)
    }

    /// A name that no backup has.
    fn any_name(&mut self) -> String {
        loop {
            self.begun += 1;
            let name = format!("backup{}", self.begun);
            if !self.has(&name) {
                return name;
            }
        }
    }
}

/// The name of a backup that is about to begin, reserved until this is dropped.
pub(super) struct NewName<'a> {
    backups: &'a Backups,
    pub(super) name: String,
}

impl Drop for NewName<'_> {
    fn drop(&mut self) {
        self.backups.0.lock().beginning.retain(|name| *name != self.name);
    }
}

impl Backups {
    /// All backups, in the order in which they began.
    pub(crate) fn list(&self) -> Vec<Arc<RunningBackup>> {
        self.0.lock().backups.clone()
    }

    /// Lists a backup that has begun.
    pub(super) fn push(&self, backup: Arc<RunningBackup>) {
        self.0.lock().backups.push(backup);
    }

    /// Removes a backup from the list.
    pub(super) fn forget(&self, backup: &Arc<RunningBackup>) {
        self.0.lock().backups.retain(|other| !Arc::ptr_eq(other, backup));
    }

    /// Reserves a name for a backup: the given one, or any.
    ///
    /// # Errors
    /// Another backup has the name, or the name is invalid.
    pub(super) fn new_name(&self, wanted: Option<String>) -> Result<NewName<'_>> {
        let mut state = self.0.lock();
        let name = match wanted {
            None => state.any_name(),
            Some(name) if name.is_empty() || name.len() > MAX_NAME => {
                bail!(
                    "a backup's name has 1 to {MAX_NAME} bytes, not {}; choose another name",
                    name.len()
                )
            }
            Some(name) if state.has(&name) => {
                bail!("a backup is called {name:?} already; choose another name, or end that one")
            }
            Some(name) => name,
        };
        state.beginning.push(name.clone());
        Ok(NewName { backups: self, name })
    }

    /// Fails if the disk is a frozen one, which guests must not use.
    pub(super) fn check_not_frozen(&self, disk: &str) -> Result<()> {
        let state = self.0.lock();
        let has_frozen =
            |backup: &&Arc<RunningBackup>| backup.disks.iter().any(|one| one.frozen.name() == disk);
        match state.backups.iter().find(has_frozen) {
            Some(backup) => bail!(
                "the disk {disk:?} is gone when the backup {:?} ends, which a guest's driver does not expect of its disk; serve it over NBD",
                backup.name
            ),
            None => Ok(()),
        }
    }

    /// Fails if a backup uses the disk.
    pub(super) fn check_free(&self, disk: &str) -> Result<()> {
        let state = self.0.lock();
        let uses = |backup: &&Arc<RunningBackup>| {
            backup.disks.iter().any(|one| one.source() == disk || one.frozen.name() == disk)
        };
        match state.backups.iter().find(uses) {
            Some(backup) => {
                bail!("the backup {:?} uses the disk {disk:?}; end it first", backup.name)
            }
            None => Ok(()),
        }
    }
}
