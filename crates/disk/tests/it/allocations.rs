//! The path of an aligned read, write or flush takes nothing from the allocator.

use std::pin::pin;
use std::task::{Context, Waker};

use blockhouse_core::{Alignment, Buffer, Durability, Request};
use blockhouse_disk::{Disk, Options};

use crate::storages::{AnyStorage, Immediate};

fn submit(disk: &Disk<AnyStorage>, request: Request) {
    let outcome = pin!(disk.submit(request)).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(outcome, std::task::Poll::Ready(Ok(()))));
}

fn one_of_each(disk: &Disk<AnyStorage>, buffer: &mut Buffer) {
    submit(disk, Request::Read { offset: 4096, into: buffer.lend() });
    for durability in [Durability::None, Durability::Data, Durability::Full] {
        submit(disk, Request::Write { offset: 4096, from: buffer.lend(), durability });
    }
    submit(disk, Request::Flush);
}

#[test]
fn a_warmed_up_path_allocates_nothing() {
    for alignment in [Alignment::BYTE, Alignment { offset: 4096, memory: 512 }] {
        let disk =
            Disk::raw(AnyStorage::Immediate(Immediate(alignment)), Options::default()).unwrap();
        let mut buffer = Buffer::new(4096);
        one_of_each(&disk, &mut buffer);
        let allocated = allocation_counter::measure(|| {
            for _ in 0..100 {
                one_of_each(&disk, &mut buffer);
            }
        });
        assert_eq!(allocated.count_total, 0, "{alignment:?}");
    }
}
