//! The I/O path of real images, compiled once, with full optimization (layer 5).
//!
//! A generic function is compiled where its types are known: without this crate, in each crate that
//! opens a [`Disk`](blockhouse_disk::Disk), with the optimization of that crate. The crates above
//! are compiled without optimization, because they hand requests to the path one by one only at the
//! ends of a copy.
//!
//! The crates above use the copy of a function that is compiled here under two conditions. The
//! function is never inlined: [`rare`] is not, and the long-lived and the rare futures of the path
//! go through it. And a function below mentions the future for [`ImageStorage`].
//!
//! The functions below are only compiled, and never called. They mention what is called for each
//! request, each cluster or each table of an image. Changes of a header, of a bitmap or of a size
//! are compiled in the crates above.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_core::{Buffer, ByteRange, Request, Result, SyncMode, ToolProgress, rare};
use blockhouse_disk::{
    AfterCommit, BlockStatusCache, CompareJob, CopyJob, ImageDisk, RangeCopy, StreamOptions,
    commit_overlay, copy_stream, first_status_difference, flush_ahead, send_load, take_space,
};
use blockhouse_engine::{Handle, Listener, Stream};
use blockhouse_format::SpaceMode;
use blockhouse_format::qcow2::{Repair, repair_with};
use blockhouse_jobs::{self as jobs, FailureTeller, FreezeOptions, FrozenDisk, JobEnd, Mirror};
use blockhouse_nbd::{Exports, PausedSession};
use blockhouse_storage::{ImageStorage, ViewStorage};
use blockhouse_ublk::{DeviceOptions, PreparedDevice};
use blockhouse_vhost_user::Device;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::LocalBoxStream;

/// The connections of NBD clients.
pub fn nbd<'a>(
    server: &'a blockhouse_nbd::Server,
    listener: &'a Listener,
    exports: &'a Exports<ImageStorage>,
    loops: &'a [Handle],
    connections: Vec<(Stream, PausedSession)>,
) -> LocalBoxFuture<'a, io::Result<()>> {
    rare(server.serve_with(listener, exports, loops, connections))
}

/// The queues of virtual machines.
pub fn vhost_user(device: Device<ImageStorage>, socket: OwnedFd) -> io::Result<()> {
    blockhouse_vhost_user::Server::start(device, socket).map(drop)
}

/// The queues of the kernel's block devices.
pub fn ublk(
    options: DeviceOptions,
    disk: &Arc<ImageDisk>,
    loops: &[Handle],
) -> std::result::Result<(), blockhouse_ublk::Error> {
    PreparedDevice::new(options, disk, loops).map(drop)
}

/// Mirrors, commits, backups and streams.
pub fn jobs<'a>(
    mirror: &'a Mirror<ImageStorage>,
    stream: &'a jobs::Stream<ImageStorage>,
) -> LocalBoxFuture<'a, (JobEnd, JobEnd)> {
    rare(async { (mirror.run().await, stream.run().await) })
}

/// The content of a disk at one moment.
pub fn frozen(
    source: Arc<ImageDisk>,
    scratch: ImageDisk,
    options: FreezeOptions,
    teller: FailureTeller,
) -> Result<(ViewStorage, LocalBoxFuture<'static, ()>)> {
    let frozen = FrozenDisk::new(source, scratch, options, teller)?;
    let writing = rare(frozen.write_behind());
    Ok((ViewStorage::new(frozen), writing))
}

/// Requests, and the commands that read or write all of an image.
pub fn tools<'a>(
    disk: &'a Arc<ImageDisk>,
    request: Request,
    (copy, compare): (&'a CopyJob<ImageStorage>, &'a CompareJob<ImageStorage>),
    (ranges, range): (&'a RangeCopy<ImageStorage>, ByteRange),
    pieces: LocalBoxStream<'a, Result<Buffer>>,
    (options, mode, progress): (StreamOptions, SpaceMode, &'a ToolProgress),
    (storage, repair): (&'a ImageStorage, Repair),
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        rare(disk.submit(request)).await?;
        rare(send_load(disk, Vec::new())).await?;
        disk.flush().await?;
        copy.work().await?;
        compare.work().await?;
        rare(ranges.copy(range)).await?;
        rare(ranges.is_copied(range)).await?;
        rare(take_space(disk, range, mode, progress)).await?;
        rare(first_status_difference(disk, disk)).await?;
        copy_stream(disk, pieces, options, progress).await?;
        disk.map_entry(range, &mut BlockStatusCache::default()).await?;
        disk.image().check_with(progress).await?;
        commit_overlay(disk, disk, AfterCommit::Keep, progress).await?;
        rare(repair_with(storage, repair, progress)).await.map(drop)
    })
}

/// Changes whose time grows with the disk.
pub fn changes(disk: &ImageDisk) -> LocalBoxFuture<'_, Result<()>> {
    rare(async move {
        let snapshots = disk.snapshots();
        snapshots.create("").await?;
        snapshots.apply("").await?;
        snapshots.delete("").await?;
        disk.close().await?;
        rare(flush_ahead(&[disk], SyncMode::Full)).await.map(drop)
    })
}
