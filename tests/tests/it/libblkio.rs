//! libblkio as a front-end, which QEMU, nbdkit and others use for vhost-user-blk. It has its own
//! memory and layout of rings, and regions that are not whole pages.

use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use blockhouse_tests::image_tool::{command, new_image, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, eventually};

const SIZE: u64 = 8 << 20;
const MEMORY: usize = 2 << 20;
/// The length of a request, and of a slot in the front-end's memory.
const LENGTH: usize = 64 << 10;
const LIMIT: Duration = Duration::from_secs(20);

/// A device with its queues and shared memory.
struct Disk {
    queues: Vec<Blkioq>,
    region: MemoryRegion,
    /// The region's file, by which the test accesses the memory without pointers.
    memory: File,
    device: Blkio,
}

impl Disk {
    fn connect(socket: &Path, queues: i32) -> Self {
        let mut device = Blkio::new("virtio-blk-vhost-user").expect("the driver is built in");
        device.set_str("path", str(socket)).expect("before it is connected");
        device.connect().expect("the server listens");
        device.set_i32("num-queues", queues).expect("before it is started");
        let queues = device.start().expect("the server takes the rings").queues;
        let region = device.alloc_mem_region(MEMORY).expect("memory");
        device.map_mem_region(&region).expect("the server takes the region");
        let memory = format!("/proc/self/fd/{}", region.fd);
        let memory = OpenOptions::new().read(true).write(true).open(memory).expect("a memfd");
        Self { queues, region, memory, device }
    }

    fn slot(&self, slot: usize) -> *mut u8 {
        (self.region.addr + slot * LENGTH) as *mut u8
    }

    fn fill(&self, slot: usize, byte: u8) {
        self.memory.write_all_at(&[byte; LENGTH], (slot * LENGTH) as u64).expect("memory");
    }

    fn is_filled(&self, slot: usize, byte: u8) -> bool {
        let mut bytes = vec![!byte; LENGTH];
        self.memory.read_exact_at(&mut bytes, (slot * LENGTH) as u64).expect("memory");
        bytes == [byte; LENGTH]
    }

    /// Waits until a queue has completed this many requests.
    fn complete(&mut self, queue: usize, count: usize) {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; 16];
        let mut limit = LIMIT;
        let done =
            self.queues[queue].do_io(&mut completions[..count], count, Some(&mut limit), None);
        assert_eq!(done.expect("in time"), count);
    }
}

fn none() -> ReqFlags {
    ReqFlags::empty()
}

#[test]
fn every_request_of_libblkio_is_served_in_several_queues() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", &SIZE.to_string());
    let socket = scratch.socket("vu");
    let server = Serve::new(&scratch, &image).option("--vhost-user-blk", &socket);
    let server = server.option("--queues", "4").start();
    let mut nbd = Client::open(&server.address());
    let mut disk = Disk::connect(&socket, 4);
    assert_eq!(disk.device.get_u64("capacity").expect("a size"), SIZE);
    assert!(!disk.device.get_bool("read-only").expect("a property"));

    // Eight requests in flight in each queue, with one buffer or several.
    for queue in 0..4 {
        for number in 0..8 {
            let byte = (queue * 8 + number + 1) as u8;
            disk.fill(number, byte);
            let (start, address) = ((queue * 8 + number) * LENGTH, disk.slot(number));
            let flags = if number % 2 == 0 { ReqFlags::FUA } else { none() };
            disk.queues[queue].write(start as u64, address, LENGTH, number, flags);
        }
        disk.complete(queue, 8);
    }
    for queue in 0..4 {
        disk.queues[queue].flush(0, none());
        disk.complete(queue, 1);
    }
    let byte_at = |nbd: &mut Client, slot: usize| {
        let read = nbd.read((slot * LENGTH) as u64, LENGTH as u64).expect("a read");
        assert!(read.iter().all(|byte| *byte == read[0]), "{slot}: torn");
        read[0]
    };
    for slot in 0..32 {
        assert_eq!(byte_at(&mut nbd, slot), slot as u8 + 1);
        let number = slot % 8;
        disk.fill(number, 0xff);
        let (queue, address) = (3 - slot % 4, disk.slot(number));
        disk.queues[queue].read((slot * LENGTH) as u64, address, LENGTH, 0, none());
        disk.complete(queue, 1);
        assert!(disk.is_filled(number, slot as u8 + 1), "{slot}");
    }
    let length = LENGTH as u64;
    disk.queues[0].write_zeroes(0, length, 0, none());
    disk.complete(0, 1);
    disk.queues[1].write_zeroes(length, length, 0, ReqFlags::NO_UNMAP);
    disk.complete(1, 1);
    disk.queues[2].discard(2 * length, length, 0, none());
    disk.complete(2, 1);
    assert_eq!([0, 1, 2, 3].map(|slot| byte_at(&mut nbd, slot)), [0, 0, 0, 4]);
    drop(nbd);
    drop(disk);
    server.stop();
    command(&["check", str(&image)]).success();
}

#[test]
fn libblkio_sees_a_longer_disk_and_a_read_only_one_and_comes_back() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let (socket, control) = (scratch.socket("vu"), scratch.socket("control"));
    let server = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let server = server.option("--control", &control).start();
    let disk = Disk::connect(&socket, 1);
    let longer = (2 * SIZE).to_string();
    command(&["ctl", str(&control), "resize", "disk.img", &longer]).success();
    let is_longer = || disk.device.get_u64("capacity").expect("a size") == 2 * SIZE;
    assert!(eventually(LIMIT, is_longer), "still {:?}", disk.device.get_u64("capacity"));
    drop(disk);
    let mut again = Disk::connect(&socket, 1);
    again.fill(0, 7);
    let address = again.slot(0);
    again.queues[0].write(SIZE, address, LENGTH, 0, none());
    again.complete(0, 1);
    drop(again);
    server.stop();
    assert_eq!(image.bytes(SIZE, LENGTH), vec![7; LENGTH]);

    let server = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let server = server.flag("--read-only").start();
    let mut device = Blkio::new("virtio-blk-vhost-user").expect("the driver is built in");
    device.set_str("path", str(&socket)).expect("before it is connected");
    device.set_bool("read-only", true).expect("before it is connected");
    device.connect().expect("the server listens");
    drop(device.start().expect("a disk to read"));
    drop(device);
    server.stop();
}
