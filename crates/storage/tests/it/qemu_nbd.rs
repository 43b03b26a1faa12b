//! Bytes that are written through the client are in the server's file, also over a server that is
//! started again.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, KernelPages, Offload, PageUse, Storage, SyncMode,
    Unmap, errno, yield_now,
};
use blockhouse_engine::{
    EngineChoice, EventLoop, FaultDomain, GuestMemory, GuestRange, GuestRegion, SharedMemory,
};
use blockhouse_storage::NbdStorage;
use fastrand::Rng;
use futures_util::future::{join, join_all, select};

use crate::server::{QemuNbd, has_qemu_nbd, uri};

/// The disk, in bytes: no multiple of a block of 4096.
const SIZE: usize = (1 << 20) + 512;
/// Parts that are changed at the same time.
const PARTS: usize = 8;
const PART: usize = SIZE / PARTS / 512 * 512;

/// The work of flushes.
enum Flushes<'a> {
    Succeed,
    /// They may fail, because a server was killed that had answered more than was flushed; if one
    /// does, all do.
    FailAfterLoss(&'a Cell<bool>),
}

impl Flushes<'_> {
    async fn flush(&self, disk: &NbdStorage) {
        let flushed = disk.flush(SyncMode::Data).await;
        match (self, flushed) {
            (Self::Succeed, flushed) => flushed.unwrap(),
            (Self::FailAfterLoss(has_failed), Ok(())) => assert!(!has_failed.get()),
            (Self::FailAfterLoss(has_failed), Err(error)) => {
                assert!(error.to_string().contains("not flushed"), "{error}");
                has_failed.set(true);
            }
        }
    }
}

/// One change of a part, and a look at it.
async fn change(
    disk: &NbdStorage,
    flushes: &Flushes<'_>,
    rng: &mut Rng,
    at: usize,
    model: &mut [u8],
) {
    let start = rng.usize(..model.len());
    let length = rng.usize(1..=model.len() - start);
    let range = start..start + length;
    let (offset, bytes) = ((at + start) as u64, &mut model[range]);
    let host = ByteRange::new(offset, length as u64).expect("it is short");
    match rng.u8(..10) {
        0 => {
            disk.write_zeroes(host, Unmap::Allowed).await.unwrap();
            bytes.fill(0);
        }
        1 => {
            disk.write_zeroes(host, Unmap::Forbidden).await.unwrap();
            bytes.fill(0);
        }
        2 => flushes.flush(disk).await,
        3..=5 => {
            let mut buffer = Buffer::new(length);
            disk.read(offset, buffer.lend()).await.unwrap();
            assert!(!buffer.is_lent());
            assert_eq!(buffer.bytes(), bytes);
        }
        6 => {
            let (allocation, told) = disk.block_status(host).await.unwrap();
            assert!((1..=length as u64).contains(&told));
            if allocation == Allocation::Hole {
                assert!(bytes[..told as usize].iter().all(|&byte| byte == 0));
            }
        }
        which => {
            let mut buffer = Buffer::new(length);
            buffer.bytes_mut().fill(rng.u8(..));
            bytes.copy_from_slice(buffer.bytes());
            let durability = if which == 7 { Durability::Data } else { Durability::None };
            disk.write(offset, buffer.lend(), durability).await.unwrap();
            assert!(!buffer.is_lent());
        }
    }
}

async fn change_parts(
    disk: &NbdStorage,
    flushes: &Flushes<'_>,
    rng: &mut Rng,
    rounds: usize,
) -> Vec<u8> {
    let part = |index: usize| {
        let mut rng = rng.fork();
        async move {
            let mut model = vec![0; PART];
            for _ in 0..rounds {
                change(disk, flushes, &mut rng, index * PART, &mut model).await;
            }
            model
        }
    };
    let parts: Vec<_> = (0..PARTS).map(part).collect();
    join_all(parts).await.concat()
}

fn empty_image(path: &Path) {
    std::fs::File::create(path).unwrap().set_len(SIZE as u64).unwrap();
}

#[test]
fn the_file_holds_what_was_written() {
    if !has_qemu_nbd() {
        return;
    }
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    for choice in [EngineChoice::Auto, EngineChoice::Only(blockhouse_engine::Engine::Threads)] {
        let folder = tempfile::tempdir().unwrap();
        let (image, socket) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
        empty_image(&image);
        let server = QemuNbd::start(&image, &socket);
        let model = EventLoop::new(choice).unwrap().block_on(async {
            let disk = NbdStorage::connect(uri(&socket), Duration::ZERO).await.unwrap();
            assert_eq!((disk.size(), disk.is_read_only()), (SIZE as u64, false));
            assert_eq!(disk.capabilities().discard, Offload::Available);
            let model = change_parts(&disk, &Flushes::Succeed, &mut rng, 60).await;
            let mut past = Buffer::new(1024);
            past.bytes_mut().fill(7);
            disk.read(SIZE as u64 - 512, past.lend()).await.unwrap();
            assert_eq!(past.bytes(), [0; 1024], "past the end are zeros");
            let past = disk.write(SIZE as u64 - 512, past.lend(), Durability::None).await;
            assert_eq!(past.unwrap_err().errno(), blockhouse_core::errno::ENOSPC);
            disk.flush(SyncMode::Data).await.unwrap();
            model
        });
        drop(server);
        assert_eq!(std::fs::read(&image).unwrap()[..model.len()], model);
    }
}

/// The kernel's pages may vanish before a write's bytes are copied from them.
#[test]
fn a_write_whose_bytes_are_lost_fails_alone() {
    if !has_qemu_nbd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
    empty_image(&image);
    let server = QemuNbd::start(&image, &socket);
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), Duration::ZERO).await.unwrap();
        let pages = Arc::new(KernelPages::new(None, |_| false));
        let mut buffer = Buffer::new(512);
        let vector = buffer.lend().in_pages(&pages, PageUse::Stored);
        let error = disk.write(0, vector, Durability::None).await.expect_err("no byte is there");
        assert_eq!(error.errno(), errno::EFAULT, "{error}");
        buffer.bytes_mut().fill(7);
        disk.write(512, buffer.lend(), Durability::None).await.unwrap();
    });
    drop(server);
    assert_eq!(std::fs::read(&image).unwrap()[..1024], [[0; 512], [7; 512]].concat());
}

/// The file of a guest's memory is cut off.
#[test]
fn requests_with_memory_that_vanishes_fail_alone() {
    if !has_qemu_nbd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
    empty_image(&image);
    let _server = QemuNbd::start(&image, &socket);
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), Duration::ZERO).await.unwrap();
        for is_write in [false, true] {
            let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 1 << 20).unwrap();
            let memory = SharedMemory::map(
                file.try_clone().unwrap(),
                0,
                1 << 20,
                &FaultDomain::unconnected(),
            );
            let memory = Arc::new(memory.unwrap());
            let mut guest = GuestMemory::new();
            assert!(guest.add(GuestRegion { guest: 0, user_addr: 0, memory }));
            let vector = Arc::new(guest).vector(&[GuestRange { address: 0, length: 1 << 20 }]);
            rustix::fs::ftruncate(&file, 512 << 10).unwrap();
            let mut buffer = Buffer::new(512);
            buffer.bytes_mut().fill(7);
            let vector = vector.unwrap();
            let (lost, other) = if is_write {
                let lost = disk.write(512, vector, Durability::None);
                join(lost, disk.write(0, buffer.lend(), Durability::None)).await
            } else {
                join(disk.read(512, vector), disk.read(0, buffer.lend())).await
            };
            let error = lost.expect_err("half of the memory is gone");
            assert_eq!(error.errno(), errno::EFAULT, "{error}");
            other.unwrap();
        }
        let mut buffer = Buffer::new(512);
        disk.read(0, buffer.lend()).await.unwrap();
        assert_eq!(buffer.bytes(), [7; 512]);
    });
}

#[test]
fn requests_wait_for_a_server_that_comes_back() {
    if !has_qemu_nbd() {
        return;
    }
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
    empty_image(&image);
    let mut server = Some(QemuNbd::start(&image, &socket));
    let model = EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), Duration::from_secs(60)).await.unwrap();
        let (has_failed, mut rng) = (Cell::new(false), rng.fork());
        let flushes = Flushes::FailAfterLoss(&has_failed);
        let changes = std::pin::pin!(change_parts(&disk, &flushes, &mut rng, 100));
        let kills = async {
            for _ in 0..3 {
                for _ in 0..40 {
                    yield_now().await;
                }
                drop(server.take());
                server = Some(QemuNbd::start(&image, &socket));
                blockhouse_engine::sleep(Duration::from_millis(300)).await;
            }
        };
        let kills = std::pin::pin!(kills);
        match select(changes, kills).await {
            futures_util::future::Either::Left((model, _)) => model,
            futures_util::future::Either::Right(((), changes)) => changes.await,
        }
    });
    drop(server);
    assert_eq!(std::fs::read(&image).unwrap()[..model.len()], model);
}

#[test]
fn without_a_server_requests_fail() {
    if !has_qemu_nbd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
    empty_image(&image);
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let refused = NbdStorage::connect(uri(&socket), Duration::ZERO).await;
        let line = refused.err().expect("nobody listens").to_string();
        assert!(line.contains("nbd.sock") && line.contains("cannot connect"), "{line}");
        let server = QemuNbd::start(&image, &socket);
        let mut other = uri(&socket);
        other.export.export = "other".into();
        let line = NbdStorage::connect(other, Duration::ZERO).await.err().unwrap().to_string();
        assert!(line.contains("no export named \"other\""), "{line}");
        let disk = NbdStorage::connect(uri(&socket), Duration::from_millis(1)).await.unwrap();
        let mut buffer = Buffer::new(512);
        disk.read(0, buffer.lend()).await.unwrap();
        drop(server);
        for _ in 0..2 {
            let error = disk.read(0, buffer.lend()).await.unwrap_err();
            assert!(error.to_string().contains("nbd+unix"), "{error}");
        }
        let server = QemuNbd::start(&image, &socket);
        while disk.read(0, buffer.lend()).await.is_err() {
            blockhouse_engine::sleep(Duration::from_millis(20)).await;
        }
        drop(server);
    });
}
