//! vhost-user-blk devices: a disk at a socket of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_disk::Access;
use blockhouse_engine::sleep;
use blockhouse_nbd::uri::Address;
use blockhouse_vhost_user::{Device, Export, FrontendEvent, FrontendObserver};

use super::disk::RunningDisk;
use super::export::{Frontends, RunningDevice, RunningExport};
use super::export_list::ExportList;
use crate::endpoints::vhost_user::{self, DeviceSocket};
use crate::events::Event;
use crate::process::blocking;
use crate::process::kept_sockets;

/// The interval at which a removed device is checked for users: a task that reports a new size to
/// it may hold it.
const RETRY: Duration = Duration::from_millis(1);

impl ExportList {
    /// Serves a disk to a guest at a bound socket.
    ///
    /// # Errors
    /// A thread cannot be started for it.
    pub(crate) fn serve_device(&self, socket: DeviceSocket, disk: &RunningDisk) -> Result<()> {
        let access = socket.access;
        let (name, loops) = (disk.name().to_owned(), self.loops.clone());
        // The guest reads this as the device's ID, which has 20 bytes: too few for a path.
        let label = Path::new(&name).file_name().unwrap_or_default().to_string_lossy().into();
        let (queues, memory) = (self.queues, self.memory);
        let shared = Arc::clone(&disk.disk);
        let export = Export { disk: shared, name: label, queues, loops, memory, access };
        let frontends = Frontends::default();
        let observer = self.frontend_observer(&socket, Arc::clone(&frontends));
        let served = vhost_user::serve(socket, Device::observed(export, observer))?;
        let path = served.path().to_owned();
        let mut list = self.state.lock();
        let address = ExportAddress::VhostUser(path);
        let options = ExportOptions { access, ..ExportOptions::default() };
        list.exports.push(RunningExport {
            address,
            disk: name.clone(),
            options,
            added_bitmaps: Vec::new(),
        });
        list.devices.push(Arc::new(RunningDevice { disk: name, access, served, frontends }));
        Ok(())
    }

    /// Lists the front-ends of a device, and reports them to subscribers.
    fn frontend_observer(&self, socket: &DeviceSocket, frontends: Frontends) -> FrontendObserver {
        let (events, address) = (self.events.clone(), socket.bound.address.clone());
        Box::new(move |peer, what| {
            match what {
                FrontendEvent::Came => frontends.lock().push(peer.to_owned()),
                FrontendEvent::Left => {
                    let mut frontends = frontends.lock();
                    if let Some(at) = frontends.iter().position(|one| one == peer) {
                        frontends.remove(at);
                    }
                }
            }
            let Address::Unix(path) = &address else { return };
            let (export, peer) = (path.display().to_string(), peer.to_owned());
            events.tell(match what {
                FrontendEvent::Came => Event::ClientCame { export, peer },
                FrontendEvent::Left => Event::ClientLeft { export, peer },
            });
        })
    }

    /// The devices, in the order in which they were added.
    pub(crate) fn devices(&self) -> Vec<Arc<RunningDevice>> {
        self.state.lock().devices.clone()
    }

    pub(super) async fn add_device(
        &self,
        path: PathBuf,
        disk: Arc<RunningDisk>,
        access: Access,
    ) -> Result<()> {
        let permissions = self.permissions;
        let bound =
            blocking::run(move || kept_sockets::bind(&Address::Unix(path), permissions)).await??;
        kept_sockets::serve_or_give_up(bound, |bound| {
            self.serve_device(DeviceSocket { bound, frontend: None, access }, &disk)
        })
    }

    /// Stops serving a device. The guest's requests in flight complete.
    pub(super) async fn remove_device(&self, path: &Path) -> Result<()> {
        let device = {
            let mut list = self.state.lock();
            let index = list.devices.iter().position(|device| device.served.path() == path);
            index.map(|index| list.devices.remove(index))
        };
        if let Some(device) = device {
            let device = alone(device).await;
            kept_sockets::give_up(&Address::Unix(path.to_owned()), device.served.file());
            blocking::run(move || device.served.stop()).await?;
        }
        let address = ExportAddress::VhostUser(path.to_owned());
        self.state.lock().exports.retain(|export| export.address != address);
        Ok(())
    }

    /// Notifies the guests of a disk that its size has changed.
    pub(crate) fn tell_guests_of_size(&self, disk: &str) {
        let mut devices = self.state.lock().devices.clone();
        devices.retain(|device| device.disk == disk);
        devices.iter().for_each(|device| device.served.resized());
        self.resize_ublk(disk);
    }

    /// Begins to stop all devices, which [`stop`](RunningDevice::stop) completes.
    pub(crate) fn begin_stop_devices(&self) -> Vec<RunningDevice> {
        let devices = std::mem::take(&mut self.state.lock().devices);
        let mut devices: Vec<_> = devices.into_iter().map(wait_alone).collect();
        devices.iter_mut().for_each(|device| device.served.begin_stop());
        devices
    }
}

/// As [`alone`], on a thread that may block.
pub(super) fn wait_alone<T>(mut shared: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(shared) {
            Ok(alone) => return alone,
            Err(used) => shared = used,
        }
        std::thread::sleep(RETRY);
    }
}

/// Waits until no other task uses the value, and returns it.
pub(super) async fn alone<T>(mut shared: Arc<T>) -> T {
    loop {
        match Arc::try_unwrap(shared) {
            Ok(alone) => return alone,
            Err(used) => shared = used,
        }
        sleep(RETRY).await;
    }
}
