//! Servers that break the protocol: the client answers with an error, in bounded time and memory,
//! and no byte outside of a request's memory changes.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Storage};
use blockhouse_engine::{EngineChoice, EventLoop, sleep, timeout};
use blockhouse_storage::NbdStorage;
use fastrand::Rng;
use futures_util::future::{Either, join, select};

use crate::server::uri;

/// Longer than any answer takes, on however slow a machine.
const HANG: Duration = Duration::from_secs(60);
/// How long the client waits for a greeting.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);

/// Reads one option; its number.
fn option(client: &mut UnixStream) -> std::io::Result<u32> {
    let mut head = [0; 16];
    client.read_exact(&mut head)?;
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let mut data = vec![0; number(12) as usize];
    client.read_exact(&mut data)?;
    Ok(number(8))
}

fn reply(client: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> std::io::Result<()> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    client.write_all(&bytes)
}

/// A handshake as it should be, for an export of 1 MiB with structured replies and block status.
fn greet(client: &mut UnixStream) -> std::io::Result<()> {
    client.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let number = option(client)?;
        match number {
            8 => reply(client, number, 1, &[])?,
            10 => {
                reply(client, number, 4, b"\0\0\0\x01base:allocation")?;
                reply(client, number, 1, &[])?;
            }
            7 => {
                // Size, and flags: flush, FUA, trim, zeros.
                let flags = 0x6d_u16.to_be_bytes();
                let info = [&[0, 0][..], &(1u64 << 20).to_be_bytes(), &flags].concat();
                reply(client, number, 3, &info)?;
                return reply(client, number, 1, &[]);
            }
            _ => reply(client, number, (1 << 31) + 1, &[])?,
        }
    }
}

/// A structured chunk that is nearly right.
fn chunk(rng: &mut Rng, cookie: [u8; 8]) -> Vec<u8> {
    let kind = [0, 1, 2, 5, 0x8001, 0x8002, 0x8003, rng.u16(..)][rng.usize(..8)];
    let length = [0, 4, 8, 12, 20, 4104, u32::MAX, rng.u32(..5000)][rng.usize(..8)];
    let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
    bytes.extend(u16::from(rng.bool()).to_be_bytes());
    bytes.extend(u16::to_be_bytes(kind));
    bytes.extend(if rng.u8(..8) == 0 { rng.u64(..).to_be_bytes() } else { cookie });
    bytes.extend(length.to_be_bytes());
    let offset = [0, 4096, 8191, u64::MAX, rng.u64(..20_000)][rng.usize(..5)];
    bytes.extend(offset.to_be_bytes());
    let rest = (length as usize).min(5000).saturating_sub(8);
    bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(rest));
    bytes
}

/// Serves one client: as it should be up to a point, and then not.
fn serve(mut client: UnixStream, mut rng: Rng) -> std::io::Result<()> {
    if rng.u8(..4) == 0 {
        let bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(200).collect();
        let real = b"NBDMAGICIHAVEOPT\0\x03";
        client.write_all(&real[..rng.usize(..=real.len())])?;
        return client.write_all(&bytes);
    }
    greet(&mut client)?;
    for _ in 0..rng.usize(1..20) {
        let mut head = [0; 28];
        client.read_exact(&mut head)?;
        let mut cookie = [0; 8];
        cookie.copy_from_slice(&head[8..16]);
        for _ in 0..rng.usize(1..4) {
            client.write_all(&chunk(&mut rng, cookie))?;
        }
    }
    Ok(())
}

/// Asks for a few things; what is answered does not matter.
async fn use_disk(disk: &NbdStorage, buffers: &mut [Buffer; 2]) {
    let [first, second] = buffers;
    for round in 0..10 {
        let read = disk.read(4096, first.lend_range(512, 8192));
        let written = disk.write(round * 512, second.lend_range(0, 512), Durability::Data);
        let (read, written) = join(read, written).await;
        let range = blockhouse_core::ByteRange::new(0, 1 << 20).expect("it is short");
        let status = disk.block_status(range).await;
        if read.is_err() && written.is_err() && status.is_err() {
            return;
        }
    }
}

#[test]
fn whatever_a_server_sends_the_client_answers() {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    const CLIENTS: usize = 300;
    let mut server_rng = rng.fork();
    let server = std::thread::spawn(move || {
        for _ in 0..CLIENTS {
            let (client, _) = listener.accept().unwrap();
            // It fails when the client has had enough.
            let _ = serve(client, server_rng.fork());
        }
    });
    let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
    event_loop.block_on(async {
        for _ in 0..CLIENTS {
            let session = async {
                let Ok(disk) = NbdStorage::connect(uri(&socket), Duration::ZERO).await else {
                    return;
                };
                let mut buffers = [Buffer::new(9216), Buffer::new(512)];
                buffers[0].bytes_mut().fill(0xa5);
                use_disk(&disk, &mut buffers).await;
                let bytes = buffers[0].bytes();
                let around = bytes[..512].iter().chain(&bytes[512 + 8192..]);
                assert!(around.copied().all(|byte| byte == 0xa5), "bytes around a read changed");
            };
            let session = std::pin::pin!(session);
            match select(session, sleep(HANG)).await {
                Either::Left(_) => {}
                Either::Right(_) => panic!("the client waits for ever"),
            }
        }
    });
    server.join().unwrap();
}

/// Serves one client: as it should be, but no request is ever answered in full.
fn keep_waiting(mut client: UnixStream) -> std::io::Result<()> {
    greet(&mut client)?;
    client.set_nonblocking(true)?;
    let mut cookie = None;
    loop {
        let mut head = [0; 28];
        match client.read(&mut head) {
            Ok(0) => return Ok(()),
            Ok(28) => cookie = head[8..16].try_into().ok(),
            _ => {}
        }
        if let Some(cookie) = cookie {
            // A chunk that says nothing, and is not the last one.
            let cookie: [u8; 8] = cookie;
            let head = [&0x668e_33ef_u32.to_be_bytes()[..], &[0; 4], &cookie, &[0; 4]].concat();
            client.write_all(&head)?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_that_never_answers_is_waited_for_with_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    // It fails when the client has ended.
    let server = std::thread::spawn(move || drop(keep_waiting(listener.accept().unwrap().0)));
    let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
    event_loop.block_on(async {
        let time = Duration::from_millis(300);
        let disk = NbdStorage::connect(uri(&socket), Duration::ZERO).await.unwrap();
        disk.set_answer_time(Some(time));
        let mut buffer = Buffer::new(512);
        let error = disk.read(0, buffer.lend()).await.unwrap_err().to_string();
        assert!(error.contains("has not answered for 300ms"), "{error}");
        // A flush that waits without a limit, as a guest's does, has one from the close on.
        disk.set_answer_time(None);
        let limited = async {
            sleep(time).await;
            disk.set_answer_time(Some(time));
        };
        let (flushed, ()) = join(disk.flush(blockhouse_core::SyncMode::Data), limited).await;
        let error = flushed.unwrap_err().to_string();
        assert!(error.contains("has not answered for 300ms"), "{error}");
        disk.disconnect();
    });
    server.join().unwrap();
}

#[test]
fn a_server_that_breaks_off_twice_is_asked_for_the_name_alone() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        [(); 3].map(|()| {
            let (mut client, _) = listener.accept().unwrap();
            client.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
            client.read_exact(&mut [0; 4]).unwrap();
            option(&mut client).unwrap()
        })
    });
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        assert!(NbdStorage::connect(uri(&socket), Duration::ZERO).await.is_err());
    });
    // Extended headers, and EXPORT_NAME.
    assert_eq!(server.join().unwrap(), [11, 11, 1]);
}

#[test]
fn a_request_that_ends_each_connection_fails_after_the_reconnect_time() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        let mut requests = 0;
        loop {
            let mut client = listener.accept().unwrap().0;
            // The last client only connects.
            if greet(&mut client).is_err() {
                return requests;
            }
            requests += u32::from(client.read_exact(&mut [0; 28]).is_ok());
        }
    });
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), Duration::from_secs(1)).await.unwrap();
        let mut buffer = Buffer::new(512);
        let read = timeout(HANG / 2, disk.read(0, buffer.lend())).await;
        disk.disconnect();
        assert!(read.expect("the read fails").is_err());
    });
    // The server may have ended by itself: its last client was the disk that was closed.
    drop(UnixStream::connect(socket));
    // Five a second at most, and the first one.
    let requests = server.join().unwrap();
    assert!((1..=7).contains(&requests), "{requests} requests");
}

/// Serves one client until it has asked for `bad`, and for other bytes, which are zeros; if
/// `is_alone`, until its first request. Returns whether it has asked for `bad`.
fn serve_all_but(client: &mut UnixStream, bad: u64, is_alone: bool) -> bool {
    let (mut was_bad, mut has_answered) = (false, is_alone);
    while !(was_bad && has_answered) {
        let mut head = [0; 28];
        if client.read_exact(&mut head).is_err() {
            return false;
        }
        if head[16..24] == bad.to_be_bytes() {
            was_bad = true;
        } else if head[6..8] == [0, 0] {
            // A last chunk of data.
            let start = [&0x668e_33ef_u32.to_be_bytes()[..], &[0, 1, 0, 1], &head[8..16]].concat();
            let chunk = [&start[..], &520_u32.to_be_bytes(), &head[16..24], &[0; 512]].concat();
            has_answered = client.write_all(&chunk).is_ok();
        }
    }
    true
}

#[test]
fn a_request_that_ends_each_connection_fails_although_others_are_answered() {
    const BAD: u64 = 4096;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        (0..)
            .take_while(|number| {
                let mut client = listener.accept().unwrap().0;
                greet(&mut client).unwrap();
                serve_all_but(&mut client, BAD, *number == 8)
            })
            .count()
    });
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), 2 * HANG).await.unwrap();
        let is_over = std::cell::Cell::new(false);
        let mut buffers = [Buffer::new(512), Buffer::new(512)];
        let [first, second] = &mut buffers;
        let bad = async {
            let read = timeout(HANG, disk.read(BAD, first.lend())).await;
            is_over.set(true);
            read
        };
        let others = async {
            while !is_over.get() {
                disk.read(0, second.lend()).await.expect("the others go on");
            }
        };
        let (read, ()) = join(bad, others).await;
        let error = read.expect("the read fails").unwrap_err().to_string();
        assert!(error.contains("8 connections") && error.contains("offset 4096"), "{error}");
        disk.disconnect();
    });
    assert_eq!(server.join().unwrap(), 9);
}

#[test]
fn requests_wait_no_longer_for_a_server_that_greets_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        greet(&mut listener.accept().unwrap().0).unwrap();
        // Nothing arrives, until the client gives the attempt up.
        assert_eq!(listener.accept().unwrap().0.read(&mut [0]).unwrap(), 0);
    });
    let begun = std::time::Instant::now();
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let disk = NbdStorage::connect(uri(&socket), Duration::from_secs(1)).await.unwrap();
        let mut buffer = Buffer::new(512);
        disk.read(0, buffer.lend()).await.unwrap_err();
        disk.disconnect();
        sleep(Duration::from_millis(100)).await;
    });
    server.join().unwrap();
    assert!(begun.elapsed() < HANDSHAKE_TIME, "{:?}", begun.elapsed());
}
