//! The second ring where the kernel does not poll, which any file in the page cache shows; and completions
//! that the kernel drops.

use std::fs::{DirEntry, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::task::Waker;

use blockhouse_core::Buffer;

use super::Uring;
use crate::driver::{Driver, Wait};
use crate::file::{Caching, File, Medium};
use crate::fixed_files::FixedFiles;
use crate::io_poll::{IoPoll, Pollable};
use crate::loop_shared::LoopShared;
use crate::operation::{Operation, OperationTable, Token, Transfer, WriteThrough};
use crate::ring_restrictions::DeviceCommands;

const BLOCK: usize = 4096;

fn engine() -> Option<Uring> {
    let shared = LoopShared::new().unwrap();
    match Uring::open(&shared, DeviceCommands::Refused) {
        Ok(engine) => Some(engine),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// A file in the page cache, whose completions no kernel polls for, taken for one on a disk with queues
/// for that.
fn wrongly_pollable(path: &Path) -> Arc<File> {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut file = File::new(file.into(), Medium::Device, Caching::PageCache);
    file.pollable = Pollable::everything();
    Arc::new(file)
}

fn block(mark: u8) -> Buffer {
    let mut buffer = Buffer::new(BLOCK);
    buffer.bytes_mut().fill(mark);
    buffer
}

fn begin(engine: &mut Uring, operations: &mut OperationTable, operation: Operation) -> Token {
    let token = operations.insert(&mut Some(operation), None, Waker::noop()).ok().unwrap();
    engine.start(token, operations.operation(token));
    token
}

/// The results of the next operations, which a sleeping `poll` waits for.
fn end(engine: &mut Uring, operations: &mut OperationTable, count: usize) -> Vec<i32> {
    let mut done = Vec::new();
    while done.len() < count {
        engine.poll(Wait::Event, operations, &mut done);
    }
    for completion in &done {
        let _ = operations.complete(completion.token, completion.result);
        drop(operations.release(completion.token));
    }
    done.iter().map(|completion| completion.result).collect()
}

/// In how many slots of this process's rings the file is.
fn slots_of(path: &Path) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let about = |file: DirEntry| {
        // The ring of another test may be gone meanwhile.
        let about = Path::new("/proc/self/fdinfo").join(file.file_name());
        std::fs::read_to_string(about).unwrap_or_default()
    };
    let is_it = |line: &&str| line.ends_with(path.to_str().unwrap());
    files.map(|file| about(file).lines().filter(is_it).count()).sum()
}

/// `slots` is in how many rings the file then has a slot.
fn operations_that_are_refused_go_on(fixed: FixedFiles, slots: usize) {
    let Some(mut engine) = engine() else { return };
    engine.set_fixed_files(fixed);
    engine.io_poll(IoPoll::On);
    let mut operations = OperationTable::new();
    let place = tempfile::NamedTempFile::new().unwrap();
    let file = wrongly_pollable(place.path());
    let write = |index: u64, through| {
        let (file, vector) = (Arc::clone(&file), block(7).lend());
        Operation::Write(Transfer { file, offset: index * BLOCK as u64, vector }, through)
    };
    for index in 0..300 {
        let through = if index % 2 == 0 { WriteThrough::No } else { WriteThrough::Yes };
        begin(&mut engine, &mut operations, write(index, through));
    }
    assert!(engine.is_polling(), "the second ring has them");
    assert_eq!(end(&mut engine, &mut operations, 300), [BLOCK as i32; 300]);
    assert!(!engine.is_polling(), "nothing is in flight there");
    assert_eq!(slots_of(place.path()), slots);
    assert_eq!(std::fs::read(place.path()).unwrap(), vec![7; 300 * BLOCK]);
    // The kernel has said no; it is not asked again.
    let mut bytes = block(1);
    let transfer = Transfer { file: Arc::clone(&file), offset: 0, vector: bytes.lend() };
    begin(&mut engine, &mut operations, Operation::Read(transfer));
    assert!(!engine.is_polling());
    assert_eq!(end(&mut engine, &mut operations, 1), [BLOCK as i32]);
    assert_eq!(bytes.bytes(), [7; BLOCK]);
}

#[test]
fn what_the_kernel_does_not_poll_for_goes_by_the_main_ring() {
    operations_that_are_refused_go_on(FixedFiles::Off, 0);
}

#[test]
fn both_rings_have_slots_of_their_own() {
    operations_that_are_refused_go_on(FixedFiles::On, 2);
}

#[test]
fn nothing_is_polled_for_unasked() {
    let Some(mut engine) = engine() else { return };
    let mut operations = OperationTable::new();
    let place = tempfile::NamedTempFile::new().unwrap();
    let file = wrongly_pollable(place.path());
    let transfer = Transfer { file: Arc::clone(&file), offset: 0, vector: block(1).lend() };
    begin(&mut engine, &mut operations, Operation::Write(transfer, WriteThrough::No));
    assert!(!engine.is_polling());
    assert_eq!(end(&mut engine, &mut operations, 1), [BLOCK as i32]);
    assert!(file.pollable.reads(), "the kernel has not been asked");
}

#[test]
fn an_operation_whose_completion_is_lost_fails_and_no_other() {
    let Some(mut engine) = engine() else { return };
    let mut operations = OperationTable::new();
    let place = tempfile::NamedTempFile::new().unwrap();
    let file = wrongly_pollable(place.path());
    let write = |mark| {
        let transfer = Transfer { file: Arc::clone(&file), offset: 0, vector: block(mark).lend() };
        Operation::Write(transfer, WriteThrough::No)
    };
    let lost = begin(&mut engine, &mut operations, write(1));
    engine.ring.enter(1, None);
    // As the kernel does when it has no memory to keep them; it says so once.
    assert_eq!(engine.ring.completions().count(), 1);
    engine.ring.has_lost_completions = true;
    begin(&mut engine, &mut operations, write(2));
    let mut done = Vec::new();
    while done.len() < 2 {
        engine.poll(Wait::Event, &operations, &mut done);
    }
    for completion in &done {
        let is_lost = completion.token == lost;
        // The other one may have been cancelled: the kernel still had it.
        let results: &[i32] =
            if is_lost { &[-libc::EIO] } else { &[BLOCK as i32, -libc::ECANCELED] };
        assert!(results.contains(&completion.result), "{completion:?}");
        let _ = operations.complete(completion.token, completion.result);
        drop(operations.release(completion.token));
    }
    begin(&mut engine, &mut operations, write(3));
    assert_eq!(end(&mut engine, &mut operations, 1), [BLOCK as i32]);
    assert_eq!(std::fs::read(place.path()).unwrap(), vec![3; BLOCK]);
}
