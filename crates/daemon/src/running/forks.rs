//! Forks: disks continue in overlays, and new disks begin over the same layer.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::text_fields::repeated;
use blockhouse_disk::{Access, ImageDisk, ImageFormat, Pause};
use blockhouse_images::{
    AllowedPaths, CloneOf, ForkOf, Forked, ImageOptions, NewChild, Secrets, clone_disks, fork,
    is_address, is_device, is_in_ceph,
};

use super::Running;
use super::disk::RunningDisk;
use crate::events::Event;
use crate::forks::{ForkChildParams, ForkDiskParams, ForkedDisk};
use crate::running::claims::Name;
use crate::running::open::image_options;

/// The result of a fork.
pub(crate) struct ForkReport {
    /// The time for which changes were held off.
    pub(crate) pause: Duration,
    /// The disks, in the order of the request.
    pub(crate) disks: Vec<ForkedDisk>,
}

/// The maximum number in the name of a new file.
const MAX_NUMBER: u32 = 100_000;

/// Forks disks, all at the same moment. When this returns, the layers are durable, and other
/// programs may read them.
///
/// # Errors
/// A disk does not exist, is used by a job or a backup, is too busy, or cannot be forked; a file
/// cannot be created. In these cases nothing has changed. If the layer cannot be made durable, the
/// disk is forked nevertheless.
pub(crate) async fn fork_disks(
    running: &Running,
    setups: Vec<ForkDiskParams>,
) -> Result<ForkReport> {
    let children = setups.iter().flat_map(|setup| &setup.children);
    let names = children.filter_map(|child| child.name.clone()).collect::<Vec<_>>();
    let claimed = setups.iter().map(|setup| setup.disk.clone()).chain(names.iter().cloned());
    let claimed: Vec<_> = claimed.map(Name::Disk).collect();
    if let Some(Name::Disk(name)) = repeated(&claimed) {
        bail!("the disk {name:?} is named twice");
    }
    let _claim = running.claims.claim(claimed).await;
    if let Some(name) = names.iter().find(|name| running.disks.find(name).is_some()) {
        bail!("a disk is called {name:?} already; choose another name");
    }
    let disks = setups.iter().map(|setup| running.disks.get(&setup.disk));
    let disks = disks.collect::<Result<Vec<_>>>()?;
    match disks.iter().filter(|disk| is_in_ceph(&disk.path())).count() {
        0 => {}
        count if count == disks.len() => return clone_in_ceph(running, &disks, &setups).await,
        _ => bail!(
            "disks in Ceph are cloned and others go on in overlays, not both at one moment: fork them in two commands"
        ),
    }
    let plans = disks.iter().zip(&setups).map(|(disk, setup)| plan(running, disk, setup));
    let sizes: Vec<_> = disks.iter().map(|disk| disk.disk.size()).collect();
    let (forked, pause) = fork(plans.collect::<Result<Vec<_>>>()?).await?;
    for (disk, _) in disks.iter().zip(sizes).filter(|(disk, old)| disk.disk.size() != *old) {
        running.tell_size(disk.name(), disk.disk.size());
    }
    let report = take_in(running, &disks, &setups, forked, pause).await;
    for ForkedDisk { disk, layer, overlay, .. } in &report.1.disks {
        let Some(overlay) = overlay else { continue };
        let (disk, layer, overlay) =
            (disk.clone(), layer.display().to_string(), overlay.display().to_string());
        tracing::info!(
            "{disk}: goes on in {overlay} over {layer}; changes were held off for {:?}",
            report.1.pause
        );
        running.events.tell(Event::DiskForked { disk, layer, overlay });
    }
    report.0.map(|()| report.1)
}

/// The plan for forking a disk.
fn plan<'a>(
    running: &Running,
    disk: &'a RunningDisk,
    setup: &ForkDiskParams,
) -> Result<ForkOf<'a>> {
    running.check_free(disk.name())?;
    check_by_name(disk)?;
    let overlay = match (&setup.overlay, disk.setup.access()) {
        (Some(_), Access::ReadOnly) => bail!(
            "the disk {:?} is read-only, and goes on as it is: leave the overlay out, and name children",
            disk.name()
        ),
        (None, Access::ReadOnly) if setup.children.is_empty() => {
            bail!("the disk {:?} is read-only: name children", disk.name())
        }
        (None, Access::ReadOnly) => None,
        (Some(path), Access::ReadWrite) => Some(path.clone()),
        (None, Access::ReadWrite) if is_device(&disk.path()) => bail!(
            "the disk {:?} is a device, and the files beside it go when the host restarts: name an overlay elsewhere",
            disk.name()
        ),
        (None, Access::ReadWrite) => Some(next_name(&disk.path())?),
    };
    let mut paths = setup.children.iter().map(|child| &child.path);
    if let Some(path) = paths.find(|path| is_address(path.as_os_str().as_bytes())) {
        bail!("{}: the disk {:?} is on this host: name a file", path.display(), disk.name());
    }
    overlay.iter().try_for_each(|path| running.sandbox().check(path))?;
    let (options, children) = children_of(running, disk, setup)?;
    let is_overlay_made = setup.made && setup.overlay.is_some();
    // A fork without children is for a rollback, so it makes an overlay of its own.
    let may_share_layer = setup.overlay.is_none() && overlay.is_some() && !children.is_empty();
    let disk = &*disk.disk;
    Ok(ForkOf { disk, options, overlay, is_overlay_made, may_share_layer, children })
}

/// Refuses a disk whose content is not found by the name of its image alone, because an overlay
/// has only that name.
fn check_by_name(disk: &RunningDisk) -> Result<()> {
    if disk.setup.data_file.is_some() {
        bail!(
            "the disk {:?} has a data file that its image does not name, and an overlay would have the other one: store \
             the name (amend -o data_file=PATH)",
            disk.name()
        );
    }
    if disk.setup.snapshot.is_some() {
        bail!("the disk {:?} is a snapshot in an image, and nothing is over that", disk.name());
    }
    Ok(())
}

/// The children that a disk is to have, and the options by which they are opened.
fn children_of(
    running: &Running,
    disk: &RunningDisk,
    setup: &ForkDiskParams,
) -> Result<(ImageOptions, Vec<NewChild>)> {
    let cache = disk.moved().map_or(disk.setup.cache, |moved| moved.cache);
    let written = DiskConfig { read_only: false, cache, ..disk.setup.clone() };
    let options = image_options(&written, &running.state_use(&written)?, Secrets::of(&disk.disk))?;
    let child = |child: &ForkChildParams| {
        let opened = child.name.is_some().then(|| options.clone());
        NewChild { path: child.path.clone(), opened }
    };
    let children: Vec<_> = setup.children.iter().map(child).collect();
    children.iter().try_for_each(|child| running.sandbox().check(&child.path))?;
    Ok((options, children))
}

/// Clones disks in Ceph, which continue in their images.
async fn clone_in_ceph(
    running: &Running,
    disks: &[Arc<RunningDisk>],
    setups: &[ForkDiskParams],
) -> Result<ForkReport> {
    let mut plans = Vec::with_capacity(disks.len());
    for (disk, setup) in disks.iter().zip(setups) {
        check_by_name(disk)?;
        if setup.overlay.is_some() {
            bail!(
                "the disk {:?} is in Ceph and goes on in its image: leave the overlay out, and name children",
                disk.name()
            );
        }
        if setup.children.is_empty() {
            bail!("the disk {:?} is in Ceph, and a fork makes clones: name children", disk.name());
        }
        let (_, clones) = children_of(running, disk, setup)?;
        plans.push(CloneOf { disk: &disk.disk, clones });
    }
    let (made, pause) = clone_disks(plans).await?;
    let mut report = ForkReport { pause: pause.length, disks: Vec::new() };
    for ((disk, setup), made) in disks.iter().zip(setups).zip(made) {
        let children = made.iter().map(|(path, _)| path.clone()).collect();
        for ((path, opened), child) in made.into_iter().zip(&setup.children) {
            if let (Some(opened), Some(name)) = (opened, &child.name) {
                take_in_child(running, disk, path, name, opened);
            }
        }
        let (disk, layer) = (setup.disk.clone(), disk.path());
        tracing::info!("{disk}: was cloned; changes were held off for {:?}", report.pause);
        report.disks.push(ForkedDisk { disk, layer, overlay: None, children });
    }
    Ok(report)
}

/// Serves the children as requested, and makes the layers durable.
async fn take_in(
    running: &Running,
    disks: &[Arc<RunningDisk>],
    setups: &[ForkDiskParams],
    mut forked: Vec<Forked<'_>>,
    pause: Pause,
) -> (Result<()>, ForkReport) {
    let mut report = ForkReport { pause: pause.length, disks: Vec::new() };
    for ((disk, setup), forked) in disks.iter().zip(setups).zip(&mut forked) {
        let children = std::mem::take(&mut forked.children);
        let paths = children.iter().map(|(path, _)| path.clone()).collect();
        forked.overlay.iter().for_each(|overlay| tell_if_not_free(overlay, &forked.layer));
        for ((path, opened), child) in children.into_iter().zip(&setup.children) {
            tell_if_not_free(&path, &forked.layer);
            if let (Some(opened), Some(name)) = (opened, &child.name) {
                take_in_child(running, disk, path, name, opened);
            }
        }
        report.disks.push(ForkedDisk {
            disk: setup.disk.clone(),
            layer: forked.layer.clone(),
            overlay: forked.overlay.clone(),
            children: paths,
        });
    }
    let mut settled = Ok(());
    for (forked, setup) in forked.iter().zip(setups) {
        let outcome = forked.settle().await.with_context(|| {
            format!("the disk {:?} was forked, but what it was is not durable", setup.disk)
        });
        settled = settled.and(outcome);
    }
    (settled, report)
}

fn take_in_child(
    running: &Running,
    of: &RunningDisk,
    path: PathBuf,
    name: &str,
    opened: ImageDisk,
) {
    // A clone has the format of its source, and an overlay is qcow2.
    let format = if is_in_ceph(&path) { of.setup.format } else { Some(ImageFormat::Qcow2) };
    let setup = DiskConfig {
        name: Some(name.to_owned()),
        path,
        format,
        read_only: false,
        create: None,
        copy_on_read: false,
        prefetch: None,
        bitmaps: Vec::new(),
        bitmaps_in: None,
        trust_bitmaps: false,
        threshold: None,
        limits: LimitsConfig::default(),
        exports: Vec::new(),
        ..of.setup.clone()
    };
    running.adopt(setup, Arc::new(opened), None);
    running.events.tell(Event::DiskOpened { disk: name.to_owned() });
}

/// Warns if the image can be opened only with an allowed path for its layer, the backing file.
fn tell_if_not_free(image: &Path, layer: &Path) {
    if !AllowedPaths::is_free_to_name(image, layer.as_os_str().as_bytes()) {
        tracing::warn!(
            "{}: stands on {}, which is not below its folder: it is opened with --allow-path only",
            image.display(),
            layer.display()
        );
    }
}

/// A free name beside an image: `disk.1.qcow2` for disk.img, `disk.2.qcow2` for disk.1.qcow2.
fn next_name(image: &Path) -> Result<PathBuf> {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    let (stem, number) = match stem.rsplit_once('.') {
        Some((stem, number)) => match number.parse::<u32>() {
            Ok(number) => (stem.to_owned(), number),
            Err(_) => (format!("{stem}.{number}"), 0),
        },
        None => (stem.into_owned(), 0),
    };
    let next =
        (number.saturating_add(1)..MAX_NUMBER).map(|number| format!("{stem}.{number}.qcow2"));
    let mut next = next.map(|name| image.with_file_name(name));
    let free = next.find(|path| std::fs::symlink_metadata(path).is_err());
    free.with_context(|| format!("{}: no name beside it is free; name an overlay", image.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_are_numbered() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = |image: &str| {
            let path = next_name(&folder.path().join(image)).expect("a free name");
            path.file_name().expect("a name").to_string_lossy().into_owned()
        };
        assert_eq!(name("disk.img"), "disk.1.qcow2");
        assert_eq!(name("disk"), "disk.1.qcow2");
        assert_eq!(name("my.disk.img"), "my.disk.1.qcow2");
        assert_eq!(name("disk.1.qcow2"), "disk.2.qcow2");
        std::fs::write(folder.path().join("disk.2.qcow2"), "").expect("a file");
        assert_eq!(name("disk.1.qcow2"), "disk.3.qcow2");
    }
}
