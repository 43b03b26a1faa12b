//! Telling that a disk's host is about to be full.
//!
//! Guarantee: each crossing of the threshold is told once, and before the disk's writes are held or fail for want of room:
//! what finds no room has it told first. What is told again was above the threshold meanwhile.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockhouse_disk::Room;
use blockhouse_engine::sleep;
use parking_lot::Mutex;

use super::{Running, RunningDisk};
use crate::events::{Event, Events};
use crate::threshold::Threshold;

/// How often it is looked how much is left.
const LOOK: Duration = Duration::from_millis(500);

/// What is watched of a disk.
pub(super) struct RoomWatch {
    disk: String,
    events: Events,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threshold: Option<Threshold>,
    /// Whether it was crossed when this was looked at last.
    is_crossed: bool,
    /// Whether a task looks.
    is_watched: bool,
}

impl RoomWatch {
    pub(super) fn new(disk: &str, events: &Events) -> Arc<Self> {
        let (disk, events) = (disk.to_owned(), events.clone());
        Arc::new(Self { disk, events, state: Mutex::default() })
    }

    pub(super) fn threshold(&self) -> Option<Threshold> {
        self.state.lock().threshold
    }

    /// From now on. Whether a task has to begin to look.
    fn set(&self, threshold: Option<Threshold>) -> bool {
        let mut state = self.state.lock();
        state.threshold = threshold;
        state.is_crossed = false;
        let begins = threshold.is_some() && !state.is_watched;
        state.is_watched |= begins;
        begins
    }

    /// Whether it is still looked.
    fn goes_on(&self) -> bool {
        let mut state = self.state.lock();
        state.is_watched = state.threshold.is_some();
        state.is_watched
    }

    /// A write found no room.
    pub(super) fn note_full(&self) {
        self.note(Room { left: 0, total: 1 });
    }

    fn note(&self, room: Room) {
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

impl Running {
    /// Has it told from now on when a disk has less room than this, or never.
    ///
    /// # Errors
    /// There is no such disk, or nothing tells how much room it has.
    pub(crate) async fn set_threshold(
        &self,
        name: &str,
        threshold: Option<Threshold>,
    ) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        if threshold.is_some() && claimed.disk.disk.room_left().await?.is_none() {
            anyhow::bail!(
                "nothing tells how much room the disk {name:?} has left: it has all its space, or another server has it"
            );
        }
        self.watch_room(&claimed.disk, threshold);
        Ok(())
    }

    /// The same, of a disk that is claimed or not served yet.
    pub(super) fn watch_room(&self, disk: &Arc<RunningDisk>, threshold: Option<Threshold>) {
        let Some(handle) = self.loops.first().filter(|_| disk.room.set(threshold)) else { return };
        let disk = Arc::downgrade(disk);
        // It ends with the disk, with the threshold, or with the loop.
        drop(handle.spawn(move || async move {
            loop {
                let Some(disk) = disk.upgrade().filter(|disk| disk.room.goes_on()) else { return };
                match disk.disk.room_left().await {
                    Ok(Some(room)) => disk.room.note(room),
                    Ok(None) => {}
                    Err(error) => tracing::debug!("{error}"),
                }
                drop(disk);
                sleep(LOOK).await;
            }
        }));
    }
}
