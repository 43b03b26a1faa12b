//! The disks that are open, by name. Their groups of limits are in `limits`.

use std::sync::Arc;

use anyhow::{Result, bail};
use parking_lot::Mutex;

use super::disk::RunningDisk;

/// The maximum number of names in a message.
const MAX_NAMED: usize = 8;

/// The disks, in the order in which they were opened.
#[derive(Default)]
pub struct DiskList(pub(super) Mutex<Vec<Arc<RunningDisk>>>);

impl DiskList {
    /// All open disks.
    pub fn all(&self) -> Vec<Arc<RunningDisk>> {
        self.0.lock().clone()
    }

    /// The disk of this name.
    pub fn find(&self, name: &str) -> Option<Arc<RunningDisk>> {
        self.0.lock().iter().find(|disk| disk.name() == name).cloned()
    }

    /// The disk of this name.
    ///
    /// # Errors
    /// No disk has this name; the message lists those that exist.
    pub fn get(&self, name: &str) -> Result<Arc<RunningDisk>> {
        match self.find(name) {
            Some(disk) => Ok(disk),
            None => bail!("no disk is called {name:?}; {} ('disk.list' tells more)", self.names()),
        }
    }

    /// Some names, for a message.
    fn names(&self) -> String {
        let names: Vec<_> = self.0.lock().iter().map(|disk| format!("{:?}", disk.name())).collect();
        match names.len() {
            0 => "none is open".into(),
            count @ ..=MAX_NAMED => {
                format!("there {} {}", if count == 1 { "is" } else { "are" }, names.join(", "))
            }
            count => {
                let more = count - MAX_NAMED;
                format!("there are {} and {more} more", names[..MAX_NAMED].join(", "))
            }
        }
    }

    /// Lists a disk.
    pub(super) fn push(&self, disk: Arc<RunningDisk>) {
        self.0.lock().push(disk);
    }

    /// Removes a disk from the list. It stays open.
    pub(crate) fn forget(&self, name: &str) {
        self.0.lock().retain(|other| other.name() != name);
    }

    /// Sorts the list in this order. Disks that `names` does not contain come last.
    pub(super) fn sort_as<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let names: Vec<_> = names.collect();
        let place = |name: &str| names.iter().position(|other| *other == name);
        self.0.lock().sort_by_key(|disk| place(disk.name()).unwrap_or(usize::MAX));
    }
}
