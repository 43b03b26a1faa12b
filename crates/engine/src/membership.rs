//! Which loops' rings have a thing in slots of their tables: an open file, a mapping of memory.
//!
//! Promise: when the thing's owner is gone, every loop that has it in a slot is told, and keeps the thing
//! itself (its number, its address) from being given to another until the slot is empty.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A loop that has things of this kind in slots.
pub(crate) trait Holder<T>: Send + Sync {
    /// Nobody uses the thing any more: its slots are to be emptied, on the loop's own thread.
    fn released(&self, thing: Arc<T>);
}

/// A thing and the loops that have it in slots. Whoever uses the thing owns this; dropped with the last
/// use, and then every loop is told.
pub(crate) struct Membership<T> {
    thing: Arc<T>,
    holders: Mutex<Vec<Weak<dyn Holder<T>>>>,
}

impl<T> Membership<T> {
    pub(crate) fn new(thing: T) -> Self {
        Self { thing: Arc::new(thing), holders: Mutex::default() }
    }

    pub(crate) fn thing(&self) -> &Arc<T> {
        &self.thing
    }

    /// Has the loop told.
    pub(crate) fn add(&self, holder: &Arc<dyn Holder<T>>) {
        let mut holders = self.holders.lock();
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(Arc::downgrade(holder));
    }
}

impl<T> Drop for Membership<T> {
    fn drop(&mut self) {
        for holder in self.holders.get_mut().drain(..) {
            if let Some(holder) = holder.upgrade() {
                holder.released(Arc::clone(&self.thing));
            }
        }
    }
}
