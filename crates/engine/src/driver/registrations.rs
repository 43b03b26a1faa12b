//! Which loops' rings have a resource in slots of their tables: an open file, a mapping of memory.
//!
//! Guarantee: when the resource's last owner is dropped, every loop that has it in a slot is asked
//! to empty the slot. Until the slot is empty, the loop owns the resource (its id, its address),
//! which cannot be reused.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A loop that has resources of this kind in slots.
pub(crate) trait Unregister<T>: Send + Sync {
    /// Empties the loop's slots of a resource that is no longer used, on the loop's own thread.
    fn unregister(&self, resource: Arc<T>);
}

/// A resource and the loops that have it in slots. Each user of the resource owns this. When the
/// last one drops it, every loop empties its slots.
pub(crate) struct Registrations<T> {
    resource: Arc<T>,
    tables: Mutex<Vec<Weak<dyn Unregister<T>>>>,
}

impl<T> Registrations<T> {
    pub(crate) fn new(resource: T) -> Self {
        Self { resource: Arc::new(resource), tables: Mutex::default() }
    }

    pub(crate) fn resource(&self) -> &Arc<T> {
        &self.resource
    }

    /// Records that a loop has the resource in a slot.
    pub(crate) fn add(&self, table: &Arc<dyn Unregister<T>>) {
        let mut tables = self.tables.lock();
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(table));
    }
}

impl<T> Drop for Registrations<T> {
    fn drop(&mut self) {
        for table in self.tables.get_mut().drain(..) {
            if let Some(table) = table.upgrade() {
                table.unregister(Arc::clone(&self.resource));
            }
        }
    }
}
