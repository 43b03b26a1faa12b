//! The second ring, which polls for completions, with files for which the kernel does not poll: any
//! file in the page cache. And operations that the ring does not carry out.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use blockhouse_core::{Buffer, ByteRange, SyncMode};
use rustix::event::{EventfdFlags, eventfd};

use super::Uring;
use crate::driver::file::{Caching, File, Medium};
use crate::driver::fixed_files::FixedFiles;
use crate::driver::io_poll::{IoPoll, Pollable};
use crate::driver::loop_shared::{LoopMessage, LoopShared};
use crate::driver::operation::{Operation, OperationTable, Token, Transfer, WriteThrough};
use crate::driver::ring_restrictions::DeviceCommands;
use crate::driver::ring_tables::count_registered_files;
use crate::driver::watches::WatchKey;
use crate::driver::{Completion, Driver, Wait};

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

/// A file in the page cache, for whose completions no kernel polls, declared to be on a disk with
/// polled queues.
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

/// `slots` is the number of rings in which the file then has a slot.
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
    let process = Path::new("/proc/self");
    assert_eq!(count_registered_files(process, place.path()).unwrap(), slots);
    assert_eq!(std::fs::read(place.path()).unwrap(), vec![7; 300 * BLOCK]);
    // The kernel has refused to poll; the engine does not try again.
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

/// `signal` is an event that `poll` finds while it submits more entries than the queue has.
fn no_sleep_after(signal: impl Fn(&Uring, &OwnedFd)) {
    let Some(mut engine) = engine() else { return };
    let [watched, silent] = [0; 2].map(|_| eventfd(0, EventfdFlags::empty()).unwrap());
    let (operations, mut done) = (OperationTable::new(), Vec::new());
    engine.watch(WatchKey(0), watched.as_fd()).unwrap();
    engine.poll(Wait::Never, &operations, &mut done);
    assert_eq!(engine.next_event(), None);
    signal(&engine, &watched);
    (1..=300).for_each(|key| engine.watch(WatchKey(key), silent.as_fd()).unwrap());
    let limit = Duration::from_secs(30);
    let begun = Instant::now();
    engine.poll(Wait::AtMost(limit), &operations, &mut done);
    assert!(begun.elapsed() < limit, "the event did not end the sleep");
}

#[test]
fn events_that_are_reaped_to_make_space_for_entries_end_the_sleep() {
    let one = 1u64.to_ne_bytes();
    no_sleep_after(|_, watched| assert_eq!(rustix::io::write(watched, &one), Ok(8)));
    no_sleep_after(|engine, _| {
        assert_eq!(rustix::io::write(engine.shared.notifier(), &one), Ok(8))
    });
}

/// Replaces the ring's result of `operation` by `errno`, which the kernel returns if it has carried
/// out nothing. Returns the result that the loop gets.
fn result_after(errno: i32, operation: Operation) -> Option<i32> {
    let mut engine = engine()?;
    let mut operations = OperationTable::new();
    let token = operations.insert(&mut Some(operation), None, Waker::noop()).ok().unwrap();
    engine.ready.push(Completion { token, result: -errno });
    let mut done = Vec::new();
    engine.poll(Wait::Never, &operations, &mut done);
    let mut messages = Vec::new();
    while done.is_empty() && messages.is_empty() {
        engine.shared.mailbox.take(&mut messages);
        std::thread::yield_now();
    }
    let of_thread = messages.pop().map(|message| match message {
        LoopMessage::Completed(of, result) if of == token => result,
        _ => panic!("the mailbox has nothing else"),
    });
    let result = of_thread.or(done.pop().map(|completion| completion.result));
    let _ = operations.complete(token, result?);
    drop(operations.release(token));
    result
}

#[test]
fn what_the_ring_did_not_carry_out_a_thread_does() {
    let place = tempfile::NamedTempFile::new().unwrap();
    let file = wrongly_pollable(place.path());
    let transfer =
        |mark| Transfer { file: Arc::clone(&file), offset: 0, vector: block(mark).lend() };
    for (errno, mark) in [(libc::ECANCELED, 1), (libc::EAGAIN, 2), (libc::ENOMEM, 3)] {
        for through in [WriteThrough::No, WriteThrough::Yes] {
            let write = Operation::Write(transfer(mark), through);
            let Some(result) = result_after(errno, write) else { return };
            assert_eq!(result, BLOCK as i32);
            assert_eq!(std::fs::read(place.path()).unwrap(), vec![mark; BLOCK]);
        }
        assert_eq!(result_after(errno, Operation::Read(transfer(0))), Some(BLOCK as i32));
    }
    for errno in [libc::ECANCELED, libc::EAGAIN] {
        let sync = Operation::Sync { file: Arc::clone(&file), sync: SyncMode::Full };
        assert_eq!(result_after(errno, sync), Some(0));
        let range = ByteRange::between(0, BLOCK as u64);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = Operation::Allocate { file: Arc::clone(&file), mode, range, held: None };
        assert_eq!(result_after(errno, punch), Some(0));
        assert_eq!(std::fs::read(place.path()).unwrap(), vec![0; BLOCK]);
    }
}

#[test]
fn what_was_carried_out_is_not_repeated() {
    let place = tempfile::NamedTempFile::new().unwrap();
    let file = wrongly_pollable(place.path());
    let sync = || Operation::Sync { file: Arc::clone(&file), sync: SyncMode::Data };
    // A second sync would succeed, and no flush would report the loss.
    for errno in [libc::EIO, libc::ENOSPC, libc::ENOMEM] {
        assert!(result_after(errno, sync()).is_none_or(|result| result == -errno));
    }
    let transfer = Transfer { file: Arc::clone(&file), offset: 0, vector: block(1).lend() };
    let written = result_after(libc::ENOSPC, Operation::Write(transfer, WriteThrough::No));
    assert!(written.is_none_or(|result| result == -libc::ENOSPC));
}

#[test]
fn a_ring_that_lost_completions_ends_the_process() {
    let binary = std::env::current_exe().unwrap();
    let path = "driver::uring::tests::child_with_lost_completions";
    let mut child = Command::new(binary);
    let output = child.args(["--exact", path, "--ignored", "--nocapture"]).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("dropped completions"));
}

#[test]
#[ignore = "it ends its process"]
fn child_with_lost_completions() {
    super::ring::end_process_without_completions();
}
