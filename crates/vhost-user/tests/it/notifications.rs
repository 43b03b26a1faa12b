//! When the driver is notified of what was done.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use async_lock::Semaphore;
use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, Storage, SyncMode, Unmap,
};
use blockhouse_disk::{Access, Disk, Options as DiskOptions};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_vhost_user::driver::{DescriptorSpec, DriverQueue, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;
use blockhouse_vhost_user::{Device, Export, RegisteredMemory, Server};

use crate::common::{GET_ID, IN, LONG, Loops, OK, SIZE};

/// A storage whose reads wait for permission.
struct Held {
    file: HostFile,
    permits: Arc<Semaphore>,
}

impl Storage for Held {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.file.capabilities()
    }

    fn size(&self) -> u64 {
        self.file.size()
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        self.permits.acquire().await.forget();
        self.file.read(offset, into).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        self.file.write(offset, from, durability).await
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.file.write_zeroes(range, unmap).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.file.discard(range).await
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        self.file.flush(sync).await
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.file.resize(size).await
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.file.block_status(range).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.file.prefetch(range).await
    }
}

/// Puts a request with data of 20 bytes, or a sector, into the guest's memory. Gives its status'
/// place.
fn put(driver: &mut TestDriver, number: usize, kind: u32, length: u32) -> usize {
    let base = driver.requests() + number * 4096;
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    driver.memory.write(base, &header);
    let buffers = [
        DescriptorSpec::at(base, 16, 0),
        DescriptorSpec::at(base + 512, length, WRITE),
        DescriptorSpec::at(base + 16, 1, WRITE),
    ];
    let head = 3 * number as u16;
    driver.queues[0].chain(head, &buffers);
    driver.queues[0].add_available(head);
    base + 16
}

/// Sleeps until notified of a request that is done. The queue's start notifies as well.
fn told(queue: &mut DriverQueue) -> u16 {
    loop {
        assert!(queue.sleep(LONG), "the driver asked to be told");
        if let Some((head, _)) = queue.next_used() {
            return head;
        }
    }
}

#[test]
fn what_is_done_is_told_while_others_wait() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
    let file = HostFile::open(&image, OpenMode::ReadWrite, PageCache::Used).unwrap();
    let permits = Arc::new(Semaphore::new(0));
    let held = Held { file, permits: Arc::clone(&permits) };
    let disk = Arc::new(Disk::raw(held, DiskOptions::default()).unwrap());
    let loops = Loops::start(1);
    let (name, handles) = ("held".into(), loops.handles.clone());
    let (memory, access) = (RegisteredMemory::Off, Access::ReadWrite);
    let export = Export { disk, name, queues: 1, loops: handles, memory, access };
    let socket = folder.path().join("vu.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = Server::start(Device::new(export), OwnedFd::from(listener)).unwrap();
    let mut driver = TestDriver::connect(&socket, Options::default()).unwrap();

    // The loop falls asleep. Awake it would find the requests before the kick, which would then
    // have it look once more.
    std::thread::sleep(Duration::from_millis(100));
    let first = put(&mut driver, 0, GET_ID, 20);
    let second = put(&mut driver, 1, IN, 512);
    let queue = &mut driver.queues[0];
    assert!(!queue.arm());
    queue.publish();
    assert_eq!(told(queue), 0);
    assert!(queue.next_used().is_none(), "the second has no permission yet");
    assert!(!queue.arm());
    permits.add_permits(1);
    assert_eq!(told(queue), 3);
    let mut status = [0; 1];
    for place in [first, second] {
        driver.memory.read(place, &mut status);
        assert_eq!(status, [OK]);
    }
    drop(driver);
    server.stop();
}
