//! Determines the kind of an open file and its requirements, once at open.
//!
//! Nothing here changes the file. If the kernel does not report a property, the safe answer is
//! used.

use std::io;
use std::os::fd::AsFd;

use blockhouse_core::{Alignment, Fua, FuaCost, IoVector, Offload, WriteCache};
use rustix::fs::{AtFlags, FileType, StatxFlags};

use crate::driver::file::{Caching, File, Medium};
use crate::driver::operation::is_fua_refusal;
use crate::driver::request_queue::RequestQueue;

/// `STATX_DIOALIGN` (Linux 6.1).
const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
/// The types of file systems that live in memory (`statfs(2)`).
const TMPFS_MAGIC: u32 = 0x0102_1994;
const RAMFS_MAGIC: u32 = 0x8584_58f6;

/// The alignment that satisfies every device with blocks of up to a page.
const SAFE_ALIGNMENT: u32 = 4096;

/// The kind of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A file of a file system.
    Regular,
    /// A block device.
    BlockDevice,
}

/// The kind of an open file; `None` if it is neither a regular file nor a block device.
pub(crate) fn kind(file: &File) -> io::Result<Option<FileKind>> {
    let status = rustix::fs::fstat(file)?;
    Ok(match FileType::from_raw_mode(status.st_mode) {
        FileType::RegularFile => Some(FileKind::Regular),
        FileType::BlockDevice => Some(FileKind::BlockDevice),
        _ => None,
    })
}

/// The size in bytes, of files and block devices alike.
pub(crate) fn size(file: &impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// The location of the bytes. The node of a block device is mostly in a file system in memory,
/// which does not matter for its bytes.
pub(crate) fn medium(descriptor: &impl AsFd) -> Medium {
    let regular = rustix::fs::fstat(descriptor)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile);
    match rustix::fs::fstatfs(descriptor) {
        _ if !regular => Medium::Device,
        Ok(status) if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(status.f_type as u32)) => {
            Medium::Memory
        }
        _ => Medium::FileSystem,
    }
}

/// The alignment that direct I/O on the file requires.
///
/// # Errors
/// When the file cannot do direct I/O at all.
pub(crate) fn alignment(file: &File, kind: FileKind) -> io::Result<Alignment> {
    if file.caching == Caching::PageCache || file.medium == Medium::Memory {
        return Ok(Alignment::BYTE);
    }
    if kind == FileKind::BlockDevice {
        let block = rustix::fs::ioctl_blksszget(file)?;
        return Ok(Alignment { offset: block, memory: block });
    }
    let status = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, DIOALIGN);
    match status {
        Ok(status) if status.stx_mask & DIOALIGN.bits() != 0 => {
            let (offset, memory) = (status.stx_dio_offset_align, status.stx_dio_mem_align);
            if offset == 0 {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            Ok(Alignment { offset, memory: memory.max(1) })
        }
        _ => Ok(Alignment { offset: SAFE_ALIGNMENT, memory: SAFE_ALIGNMENT }),
    }
}

/// The alignment that zero writes and discards require: a device's sector, also through the page
/// cache. File systems accept any range.
pub(crate) fn offload_block(file: &File, kind: FileKind) -> io::Result<u32> {
    match kind {
        FileKind::BlockDevice => Ok(rustix::fs::ioctl_blksszget(file)?),
        FileKind::Regular => Ok(1),
    }
}

/// Whether the kernel supports `RWF_DSYNC` for this file. A read may have the flag, without effect,
/// so this can be tested without writing.
pub(crate) fn fua(file: &File, vector: &IoVector) -> Fua {
    let segments = vector.segments();
    // SAFETY: the segments belong to `vector`, which is borrowed for the time of the call.
    let result = unsafe {
        let (first, count) = (segments.as_ptr().cast(), segments.len() as i32);
        libc::preadv2(file.raw(), first, count, 0, libc::RWF_DSYNC)
    };
    let code = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    if result < 0 && is_fua_refusal(code) { Fua::Emulated } else { Fua::Native }
}

/// The properties of the block device that the file is or is on.
pub(crate) struct Device {
    pub(crate) fua_cost: FuaCost,
    pub(crate) write_cache: WriteCache,
    pub(crate) write_zeroes: Offload,
    pub(crate) prepare_zeroes: Offload,
    pub(crate) discard: Offload,
}

/// Whether the device can write zeros without being sent them (`FALLOC_FL_WRITE_ZEROES`). The queue
/// of an older kernel lacks this attribute, and the kernel has no such call. If sysfs describes no
/// queue, as for a network file system, the first use shows whether it works.
fn prepare_zeroes(queue: &RequestQueue) -> Offload {
    match queue.attribute("write_zeroes_unmap_max_bytes") {
        Some(limit) if limit != "0" => Offload::Available,
        None if queue.attribute("write_cache").is_none() => Offload::Available,
        _ => Offload::Unavailable,
    }
}

/// Queries the block device that the file is or is on. A file system without one is assumed to
/// support zeros and holes.
///
/// Only direct writes to a device without a write cache are stable when they complete: the page
/// cache is volatile, and so is a file system's metadata, on any device.
pub(crate) fn device(file: &File, kind: FileKind) -> io::Result<Device> {
    let queue = RequestQueue::of_file(&rustix::fs::fstat(file)?);
    let has_no_cache = queue.has_no_cache();
    let is_plain_device = kind == FileKind::BlockDevice && file.caching == Caching::Direct;
    let write_through = is_plain_device && has_no_cache;
    let offload = |name| match (kind, queue.attribute(name)) {
        (FileKind::BlockDevice, Some(limit)) if limit == "0" => Offload::Unavailable,
        _ => Offload::Available,
    };
    Ok(Device {
        fua_cost: if has_no_cache || queue.has_fua() {
            FuaCost::NoFlush
        } else {
            FuaCost::ExtraFlush
        },
        write_cache: if write_through { WriteCache::None } else { WriteCache::Volatile },
        write_zeroes: offload("write_zeroes_max_bytes"),
        prepare_zeroes: prepare_zeroes(&queue),
        discard: offload("discard_max_bytes"),
    })
}
