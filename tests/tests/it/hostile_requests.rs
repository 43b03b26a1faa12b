//! Clients that break the transmission phase: a request that can be answered gets an errno and the
//! connection continues; anything else ends that connection, and no other.

use std::io::Write;
use std::time::{Duration, Instant};

use blockhouse_tests::nbd::{
    Address, Client, Framing, Reply, Request, command, errno, flag, reset,
};
use blockhouse_tests::{
    Engine, Image, Scratch, Serve, Server, eventually, nbd_uri, need, on_every_engine, require,
    run, tool,
};

const SIZE: u64 = 64 << 20;
/// The maximum payload, which the server announces.
const MAX_LENGTH: u64 = 32 << 20;

fn serve(scratch: &Scratch) -> (Server, Image) {
    serve_on(scratch, Engine::IoUring)
}

fn serve_on(scratch: &Scratch, engine: Engine) -> (Server, Image) {
    let image = scratch.image("disk.img", SIZE);
    (Serve::new(scratch, image.path()).engine(engine).start(), image)
}

/// A client that requests much data and never reads the replies.
fn deaf(server: &Server) -> Client {
    let mut client = Client::open(&server.address());
    for _ in 0..100 {
        client.send(read(0, 1 << 20)).expect("the requests are taken");
    }
    client
}

#[test]
fn silent_clients_and_such_that_stop_reading_keep_nobody_out() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    // Uses all connections that a server allows by default.
    let deaf: Vec<_> = (0..8).map(|_| deaf(&server)).collect();
    let silent: Vec<_> = (8..256).map(|_| Client::open(&server.address())).collect();
    // Each new client replaces the client that was idle for longest, also the second one, which
    // connects at once.
    let mut clients = [0; 2].map(|_| Client::open(&server.address()));
    for client in &mut clients {
        // Several requests at a time, while the deaf clients hold all the memory that they can get.
        for number in 0..32 {
            client.send_with(write(number << 16, 1 << 16), &[5; 1 << 16]).expect("they are taken");
        }
        for _ in 0..32 {
            assert_eq!(client.receive().expect("a reply").1.error, 0);
        }
    }
    clients.into_iter().for_each(Client::disconnect);
    drop((deaf, silent));
    server.stop();
}

#[test]
fn those_who_hold_many_connections_make_room_for_those_who_hold_few() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let uri = |name: &str| nbd_uri("", scratch.socket(name));
    let serve = Serve::bare(&scratch, image.path()).option("--limit", "clients=4");
    let server = serve.export(&uri("one")).export(&uri("two")).start();
    let [one, two] = ["one", "two"].map(|name| Address::Unix(scratch.socket(name)));
    // All connections were used, and are idle now.
    let connect = || {
        let mut client = Client::open(&one);
        assert_eq!(client.read(0, 1), Ok(vec![0]));
        // Idle times are compared in the kernel's ticks, so they must differ by more than one.
        std::thread::sleep(Duration::from_millis(20));
        client
    };
    let mut guests = [(); 4].map(|()| connect());
    let mut other = Client::open(&two);
    assert_eq!(other.read(0, 1), Ok(vec![0]), "a client of another socket");
    assert!(guests[0].is_closed(), "the longest idle one made room");
    // Another process connects to the same socket.
    run(tool("nbdinfo").args(["--size", &uri("one")])).success();
    assert!(guests[1].is_closed());
    for guest in &mut guests[2..] {
        assert_eq!(guest.read(0, 1), Ok(vec![0]), "the others stay");
    }
    assert_eq!(other.read(0, 1), Ok(vec![0]));
    server.stop();
}

#[test]
fn a_client_that_stops_reading_is_cut_off_after_its_time() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let limits = "stall=400ms,memory=8M";
    let server = Serve::new(&scratch, image.path()).option("--limit", limits).start();
    let mut deaf = deaf(&server);
    let mut idle = Client::open(&server.address());
    assert_eq!(idle.read(0, 1), Ok(vec![0]));
    let told = || server.log().contains("did not take its replies for 400ms");
    assert!(eventually(Duration::from_secs(15), told), "{}", server.log());
    let received = (0..100).take_while(|_| deaf.receive().is_ok()).count();
    assert!(received < 100, "all replies were kept for it");
    assert_eq!(idle.read(0, 1), Ok(vec![0]), "an idle client owes nothing");
    server.stop();
}

#[test]
fn a_client_idle_for_longer_than_it_may_is_disconnected() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let server = Serve::new(&scratch, image.path()).option("--limit", "idle=3s").start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(0, 1), Ok(vec![0]));
    assert!(client.is_closed());
    server.stop();
}

#[test]
fn limits_that_make_no_sense_are_wrong_usage() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    for (limit, words) in [
        ("seats=3", "the keys are clients, memory"),
        ("clients=4,stall", "KEY=VALUE"),
        ("clients=0", "from 1"),
        ("stop=off", "cannot be off"),
    ] {
        let serve = Serve::new(&scratch, image.path()).option("--limit", limit);
        serve.refused().wrong_usage(&[words]);
    }
}

#[test]
fn a_silent_tcp_client_is_asked_within_minutes_whether_it_is_there() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let server = Serve::bare(&scratch, image.path()).export("nbd://127.0.0.1:0/").start();
    let client = Client::open(&server.address());
    let peer = client.socket.peer_addr().expect("it is connected").as_socket().expect("TCP");
    let ours = format!("0100007F:{:04X}", peer.port());
    // proc_net_tcp(5): local address, state 01 (established), timer 02 (keep-alive) and its ticks.
    let timer = || {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel tells");
        table.lines().find_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let is_server = words[1] == ours && words[3] == "01";
            is_server.then(|| words[5].to_owned())
        })
    };
    // Before the connection is idle, its timer is the retransmission timer.
    let is_short = || {
        let timer = timer().expect("the server's end of the connection");
        let ticks = timer.strip_prefix("02:").map(|ticks| u64::from_str_radix(ticks, 16));
        ticks.is_some_and(|ticks| ticks.expect("a number") <= 60 * 100)
    };
    assert!(eventually(Duration::from_secs(10), is_short), "{:?}", timer());
    drop(client);
    server.stop();
}

fn read(offset: u64, length: u64) -> Request {
    Request { command: command::READ, flags: 0, offset, length }
}

fn write(offset: u64, length: u64) -> Request {
    Request { command: command::WRITE, flags: 0, offset, length }
}

#[test]
fn a_bad_magic_number_ends_the_connection() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        client.socket.write_all(&[0x42; 64]).expect("the server listens");
        assert!(client.is_closed());
        server.assert_serves();
    }
    server.stop();
}

#[test]
fn flags_that_were_not_offered_are_invalid_and_the_connection_lives() {
    let scratch = Scratch::new();
    let (server, image) = serve(&scratch);
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        for flags in [1 << 6, 1 << 9, 1 << 15, flag::REQ_ONE] {
            assert_eq!(client.simple(command::READ, 0, 512, flags), errno::EINVAL, "{flags:#x}");
            assert_eq!(client.write(0, &[1; 512], flags), errno::EINVAL, "{flags:#x}");
            assert_eq!(client.simple(command::TRIM, 0, 512, flags), errno::EINVAL, "{flags:#x}");
            assert_eq!(client.simple(command::FLUSH, 0, 0, flags), errno::EINVAL, "{flags:#x}");
        }
        // These flags are offered, but only for other requests.
        assert_eq!(client.write(0, &[1; 512], flag::NO_HOLE), errno::EINVAL);
        assert_eq!(client.write(0, &[1; 512], flag::FAST_ZERO), errno::EINVAL);
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
        client.disconnect();
    }
    server.stop();
    assert_eq!(image.bytes(0, 512), [0; 512], "a refused write was done");
}

#[test]
fn unknown_requests_are_invalid_and_the_connection_lives() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        for number in [8, 9, 1000, u16::MAX] {
            assert_eq!(client.simple(number, 0, 512, 0), errno::EINVAL, "request type {number}");
        }
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
        client.disconnect();
    }
    // Block status without a selected metadata context.
    let mut client = Client::open(&server.address());
    assert_eq!(client.simple(command::BLOCK_STATUS, 0, 512, 0), errno::EINVAL);
    client.disconnect();
    server.stop();
}

#[test]
fn past_the_end_a_write_has_no_space_and_anything_else_is_invalid() {
    let scratch = Scratch::new();
    let (server, image) = serve(&scratch);
    let far = u64::MAX - 511;
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        for offset in [SIZE - 511, SIZE, SIZE + 1, 1 << 40, 1 << 63, far, u64::MAX] {
            assert_eq!(client.write(offset, &[1; 512], 0), errno::ENOSPC, "{offset}");
            assert_eq!(client.write(offset, &[1; 512], flag::FUA), errno::ENOSPC, "{offset}");
            let zeroes = client.simple(command::WRITE_ZEROES, offset, 512, 0);
            assert_eq!(zeroes, errno::ENOSPC, "{offset}");
            assert_eq!(client.read(offset, 512), Err(errno::EINVAL), "{offset}");
            for request in [command::TRIM, command::CACHE] {
                let error = client.simple(request, offset, 512, 0);
                assert_eq!(error, errno::EINVAL, "request type {request} at {offset}");
            }
            if framing != Framing::Simple {
                let error = client.simple(command::BLOCK_STATUS, offset, 512, 0);
                assert_eq!(error, errno::EINVAL, "block status at {offset}");
            }
        }
        assert_eq!(client.read(SIZE - 512, 512), Ok(vec![0; 512]), "the last bytes are there");
        client.disconnect();
    }
    server.stop();
    assert_eq!(std::fs::metadata(image.path()).expect("it is there").len(), SIZE);
}

#[test]
fn a_read_of_4_gib_is_refused_and_the_connection_lives() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        for length in [MAX_LENGTH + 1, u32::MAX.into()] {
            let expected = [errno::EINVAL, errno::EOVERFLOW];
            let error = client.read(0, length).expect_err("nobody announced so much");
            assert!(expected.contains(&error), "{framing:?}: {error}");
        }
        if framing == Framing::Extended {
            assert!(client.read(0, 1 << 62).is_err());
        }
        assert_eq!(client.read(0, MAX_LENGTH).map(|bytes| bytes.len() as u64), Ok(MAX_LENGTH));
        client.disconnect();
    }
    server.assert_serves();
    server.stop();
}

#[test]
fn effects_of_almost_4_gib_need_no_memory() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 8 << 30);
    let server = Serve::new(&scratch, image.path()).start();
    let mut client = Client::open_with(&server.address(), Framing::Structured);
    let length = u64::from(u32::MAX);
    assert_eq!(client.simple(command::TRIM, 1000, length, 0), 0);
    assert_eq!(client.simple(command::WRITE_ZEROES, 1000, length, 0), 0);
    assert_eq!(client.simple(command::CACHE, 0, length, 0), 0);
    let status = Request { command: command::BLOCK_STATUS, flags: 0, offset: 0, length };
    let Reply { error, extents, .. } = client.call(status, &[]);
    assert_eq!(error, 0);
    assert!(!extents.is_empty() && extents.iter().all(|extent| extent.0 > 0), "{extents:?}");
    client.disconnect();
    let mut client = Client::open_with(&server.address(), Framing::Extended);
    assert_eq!(client.simple(command::WRITE_ZEROES, 0, 8 << 30, 0), 0);
    assert_eq!(client.simple(command::TRIM, 0, 8 << 30, 0), 0);
    client.disconnect();
    server.assert_serves();
    server.stop();
}

#[test]
fn a_write_longer_than_announced_ends_that_connection_only() {
    let scratch = Scratch::new();
    let (server, image) = serve(&scratch);
    for length in [MAX_LENGTH + 1, u64::from(u32::MAX)] {
        let mut client = Client::open(&server.address());
        client.send(write(0, length)).expect("the head is taken");
        // The server need not answer, but must not buffer the payload in memory.
        let piece = vec![1; 1 << 20];
        client.socket.set_write_timeout(Some(Duration::from_secs(2))).expect("a deadline");
        for _ in 0..40 {
            if client.socket.write_all(&piece).is_err() {
                break;
            }
        }
        server.assert_serves();
    }
    server.stop();
    assert_eq!(image.bytes(0, 512), [0; 512], "a part of it was written");
}

#[test]
fn requests_for_nothing_are_answered() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        // The protocol does not say whether these fail, but they must be answered.
        let _ = client.read(0, 0);
        let _ = client.write(0, &[], 0);
        for request in [command::TRIM, command::CACHE, command::WRITE_ZEROES] {
            let _ = client.simple(request, 0, 0, 0);
        }
        assert_eq!(client.read(0, 1), Ok(vec![0]));
        client.disconnect();
    }
    server.stop();
}

fn sixty_four_requests_and_a_reset(engine: Engine) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let unix = nbd_uri("", scratch.socket("nbd"));
    let serve = Serve::bare(&scratch, image.path()).engine(engine);
    let server = serve.export("nbd://127.0.0.1:0/").export(&unix).start();
    let unix = blockhouse_tests::nbd::Address::Unix(scratch.socket("nbd"));
    for round in 0..20 {
        let address = if round % 2 == 0 { server.address() } else { unix.clone() };
        let mut client = Client::open_with(&address, Framing::ALL[round % 3]);
        for number in 0..64u64 {
            let offset = number * 70_000;
            let sent = match number % 4 {
                0 | 1 => client.send(read(offset, 65_536)),
                2 => client.send_with(write(offset, 65_536), &[1; 65_536]),
                _ => client.send(Request { command: command::FLUSH, ..Request::default() }),
            };
            sent.expect("64 requests are taken");
        }
        // Every other pair of rounds ends in the middle of a request.
        if round % 4 < 2 {
            client.socket.write_all(&[0x25, 0x60]).expect("two bytes are taken");
        }
        reset(client.socket);
    }
    server.assert_serves();
    server.stop();
}

#[test]
fn a_write_whose_payload_never_comes_changes_nothing() {
    let scratch = Scratch::new();
    let (server, image) = serve(&scratch);
    let mut clients: Vec<_> = (0..40).map(|_| Client::open(&server.address())).collect();
    for client in &mut clients {
        client.send_with(write(1 << 20, MAX_LENGTH), &[7; 3000]).expect("the head is taken");
    }
    server.assert_serves();
    // Half of the clients disconnect, half are still connected when the server stops.
    clients.truncate(20);
    server.assert_serves();
    let start = Instant::now();
    server.stop();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    drop(clients);
    assert_eq!(image.bytes(1 << 20, 8192), [0; 8192], "half a write was done");
}

fn a_client_that_never_reads_is_slowed_down_and_nobody_else(engine: Engine) {
    let scratch = Scratch::new();
    let (server, _image) = serve_on(&scratch, engine);
    let mut greedy = Client::open(&server.address());
    greedy.socket.set_write_timeout(Some(Duration::from_millis(500))).expect("a deadline");
    let mut sent = 0;
    // Requests for 100 GiB of replies: the server must stop taking them.
    let slowed = loop {
        match greedy.send(read(0, 1 << 20)) {
            Ok(_) if sent < 100_000 => sent += 1,
            Ok(_) => break false,
            Err(_) => break true,
        }
    };
    assert!(slowed, "{sent} requests were taken without an answer being read");
    server.assert_serves();
    let mut good = Client::open(&server.address());
    for _ in 0..100 {
        assert_eq!(good.read(0, 4096).map(|bytes| bytes.len()), Ok(4096));
    }
    good.disconnect();
    drop(greedy);
    server.assert_serves();
    server.stop();
}

fn more_in_flight_than_the_server_admits_is_answered_in_the_end(engine: Engine) {
    let scratch = Scratch::new();
    let (server, _image) = serve_on(&scratch, engine);
    let mut client = Client::open(&server.address());
    let count = 2000u64;
    let mut other_end = client.socket.try_clone().expect("a second descriptor");
    // Replies are read while requests are sent, so that back-pressure causes no deadlock.
    let sender = std::thread::spawn(move || {
        for cookie in 1..=count {
            let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
            request.extend(cookie.to_be_bytes());
            request.extend((cookie * 4096).to_be_bytes());
            request.extend(4096u32.to_be_bytes());
            other_end.write_all(&request).expect("the server takes it in the end");
        }
    });
    let mut answered = vec![false; count as usize + 1];
    for _ in 0..count {
        let head: [u8; 16] = receive(&mut client);
        assert_eq!(head[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        let cookie = u64::from_be_bytes(*head[8..].first_chunk().expect("eight bytes"));
        let twice = std::mem::replace(&mut answered[cookie as usize], true);
        assert!(!twice, "request {cookie} is answered twice");
        assert_eq!(receive::<4096>(&mut client), [0; 4096]);
    }
    sender.join().expect("the sender is done");
    client.disconnect();
    server.stop();
}

fn receive<const LENGTH: usize>(client: &mut Client) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    std::io::Read::read_exact(&mut client.socket, &mut bytes).expect("a reply");
    bytes
}

on_every_engine! {
    sixty_four_requests_and_a_reset
    a_client_that_never_reads_is_slowed_down_and_nobody_else
    more_in_flight_than_the_server_admits_is_answered_in_the_end
}

#[test]
fn a_goodbye_is_kept_until_everything_before_it_is_done() {
    let scratch = Scratch::new();
    let (server, image) = serve(&scratch);
    let mut client = Client::open(&server.address());
    for number in 0..32u64 {
        client.send_with(write(number << 20, 1 << 20), &vec![3; 1 << 20]).expect("it is taken");
    }
    client.send(Request { command: command::DISC, ..Request::default() }).expect("it is taken");
    for _ in 0..32 {
        assert_eq!(client.receive().expect("a reply before the end").1.error, 0);
    }
    assert!(client.is_closed());
    assert_eq!(image.bytes(0, 32 << 20), vec![3; 32 << 20]);
    server.stop();
}

#[test]
fn the_last_client_out_does_not_take_the_server_along() {
    let scratch = Scratch::new();
    let (mut server, _image) = serve(&scratch);
    for _ in 0..3 {
        Client::open(&server.address()).disconnect();
        let ended = eventually(Duration::from_millis(100), || !server.is_running());
        assert!(!ended, "the server ended with its client");
    }
    server.stop();
}

#[test]
fn a_client_that_makes_many_errors_does_not_flood_the_log() {
    let scratch = Scratch::new();
    let (server, _image) = serve(&scratch);
    let mut client = Client::open(&server.address());
    for _ in 0..5000 {
        assert_eq!(client.write(SIZE, &[1; 512], 0), errno::ENOSPC);
    }
    client.disconnect();
    let log = server.log();
    assert!(log.lines().count() < 500, "{} lines of log", log.lines().count());
    server.stop();
}
