//! Clones of disks in Ceph: images that begin with a disk's content at one moment and share its
//! objects in the cluster.
//!
//! Guarantees: all disks are cloned at the same moment, and the clones have every write that was
//! answered before. The disks continue in their images. A clone that fails leaves no image and no
//! snapshot, unless the cluster fails their removal. A kill or a dropped future may leave a
//! snapshot `fork-NUMBER` and unused images.

use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, rare};
use blockhouse_disk::{ImageDisk, Pause, create_together, delete_unneeded};
use blockhouse_storage::{Location, RbdLocation, clone_rbd_image};
use futures_util::future::LocalBoxFuture;

use crate::create::remove_created;
use crate::fork::NewChild;
use crate::open_image::open;

/// The start of the name of the snapshot that clones are made from.
const SNAPSHOT: &str = "fork-";

/// A disk to clone, and its clones.
pub struct CloneOf<'a> {
    /// The disk, which is in use.
    pub disk: &'a ImageDisk,
    /// The clones: images of the same pool that do not exist yet. A name without options gets the
    /// options of the disk's name.
    pub clones: Vec<NewChild>,
}

/// A clone: its location, and its disk if it was to be opened.
pub type MadeClone = (PathBuf, Option<ImageDisk>);

/// The clones of one disk, to be made.
struct Plan<'a> {
    of: CloneOf<'a>,
    snapshot: RbdLocation,
    places: Vec<RbdLocation>,
}

/// Whether this is the location of an image in Ceph.
pub fn is_in_ceph(name: &Path) -> bool {
    matches!(Location::of(name), Ok(Location::Rbd(_)))
}

/// Clones disks at one moment. Returns the clones of each disk, and how long changes were held off:
/// the time for a snapshot of each disk. Needs the event loop of the current thread.
///
/// # Errors
/// An error names the disk or the image. The disk is not a raw image in Ceph, is read-only or too
/// busy, a clone exists already or would be in another pool, or the cluster fails. Then nothing has
/// changed.
pub fn clone_disks<'a>(
    all: Vec<CloneOf<'a>>,
) -> LocalBoxFuture<'a, Result<(Vec<Vec<MadeClone>>, Pause)>> {
    rare(async move {
        let mut plans = Vec::with_capacity(all.len());
        for of in all {
            plans.push(Plan::new(of).await?);
        }
        let disks: Vec<_> = plans
            .iter()
            .map(|plan| (plan.of.disk, plan.snapshot.snapshot().unwrap_or_default()))
            .collect();
        let pause = create_together(&disks).await?;
        let mut made = Vec::with_capacity(plans.len());
        let outcome = make_all(&plans, &mut made).await;
        if outcome.is_err() {
            remove(std::mem::take(&mut made)).await;
        }
        // Ceph keeps the data that the clones need.
        for (disk, snapshot) in disks {
            delete_unneeded(disk, snapshot).await;
        }
        outcome.map(|()| (made, pause))
    })
}

/// Makes the clones of all disks. After an error, `made` has the clones that were made before it.
async fn make_all(plans: &[Plan<'_>], made: &mut Vec<Vec<MadeClone>>) -> Result<()> {
    for plan in plans {
        made.push(Vec::new());
        for (place, clone) in plan.places.iter().zip(&plan.of.clones) {
            clone_rbd_image(&plan.snapshot, place).await?;
            let path = PathBuf::from(place.to_string());
            let of_disk = made.last_mut().expect("it was added");
            of_disk.push((path.clone(), None));
            if let (Some(options), Some(last)) = (&clone.opened, of_disk.last_mut()) {
                last.1 = Some(open(&path, options.clone()).await?);
            }
        }
    }
    Ok(())
}

/// Removes the clones after an error. Errors are logged.
async fn remove(made: Vec<Vec<MadeClone>>) {
    for (path, disk) in made.into_iter().flatten() {
        if let Some(disk) = disk
            && let Err(error) = disk.close().await
        {
            tracing::warn!("{error}");
        }
        remove_created(&path).await;
    }
}

impl<'a> Plan<'a> {
    async fn new(of: CloneOf<'a>) -> Result<Self> {
        let image = of.disk.image();
        let name = image.image_name();
        let refuse = |what: &str| Error::new(ErrorKind::Unsupported, what.to_owned()).on(name);
        let Location::Rbd(source) = Location::of(Path::new(name))? else {
            return Err(refuse("is not in Ceph, and is not cloned").hint("fork it"));
        };
        if image.image_format_name() == "qcow2" {
            let what = "is a qcow2 image, whose clones would share no space";
            return Err(refuse(what).hint("convert it to a raw image"));
        }
        let places = of.clones.iter().map(|clone| place_of(&source, &clone.path));
        let places = places.collect::<Result<Vec<_>>>()?;
        let taken = of.disk.snapshots().list().await?;
        let is_free = |name: &String| taken.iter().all(|snapshot| snapshot.name != *name);
        let mut names = (1_u64..).map(|number| format!("{SNAPSHOT}{number}"));
        let free = names.find(is_free).expect("there are fewer snapshots than numbers");
        Ok(Self { snapshot: source.at_snapshot(&free), of, places })
    }
}

/// The location of a clone, with the cluster and the user of its source.
fn place_of(source: &RbdLocation, path: &Path) -> Result<RbdLocation> {
    let refuse = |what: &str| {
        let error = Error::new(ErrorKind::InvalidInput, what.to_owned());
        error.on(&path.to_string_lossy())
    };
    let Location::Rbd(clone) = Location::of(path)? else {
        let what = "is not in Ceph, and the disk is";
        return Err(refuse(what).hint("name the clone as rbd:POOL/IMAGE"));
    };
    let place = source.with_image(clone.image());
    let has_options = clone.configuration().is_some() || clone.user().is_some();
    let is_there = (clone.pool(), clone.namespace()) == (place.pool(), place.namespace());
    if clone.snapshot().is_some() || !is_there || has_options && clone != place {
        let what = "is not an image in the disk's pool, where its clones are";
        return Err(refuse(what).hint("name the clone as rbd:POOL/IMAGE"));
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_is_in_the_pool_and_cluster_of_its_source() {
        let source: RbdLocation = "rbd:pool/disk?conf=/c&id=u".parse().unwrap();
        for name in ["rbd:pool/clone", "rbd:pool/clone?conf=/c&id=u"] {
            let place = place_of(&source, Path::new(name)).unwrap();
            assert_eq!(place.to_string(), "rbd:pool/clone?conf=/c&id=u");
        }
        for name in ["clone", "rbd:other/clone", "rbd:pool/clone@s", "rbd:pool/clone?conf=/d&id=u"]
        {
            assert!(place_of(&source, Path::new(name)).is_err(), "{name}");
        }
    }
}
