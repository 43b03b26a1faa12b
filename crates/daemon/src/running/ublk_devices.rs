//! ublk devices: a disk as a block device of this host.
//!
//! Guarantee: if another program removes a device, its export ends. A server without any other
//! export, and without a way to get one, ends: otherwise it would keep its image locked without
//! serving it.

use std::sync::{Arc, Weak};

use anyhow::Result;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_engine::spawn;
use signal_hook::consts::SIGTERM;
use signal_hook::low_level::raise;

use super::devices::wait_alone;
use super::disk::RunningDisk;
use super::export::{RunningExport, RunningUblk};
use super::export_list::ExportList;
use crate::endpoints::ublk::PreparedUblk;
use crate::process::blocking;

impl ExportList {
    /// Serves a disk by the device that was prepared for it.
    ///
    /// # Errors
    /// The kernel refuses the device.
    pub(crate) fn serve_ublk(
        self: &Arc<Self>,
        device: PreparedUblk,
        disk: &RunningDisk,
    ) -> Result<()> {
        let (exports, id) = (Arc::downgrade(self), device.id());
        let removed = move || drop(spawn(leave_removed(exports, id)));
        let server = device.start(removed)?;
        let disk = disk.name().to_owned();
        let mut list = self.state.lock();
        let (address, options) = (ExportAddress::Ublk(id), ExportOptions::default());
        list.exports.push(RunningExport {
            address,
            disk: disk.clone(),
            options,
            added_bitmaps: Vec::new(),
        });
        list.ublk.push(Arc::new(RunningUblk { disk, server }));
        Ok(())
    }

    /// All ublk devices, in the order in which they were added.
    pub(crate) fn ublk_devices(&self) -> Vec<Arc<RunningUblk>> {
        self.state.lock().ublk.clone()
    }

    /// Removes a block device. Its requests in flight complete.
    pub(super) async fn remove_ublk(&self, id: u32) -> Result<()> {
        let device = {
            let mut list = self.state.lock();
            let index = list.ublk.iter().position(|device| device.server.id() == id);
            index.map(|index| list.ublk.remove(index))
        };
        if let Some(device) = device {
            let device = super::devices::alone(device).await;
            blocking::run(move || device.server.stop()).await?;
        }
        self.state.lock().exports.retain(|export| export.address != ExportAddress::Ublk(id));
        Ok(())
    }

    /// Sets the size of a disk's block devices to the size of the disk.
    pub(super) fn resize_ublk(&self, disk: &str) {
        let mut devices = self.state.lock().ublk.clone();
        devices.retain(|device| device.disk == disk);
        for device in devices {
            if let Err(error) = device.server.resized() {
                tracing::warn!(disk, "{error}");
            }
        }
    }

    /// Removes all block devices: their requests in flight complete.
    pub(crate) fn stop_ublk(&self) {
        let devices = std::mem::take(&mut self.state.lock().ublk);
        devices.into_iter().map(wait_alone).for_each(|device| device.server.stop());
    }
}

/// Ends the export of device `id`, which another program has removed.
async fn leave_removed(exports: Weak<ExportList>, id: u32) {
    tracing::error!(
        "/dev/ublkb{id} was removed by another program; its image is no longer served there"
    );
    let Some(exports) = exports.upgrade() else { return };
    let mut listed = exports.list().into_iter();
    if let Some(export) = listed.find(|export| export.address == ExportAddress::Ublk(id))
        && let Err(error) = exports.end(&export).await
    {
        tracing::error!("{error:#}");
    }
    if exports.list().is_empty() && !exports.can_grow {
        tracing::error!("no export is left, so this server ends");
        let _ = raise(SIGTERM);
    }
}
