//! Clients that break the handshake, by mistake or on purpose: they get a reply of the protocol or
//! are disconnected, and the server continues to serve all others in bounded memory.

use std::io::{Read, Write};
use std::time::Duration;

use blockhouse_tests::nbd::{
    Client, Framing, Greeted, OptionReply, connect, go_data, option, reply, reset,
};
use blockhouse_tests::{Scratch, Serve, Server, random_bytes, seeded};
use rustix::process::Signal;

fn serve(scratch: &Scratch) -> Server {
    let image = scratch.image("disk.img", 1 << 20);
    Serve::new(scratch, image.path()).start()
}

fn greeted(server: &Server) -> Greeted {
    Greeted::new(&server.address())
}

/// Waits until the server closes the connection, whatever it sends before.
#[track_caller]
fn assert_dropped(mut greeted: Greeted) {
    let mut sink = [0; 4096];
    loop {
        match greeted.0.read(&mut sink) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the server keeps such a client: {error}"),
        }
    }
}

#[test]
fn unknown_options_are_answered_unsupported_and_the_handshake_goes_on() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    for number in [0, 4, 12, 1000, 0x8000_0000, u32::MAX] {
        assert_eq!(client.outcome(number, &[]), reply::ERR_UNSUP, "option {number}");
        let data = [0xa5; 3000];
        assert_eq!(client.outcome(number, &data), reply::ERR_UNSUP, "option {number}");
    }
    let mut client = client.go("", Framing::Extended);
    assert_eq!(client.read(0, 4), Ok(vec![0; 4]));
    client.disconnect();
    server.assert_serves();
    server.stop();
}

#[test]
fn a_long_unknown_option_is_passed_over() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    assert_eq!(client.outcome(77, &vec![1; 4 << 20]), reply::ERR_UNSUP);
    server.assert_serves();
    drop(client);
    server.stop();
}

#[test]
fn an_option_of_4_gib_ends_the_connection_or_waits_for_it_in_little_memory() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    for number in [option::GO, option::LIST, option::SET_META_CONTEXT, option::EXPORT_NAME, 99] {
        let mut client = greeted(&server);
        client.send_head(number, u32::MAX).expect("the head is taken");
        // Sends enough data to see that the server does not store it; the server may close the
        // connection at any time.
        let piece = vec![0; 1 << 20];
        for _ in 0..64 {
            if client.0.write_all(&piece).is_err() {
                break;
            }
        }
        server.assert_serves();
    }
    server.stop();
}

#[test]
fn option_data_that_lies_about_itself_is_invalid() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    let long = u32::MAX.to_be_bytes();
    let cases: [(&str, &[u8]); 6] = [
        ("nothing", &[]),
        ("a name longer than the data", &[&long[..], b"disk\0\0"].concat()),
        ("no count after the name", &[0, 0, 0, 0]),
        ("more requests than there are", &[0, 0, 0, 0, 0xff, 0xff]),
        ("half a request", &[0, 0, 0, 0, 0, 1, 0]),
        ("bytes behind the end", &[0, 0, 0, 0, 0, 0, 1, 2, 3]),
    ];
    for (what, data) in cases {
        for number in [option::INFO, option::GO] {
            assert_eq!(client.outcome(number, data), reply::ERR_INVALID, "{what}");
        }
    }
    assert_eq!(client.outcome(option::LIST, b"data"), reply::ERR_INVALID);
    assert_eq!(client.outcome(option::STRUCTURED_REPLY, b"data"), reply::ERR_INVALID);
    assert_eq!(client.outcome(option::STRUCTURED_REPLY, &[]), reply::ACK);
    let queries = [&[0, 0, 0, 0][..], &long, b"base:allocation"].concat();
    assert_eq!(client.outcome(option::SET_META_CONTEXT, &queries), reply::ERR_INVALID);
    assert_eq!(client.outcome(option::LIST_META_CONTEXT, &queries), reply::ERR_INVALID);
    client.go("", Framing::Simple).disconnect();
    server.assert_serves();
    server.stop();
}

#[test]
fn names_that_cannot_be_are_refused() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    for name in ["x".repeat(4096), "x".repeat(5000), "x".repeat(200_000), "a\0b".into()] {
        let outcome = client.outcome(option::GO, &go_data(&name));
        assert!(outcome >= 1 << 31, "{} bytes: {outcome:#x}", name.len());
    }
    let not_utf8 = [&[0, 0, 0, 2, 0xff, 0xfe][..], &[0, 0]].concat();
    assert!(client.outcome(option::GO, &not_utf8) >= 1 << 31);
    client.go("", Framing::Simple).disconnect();
    server.stop();
}

#[test]
fn tls_is_not_pretended() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    assert!(client.outcome(option::STARTTLS, &[]) >= 1 << 31);
    client.go("", Framing::Simple).disconnect();
    server.stop();
}

#[test]
fn an_abort_is_acknowledged() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    let acknowledged = OptionReply { kind: reply::ACK, data: Vec::new() };
    assert_eq!(client.option(option::ABORT, &[]), [acknowledged]);
    assert_dropped(client);
    server.stop();
}

#[test]
fn the_export_name_option_of_old_clients_works() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    client.send_head(option::EXPORT_NAME, 0).expect("the option is taken");
    let mut answer = [0; 10];
    client.0.read_exact(&mut answer).expect("size and flags, without padding");
    assert_eq!(answer[..8], (1u64 << 20).to_be_bytes());
    assert_eq!(answer[9] & 1, 1, "the flags say that there are flags");
    drop(client);
    let mut client = greeted(&server);
    client.send_head(option::EXPORT_NAME, 6).expect("the option is taken");
    client.0.write_all(b"absent").expect("the name is taken");
    assert_dropped(client);
    server.assert_serves();
    server.stop();
}

#[test]
fn a_client_that_hangs_up_at_any_byte_of_its_handshake_leaves_no_trace() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let structured = [&b"IHAVEOPT"[..], &option::STRUCTURED_REPLY.to_be_bytes(), &[0; 4]].concat();
    let go = go_data("");
    let length = (go.len() as u32).to_be_bytes();
    let go = [&b"IHAVEOPT"[..], &option::GO.to_be_bytes(), &length, &go].concat();
    let script = [&3u32.to_be_bytes()[..], &structured, &go].concat();
    for length in 0..=script.len() {
        let mut socket = connect(&server.address());
        socket.write_all(&script[..length]).expect("the server listens");
        if length % 2 == 0 { reset(socket) } else { drop(socket) }
    }
    server.assert_serves();
    server.stop();
}

#[test]
fn noise_instead_of_a_handshake_is_dropped() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut random = seeded();
    for _ in 0..50 {
        let mut client = Greeted(connect(&server.address()));
        let length = random.usize(4..5000);
        let mut noise = random_bytes(&mut random, length);
        // Makes the client flags, or the magic number, invalid.
        noise[0] |= 0x80;
        // The server may close the connection before all is sent.
        let _ = client.0.write_all(&noise);
        assert_dropped(client);
    }
    for request in [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], b"\x16\x03\x01\x02\x00\x01"]
    {
        let mut client = Greeted(connect(&server.address()));
        let _ = client.0.write_all(request);
        let _ = client.0.shutdown(std::net::Shutdown::Write);
        assert_dropped(client);
    }
    server.assert_serves();
    server.stop();
}

#[test]
fn an_option_without_its_magic_number_ends_the_connection() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    client.0.write_all(b"IHAVEOPS\0\0\0\x03\0\0\0\0").expect("the server listens");
    assert_dropped(client);
    server.assert_serves();
    server.stop();
}

#[test]
fn a_client_that_lists_without_reading_is_no_burden() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut client = greeted(&server);
    client.0.set_write_timeout(Some(Duration::from_millis(300))).expect("a deadline");
    let list = [&b"IHAVEOPT"[..], &option::LIST.to_be_bytes(), &[0; 4]].concat().repeat(1000);
    for _ in 0..1000 {
        // The server either stops reading, or closes the connection.
        if client.0.write_all(&list).is_err() {
            break;
        }
    }
    server.assert_serves();
    drop(client);
    server.assert_serves();
    server.stop();
}

/// Two hundred connections in every stage of the handshake, while one client works.
#[test]
fn two_hundred_half_open_connections_do_not_stop_others() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut working = Client::open(&server.address());
    let mut silent = Vec::new();
    let mut greeted = Vec::new();
    let mut halfway = Vec::new();
    for number in 0..200u64 {
        match number % 3 {
            0 => silent.push(connect(&server.address())),
            1 => greeted.push(self::greeted(&server)),
            _ => {
                let mut client = self::greeted(&server);
                client.send_head(option::GO, 6).expect("the head is taken");
                halfway.push(client);
            }
        }
        assert_eq!(working.write(number * 100, &[1; 100], 0), 0);
    }
    assert_eq!(working.read(0, 20_000), Ok(vec![1; 20_000]));
    server.assert_serves();
    drop((silent, greeted, halfway));
    server.assert_serves();
    working.disconnect();
    server.stop();
}

#[test]
fn a_flood_of_bad_handshakes_is_a_few_lines_and_a_count() {
    const CLIENTS: u64 = 300;
    let scratch = Scratch::new();
    let mut server = serve(&scratch);
    for _ in 0..CLIENTS {
        let mut client = greeted(&server);
        assert_eq!(client.outcome(option::GO, &go_data("missing")), reply::ERR_UNKNOWN);
    }
    server.signal(Signal::TERM);
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
    let log = server.log();
    let counts = log.lines().filter(|line| line.contains("no export is called")).map(|line| {
        let words = line.split_once("WARN ").and_then(|(_, rest)| rest.split_once(" more lines"));
        match words {
            Some((count, _)) => count.parse::<u64>().expect("a count"),
            None => 1,
        }
    });
    assert_eq!(counts.sum::<u64>(), CLIENTS, "{log}");
    // Ten lines in ten seconds, and more on a slow machine.
    assert!(log.lines().count() < 60, "{log}");
}
