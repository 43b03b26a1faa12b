//! Block devices are driven as devices, on every engine. Needs root and a free loop device; without
//! them the tests say so and pass.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, ErrorKind, Fua, Storage, SyncMode,
};
use blockhouse_engine::{Engine, FileKind, HostFile, OpenMode, PageCache};

use crate::common::{on_every_engine, output, write};

const MIB: u64 = 1 << 20;

/// A loop device over a file of its own; both go with it.
struct LoopDevice {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl LoopDevice {
    fn new(size: u64) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = folder.path().join("backing");
        std::fs::File::create(&file).unwrap().set_len(size).unwrap();
        let losetup = output(Command::new("losetup").args(["--find", "--show"]).arg(file));
        match losetup {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap().trim_end().into();
                Some(Self { path, _folder: folder })
            }
            other => {
                eprintln!("skipped, there is no loop device to be had: {other:?}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = output(Command::new("losetup").arg("--detach").arg(&self.path));
    }
}

fn open(path: &Path, cache: PageCache) -> HostFile {
    HostFile::open(path, OpenMode::ReadWrite, cache).unwrap()
}

/// The node of a device lies on a file system in memory. That says nothing about the device.
#[test]
fn direct_io_to_a_device_keeps_to_its_blocks() {
    let Some(device) = LoopDevice::new(MIB) else { return };
    let direct = open(&device.path, PageCache::Bypassed);
    assert_eq!((direct.kind(), direct.size()), (FileKind::BlockDevice, MIB));
    let block = direct.capabilities().alignment.offset;
    assert!(block >= 512 && block.is_power_of_two(), "blocks of {block} bytes");
    let second = HostFile::open(&device.path, OpenMode::ReadWrite, PageCache::Used);
    assert_eq!(second.err().map(|error| error.kind()), Some(ErrorKind::Locked), "two writers");
    drop(direct);
    let cached = open(&device.path, PageCache::Used);
    assert_eq!(cached.capabilities().alignment.offset, 1);
}

#[test]
fn what_was_written_to_a_device_is_read_and_zeroed() {
    let Some(device) = LoopDevice::new(MIB) else { return };
    for cache in [PageCache::Used, PageCache::Bypassed] {
        on_every_engine(|event_loop| {
            let file = open(&device.path, cache);
            event_loop.block_on(async {
                let mut buffer = Buffer::new(8192);
                buffer.bytes_mut().fill(7);
                write(&file, MIB - 8192, buffer.lend(), Durability::Data).await.unwrap();
                let middle = ByteRange::between(MIB - 8192, MIB - 4096);
                file.write_zeroes(middle, blockhouse_core::Unmap::Allowed).await.unwrap();
                file.flush(SyncMode::Data).await.unwrap();
                let mut buffer = Buffer::new(8192);
                file.read(MIB - 8192, buffer.lend()).await.unwrap();
                assert_eq!(buffer.bytes()[..4096], [0; 4096]);
                assert_eq!(buffer.bytes()[4096..], [7; 4096]);
                let status = file.block_status(ByteRange::between(0, MIB)).await.unwrap();
                assert_eq!(status, (Allocation::Data, MIB), "a device does not tell its holes");
            });
        });
    }
}

/// One device for all loops, whichever thread opened it.
#[test]
fn a_device_has_native_fua_where_no_thread_waits_for_the_write() {
    let Some(device) = LoopDevice::new(MIB) else { return };
    let file = open(&device.path, PageCache::Bypassed);
    on_every_engine(|event_loop| {
        let expected = match event_loop.engine() {
            Engine::Threads => Fua::Emulated,
            Engine::IoUring | Engine::LinuxAio => Fua::Native,
        };
        let found = event_loop.block_on(async { file.capabilities().fua });
        assert_eq!(found, expected, "{}", event_loop.engine());
    });
}

/// A file system without direct I/O, in memory. Goes with its mount.
struct RamDisk(tempfile::TempDir);

impl RamDisk {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount = output(Command::new("mount").args(["-t", "ramfs", "none"]).arg(folder.path()));
        match mount {
            Ok(output) if output.status.success() => Some(Self(folder)),
            other => {
                eprintln!("skipped, ramfs cannot be mounted: {other:?}");
                None
            }
        }
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        let _ = output(Command::new("umount").arg(self.0.path()));
    }
}

#[test]
fn a_new_file_that_cannot_be_opened_is_not_left_behind() {
    let Some(disk) = RamDisk::new() else { return };
    let path = disk.0.path().join("disk");
    let error = HostFile::create(&path, MIB, PageCache::Bypassed).expect_err("no direct I/O");
    let line = error.to_string();
    assert!(line.contains("direct I/O") && line.contains("--cache writeback"), "{line}");
    assert!(!path.exists());
    drop(HostFile::create(&path, MIB, PageCache::Used).unwrap());
}
