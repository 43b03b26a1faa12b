//! The path of an aligned read, write or flush takes nothing from the allocator.

use std::pin::pin;
use std::task::{Context, Waker};

use blockhouse_core::{
    Alignment, Allocation, Buffer, ByteRange, Capabilities, Durability, Fua, FuaCost, GroupCommit,
    IoVector, Offload, ReadAfterDiscard, Request, Result, Storage, SyncMode, Unmap, WriteCache,
};
use blockhouse_disk::{Disk, Options};

/// A storage that is always done at once.
struct Immediate(Alignment);

impl Storage for Immediate {
    fn name(&self) -> &str {
        "immediate"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            write_cache: WriteCache::Volatile,
            fua_cost: FuaCost::NoFlush,
            group_commit: GroupCommit::Never,
            alignment: self.0,
            write_zeroes: Offload::Available,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        1 << 30
    }

    async fn read(&self, _offset: u64, _into: IoVector) -> Result<()> {
        Ok(())
    }

    async fn write(&self, _offset: u64, _from: IoVector, _durability: Durability) -> Result<()> {
        Ok(())
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, _size: u64) -> Result<()> {
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}

fn submit(disk: &Disk<Immediate>, request: Request) {
    let outcome = pin!(disk.submit(request)).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(outcome, std::task::Poll::Ready(Ok(()))));
}

fn one_of_each(disk: &Disk<Immediate>, buffer: &mut Buffer) {
    submit(disk, Request::Read { offset: 4096, into: buffer.lend() });
    for durability in [Durability::None, Durability::Data, Durability::Full] {
        submit(disk, Request::Write { offset: 4096, from: buffer.lend(), durability });
    }
    submit(disk, Request::Flush);
}

#[test]
fn a_warmed_up_path_allocates_nothing() {
    for alignment in [Alignment::BYTE, Alignment { offset: 4096, memory: 512 }] {
        let disk = Disk::raw(Immediate(alignment), Options::default()).unwrap();
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
