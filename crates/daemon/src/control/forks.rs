//! What the method of forks does.

use super::fork_methods::{ForkChildParams, ForkDiskParams, ForkParams, ForkResult, ForkedDisk};
use super::outcome::{Outcome, invalid, result};
use super::rpc::Failure;
use crate::disk_options::check_absolute;
use crate::running::{ChildSetup, ForkReport, ForkSetup, ForkedFiles, Running};

/// Forks disks.
pub(super) async fn fork(running: &Running, given: ForkParams) -> Outcome {
    let ForkParams { disks } = given;
    if disks.is_empty() {
        return Err(invalid("no disk is to be forked; name one".into()));
    }
    let setups = disks.into_iter().map(setup).collect::<Result<Vec<_>, Failure>>()?;
    let ForkReport { pause, disks } = running.fork(setups).await?;
    let info = |ForkedFiles { disk, layer, overlay, children }| ForkedDisk {
        disk,
        layer,
        overlay,
        children,
    };
    result(ForkResult {
        pause_us: pause.as_micros() as u64,
        disks: disks.into_iter().map(info).collect(),
    })
}

fn setup(given: ForkDiskParams) -> Result<ForkSetup, Failure> {
    let ForkDiskParams { disk, overlay, children } = given;
    let paths = overlay.iter().chain(children.iter().map(|child| &child.path));
    paths.into_iter().try_for_each(|path| check_absolute(path)).map_err(invalid)?;
    let child = |ForkChildParams { path, name }| ChildSetup { path, name };
    Ok(ForkSetup { disk, overlay, children: children.into_iter().map(child).collect() })
}
