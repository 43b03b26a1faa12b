//! Files in a ring's own table: that requests go through the slot, and that slots come and go while
//! others are in use. Skipped where there is no io_uring, or one without such tables.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Storage, SyncMode};
use blockhouse_engine::{
    Engine, EngineChoice, EventLoop, FixedFiles, HostFile, OpenMode, PageCache,
    count_registered_files, is_byte_locked, lock_byte_shared, probe_fixed_file, sleep, spawn,
};
use tempfile::TempDir;

use crate::common::{in_time, no_program_starts};

const BLOCK: usize = 4096;
/// How many slots a ring has.
const SLOTS: usize = 256;

fn new_loop(fixed: FixedFiles) -> Option<EventLoop> {
    match EventLoop::new(EngineChoice::Only(Engine::IoUring)) {
        Ok(mut event_loop) => {
            event_loop.set_fixed_files(fixed);
            Some(event_loop)
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Not on tmpfs, whose files are served without the ring.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file of one block, full of `mark`.
fn marked(folder: &Path, name: &str, mark: u8) -> HostFile {
    let path = folder.join(name);
    std::fs::write(&path, [mark; BLOCK]).unwrap();
    HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).unwrap()
}

async fn read_mark(file: &HostFile) -> u8 {
    let mut buffer = Buffer::new(BLOCK);
    file.read(0, buffer.lend()).await.unwrap();
    let bytes = buffer.bytes();
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a block of another file, in part");
    bytes[0]
}

/// The number of slots of this process's rings that have files in `folder`.
fn slots_below(folder: &Path) -> usize {
    let folder = folder.canonicalize().unwrap();
    count_registered_files(Path::new("/proc/self"), &folder).unwrap()
}

/// Makes the number of `file`'s descriptor one for `other`, behind the engine's back.
fn change_descriptor(file: &HostFile, other: BorrowedFd<'_>) {
    // SAFETY: both descriptors are open, and the number stays that of an open descriptor, which the
    // file goes on to own.
    let number = unsafe { libc::dup2(other.as_raw_fd(), file.descriptor().as_raw_fd()) };
    assert_eq!(number, file.descriptor().as_raw_fd());
}

/// The marks that are read and written by a file whose descriptor means another file meanwhile.
fn marks_after_change(fixed: FixedFiles) -> Option<(u8, [u8; 2])> {
    let mut event_loop = new_loop(fixed)?;
    let folder = folder();
    let (first, second) = (marked(folder.path(), "1", 1), marked(folder.path(), "2", 2));
    let read = event_loop.block_on(async {
        assert_eq!(read_mark(&first).await, 1);
        change_descriptor(&first, second.descriptor());
        let read = read_mark(&first).await;
        let mut buffer = Buffer::new(BLOCK);
        buffer.bytes_mut().fill(9);
        first.write(0, buffer.lend(), Durability::Data).await.unwrap();
        first.flush(SyncMode::Full).await.unwrap();
        read
    });
    let byte = |name| std::fs::read(folder.path().join(name)).unwrap()[0];
    Some((read, [byte("1"), byte("2")]))
}

#[test]
fn requests_go_through_the_slot_and_not_the_descriptor() {
    let Some(outcome) = marks_after_change(FixedFiles::On) else { return };
    assert_eq!(outcome, (1, [9, 2]), "the slot still is the first file");
}

#[test]
fn without_slots_requests_go_by_the_descriptor() {
    let Some(outcome) = marks_after_change(FixedFiles::Off) else { return };
    assert_eq!(outcome, (2, [1, 9]), "the descriptor is the second file");
}

#[test]
fn a_loop_can_be_asked_what_its_requests_name() {
    let folder = folder();
    let path = folder.path().join("disk");
    drop(marked(folder.path(), "disk", 1));
    for fixed in [FixedFiles::On, FixedFiles::Off, FixedFiles::On] {
        let Some(mut event_loop) = new_loop(fixed) else { return };
        let answer = event_loop.block_on(probe_fixed_file(&path, PageCache::Used)).unwrap();
        assert_eq!(answer, fixed);
    }
    let mut without_ring = EventLoop::new(EngineChoice::Only(Engine::Threads)).unwrap();
    without_ring.set_fixed_files(FixedFiles::On);
    let answer = without_ring.block_on(probe_fixed_file(&path, PageCache::Used)).unwrap();
    assert_eq!(answer, FixedFiles::Off, "there is no table to have a slot in");
    assert_eq!(slots_below(folder.path()), 0);
    assert_eq!(std::fs::read(&path).unwrap(), [1; BLOCK]);
}

#[test]
fn what_requests_name_cannot_be_told_by_zeros() {
    let folder = folder();
    drop(marked(folder.path(), "disk", 0));
    let Some(mut event_loop) = new_loop(FixedFiles::On) else { return };
    let path = folder.path().join("disk");
    let error = event_loop.block_on(probe_fixed_file(&path, PageCache::Used)).unwrap_err();
    assert!(error.to_string().contains("zeros"), "{error}");
}

#[test]
fn a_closed_file_gives_its_slot_and_its_locks_back() {
    let Some(mut event_loop) = new_loop(FixedFiles::On) else { return };
    let folder = folder();
    let path = folder.path().join("disk");
    let _alone = no_program_starts();
    event_loop.block_on(async {
        let other = marked(folder.path(), "other", 2);
        for round in 0..3 * SLOTS {
            let file = marked(folder.path(), "disk", 1);
            lock_byte_shared(file.descriptor(), 100).unwrap();
            assert_eq!(read_mark(&file).await, 1);
            drop(file);
            if round % SLOTS == 0 {
                let again = HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).unwrap();
                assert!(!is_byte_locked(again.descriptor(), 100).unwrap(), "round {round}");
                drop(again);
            }
            assert_eq!(read_mark(&other).await, 2);
        }
        sleep(Duration::from_millis(1)).await;
        assert_eq!(slots_below(folder.path()), 1, "that of the other file");
    });
    drop(event_loop);
    assert_eq!(slots_below(folder.path()), 0);
}

/// Some files are closed and others opened in their place all the time, while one is read without a
/// pause; each reads as itself.
#[test]
fn slots_are_replaced_under_load_on_others() {
    in_time(|| {
        let Some(mut event_loop) = new_loop(FixedFiles::On) else { return };
        let folder = folder();
        event_loop.block_on(async {
            let steady = Rc::new(marked(folder.path(), "steady", 255));
            let load: Vec<_> = (0..32)
                .map(|_| {
                    let steady = Rc::clone(&steady);
                    spawn(async move {
                        for _ in 0..500 {
                            assert_eq!(read_mark(&steady).await, 255);
                        }
                    })
                })
                .collect();
            let mut open: Vec<Option<HostFile>> = (0..8).map(|_| None).collect();
            for round in 0..400_usize {
                let mark = (round % 250) as u8;
                let file = marked(folder.path(), &mark.to_string(), mark);
                // Given up in the middle: the slot stays until the kernel is done.
                let mut given_up = Box::pin(file.read(0, Buffer::new(BLOCK).lend()));
                let _ = futures_util::poll!(given_up.as_mut());
                drop(given_up);
                if round % 3 != 0 {
                    assert_eq!(read_mark(&file).await, mark);
                }
                open[round % 8] = Some(file);
            }
            for task in load {
                task.await;
            }
            sleep(Duration::from_millis(1)).await;
            let held = slots_below(folder.path());
            assert!((1..=9).contains(&held), "{held} slots for 9 files");
        });
    });
}

#[test]
fn files_that_find_no_slot_go_by_their_descriptor_until_one_is_free() {
    let Some(mut event_loop) = new_loop(FixedFiles::On) else { return };
    let folder = folder();
    event_loop.block_on(async {
        let make = |index: usize| marked(folder.path(), &index.to_string(), index as u8);
        let mut files: Vec<_> = (0..SLOTS + 44).map(make).collect();
        for (index, file) in files.iter().enumerate() {
            assert_eq!(read_mark(file).await, index as u8);
        }
        match slots_below(folder.path()) {
            0 => return eprintln!("skipped: this kernel has no such tables, or does not tell"),
            used => assert_eq!(used, SLOTS),
        }
        let rest = files.split_off(SLOTS);
        drop(files.split_off(SLOTS - 10));
        sleep(Duration::from_millis(1)).await;
        assert_eq!(slots_below(folder.path()), SLOTS - 10);
        for (index, file) in rest.iter().enumerate() {
            assert_eq!(read_mark(file).await, (SLOTS + index) as u8);
        }
        assert_eq!(slots_below(folder.path()), SLOTS, "ten that had none have one now");
    });
}

/// The file is dropped on one of the threads, or on one that has no loop, while loops sleep.
#[test]
fn a_file_of_many_loops_leaves_all_of_them() {
    in_time(|| {
        if new_loop(FixedFiles::On).is_none() {
            return;
        }
        const LOOPS: usize = 5;
        let folder = folder();
        for round in 0..10_usize {
            let file = Arc::new(marked(folder.path(), "shared", 7));
            let [used, dropped, seen] = [(); 3].map(|()| Arc::new(Barrier::new(LOOPS + 1)));
            std::thread::scope(|scope| {
                for _ in 0..LOOPS {
                    let (used, dropped, seen) = (used.clone(), dropped.clone(), seen.clone());
                    let file = Arc::clone(&file);
                    scope.spawn(move || {
                        let mut event_loop = new_loop(FixedFiles::On).unwrap();
                        event_loop.block_on(async {
                            for _ in 0..20 {
                                assert_eq!(read_mark(&file).await, 7);
                            }
                        });
                        used.wait();
                        drop(file);
                        dropped.wait();
                        event_loop.block_on(sleep(Duration::from_millis(2)));
                        seen.wait();
                        seen.wait();
                    });
                }
                used.wait();
                if round.is_multiple_of(2) {
                    assert_eq!(slots_below(folder.path()), LOOPS);
                }
                drop(file);
                dropped.wait();
                seen.wait();
                let left = slots_below(folder.path());
                seen.wait();
                assert_eq!(left, 0, "round {round}");
            });
        }
    });
}

#[test]
fn loops_and_files_end_in_any_order() {
    in_time(|| {
        let Some(mut first) = new_loop(FixedFiles::On) else { return };
        let mut second = new_loop(FixedFiles::On).unwrap();
        let folder = folder();
        let file = marked(folder.path(), "disk", 3);
        assert_eq!(first.block_on(read_mark(&file)), 3);
        assert_eq!(second.block_on(read_mark(&file)), 3);
        // The future keeps what is left of its loop.
        let mut read = Box::pin(file.read(0, Buffer::new(BLOCK).lend()));
        first.block_on(async { assert!(futures_util::poll!(read.as_mut()).is_pending()) });
        drop(first);
        assert_eq!(slots_below(folder.path()), 1);
        drop(read);
        drop(file);
        // The number may be that of the file before, which the second loop has not let go yet.
        let next = marked(folder.path(), "next", 4);
        assert_eq!(second.block_on(read_mark(&next)), 4);
        drop(second);
        drop(next);
        assert_eq!(slots_below(folder.path()), 0);
    });
}
