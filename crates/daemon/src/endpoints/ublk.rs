//! The ublk devices of `serve`: the checks and preparations before the sandbox.
//!
//! Guarantee: a device's commands fit into every loop that serves it, and leave room there for the
//! I/O of the image.

use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::setup::{Setup, UblkSetup};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::Engine;
use blockhouse_storage::ImageStorage;
use blockhouse_ublk::{DeviceOptions, HandedOverDevice, PreparedDevice};

use crate::process::workers::Workers;

/// How many requests a queue may have in flight, if the loop has room.
const MAX_DEPTH: usize = 128;
/// How many commands all queues of a loop may have: half of the operations that a loop has room
/// for.
const MAX_COMMANDS: usize = 1024;

/// A device that was prepared and not started.
pub(crate) type PreparedUblk = PreparedDevice<ImageStorage>;
/// A prepared device, with the index of its disk.
pub(crate) type UblkOfDisk = (PreparedUblk, usize);
/// A device that another process still serves, with the index of its disk.
pub(crate) type HandedOverUblk = (HandedOverDevice, usize);

/// Checks whether a server can serve the ublk devices of its setup.
///
/// # Errors
/// The reason why it cannot.
pub(crate) fn check(setup: &Setup, workers: &Workers) -> Result<()> {
    if setup.ublk.is_empty() {
        return Ok(());
    }
    let report = workers.report();
    if report.engine != Engine::IoUring {
        bail!(
            "cannot serve ublk devices by the engine {report}: the kernel takes their commands by io_uring alone; use \
             --nbd or --vhost-user-blk"
        );
    }
    if setup.user.is_some() {
        bail!(
            "a ublk device needs root's rights to its end; leave out --user, or use --nbd or --vhost-user-blk"
        );
    }
    Ok(blockhouse_ublk::check_driver()?)
}

/// Creates the devices of a server, or takes over devices that wait for a server. Call [`check`]
/// first. `disks` are the setup's disks, in its order.
///
/// # Errors
/// The reason why a device cannot be served. Devices that were created are removed again.
pub(crate) fn prepare(
    setup: &Setup,
    workers: &Workers,
    disks: &[Arc<ImageDisk>],
) -> Result<Vec<UblkOfDisk>> {
    if setup.ublk.is_empty() {
        return Ok(Vec::new());
    }
    let depth = (MAX_COMMANDS / setup.ublk.len()).clamp(1, MAX_DEPTH) as u16;
    let loops = workers.handles();
    let prepare = |device: &UblkSetup| {
        let image = image_of(&setup.disks[device.disk]);
        let options = DeviceOptions { id: device.id, queues: loops.len() as u16, depth, image };
        Ok((PreparedDevice::new(options, &disks[device.disk], &loops)?, device.disk))
    };
    let devices = setup.ublk.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    let all: usize = devices.iter().map(|(device, _)| device.commands(loops.len())).sum();
    if all > MAX_COMMANDS {
        bail!(
            "the ublk devices may have {all} requests in flight on each loop, more than {MAX_COMMANDS}; use more \
             --workers, or another server for some of them"
        );
    }
    Ok(devices)
}

/// Takes the devices of a process that has handed them over, as soon as that process has ended. A
/// device that cannot be taken is logged and keeps waiting for a server; everything else that was
/// handed over is served.
pub(crate) fn take_over(
    devices: Vec<HandedOverUblk>,
    workers: &Workers,
    disks: &[Arc<ImageDisk>],
) -> Vec<UblkOfDisk> {
    let loops = workers.handles();
    let take = |(device, disk): HandedOverUblk| match device.take_over(&disks[disk], &loops) {
        Ok(device) => Some((device, disk)),
        Err(error) => {
            tracing::error!(
                disk = disks[disk].name(),
                "{error}; what uses it waits until this server is stopped and started again"
            );
            None
        }
    };
    devices.into_iter().filter_map(take).collect()
}

/// The identity of an image: its canonical path, and the name of the snapshot that is served.
fn image_of(disk: &DiskConfig) -> String {
    let path = disk.path.canonicalize().unwrap_or_else(|_| disk.path.clone());
    match &disk.snapshot {
        Some(snapshot) => format!("{}\n{snapshot}", path.display()),
        None => path.display().to_string(),
    }
}
