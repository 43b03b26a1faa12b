//! The server as a whole: exports, the limit on connections, deadlines, the drain, sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockhouse_engine::Engine;
use blockhouse_nbd::proto::Framing;
use blockhouse_nbd::proto::request::kind;
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{Limits, bind};

use crate::common::client::haggle;
use crate::common::{self, Client, ENGINES, NONE, Outcome, Rig, on_every_engine, wait_for};

const MIB: usize = 1 << 20;

/// Runs `test` on every engine with these limits.
fn with_limits(limits: Limits, test: impl Fn(Rig) + Sync) {
    common::with_limits(limits, MIB, test);
}

/// Whether the server has closed a connection on which it owes nothing.
fn is_closed(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0; 64]), Ok(0))
}

#[test]
fn exports_are_found_by_name_and_the_first_without_one() {
    on_every_engine(MIB, |rig| {
        let is_frozen = |name: &str| {
            let client = Client::connect(&rig.path, Framing::Simple, name);
            client.flags() & 0b10 != 0
        };
        assert!(!is_frozen("") && !is_frozen("disk") && is_frozen("frozen"));
        let mut stream = Client::knock(&rig.path);
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        let unknown = haggle(&mut stream, 7, b"\0\0\0\x01x\0\0");
        assert_eq!(unknown, Err((1 << 31) + 6));
        assert!(haggle(&mut stream, 7, b"\0\0\0\0\0\0").is_ok(), "and the handshake goes on");
    });
}

#[test]
fn requests_may_come_together_with_the_choice_of_the_export() {
    on_every_engine(MIB, |rig| {
        let mut client = rig.client(Framing::Simple);
        let flush = client.encode(kind::FLUSH, NONE, 0, 0);
        let mut stream = Client::knock(&rig.path);
        let go = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0".to_vec();
        stream.write_all(&[go, flush].concat()).unwrap();
        let mut answer = [0; 10 + 16];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[10..18], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    });
}

#[test]
fn a_silent_client_is_dropped_after_its_time() {
    let limits = Limits { handshake: Duration::from_millis(1500), ..Limits::default() };
    with_limits(limits, |rig| {
        let start = Instant::now();
        let mut silent = Client::knock(&rig.path);
        // One that says something, but never decides, fares no better.
        let mut chatty = Client::knock(&rig.path);
        chatty.write_all(&3u32.to_be_bytes()).unwrap();
        assert!(haggle(&mut chatty, 3, b"").is_ok());
        assert!(is_closed(&mut silent) && is_closed(&mut chatty));
        let took = start.elapsed();
        assert!((1500..30_000).contains(&took.as_millis()), "{took:?}");
        let mut served = rig.client(Framing::Simple);
        std::thread::sleep(Duration::from_secs(2));
        assert!(served.is_served(), "the time is for the handshake only");
    });
}

#[test]
fn half_open_connections_keep_nobody_out() {
    on_every_engine(MIB, |rig| {
        let mut before = rig.client(Framing::Extended);
        let half_open: Vec<_> = (0..200).map(|_| Client::knock(&rig.path)).collect();
        for stream in half_open.iter().step_by(2) {
            let mut stream = stream;
            stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0").unwrap();
        }
        let start = Instant::now();
        for _ in 0..20 {
            assert!(before.is_served());
            assert!(rig.client(Framing::Structured).is_served());
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
}

#[test]
fn a_long_handshake_gives_way_when_all_places_are_taken() {
    with_limits(Limits { connections: 4, ..Limits::default() }, |rig| {
        let mut served = rig.client(Framing::Simple);
        let mut silent: Vec<_> = (0..3).map(|_| Client::knock(&rig.path)).collect();
        // This one waits in the kernel's queue until the oldest of the others has had a second.
        let mut late = rig.client(Framing::Simple);
        assert!(late.is_served() && served.is_served());
        assert!(is_closed(&mut silent[0]), "the oldest gave way");
        silent[2].write_all(&3u32.to_be_bytes()).unwrap();
        assert!(haggle(&mut silent[2], 3, b"").is_ok(), "the youngest did not");
    });
}

#[test]
fn a_client_waits_for_a_place_among_busy_ones() {
    with_limits(Limits { connections: 2, ..Limits::default() }, |rig| {
        let (first, mut second) = (rig.client(Framing::Simple), rig.client(Framing::Simple));
        let path = rig.path.clone();
        let third =
            std::thread::spawn(move || Client::connect(&path, Framing::Simple, "").is_served());
        std::thread::sleep(Duration::from_millis(200));
        assert!(!third.is_finished() && second.is_served());
        first.disconnect();
        assert!(third.join().unwrap());
    });
}

#[test]
fn clients_that_never_ask_for_anything_make_room() {
    with_limits(Limits { connections: 4, ..Limits::default() }, |rig| {
        let mut silent: Vec<_> = (0..4).map(|_| rig.client(Framing::Simple)).collect();
        assert!(silent[1].is_served(), "this one asks");
        assert!(rig.client(Framing::Simple).is_served(), "beside four silent ones");
        assert!(is_closed(silent[0].stream()), "the oldest made room");
        assert!(silent[1].is_served() && silent[2].is_served() && silent[3].is_served());
    });
}

#[test]
fn an_idle_guest_is_not_cut_off_for_another_of_the_same_client() {
    let handshake = Duration::from_millis(1200);
    with_limits(Limits { connections: 2, handshake, ..Limits::default() }, |rig| {
        let mut guests = [0; 2].map(|_| rig.client(Framing::Simple));
        assert!(guests.iter_mut().all(Client::is_served));
        let mut late = UnixStream::connect(&rig.path).unwrap();
        late.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert!(is_closed(&mut late), "it waited for as long as a handshake may take");
        assert!(guests.iter_mut().all(Client::is_served));
    });
}

/// Has more replies coming than a socket takes.
fn ask_for_much(client: &mut Client, requests: u64) {
    for _ in 0..requests {
        client.send(kind::READ, NONE, 0, MIB as u64);
    }
}

#[test]
fn a_client_that_stands_still_is_cut_off_and_what_it_held_is_free() {
    let stall = Some(Duration::from_millis(1500));
    let limits = Limits { stall, bytes_of_all: 4 * MIB, ..Limits::default() };
    with_limits(limits, |rig| {
        let mut deaf: Vec<_> = (0..8).map(|_| rig.client(Framing::Simple)).collect();
        deaf.iter_mut().for_each(|client| ask_for_much(client, 8));
        let mut mute = rig.client(Framing::Simple);
        let head = mute.encode(kind::WRITE, NONE, 0, MIB as u64);
        mute.stream().write_all(&head).unwrap();
        let mut half = rig.client(Framing::Structured);
        half.stream().write_all(&[0x25, 0x60, 0x95]).unwrap();
        let mut idle = rig.client(Framing::Extended);
        assert!(idle.is_served(), "beside them all");
        assert!(is_closed(mute.stream()) && is_closed(half.stream()));
        for client in &mut deaf {
            wait_for("it to be cut off", || client.stream().write(&[0]).is_err());
            let mut received = 0;
            let mut bytes = vec![0; 64 << 10];
            while let Ok(count @ 1..) = client.stream().read(&mut bytes) {
                received += count;
            }
            assert!(received < 4 * MIB, "{received} bytes of eight MiB were kept for it");
        }
        std::thread::sleep(Duration::from_millis(2500));
        assert!(idle.is_served(), "who asks for nothing owes nothing");
    });
}

#[test]
fn a_slow_client_that_goes_on_is_not_cut_off() {
    let stall = Some(Duration::from_secs(3));
    with_limits(Limits { stall, ..Limits::default() }, |rig| {
        let mut slow = rig.client(Framing::Simple);
        ask_for_much(&mut slow, 4);
        // A step of the server's is a MiB, or what is left in the socket.
        let mut left = 4 * (MIB + 16);
        let mut bytes = vec![0; MIB / 8];
        while left > 0 {
            std::thread::sleep(Duration::from_millis(100));
            let count = left.min(bytes.len());
            slow.stream().read_exact(&mut bytes[..count]).expect("it is still connected");
            left -= count;
        }
        let mut write = slow.encode(kind::WRITE, NONE, 0, 4096);
        write.extend([7; 4096]);
        for piece in write.chunks(128) {
            std::thread::sleep(Duration::from_millis(100));
            slow.stream().write_all(piece).unwrap();
        }
        assert_eq!(slow.receive().unwrap().outcome, Outcome::Done);
    });
}

#[test]
fn a_client_that_takes_one_reply_for_longer_than_the_limit_is_not_cut_off() {
    let stall = Some(Duration::from_secs(2));
    with_limits(Limits { stall, ..Limits::default() }, |rig| {
        let mut slow = rig.client(Framing::Simple);
        ask_for_much(&mut slow, 1);
        let mut left = MIB + 16;
        let mut bytes = vec![0; MIB / 64];
        while left > 0 {
            std::thread::sleep(Duration::from_millis(60));
            let count = left.min(bytes.len());
            slow.stream().read_exact(&mut bytes[..count]).expect("it is still connected");
            left -= count;
        }
        assert!(slow.is_served());
    });
}

#[test]
fn an_idle_limit_is_for_those_who_ask_for_nothing() {
    let idle = Some(Duration::from_secs(2));
    with_limits(Limits { idle, ..Limits::default() }, |rig| {
        let (mut busy, mut quiet) = (rig.client(Framing::Simple), rig.client(Framing::Simple));
        assert!(quiet.is_served());
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(60));
            assert!(busy.is_served());
        }
        assert!(is_closed(quiet.stream()));
        assert!(is_closed(busy.stream()), "later");
    });
}

#[test]
fn who_never_receives_delays_no_others_and_gets_no_more_than_a_share() {
    let limits = Limits { bytes_of_all: 32 * MIB, ..Limits::default() };
    with_limits(limits, |rig| {
        let mut deaf: Vec<_> = (0..8).map(|_| rig.client(Framing::Simple)).collect();
        deaf.iter_mut().for_each(|client| ask_for_much(client, 40));
        rig.settle();
        let mut other = rig.client(Framing::Structured);
        rig.storage.hold_writes(true);
        let mut writes = Vec::new();
        for block in 0..16 {
            writes.extend(other.encode(kind::WRITE, NONE, block * 4096, 4096));
            writes.extend([1; 4096]);
        }
        other.stream().write_all(&writes).unwrap();
        // None of them can end yet: its share has room for all of them side by side.
        wait_for("all writes to run at once", || rig.storage.held_writes() == 16);
        rig.storage.hold_writes(false);
        for _ in 0..16 {
            assert_eq!(other.receive().unwrap().outcome, Outcome::Done);
        }
    });
}

#[test]
fn a_drain_answers_what_is_under_way_and_ends() {
    with_limits(Limits::default(), |rig| {
        rig.storage.delay(Duration::from_millis(200));
        let mut client = rig.client(Framing::Structured);
        let mut idle = rig.client(Framing::Extended);
        let mut half_open = Client::knock(&rig.path);
        for block in 0..10 {
            client.write(NONE, block * 4096, &[5; 4096]);
        }
        wait_for("the requests to be read", || rig.storage.running().0 == 10);
        rig.drain();
        for _ in 0..10 {
            assert_eq!(client.receive().unwrap().outcome, Outcome::Done);
        }
        assert!(client.receive().is_err() && idle.receive().is_err());
        assert!(is_closed(&mut half_open));
        let (path, storage) = (rig.path.clone(), rig.storage.clone());
        rig.join();
        assert!(UnixStream::connect(path).is_err());
        assert_eq!(storage.content()[..40960], [5; 40960]);
    });
}

#[test]
fn a_drain_cuts_off_who_does_not_take_replies() {
    let limits = Limits { drain: Duration::from_millis(300), ..Limits::default() };
    with_limits(limits, |rig| {
        let mut client = rig.client(Framing::Simple);
        for _ in 0..40 {
            client.send(kind::READ, NONE, 0, 512 * 1024);
        }
        // One reply is more than the socket takes.
        wait_for("a request to be read", || rig.storage.running().1 > 0);
        let start = Instant::now();
        rig.drain();
        rig.join();
        assert!((300..30_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    });
}

#[test]
fn connections_come_over_tcp_as_well() {
    use blockhouse_engine::{EngineChoice, EventLoop, Listener};
    for engine in ENGINES {
        let Some(rig) = Rig::start(engine, Limits::default(), MIB) else { continue };
        let bound = bind(&Address::Tcp { host: "127.0.0.1".into(), port: 0 }).unwrap();
        let Address::Tcp { port, .. } = bound.address else { panic!("{:?}", bound.address) };
        assert_ne!(port, 0, "the real port is told");
        let (server, exports) = (rig.server(), rig.exports.clone());
        let thread = std::thread::spawn(move || {
            let mut event_loop = EventLoop::new(EngineChoice::Only(engine)).unwrap();
            let loops = [event_loop.handle()];
            let listener = Listener::new(bound.socket).unwrap();
            event_loop.block_on(async {
                server.serve(&listener, &exports, &loops).await.unwrap();
                server.drain().await;
            });
        });
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], (MIB as u64).to_be_bytes());
        rig.drain();
        thread.join().unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn an_export_that_is_removed_ends_its_clients_and_no_others() {
    with_limits(Limits::default(), |rig| {
        let mut stays = Client::connect(&rig.path, Framing::Simple, "frozen");
        let mut leaves = rig.client(Framing::Simple);
        assert!(leaves.is_served());
        let (server, exports) = (rig.server(), rig.exports.clone());
        wait_for("both to be counted", || {
            (server.clients(&exports, "disk"), server.clients(&exports, "frozen")) == (1, 1)
        });
        let removed = rig.run(move || async move { server.remove(&exports, "disk").await });
        let disk = removed.expect("it was there").disk;
        // This test and, for a moment, the task that has just ended are the only users.
        wait_for("its users to be gone", || std::sync::Arc::strong_count(&disk) == 1);
        assert!(is_closed(leaves.stream()) && stays.is_served());
        let server = rig.server();
        assert_eq!(server.clients(&rig.exports, "disk"), 0);
        assert!(rig.exports.remove("disk").is_none());
        server.close(&rig.exports);
        // The rig ends when nothing accepts.
        wait_for("the socket to be let go", || {
            std::os::unix::net::UnixStream::connect(&rig.path).is_err()
        });
    });
}

#[test]
fn addresses_that_cannot_be_had_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |address: &Address, reason: &str| {
        let error = bind(address).expect_err(reason).to_string();
        assert!(error.contains(reason) && error.contains(';'), "{error}");
    };
    let path = folder.path().join("socket");
    let unix = Address::Unix(path.clone());
    let bound = bind(&unix).unwrap();
    refused(&unix, "a running server listens there");
    // A server that died leaves its socket behind; the next one takes its place.
    std::mem::forget(bound.file);
    drop(bound.socket);
    assert!(path.exists());
    drop(bind(&unix).unwrap());
    assert!(!path.exists(), "a server that ends takes its socket with it");
    let file = folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    refused(&Address::Unix(file.clone()), "no socket");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    refused(&Address::Unix(folder.path().join("x".repeat(108))), "more than 107");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    refused(&Address::Tcp { host: "127.0.0.1".into(), port }, "another program listens there");
}

#[test]
fn engines_are_really_tried() {
    // The tests above skip what the host forbids; threads work everywhere.
    assert!(Rig::start(Engine::Threads, Limits::default(), MIB).is_some());
}
