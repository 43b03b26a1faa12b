//! The path of an aligned read, write or flush takes nothing from the allocator.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use blockhouse_core::{Alignment, Buffer, Durability, Request};
use blockhouse_disk::{Disk, Options};
use blockhouse_sim::SimDisk;

use crate::storages::Immediate;

fn submit(disk: &Disk<SimDisk>, request: Request) {
    let outcome = pin!(disk.submit(request)).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(outcome, std::task::Poll::Ready(Ok(()))));
}

fn one_of_each(disk: &Disk<SimDisk>, buffer: &mut Buffer) {
    submit(disk, Request::Read { offset: 4096, into: buffer.lend() });
    for durability in [Durability::None, Durability::Data, Durability::Full] {
        submit(disk, Request::Write { offset: 4096, from: buffer.lend(), durability });
    }
    submit(disk, Request::Flush);
}

#[test]
fn a_warmed_up_path_allocates_nothing() {
    for alignment in [Alignment::BYTE, Alignment { offset: 4096, memory: 512 }] {
        let storage = Immediate::new(alignment);
        let calls = storage.calls();
        let disk = Disk::raw(SimDisk::wrapping(storage), Options::default()).unwrap();
        let mut buffer = Buffer::new(4096);
        one_of_each(&disk, &mut buffer);
        let before = calls.load(Ordering::Relaxed);
        let allocated = allocation_counter::measure(|| {
            for _ in 0..100 {
                one_of_each(&disk, &mut buffer);
            }
        });
        // The future of each call of a wrapped storage is boxed.
        let boxed = calls.load(Ordering::Relaxed) - before;
        assert_eq!(allocated.count_total, boxed, "{alignment:?}");
    }
}
