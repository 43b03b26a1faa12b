//! Limits of disks while they are served: `ctl limits` and `ctl limit`.
//!
//! Guarantees: a group of limits exists from when the first disk joins it until the last one leaves
//! it or is closed. Disks with the same group name share one group. Changed limits apply to waiting
//! requests, too, and no request fails because of a change.

use std::sync::Arc;

use anyhow::{Error, Result, bail};
use blockhouse_config::limits::LimitsConfig;
use blockhouse_disk::{RateLimits, ThrottleGroup};

use super::disk::RunningDisk;
use super::disk_list::DiskList;

/// The group of this name, if one of these disks is in it.
fn group(disks: &[Arc<RunningDisk>], name: &str) -> Option<Arc<ThrottleGroup>> {
    let member = disks.iter().find(|disk| disk.group.lock().as_deref() == Some(name))?;
    member.disk.throttle().group()
}

impl DiskList {
    /// Whether these limits can be applied.
    ///
    /// # Errors
    /// They name a group that does not exist, and set no limits for it.
    pub(super) fn check_limits(&self, limits: &LimitsConfig) -> Result<()> {
        let Some(name) = &limits.group else { return Ok(()) };
        let is_unlimited = limits.rates().map_err(Error::msg)?.is_unlimited();
        if is_unlimited && group(&self.0.lock(), name).is_none() { missing(name) } else { Ok(()) }
    }

    /// Gives all disks of a group other limits.
    ///
    /// # Errors
    /// There is no such group.
    pub(crate) fn limit_group(&self, name: &str, rates: RateLimits) -> Result<()> {
        match group(&self.0.lock(), name) {
            Some(group) => group.set_limits(rates),
            None => {
                bail!("no disk is in a group {name:?}; 'limit.get' tells which groups there are")
            }
        }
        Ok(())
    }

    /// Gives a disk the limits that it had before the hand-over, before it is served. They start
    /// over, without credit or debt.
    ///
    /// # Errors
    /// There is no error if the limits come from a server that ran with them.
    pub(crate) fn limit_as_before(&self, disk: &RunningDisk, limits: &LimitsConfig) -> Result<()> {
        if let Some(name) = &limits.group
            && group(&self.0.lock(), name).is_none()
        {
            // The group is made even if it has no limits.
            *disk.group.lock() = Some(name.clone());
            let rates = limits.rates().map_err(Error::msg)?;
            disk.disk.throttle().set_group(Some(ThrottleGroup::new(rates)));
            return Ok(());
        }
        self.limit(disk, limits)
    }

    /// Gives a disk other limits, or none. Limits of a group apply to all its disks. If only a
    /// group is named, the disk joins it, and the group keeps its limits. If the disk is served,
    /// the caller has claimed it.
    ///
    /// # Errors
    /// There is no group to join.
    pub(crate) fn limit(&self, disk: &RunningDisk, limits: &LimitsConfig) -> Result<()> {
        let disks = self.0.lock();
        if limits.is_off() {
            *disk.group.lock() = None;
            disk.disk.throttle().set_group(None);
            return Ok(());
        }
        let rates = limits.rates().map_err(Error::msg)?;
        let own = disk.disk.throttle().group().filter(|_| disk.group.lock().is_none());
        let existing = match &limits.group {
            Some(name) => group(&disks, name),
            None => own,
        };
        let joined = match (existing, &limits.group) {
            // The group's credit and debt stay.
            (Some(existing), name) => {
                if name.is_none() || !rates.is_unlimited() {
                    existing.set_limits(rates);
                }
                existing
            }
            (None, Some(name)) if rates.is_unlimited() => return missing(name),
            (None, _) => ThrottleGroup::new(rates),
        };
        (*disk.group.lock()).clone_from(&limits.group);
        let is_member = |current: Arc<ThrottleGroup>| Arc::ptr_eq(&current, &joined);
        if !disk.disk.throttle().group().is_some_and(is_member) {
            disk.disk.throttle().set_group(Some(Arc::clone(&joined)));
        }
        Ok(())
    }
}

fn missing(name: &str) -> Result<()> {
    bail!("no disk is in a group {name:?} yet; say its limits, like iops=1000")
}
