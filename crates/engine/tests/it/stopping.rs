//! Operations on sockets that are stopped and begun again, and files that another `HostFile` takes
//! over: nothing of what the kernel has taken in is lost.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::task::Context;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList, Storage};
use blockhouse_engine::{
    HostFile, Listener, OpenFiles, OpenMode, PageCache, Stream, is_byte_locked, is_stopped,
    lock_byte_shared, sleep,
};

use crate::common::on_every_engine;

const BYTES: usize = 20_000;

/// Says "stop" as soon as it is asked.
fn at_once(_: &Context<'_>) -> bool {
    true
}

#[test]
fn a_stopped_receive_loses_no_byte() {
    on_every_engine(|event_loop| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            for chunk in (0..BYTES).map(|at| at as u8).collect::<Vec<_>>().chunks(37) {
                theirs.write_all(chunk).unwrap();
                std::thread::yield_now();
            }
        });
        event_loop.block_on(async move {
            let stream = Stream::new(ours.into()).unwrap();
            let mut buffer = Buffer::new(1000);
            let (mut received, mut stops) = (0, 0);
            while received < BYTES {
                let mut list = IoVectorList::new();
                list.push(buffer.lend());
                let (outcome, list) = stream.receive_until(list, at_once).await;
                drop(list);
                match outcome {
                    Ok(count) => {
                        assert_ne!(count, 0, "the end of the stream came after {received} bytes");
                        for &byte in &buffer.bytes()[..count] {
                            assert_eq!(byte, received as u8);
                            received += 1;
                        }
                    }
                    Err(error) => {
                        assert!(is_stopped(&error), "{error}");
                        stops += 1;
                        sleep(Duration::from_micros(20)).await;
                    }
                }
            }
            assert_ne!(stops, 0, "no receive had to wait");
        });
        sender.join().unwrap();
    });
}

#[test]
fn a_stopped_accept_loses_no_connection() {
    on_every_engine(|event_loop| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let clients = std::thread::spawn(move || {
            for _ in 0..50 {
                drop(UnixStream::connect(&path).unwrap());
            }
        });
        event_loop.block_on(async move {
            let listener = Listener::new(OwnedFd::from(listener)).unwrap();
            let mut accepted = 0;
            while accepted < 50 {
                match listener.accept_until(at_once).await {
                    Ok(_) => accepted += 1,
                    Err(error) => {
                        assert!(is_stopped(&error), "{error}");
                        sleep(Duration::from_micros(20)).await;
                    }
                }
            }
        });
        clients.join().unwrap();
    });
}

#[test]
fn an_adopted_file_keeps_the_locks_of_both_until_it_owns_them() {
    on_every_engine(|event_loop| {
        event_loop.block_on(async {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len((1 << 20) + 100).unwrap();
            let open = || HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used);
            let (first, other) = (open().unwrap(), open().unwrap());
            lock_byte_shared(first.descriptor(), 100).unwrap();
            let is_locked = || is_byte_locked(other.descriptor(), 100).unwrap();
            let adopt = || {
                let copy = |file: std::os::fd::BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
                let OpenFiles { file: open, tail, flushed } = first.open_files();
                let files = OpenFiles {
                    file: copy(open),
                    tail: tail.map(copy),
                    flushed: flushed.map(copy),
                };
                HostFile::adopt(file.path(), files, OpenMode::ReadWrite, PageCache::Used).unwrap()
            };
            drop(adopt());
            assert!(is_locked(), "a process that could not take over gave the locks back");
            let second = adopt();
            assert_eq!(second.size(), first.size());
            let raw =
                |file: &HostFile| rustix::fs::fstat(file.descriptor().as_fd()).unwrap().st_ino;
            assert_eq!(raw(&second), raw(&first));
            second.own_locks();
            drop(second);
            assert!(!is_locked());
        });
    });
}
