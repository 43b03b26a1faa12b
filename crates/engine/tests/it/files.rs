//! Host files behave the same on every engine, with and without the page cache.

use std::path::Path;

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, ErrorKind, Fua, FuaCost, GroupCommit, Offload,
    ReadAfterDiscard, Storage, SyncMode, Unmap, errno,
};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use lab_tools::block_device::has_flushes_to_share;

use crate::common::memory::Memory;
use crate::common::{self, on_every_engine};

const MIB: u64 = 1 << 20;

/// A folder on a disk (not in memory, where engines take short cuts) where there is one.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs `test` on every engine and in both ways of caching, on a new file of 1 MiB each time.
fn on_every_file(test: impl AsyncFn(&HostFile)) {
    for cache in [PageCache::Used, PageCache::Bypassed] {
        on_every_engine(|event_loop| {
            let folder = folder();
            let file = HostFile::create(&folder.path().join("disk"), MIB, cache).unwrap();
            event_loop.block_on(test(&file));
        });
    }
}

async fn read(file: &HostFile, offset: u64, length: usize) -> Vec<u8> {
    let mut buffer = Buffer::new(length);
    buffer.bytes_mut().fill(0xaa);
    file.read(offset, buffer.lend()).await.unwrap();
    buffer.bytes().to_vec()
}

async fn write(file: &HostFile, offset: u64, byte: u8, length: usize, durability: Durability) {
    let mut buffer = Buffer::new(length);
    buffer.bytes_mut().fill(byte);
    common::write(file, offset, buffer.lend(), durability).await.unwrap();
}

#[test]
fn what_was_written_is_read() {
    on_every_file(async |file| {
        for (index, durability) in
            [Durability::None, Durability::Data, Durability::Full].into_iter().enumerate()
        {
            let offset = 8192 * index as u64;
            write(file, offset, index as u8 + 1, 8192, durability).await;
            assert_eq!(read(file, offset, 8192).await, vec![index as u8 + 1; 8192]);
        }
        file.flush(SyncMode::Data).await.unwrap();
        file.flush(SyncMode::Full).await.unwrap();
        assert_eq!(file.capabilities().fua, Fua::Native);
    });
}

/// The layer above flushes after such a write.
#[test]
fn a_write_that_is_not_durable_as_one_request_is_refused_and_changes_nothing() {
    for cache in [PageCache::Used, PageCache::Bypassed] {
        on_every_engine(|event_loop| {
            let folder = folder();
            let size = MIB + 100;
            let file = HostFile::create(&folder.path().join("disk"), size, cache).unwrap();
            let has_blocks = file.capabilities().alignment.offset > 1;
            event_loop.block_on(async {
                let mut buffer = Buffer::new(4096);
                buffer.bytes_mut().fill(7);
                let written = file.write(0, buffer.lend(), Durability::Full).await;
                assert_eq!(written.unwrap_err().kind(), ErrorKind::Unsupported);
                let last = file.write(MIB, buffer.lend_range(0, 100), Durability::Data).await;
                let refused = last.err().map(|error| error.kind());
                assert_eq!(refused, has_blocks.then_some(ErrorKind::Unsupported));
                assert_eq!(read(&file, 0, 4096).await, [0; 4096]);
                let expected = if has_blocks { [0; 100] } else { [7; 100] };
                assert_eq!(read(&file, MIB, 100).await, expected);
            });
        });
    }
}

#[test]
fn group_commit_is_measured_where_durable_writes_may_share_flushes() {
    let folder = folder();
    let own_disk = if has_flushes_to_share(folder.path()).unwrap() {
        FuaCost::ExtraFlush
    } else {
        FuaCost::NoFlush
    };
    let path = folder.path().join("disk");
    let direct = HostFile::create(&path, MIB, PageCache::Bypassed).unwrap();
    let cached = HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).unwrap();
    on_every_engine(|event_loop| {
        let expected = match own_disk {
            FuaCost::ExtraFlush => GroupCommit::Measured { shares_first: false },
            FuaCost::NoFlush => GroupCommit::Never,
        };
        let asked = async { [&direct, &cached].map(|file| file.capabilities()) };
        let found = event_loop.block_on(asked);
        let grouped = found.map(|capabilities| capabilities.group_commit);
        assert_eq!(
            grouped,
            [expected, GroupCommit::Measured { shares_first: true }],
            "{}",
            event_loop.engine()
        );
        let costs = found.map(|capabilities| capabilities.fua_cost);
        assert_eq!(costs, [own_disk, FuaCost::ExtraFlush], "the page cache writes and flushes");
    });
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = HostFile::create(&memory.path().join("disk"), MIB, PageCache::Bypassed).unwrap();
    on_every_engine(|event_loop| {
        let found = event_loop.block_on(async { file.capabilities() });
        let found = (found.group_commit, found.fua_cost);
        assert_eq!(found, (GroupCommit::Never, FuaCost::NoFlush), "there is nothing to flush");
    });
}

#[test]
fn a_read_past_the_end_gives_zeros() {
    on_every_file(async |file| {
        write(file, MIB - 4096, 5, 4096, Durability::None).await;
        let bytes = read(file, MIB - 4096, 12288).await;
        assert_eq!(bytes[..4096], [5; 4096]);
        assert_eq!(bytes[4096..], [0; 8192]);
    });
}

#[test]
fn the_last_partial_block_is_reached_and_the_size_stays() {
    for cache in [PageCache::Used, PageCache::Bypassed] {
        on_every_engine(|event_loop| {
            let folder = folder();
            let size = MIB + 100;
            let file = HostFile::create(&folder.path().join("disk"), size, cache).unwrap();
            let block = file.capabilities().alignment.offset;
            assert!(block == 1 || block >= 4096, "blocks of {block} share a page with the last");
            event_loop.block_on(async {
                write(&file, MIB, 7, 100, Durability::Data).await;
                assert_eq!(read(&file, MIB, 100).await, [7; 100]);
                write(&file, MIB - 4096, 8, 4096, Durability::None).await;
                assert_eq!(read(&file, MIB - 4096, 4096).await, [8; 4096]);
                file.flush(SyncMode::Data).await.unwrap();
            });
            assert_eq!(std::fs::metadata(file.name()).unwrap().len(), size);
        });
    }
}

#[test]
fn a_last_partial_block_needs_no_larger_blocks_where_it_is_only_read_or_filled() {
    on_every_engine(|event_loop| {
        let folder = folder();
        let (path, cache) = (folder.path().join("disk"), PageCache::Bypassed);
        let block = |file: &HostFile| file.capabilities().alignment.offset;
        let whole = HostFile::create(&path, MIB, cache).unwrap();
        let usual = block(&whole);
        drop(whole);
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB + 100).unwrap();
        let reader = HostFile::open(&path, OpenMode::ReadOnly, cache).unwrap();
        assert_eq!(block(&reader), usual);
        let mut writer = HostFile::open(&path, OpenMode::ReadWrite, cache).unwrap();
        assert!(usual == 1 || block(&writer) >= 4096 && writer.has_partial_block());
        writer.fill_last_block().unwrap();
        assert!(block(&writer) == usual && !writer.has_partial_block());
        assert_eq!(writer.size(), (MIB + 100).next_multiple_of(usual.into()));
        event_loop.block_on(async {
            assert_eq!(read(&reader, MIB, 100).await, [0; 100]);
            let length = (writer.size() - MIB) as usize;
            write(&writer, MIB, 7, length, Durability::None).await;
            assert_eq!(read(&writer, MIB, length).await, vec![7; length]);
        });
    });
}

#[test]
fn bytes_that_another_program_has_cut_off_are_no_zeros() {
    on_every_engine(|event_loop| {
        let folder = folder();
        let path = folder.path().join("disk");
        for cache in [PageCache::Used, PageCache::Bypassed] {
            std::fs::write(&path, vec![7; MIB as usize]).unwrap();
            let file = HostFile::open(&path, OpenMode::ReadWrite, cache).unwrap();
            let cut = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            cut.set_len(MIB / 2).unwrap();
            event_loop.block_on(async {
                for offset in [MIB / 2, MIB - 4096, MIB / 2 - 4096] {
                    let mut buffer = Buffer::new(8192);
                    let error = file.read(offset, buffer.lend()).await.unwrap_err().to_string();
                    assert!(error.contains("has been cut"), "{offset}: {error}");
                }
                assert_eq!(read(&file, 0, 8192).await, [7; 8192]);
                assert_eq!(read(&file, MIB, 4096).await, [0; 4096], "nothing was there");
                file.resize(MIB / 2).await.unwrap();
                assert_eq!(read(&file, MIB / 2, 4096).await, [0; 4096], "this process cut it");
            });
        }
    });
}

#[test]
fn zeroed_and_discarded_ranges_read_as_zeros_and_become_holes() {
    on_every_file(async |file| {
        write(file, 0, 9, 65536, Durability::None).await;
        let range = ByteRange::between(4096, 12288);
        file.write_zeroes(range, Unmap::Allowed).await.unwrap();
        file.discard(ByteRange::between(16384, 20480)).await.unwrap();
        assert_eq!(file.capabilities().read_after_discard, ReadAfterDiscard::Zeros);
        let bytes = read(file, 0, 65536).await;
        for (index, &byte) in bytes.iter().enumerate() {
            let gone = (4096..12288).contains(&index) || (16384..20480).contains(&index);
            assert_eq!(byte, if gone { 0 } else { 9 }, "at {index}");
        }
        file.flush(SyncMode::Data).await.unwrap();
        let (status, length) = file.block_status(ByteRange::between(4096, MIB)).await.unwrap();
        assert_eq!((status, length), (Allocation::Hole, 8192));
        let (status, length) = file.block_status(ByteRange::between(0, MIB)).await.unwrap();
        assert_eq!((status, length), (Allocation::Data, 4096));
        let (status, length) = file.block_status(ByteRange::between(65536, MIB)).await.unwrap();
        assert_eq!((status, length), (Allocation::Hole, MIB - 65536));
    });
}

#[test]
fn a_grown_file_reads_as_zeros() {
    on_every_file(async |file| {
        file.resize(2 * MIB).await.unwrap();
        assert_eq!(file.size(), 2 * MIB);
        assert_eq!(read(file, 2 * MIB - 8192, 8192).await, vec![0; 8192]);
    });
}

#[test]
fn a_lengthened_file_keeps_what_it_has() {
    on_every_file(async |file| {
        let last = file.size() - 4096;
        write(file, last, 7, 4096, Durability::None).await;
        file.extend_hint(MIB / 2).await;
        assert_eq!(read(file, last, 4096).await, vec![7; 4096]);
        let size = file.size();
        file.extend_hint(size + MIB).await;
        // Whether it can be done is the file system's affair.
        assert!([size, size + MIB].contains(&file.size()), "{}", file.size());
        assert_eq!(read(file, last, 4096).await, vec![7; 4096]);
        assert_eq!(
            read(file, file.size() - 4096, 4096).await,
            vec![if file.size() > size { 0 } else { 7 }; 4096]
        );
    });
}

/// Zeros where the host has the call; where it has not, a refusal that is remembered and changes
/// nothing.
#[test]
fn zeros_are_prepared_or_refused_for_good() {
    on_every_file(async |file| {
        let size = file.size();
        write(file, 0, 7, 4096, Durability::None).await;
        let range = ByteRange::between(0, size + MIB);
        match file.prepare_zeroes(range, Buffer::new(0).lend()).await {
            Ok(()) => {
                assert_eq!((file.size(), file.query_size().unwrap()), (size + MIB, size + MIB));
                file.flush(SyncMode::Full).await.unwrap();
                assert_eq!(read(file, 0, 4096).await, vec![0; 4096], "also where data was");
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert_eq!(file.capabilities().prepare_zeroes, Offload::Unavailable);
                assert_eq!((file.size(), file.query_size().unwrap()), (size, size));
                assert_eq!(read(file, 0, 4096).await, vec![7; 4096]);
                let again = file.prepare_zeroes(range, Buffer::new(0).lend()).await;
                assert_eq!(again.unwrap_err().kind(), ErrorKind::Unsupported);
            }
        }
    });
}

/// The guards of a refused or finished operation are gone with it.
#[test]
fn an_operation_gives_its_guards_back() {
    on_every_file(async |file| {
        let guard = std::sync::Arc::new(());
        let held = Buffer::new(0).lend().with_guard(std::sync::Arc::clone(&guard));
        let _ = file.prepare_zeroes(ByteRange::between(0, MIB), held).await;
        assert_eq!(std::sync::Arc::strong_count(&guard), 1);
    });
}

#[test]
fn an_operation_whose_future_is_dropped_keeps_its_memory() {
    on_every_file(async |file| {
        let mut buffer = Buffer::new(8192);
        buffer.bytes_mut().fill(3);
        {
            let mut write = std::pin::pin!(file.write(0, buffer.lend(), Durability::None));
            let started = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(write.as_mut().poll(cx).is_pending())
            });
            started.await;
        }
        while buffer.is_lent() {
            blockhouse_engine::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(read(file, 0, 8192).await, vec![3; 8192]);
    });
}

#[test]
fn more_operations_than_places_all_complete() {
    on_every_file(async |file| {
        let file: &'static HostFile = Box::leak(Box::new(reopen(file)));
        let tasks: Vec<_> = (0..5000u64)
            .map(|index| {
                blockhouse_engine::spawn(async move {
                    write(file, index % 256 * 4096, 1, 4096, Durability::None).await;
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        assert_eq!(read(file, 0, MIB as usize).await, vec![1; MIB as usize]);
    });
}

fn reopen(file: &HostFile) -> HostFile {
    HostFile::open(Path::new(file.name()), OpenMode::ReadWrite, PageCache::Used).unwrap()
}

#[test]
fn errors_name_the_file_and_the_offset_and_keep_the_errno() {
    on_every_file(async |file| {
        let path = Path::new(file.name());
        let read_only = HostFile::open(path, OpenMode::ReadOnly, PageCache::Used).unwrap();
        let mut buffer = Buffer::new(512);
        let error =
            read_only.write(1024, buffer.lend(), Durability::None).await.expect_err("read-only");
        assert_eq!(error.errno(), 9 /* EBADF */);
        let line = error.to_string();
        assert!(line.contains(file.name()) && line.contains("at offset 1024"), "{line}");
    });
}

#[test]
fn what_is_no_disk_is_refused() {
    let folder = folder();
    let open = |path: &Path| HostFile::open(path, OpenMode::ReadOnly, PageCache::Used);
    let error = open(folder.path()).expect_err("a directory");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let error = open(&folder.path().join("nothing")).expect_err("a missing file");
    assert_eq!(error.errno(), 2 /* ENOENT */);
    let error = open(Path::new("/dev/null")).expect_err("a character device");
    assert_eq!(error.errno(), errno::EINVAL);
}

#[test]
fn an_existing_file_is_not_made_again() {
    let folder = folder();
    let path = folder.path().join("disk");
    std::fs::write(&path, b"precious").unwrap();
    let error = HostFile::create(&path, MIB, PageCache::Used).expect_err("it exists");
    assert_eq!(error.errno(), 17 /* EEXIST */);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_file_that_cannot_get_its_size_is_not_left_behind() {
    let folder = folder();
    let path = folder.path().join("disk");
    let error = HostFile::create(&path, i64::MAX as u64, PageCache::Used).expect_err("too large");
    assert_eq!(error.errno(), 27 /* EFBIG */);
    assert!(!path.exists());
}

#[test]
fn what_is_written_past_the_end_makes_the_file_longer() {
    on_every_file(async |file| {
        write(file, 2 * MIB, 4, 4096, Durability::None).await;
        assert_eq!(file.size(), 2 * MIB + 4096);
        write(file, 0, 4, 4096, Durability::None).await;
        assert_eq!(file.size(), 2 * MIB + 4096);
        assert_eq!(read(file, 2 * MIB, 8192).await[..4096], [4; 4096]);
    });
}

/// Another process made the file longer since it was opened, and a read of the new part takes
/// several calls: the end that was seen at open is not the end.
#[test]
fn a_short_read_is_continued_in_a_file_that_has_grown() {
    on_every_file(async |file| {
        let mut bytes = vec![6; 2 * MIB as usize];
        bytes[MIB as usize..].fill(8);
        std::fs::write(file.name(), bytes).unwrap();
        // More segments than the kernel takes in one call (IOV_MAX).
        let memory = Memory::new(MIB as usize);
        file.read(MIB, memory.vector(512)).await.unwrap();
        assert!(memory.bytes().iter().all(|&byte| byte == 8));
        file.read(2 * MIB - 4096, memory.vector(512)).await.unwrap();
        let bytes = memory.bytes();
        assert!(bytes[..4096].iter().all(|&byte| byte == 8));
        assert!(bytes[4096..].iter().all(|&byte| byte == 0));
    });
}

/// A file system that does not zero a range and keep its space at once makes a hole and fills it:
/// tmpfs.
#[test]
fn zeros_in_memory_have_space_behind_them() {
    on_every_engine(|event_loop| {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 64 << 10]).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB).unwrap();
        event_loop.block_on(async {
            let file = HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).unwrap();
            file.write_zeroes(ByteRange::between(0, MIB), Unmap::Forbidden).await.unwrap();
        });
        let content = std::fs::read(&path).unwrap();
        assert!(content.len() == MIB as usize && content.iter().all(|byte| *byte == 0));
        let blocks = std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap());
        assert!(blocks * 512 >= MIB, "{blocks}");
    });
}
