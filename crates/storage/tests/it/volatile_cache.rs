//! A server that loses its write cache: flushes fail where answered writes may be gone, and nothing
//! else does.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode, Unmap, errno,
};
use blockhouse_engine::{EngineChoice, EventLoop, LoopThread, sleep};
use blockhouse_storage::NbdStorage;
use futures_util::future::join;
use lab_nbd::transmission::{CAN_MULTI_CONN, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES};
use lab_nbd::{VolatileServer, command};
use tempfile::TempDir;

use crate::server::uri;

const SIZE: usize = 64 << 10;
const BLOCK: usize = 4096;
const ALL: u16 = SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES;
/// Longer than a server is gone, on however slow a machine.
const RECONNECT: Duration = Duration::from_secs(600);

fn serve(flags: u16) -> (TempDir, PathBuf, VolatileServer) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let server = VolatileServer::start(&socket, SIZE, flags);
    (folder, socket, server)
}

/// Runs a test on a loop.
fn run(test: impl AsyncFnOnce()) {
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(test());
}

async fn write(disk: &NbdStorage, block: usize, byte: u8, durability: Durability) -> Result<()> {
    let mut buffer = Buffer::new(BLOCK);
    buffer.bytes_mut().fill(byte);
    disk.write((block * BLOCK) as u64, buffer.lend(), durability).await
}

async fn read(disk: &NbdStorage, block: usize) -> u8 {
    let mut buffer = Buffer::new(BLOCK);
    disk.read((block * BLOCK) as u64, buffer.lend()).await.unwrap();
    buffer.bytes()[0]
}

async fn flush(disk: &NbdStorage) -> Result<()> {
    disk.flush(SyncMode::Data).await
}

fn range(block: usize) -> ByteRange {
    ByteRange::new((block * BLOCK) as u64, BLOCK as u64).expect("it is short")
}

fn assert_lost(error: &Error) {
    let line = error.to_string();
    assert_eq!(error.errno(), errno::EIO, "{line}");
    for words in ["nbd.sock", "not flushed", "may have lost", "open the image again"] {
        assert!(line.contains(words), "{line}");
    }
    assert!(!line.contains('\n'), "{line}");
}

#[test]
fn no_flush_succeeds_after_answered_writes_may_be_lost() {
    for kind in ["write", "zeros", "trim"] {
        run(async || {
            let (_folder, socket, mut server) = serve(ALL);
            let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
            write(&disk, 0, 1, Durability::None).await.unwrap();
            flush(&disk).await.unwrap();
            match kind {
                "write" => write(&disk, 0, 2, Durability::None).await.unwrap(),
                "zeros" => disk.write_zeroes(range(0), Unmap::Forbidden).await.unwrap(),
                _ => disk.discard(range(0)).await.unwrap(),
            }
            server.lose_power();
            assert_eq!(read(&disk, 0).await, 1, "requests go on, and {kind} is lost");
            for _ in 0..2 {
                assert_lost(&flush(&disk).await.unwrap_err());
                write(&disk, 1, 3, Durability::None).await.unwrap();
            }
            let again = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
            flush(&again).await.unwrap();
        });
    }
}

#[test]
fn a_server_without_fua_has_no_durable_writes() {
    run(async || {
        let (_folder, socket, server) = serve(SEND_FLUSH);
        let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
        let refused = write(&disk, 0, 1, Durability::Data).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert_eq!((server.received(command::WRITE), read(&disk, 0).await), (0, 0));
    });
}

#[test]
fn a_full_sync_is_no_single_request() {
    run(async || {
        let (_folder, socket, server) = serve(ALL);
        let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
        let refused = write(&disk, 0, 1, Durability::Full).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert_eq!(server.received(command::WRITE), 0);
    });
}

#[test]
fn a_server_that_had_nothing_to_lose_is_not_missed() {
    run(async || {
        let (_folder, socket, mut server) = serve(ALL);
        let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
        // Nothing was written at all.
        assert_eq!(read(&disk, 0).await, 0);
        server.lose_power();
        flush(&disk).await.unwrap();
        // FUA.
        write(&disk, 0, 1, Durability::Data).await.unwrap();
        server.lose_power();
        flush(&disk).await.unwrap();
        // A flush.
        write(&disk, 1, 2, Durability::None).await.unwrap();
        disk.write_zeroes(range(2), Unmap::Allowed).await.unwrap();
        disk.discard(range(2)).await.unwrap();
        flush(&disk).await.unwrap();
        server.lose_power();
        // A write that is not answered is sent again, and not lost.
        server.hold(command::WRITE);
        let writing = write(&disk, 2, 3, Durability::None);
        let losing = async {
            until(|| server.received(command::WRITE) == 3).await;
            server.lose_power();
        };
        join(writing, losing).await.0.unwrap();
        flush(&disk).await.unwrap();
        let model: Vec<u8> =
            (0..SIZE).map(|at| [1, 2, 3].get(at / BLOCK).map_or(0, |&byte| byte)).collect();
        assert_eq!((server.content(), server.stable()), (model.clone(), model));
    });
}

/// Waits for a server that has a thread of its own.
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_flush_that_is_sent_again_covers_nothing_that_was_lost() {
    run(async || {
        let (_folder, socket, mut server) = serve(ALL);
        let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
        write(&disk, 0, 1, Durability::None).await.unwrap();
        server.hold(command::FLUSH);
        let losing = async {
            until(|| server.received(command::FLUSH) == 1).await;
            server.lose_power();
        };
        let (flushed, ()) = join(flush(&disk), losing).await;
        assert_lost(&flushed.unwrap_err());
        assert_eq!(server.content(), [0; SIZE]);
    });
}

#[test]
fn an_export_without_flush_has_nothing_to_lose() {
    run(async || {
        let (_folder, socket, mut server) = serve(SEND_TRIM);
        let disk = NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap();
        write(&disk, 0, 1, Durability::None).await.unwrap();
        server.lose_power();
        assert_eq!(read(&disk, 0).await, 1);
        flush(&disk).await.unwrap();
    });
}

/// The flush of one loop fails for writes that another loop's connection has lost, whichever of
/// them notices first.
#[test]
fn a_flush_covers_the_writes_of_all_connections() {
    let start = |name: &str| LoopThread::start(name.into(), EngineChoice::Auto, |_| ()).unwrap();
    let (_folder, socket, mut server) = serve(ALL | CAN_MULTI_CONN);
    let (first, second) = (start("first"), start("second"));
    let disk = first.run(move || async move {
        Arc::new(NbdStorage::connect(uri(&socket), RECONNECT).await.unwrap())
    });
    let write_at = |on: &LoopThread, block| {
        let disk = Arc::clone(&disk);
        on.run(move || async move { write(&disk, block, 1, Durability::None).await.unwrap() });
    };
    let flush_at = |on: &LoopThread| {
        let disk = Arc::clone(&disk);
        on.run(move || async move { flush(&disk).await })
    };
    write_at(&first, 0);
    write_at(&second, 1);
    flush_at(&second).unwrap();
    assert_eq!(server.received(command::FLUSH), 1, "by the oldest connection, for all");
    server.lose_power();
    flush_at(&second).unwrap();
    write_at(&first, 2);
    server.lose_power();
    assert_lost(&flush_at(&second).unwrap_err());
    assert_lost(&flush_at(&first).unwrap_err());
    drop(disk);
    first.stop();
    second.stop();
}

#[test]
fn a_later_loop_of_a_thread_gets_a_connection_of_its_own() {
    let (_folder, socket, server) = serve(ALL);
    let connect = NbdStorage::connect(uri(&socket), Duration::ZERO);
    let disk = EventLoop::new(EngineChoice::Auto).unwrap().block_on(connect).unwrap();
    // The first loop has ended with its connection.
    run(async || {
        write(&disk, 0, 7, Durability::Data).await.unwrap();
        assert_eq!(read(&disk, 0).await, 7);
        disk.disconnect();
    });
    drop(server);
}
