//! How a server ends: acknowledged writes are in the file, and no client can prevent the end. The
//! server does not remove sockets of its successor.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blockhouse_tests::nbd::{
    Address, Client, Framing, Greeted, Request, command, connect, go_data, option, reply,
};
use blockhouse_tests::{
    Cache, Engine, Image, Scratch, Serve, Server, Trace, eventually, nbd_uri, need,
    on_every_engine_and_cache, require,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const BLOCK: usize = 6000;
/// Less than the time that [`stops_late`] gives to clients.
const SOON: Duration = Duration::from_secs(20);

/// A server that waits for clients for a minute at its end.
fn stops_late(scratch: &Scratch, image: &Image) -> Serve {
    Serve::new(scratch, image.path()).option("--limit", "stop=60s")
}

/// Writes numbered blocks, 16 at a time, until the server ends the connection, and counts the
/// acknowledged ones. Returns their numbers.
fn write_until_the_end(address: &Address, writer: usize, count: &AtomicUsize) -> Vec<u64> {
    let mut client = Client::open_with(address, Framing::ALL[writer % 3]);
    let mut acknowledged = Vec::new();
    let mut next = 0;
    loop {
        while next < acknowledged.len() as u64 + 16 {
            let block = block(writer, next);
            let offset = offset(writer, next);
            let length = block.len() as u64;
            let write = Request { command: command::WRITE, flags: 0, offset, length };
            if client.send_with(write, &block).is_err() {
                break;
            }
            next += 1;
        }
        match client.receive() {
            // Cookies begin at 1, blocks at 0.
            Ok((cookie, reply)) if reply.error == 0 => {
                acknowledged.push(cookie - 1);
                count.store(acknowledged.len(), Relaxed);
            }
            Ok((_, reply)) => assert_eq!(reply.error, 108, "only ESHUTDOWN makes sense here"),
            Err(_) => return acknowledged,
        }
    }
}

/// The offset of a block. After 4096 blocks the writer begins again, far from its writes in flight.
fn offset(writer: usize, number: u64) -> u64 {
    (writer as u64 * 4096 + number % 4096) * BLOCK as u64
}

fn block(writer: usize, number: u64) -> Vec<u8> {
    let mut block = vec![writer as u8; BLOCK];
    block[..8].copy_from_slice(&number.to_be_bytes());
    block[BLOCK - 8..].copy_from_slice(&number.to_be_bytes());
    block
}

fn sigterm_under_load_loses_nothing_that_was_acknowledged(engine: Engine, cache: Cache) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 4 * 4096 * 6000 / 512 * 512 + 512);
    let serve = Serve::new(&scratch, image.path()).engine(engine).cache(cache);
    let server = serve.option("--workers", "2").start();
    let address = server.address();
    let counts: [AtomicUsize; 4] = Default::default();
    let acknowledged: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let writers: Vec<_> = counts
            .iter()
            .enumerate()
            .map(|(writer, count)| {
                let address = &address;
                scope.spawn(move || write_until_the_end(address, writer, count))
            })
            .collect();
        let busy = || counts.iter().all(|count| count.load(Relaxed) > 100);
        assert!(eventually(Duration::from_secs(20), busy), "not all writers are served");
        server.stop();
        writers.into_iter().map(|writer| writer.join().expect("no panic")).collect()
    });
    let content = image.content();
    for (writer, numbers) in acknowledged.iter().enumerate() {
        for number in numbers {
            let start = offset(writer, *number) as usize;
            let found = &content[start..start + BLOCK];
            let head = u64::from_be_bytes(*found.first_chunk().expect("eight bytes"));
            // A later round may have overwritten the block, acknowledged or not; an earlier one
            // cannot.
            assert!(head >= *number && head % 4096 == number % 4096, "writer {writer}: {number}");
            assert_eq!(found, block(writer, head), "writer {writer}: block {head} is torn");
        }
    }
    assert!(!scratch.socket("nbd").exists(), "the socket's file is left behind");
}

on_every_engine_and_cache! {
    sigterm_under_load_loses_nothing_that_was_acknowledged
}

#[test]
fn what_is_in_flight_is_finished_and_answered() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    // Writes take long enough that the signal comes while they are in flight.
    let slow = ["-e", "inject=pwritev2:delay_enter=3000000"];
    let trace = Trace::of(&scratch, image.path(), "pwritev2", &slow);
    let serve = stops_late(&scratch, &image).engine(Engine::Threads);
    let (mut server, mut control) = serve.under(&trace.wrapper).start_with_control(&scratch);
    let mut client = Client::open(&server.address());
    for offset in [0, 4096, 8192] {
        let write = Request { command: command::WRITE, flags: 0, offset, length: 4096 };
        client.send_with(write, &[8; 4096]).expect("it is taken");
    }
    let mut stats = || -> Value { control.get("disk.stats", json!({})) };
    assert!(eventually(SOON, || stats()[0]["in-flight"] == 3), "{}", stats());
    let start = Instant::now();
    server.signal(Signal::TERM);
    for _ in 0..3 {
        assert_eq!(client.receive().expect("a reply in spite of the signal").1.error, 0);
    }
    assert!(start.elapsed() > Duration::from_millis(200), "the writes were not slow");
    assert!(client.is_closed());
    assert_eq!(server.wait(SOON).code(), Some(0));
    assert_eq!(image.bytes(0, 3 * 4096), [8; 3 * 4096]);
}

#[test]
fn idle_clients_do_not_delay_the_end() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = stops_late(&scratch, &image).start();
        let _silent = connect(&server.address());
        let _greeted = Greeted::new(&server.address());
        let mut halfway = Greeted::new(&server.address());
        halfway.send_head(option::GO, 6).expect("the head is taken");
        let mut idle = Client::open(&server.address());
        let start = Instant::now();
        server.signal(signal);
        assert_eq!(server.wait(Duration::from_secs(30)).code(), Some(0));
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert!(idle.is_closed());
    }
}

#[test]
fn nobody_new_is_let_in_while_the_server_ends() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 64 << 20);
    let mut server = stops_late(&scratch, &image).start();
    let mut slow = client_that_takes_no_replies(&server.address());
    server.signal(Signal::TERM);
    let refused = eventually(SOON, || {
        take_some(&mut slow);
        let Address::Unix(path) = server.address() else { unreachable!("a Unix socket") };
        std::os::unix::net::UnixStream::connect(path).is_err()
    });
    assert!(refused, "new clients can still connect");
    assert!(server.is_running(), "the slow client should have kept it");
    drop(slow);
    assert_eq!(server.wait(Duration::from_secs(10)).code(), Some(0));
}

/// A client that does not read: its replies fill the socket, so the server cannot complete its
/// requests.
fn client_that_takes_no_replies(address: &Address) -> Client {
    let mut client = Client::open(address);
    for _ in 0..16 {
        let read = Request { command: command::READ, flags: 0, offset: 0, length: 4 << 20 };
        client.send(read).expect("the requests are taken");
    }
    // The server has begun to answer.
    client.socket.peek(&mut [std::mem::MaybeUninit::uninit()]).expect("the first byte");
    client
}

/// Takes a small part of the replies, so that the server, which drops a client that takes nothing
/// for two seconds at its end, keeps this one.
fn take_some(client: &mut Client) {
    // At the server's end there is nothing to take.
    let _ = client.socket.read(&mut [0; 4096]);
}

#[test]
fn a_client_that_takes_no_replies_delays_the_end_but_not_for_ever() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 64 << 20);
    let mut server = Serve::new(&scratch, image.path()).start();
    let _stuck = client_that_takes_no_replies(&server.address());
    let mut writer = Client::open(&server.address());
    assert_eq!(writer.write(0, &[6; 4096], 0), 0);
    server.signal(Signal::TERM);
    assert_eq!(server.wait(Duration::from_secs(60)).code(), Some(0));
    assert_eq!(image.bytes(0, 4096), [6; 4096]);
}

#[test]
fn signals_that_come_together_are_one_request_to_stop() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 64 << 20);
    let mut server = Serve::new(&scratch, image.path()).start();
    let stuck = client_that_takes_no_replies(&server.address());
    // As `timeout` does: it signals its child, then its process group. With pauses, so that the
    // kernel delivers each signal.
    for signal in [Signal::TERM, Signal::TERM, Signal::INT] {
        server.signal(signal);
        std::thread::sleep(Duration::from_millis(20));
    }
    let quit = eventually(Duration::from_millis(300), || !server.is_running());
    assert!(!quit, "repeats of the first signal count as a second request");
    drop(stuck);
    assert_eq!(server.wait(Duration::from_secs(10)).code(), Some(0));
}

#[test]
fn a_stop_takes_no_longer_than_it_may_and_the_service_manager_is_told() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 64 << 20);
    let notices = std::os::unix::net::UnixDatagram::bind(scratch.socket("notify"));
    let notices = notices.expect("the test's own socket");
    notices.set_read_timeout(Some(Duration::from_secs(20))).expect("a deadline");
    let serve = Serve::new(&scratch, image.path()).option("--limit", "stop=200ms");
    let mut server = serve.environment("NOTIFY_SOCKET", scratch.socket("notify")).start();
    let _stuck = client_that_takes_no_replies(&server.address());
    server.signal(Signal::TERM);
    let mut told = String::new();
    while !told.contains("EXTEND_TIMEOUT_USEC=20000000") {
        let mut message = [0; 4096];
        let length = notices.recv(&mut message).unwrap_or_else(|error| panic!("{error}: {told}"));
        told += std::str::from_utf8(&message[..length]).expect("text");
    }
    assert!(told.contains("READY=1") && told.contains("STOPPING=1"), "{told}");
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
}

#[test]
fn a_second_signal_quits_at_once() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 64 << 20);
    let mut server = stops_late(&scratch, &image).start();
    let mut slow = client_that_takes_no_replies(&server.address());
    let mut has_ended = |server: &mut Server| {
        take_some(&mut slow);
        !server.is_running()
    };
    server.signal(Signal::TERM);
    // Within a second, another signal counts as a repetition of the first one. The server measures
    // it, and may handle the first signal late.
    let early = eventually(Duration::from_secs(3), || has_ended(&mut server));
    assert!(!early, "the first signal does not wait for the client");
    server.signal(Signal::TERM);
    assert!(eventually(SOON, || has_ended(&mut server)), "the second signal waits for the client");
    let status = server.wait(SOON);
    assert_eq!(status.code(), Some(1), "what was in flight may be lost: that is no success");
    assert_eq!(server.log().lines().filter(|line| line.contains("second")).count(), 1);
}

#[test]
fn a_client_in_the_middle_of_a_request_does_not_keep_the_server() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let server = Serve::new(&scratch, image.path()).start();
    let mut half_header = Client::open(&server.address());
    half_header.socket.write_all(&[0x25, 0x60, 0x95]).expect("three bytes are taken");
    let mut half_payload = Client::open(&server.address());
    let write = Request { command: command::WRITE, flags: 0, offset: 0, length: 4096 };
    half_payload.send_with(write, &[1; 100]).expect("a part is taken");
    let start = Instant::now();
    server.stop();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!(image.bytes(0, 4096), [0; 4096], "half a write was done");
}

#[test]
fn a_signal_that_means_nothing_here_is_no_end() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let mut server = Serve::new(&scratch, image.path()).start();
    // A client that disconnects while the server sends must not end the server by SIGPIPE.
    let client = client_that_takes_no_replies(&server.address());
    client.socket.shutdown(std::net::Shutdown::Both).expect("it is open");
    drop(client);
    server.signal(Signal::PIPE);
    assert!(!eventually(Duration::from_millis(300), || !server.is_running()));
    server.stop();
}

#[test]
fn a_closed_standard_output_is_no_end() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let socket = scratch.socket("nbd");
    let mut command = std::process::Command::new(blockhouse_tests::blockhouse());
    command.arg("serve").arg(image.path());
    command.arg("--nbd").arg(nbd_uri("", &socket));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut child =
        command.stdout(writer).stderr(std::process::Stdio::null()).spawn().expect("it starts");
    let address = Address::Unix(socket.clone());
    let served = eventually(Duration::from_secs(10), || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    let read = served.then(|| Client::open(&address).read(0, 1));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::TERM).expect("it runs");
    let status = blockhouse_tests::wait_for_exit(&mut child, Duration::from_secs(10));
    let _ = child.kill();
    assert_eq!(read, Some(Ok(vec![0])));
    assert_eq!(status.and_then(|status| status.code()), Some(0));
}

#[test]
fn a_log_that_is_not_read_holds_up_neither_clients_nor_the_end() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (_unread, mut stderr) = std::io::pipe().expect("a pipe");
    let capacity = rustix::pipe::fcntl_getpipe_size(&stderr).expect("a pipe has a size");
    stderr.write_all(&vec![b'x'; capacity]).expect("it is as large as it says");
    let mut server = Serve::new(&scratch, image.path()).stderr(stderr).start();
    for _ in 0..50 {
        // Makes the server log a line.
        let mut client = Greeted::new(&server.address());
        assert_eq!(client.outcome(option::GO, &go_data("missing")), reply::ERR_UNKNOWN);
    }
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[5; 4096], 0), 0);
    assert_eq!(client.read(0, 4096), Ok(vec![5; 4096]));
    client.disconnect();
    server.signal(Signal::TERM);
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
    assert_eq!(image.bytes(0, 4096), [5; 4096]);
}

#[test]
fn a_successors_sockets_are_left_alone() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let sockets = ["nbd", "guest", "control"].map(|name| scratch.socket(name));
    let serve = Serve::new(&scratch, image.path());
    let serve = serve.option("--vhost-user-blk", &sockets[1]).option("--control", &sockets[2]);
    let server = serve.start();
    let successors = sockets.each_ref().map(|path| {
        assert!(eventually(Duration::from_secs(20), || path.exists()));
        std::fs::remove_file(path).expect("it is there");
        std::os::unix::net::UnixListener::bind(path).expect("the path is free")
    });
    server.stop();
    for path in &sockets {
        let connected = std::os::unix::net::UnixStream::connect(path);
        assert!(connected.is_ok(), "{} is gone with the server before", path.display());
    }
    drop(successors);
}
