//! Limits on the rates of a disk. `throttle` says what they guarantee.

use std::sync::Arc;

use blockhouse_core::Storage;

use super::Disk;
use crate::throttle::{LiftGuard, RateLimits, ThrottleGroup};

impl<S: Storage> Disk<S> {
    /// Has the disk share the limits of a group, from now on; requests that wait under former
    /// limits wait under these. It leaves the group that it is in.
    pub fn join_throttle_group(&self, group: &Arc<ThrottleGroup>) {
        self.throttle.set_group(Some(Arc::clone(group)));
    }

    /// Takes the disk out of its group: it has no limits.
    pub fn leave_throttle_group(&self) {
        self.throttle.set_group(None);
    }

    /// The group whose limits the disk shares, if it has limits.
    pub fn throttle_group(&self) -> Option<Arc<ThrottleGroup>> {
        self.throttle.group()
    }

    /// Limits the disk, while requests are in flight or wait, or not. Where it shares the limits of
    /// a group, these are the new limits of the group. Otherwise the disk gets limits of its
    /// own; its requests are to be submitted on event loops then.
    pub fn set_limits(&self, limits: RateLimits) {
        self.throttle.set_limits(limits);
    }

    /// Lifts the limits until the guard is dropped: requests that wait are let go at once, and
    /// count nowhere. For an orderly end, which waits for the requests in flight.
    pub fn lift_limits(&self) -> LiftGuard {
        LiftGuard::new(&self.throttle)
    }
}
