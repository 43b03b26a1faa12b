//! Limits of disks while they are served: `ctl limits` and `ctl limit`.
//!
//! Guarantees: a group of limits exists from when the first disk joins it until the last one leaves
//! it or is closed. Disks whose groups have one name share one group. Other limits hold for
//! requests that wait, too, and no request fails because of a change.

use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_disk::{RateLimits, ThrottleGroup};

use super::{List, Running, RunningDisk};
use crate::options::limit_options::DiskThrottle;

impl RunningDisk {
    /// The limits in force; `None`: none.
    pub(crate) fn throttle(&self) -> Option<DiskThrottle> {
        let group = self.group.lock().clone();
        let limits = self.disk.throttle_group()?.limits();
        (group.is_some() || !limits.is_unlimited()).then_some(DiskThrottle { group, limits })
    }
}

impl List {
    /// The group of this name.
    fn group(&self, name: &str) -> Option<Arc<ThrottleGroup>> {
        let mut members = self.disks.iter();
        let member = members.find(|disk| disk.group.lock().as_deref() == Some(name))?;
        member.disk.throttle_group()
    }
}

impl Running {
    /// Whether these limits can be put in force.
    ///
    /// # Errors
    /// They are those of a group that does not exist.
    pub(crate) fn check_limits(&self, throttle: &DiskThrottle) -> Result<()> {
        match &throttle.group {
            Some(name)
                if throttle.limits.is_unlimited() && self.list.lock().group(name).is_none() =>
            {
                missing(&throttle.group)
            }
            _ => Ok(()),
        }
    }

    /// Gives a disk other limits, or none. The limits of a group hold for all its disks; where none
    /// are said, the disk joins the group, and the group's stay.
    ///
    /// # Errors
    /// There is no such disk, or no group to join.
    pub(crate) async fn limit_disk(
        &self,
        name: &str,
        throttle: Option<&DiskThrottle>,
    ) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        self.put_in_force(&claimed.disk, throttle)
    }

    /// Gives all disks of a group other limits.
    ///
    /// # Errors
    /// There is no such group.
    pub(crate) fn limit_group(&self, name: &str, limits: RateLimits) -> Result<()> {
        match self.list.lock().group(name) {
            Some(group) => group.set_limits(limits),
            None => {
                bail!("no disk is in a group {name:?}; 'limit.get' tells which groups there are")
            }
        }
        Ok(())
    }

    /// Gives a disk the limits that it was set up with, before it is served.
    ///
    /// # Errors
    /// As [`check_limits`](Self::check_limits).
    pub(crate) fn limit_as_set_up(&self, disk: &RunningDisk) -> Result<()> {
        match &disk.setup.throttle {
            None => Ok(()),
            throttle => self.put_in_force(disk, throttle.as_ref()),
        }
    }

    /// Gives a disk the limits that it had in the process that has handed it over, before it is
    /// served. They begin anew, with nothing saved and nothing owed.
    ///
    /// # Errors
    /// None that a server with these limits could give.
    pub(crate) fn limit_as_before(
        &self,
        disk: &RunningDisk,
        throttle: Option<&DiskThrottle>,
    ) -> Result<()> {
        if let Some(DiskThrottle { group: Some(name), limits }) = throttle
            && self.list.lock().group(name).is_none()
        {
            // Also one without any limits.
            *disk.group.lock() = Some(name.clone());
            disk.disk.join_throttle_group(&ThrottleGroup::new(*limits));
            return Ok(());
        }
        self.put_in_force(disk, throttle)
    }

    /// The disk is claimed, or not served yet.
    fn put_in_force(&self, disk: &RunningDisk, throttle: Option<&DiskThrottle>) -> Result<()> {
        let list = self.list.lock();
        let Some(DiskThrottle { group, limits }) = throttle else {
            *disk.group.lock() = None;
            disk.disk.leave_throttle_group();
            return Ok(());
        };
        let own = disk.disk.throttle_group().filter(|_| disk.group.lock().is_none());
        let existing = match group {
            Some(name) => list.group(name),
            None => own,
        };
        let joined = match existing {
            // The saved and the owed operations stay.
            Some(existing) => {
                if group.is_none() || !limits.is_unlimited() {
                    existing.set_limits(*limits);
                }
                existing
            }
            None if group.is_some() && limits.is_unlimited() => return missing(group),
            None => ThrottleGroup::new(*limits),
        };
        (*disk.group.lock()).clone_from(group);
        let is_member = |current: Arc<ThrottleGroup>| Arc::ptr_eq(&current, &joined);
        if !disk.disk.throttle_group().is_some_and(is_member) {
            disk.disk.join_throttle_group(&joined);
        }
        Ok(())
    }
}

fn missing(group: &Option<String>) -> Result<()> {
    let name = group.as_deref().unwrap_or_default();
    bail!("no disk is in a group {name:?} yet; say its limits, like iops=1000")
}
