//! One disk, many threads: a flush that returns has covered everything its thread wrote before,
//! blocks that threads share lose no thread's bytes, and writebacks of qcow2 tables that they share
//! serve all of them.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use blockhouse_core::{Buffer, Durability, Request};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::SimDisk;

use crate::storages::Memory;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

const THREADS: usize = 4;
const ROUNDS: usize = 2_000;
/// Each thread has a part of every block of 512 bytes.
const PART: usize = 512 / THREADS;
const BLOCKS: usize = 8;

/// Writes and flushes on all threads; `stable` must have each round's bytes when its flush returns.
fn contend(block: u32) -> (u64, u64) {
    let memory = Memory::new(vec![0; 512 * BLOCKS], block);
    let disk = Disk::raw(SimDisk::wrapping(memory.clone()), Options::default()).unwrap();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (disk, memory) = (&disk, &memory);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let offset = round % BLOCKS * 512 + number * PART;
                    let mut buffer = Buffer::new(PART);
                    buffer.bytes_mut().fill(round as u8);
                    let (from, durability) = (buffer.lend(), Durability::None);
                    let write = Request::Write { offset: offset as u64, from, durability };
                    block_on(disk.submit(write)).unwrap();
                    block_on(disk.submit(Request::Flush)).unwrap();
                    let stable = memory.stable()[offset..offset + PART].to_vec();
                    assert_eq!(stable, [round as u8; PART], "round {round} of thread {number}");
                }
            });
        }
    });
    let asked = (THREADS * ROUNDS) as u64;
    (asked, memory.flushes())
}

#[test]
fn a_flush_covers_what_its_thread_wrote() {
    let (asked, issued) = contend(1);
    assert!(issued <= asked);
}

#[test]
fn threads_share_blocks_without_losing_bytes() {
    let (asked, issued) = contend(512);
    assert!(issued <= asked);
}

/// Each thread writes clusters of its own durably, and reads them in what would be left of the
/// image.
#[test]
fn threads_share_rounds_of_tables() {
    const CLUSTER: u64 = 4096;
    const EACH: u64 = 200;
    let memory = Memory::new(Vec::new(), 1);
    let disk = block_on(async {
        let size = THREADS as u64 * EACH * CLUSTER;
        let image = CreateOptions { cluster_size: CLUSTER, ..CreateOptions::new(size) };
        qcow2::create(&memory, &image).await.unwrap();
        let storage = SimDisk::wrapping(memory.clone());
        Disk::open(storage, ImageFormat::Qcow2, Options::default()).await.unwrap()
    });
    thread::scope(|scope| {
        for number in 0..THREADS as u64 {
            let (disk, memory) = (&disk, &memory);
            scope.spawn(move || {
                for round in 0..EACH {
                    let offset = (round * THREADS as u64 + number) * CLUSTER;
                    let from = bytes(round as u8 | 1).lend();
                    let durability = Durability::Data;
                    block_on(disk.submit(Request::Write { offset, from, durability })).unwrap();
                    if round.is_multiple_of(20) {
                        assert_eq!(left_at(memory, offset), [round as u8 | 1; 512]);
                    }
                }
            });
        }
    });
    let writes = THREADS as u64 * EACH;
    let flushes = memory.flushes();
    assert!(flushes <= 2 * writes + 4, "two for a round at most: {flushes} for {writes} writes");
}

fn bytes(byte: u8) -> Buffer {
    let mut buffer = Buffer::new(512);
    buffer.bytes_mut().fill(byte);
    buffer
}

/// 512 bytes at `offset` of the disk, from what is stable of its image.
fn left_at(memory: &Memory, offset: u64) -> Vec<u8> {
    let left = SimDisk::wrapping(Memory::new(memory.stable(), 1));
    let disk = block_on(Disk::open(left, ImageFormat::Qcow2, Options::default())).unwrap();
    let mut buffer = Buffer::new(512);
    block_on(disk.submit(Request::Read { offset, into: buffer.lend() })).unwrap();
    buffer.bytes().to_vec()
}
