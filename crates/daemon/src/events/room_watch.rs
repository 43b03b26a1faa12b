//! Reports that a disk's host is almost full.
//!
//! Guarantee: each crossing of the threshold is reported once, before the disk's writes are held or
//! fail with ENOSPC: a write that gets ENOSPC reports the crossing first. The crossing is reported
//! again only after the free space was above the threshold.
//!
//! A *write threshold* is QEMU's: an offset in the image's storage. It is reported once, when a
//! guest's writes exceed it, and is then unset.

use std::sync::Arc;

use blockhouse_config::threshold::Threshold;
use blockhouse_disk::Room;
use parking_lot::Mutex;

use crate::events::{Event, Events};

/// The watch of the free space for a disk.
pub(crate) struct RoomWatch {
    disk: String,
    events: Events,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threshold: Option<Threshold>,
    write_threshold: Option<u64>,
    /// Whether `threshold` was crossed at the last check.
    is_crossed: bool,
    /// Whether a task checks the space.
    is_watched: bool,
}

impl RoomWatch {
    pub(crate) fn new(disk: &str, events: &Events) -> Arc<Self> {
        let (disk, events) = (disk.to_owned(), events.clone());
        Arc::new(Self { disk, events, state: Mutex::default() })
    }

    pub(crate) fn threshold(&self) -> Option<Threshold> {
        self.state.lock().threshold
    }

    /// Sets the threshold. Returns whether the caller must start the task that checks the space.
    pub(crate) fn set(&self, threshold: Option<Threshold>) -> bool {
        let mut state = self.state.lock();
        state.threshold = threshold;
        state.is_crossed = false;
        state.begins()
    }

    pub(crate) fn write_threshold(&self) -> Option<u64> {
        self.state.lock().write_threshold
    }

    /// As [`set`](Self::set), for the write threshold.
    pub(crate) fn set_write_threshold(&self, threshold: Option<u64>) -> bool {
        let mut state = self.state.lock();
        state.write_threshold = threshold;
        state.begins()
    }

    /// Whether the task that checks the space must continue.
    pub(crate) fn goes_on(&self) -> bool {
        let mut state = self.state.lock();
        state.is_watched = state.has_any();
        state.is_watched
    }

    /// Records that the image uses its storage up to this byte.
    pub(crate) fn note_end(&self, end: u64) {
        let crossed = self.state.lock().write_threshold.take_if(|threshold| end > *threshold);
        if let Some(threshold) = crossed {
            let disk = self.disk.clone();
            tracing::warn!("{disk}: its image uses {end} bytes, more than {threshold}");
            let exceeded = end - threshold;
            self.events.tell(Event::WriteThreshold { disk, threshold, exceeded });
        }
    }

    /// Records that a write got ENOSPC.
    pub(crate) fn note_full(&self) {
        self.note(Room { left: 0, total: 1 });
    }

    pub(crate) fn note(&self, room: Room) {
        let crossed = {
            let mut state = self.state.lock();
            let Some(threshold) = state.threshold else { return };
            let was_crossed = state.is_crossed;
            state.is_crossed = threshold.is_crossed(room);
            (state.is_crossed && !was_crossed).then_some(threshold)
        };
        if let Some(threshold) = crossed {
            let (disk, left, threshold) = (self.disk.clone(), room.left, threshold.to_string());
            tracing::warn!(
                "{disk}: {left} bytes of room are left on the host, less than {threshold}"
            );
            self.events.tell(Event::DiskThreshold { disk, left, threshold });
        }
    }
}

impl State {
    fn has_any(&self) -> bool {
        self.threshold.is_some() || self.write_threshold.is_some()
    }

    /// Whether the caller must start the task that checks the space.
    fn begins(&mut self) -> bool {
        let begins = self.has_any() && !self.is_watched;
        self.is_watched |= begins;
        begins
    }
}
