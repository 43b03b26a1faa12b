//! ublk devices: a disk as a block device of this host.

use std::sync::Arc;

use anyhow::Result;
use blockhouse_storage::ImageStorage;
use blockhouse_ublk::Server;

use super::{ExportAddress, Running, RunningDisk, RunningExport};
use crate::blocking;
use crate::ublk::PreparedUblk;

/// A device that is served.
pub(crate) struct RunningUblk {
    disk: String,
    server: Server<ImageStorage>,
}

impl RunningUblk {
    /// The name of its disk.
    pub(crate) fn disk(&self) -> &str {
        &self.disk
    }

    /// What serves it.
    pub(crate) fn server(&self) -> &Server<ImageStorage> {
        &self.server
    }
}

impl Running {
    /// Serves a disk by the device that was prepared for it.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn serve_ublk(&self, device: PreparedUblk, disk: &RunningDisk) -> Result<()> {
        let server = device.start()?;
        let (id, disk) = (server.id(), disk.name().to_owned());
        let mut list = self.list.lock();
        list.exports.push(RunningExport { address: ExportAddress::Ublk(id), disk: disk.clone() });
        list.ublk.push(Arc::new(RunningUblk { disk, server }));
        Ok(())
    }

    /// All of them, in the order in which they were added.
    pub(crate) fn ublk_devices(&self) -> Vec<Arc<RunningUblk>> {
        self.list.lock().ublk.clone()
    }

    /// Removes a block device. What it has in flight completes.
    pub(super) async fn remove_ublk(&self, id: u32) -> Result<()> {
        let device = {
            let mut list = self.list.lock();
            let index = list.ublk.iter().position(|device| device.server.id() == id);
            index.map(|index| list.ublk.remove(index))
        };
        if let Some(device) = device {
            let device = super::devices::alone(device).await;
            blocking::run(move || device.server.stop()).await?;
        }
        self.list.lock().exports.retain(|export| export.address != ExportAddress::Ublk(id));
        Ok(())
    }

    /// Gives the block devices of a disk its size.
    pub(super) fn resize_ublk(&self, disk: &str) {
        let mut devices = self.list.lock().ublk.clone();
        devices.retain(|device| device.disk == disk);
        for device in devices {
            if let Err(error) = device.server.resized() {
                tracing::warn!(disk, "{error}");
            }
        }
    }

    /// Removes all block devices: what they have in flight completes.
    pub(crate) fn stop_ublk(&self) {
        let devices = std::mem::take(&mut self.list.lock().ublk);
        devices.into_iter().filter_map(Arc::into_inner).for_each(|device| device.server.stop());
    }
}
