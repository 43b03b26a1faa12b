//! The transmission phase over real sockets: what is asked is done, and what is wrong is answered.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use blockhouse_core::{Allocation, ByteRange};
use blockhouse_nbd::Limits;
use blockhouse_nbd::proto::request::kind;
use blockhouse_nbd::proto::{CommandFlags, Errno, Framing, MAX_PAYLOAD};

use crate::common::storage::status;
use crate::common::{Client, FRAMINGS, NONE, Outcome, Rig, on_every_engine, random, wait_for};

const MIB: usize = 1 << 20;

fn error(errno: Errno) -> Outcome {
    Outcome::Error(errno as u32)
}

/// Bytes that differ from place to place.
fn pattern(length: usize, salt: u8) -> Vec<u8> {
    (0..length).map(|i| (i / 7) as u8 ^ (i / 1021) as u8 ^ salt).collect()
}

#[test]
fn what_was_written_is_read_in_every_framing_and_size() {
    on_every_engine(40 * MIB, |rig| {
        for framing in FRAMINGS {
            let mut client = rig.client(framing);
            assert_eq!(client.size(), 40 * MIB as u64);
            // Around the limits: of the staging memory, of "long", of a socket's memory.
            for (salt, length) in
                [1, 511, 4096, 4097, 32 << 10, 100_000, 128 << 10, MIB + 1, 32 * MIB]
                    .into_iter()
                    .enumerate()
            {
                let data = pattern(length, salt as u8);
                assert_eq!(client.store(77, &data), Outcome::Done);
                let read = client.ask(kind::READ, NONE, 77, length as u64);
                assert!(read == Outcome::Data(data), "{length} bytes, {framing:?}");
            }
            client.disconnect();
        }
    });
}

#[test]
fn offsets_beyond_the_export_have_the_errors_of_their_command() {
    on_every_engine(MIB, |rig| {
        let end = MIB as u64;
        for framing in FRAMINGS {
            let mut client = rig.client(framing);
            for offset in [end, end - 511, u64::MAX - 511, u64::MAX - 4096] {
                assert_eq!(client.ask(kind::READ, NONE, offset, 512), error(Errno::Inval));
                assert_eq!(client.ask(kind::TRIM, NONE, offset, 512), error(Errno::Inval));
                assert_eq!(client.ask(kind::CACHE, NONE, offset, 512), error(Errno::Inval));
                assert_eq!(client.ask(kind::WRITE_ZEROES, NONE, offset, 512), error(Errno::NoSpc));
                assert_eq!(client.store(offset, &[1; 512]), error(Errno::NoSpc));
                if framing.has_chunks() {
                    let status = client.ask(kind::BLOCK_STATUS, NONE, offset, 512);
                    assert_eq!(status, error(Errno::Inval));
                }
            }
            assert_eq!(client.store(end - 512, &[1; 512]), Outcome::Done);
        }
    });
}

#[test]
fn a_read_only_export_refuses_every_change() {
    on_every_engine(MIB, |rig| {
        let mut client = Client::connect(&rig.path, Framing::Structured, "frozen");
        assert_eq!(client.flags() & 0b10, 0b10);
        assert_eq!(client.store(0, &[1; 512]), error(Errno::Perm));
        assert_eq!(client.ask(kind::TRIM, NONE, 0, 512), error(Errno::Perm));
        assert_eq!(client.ask(kind::WRITE_ZEROES, NONE, 0, 512), error(Errno::Perm));
        assert_eq!(client.ask(kind::FLUSH, NONE, 0, 0), Outcome::Done);
        assert_eq!(client.ask(kind::READ, NONE, 0, 3), Outcome::Data(vec![0; 3]));
    });
}

#[test]
fn requests_for_no_bytes_do_nothing_and_succeed() {
    on_every_engine(MIB, |rig| {
        for framing in FRAMINGS {
            let mut client = rig.client(framing);
            for kind in [kind::READ, kind::TRIM, kind::CACHE, kind::WRITE_ZEROES] {
                let outcome = client.ask(kind, NONE, 512, 0);
                let empty = outcome == Outcome::Data(Vec::new());
                assert!(outcome == Outcome::Done || empty, "{outcome:?}");
            }
            assert_eq!(client.store(512, &[]), Outcome::Done);
            assert_eq!(client.ask(kind::BLOCK_STATUS, NONE, 0, 0), error(Errno::Inval));
        }
    });
}

#[test]
fn what_was_not_offered_is_refused_and_the_payload_passed_over() {
    on_every_engine(MIB, |rig| {
        let mut client = rig.client(Framing::Simple);
        assert_eq!(client.ask(kind::READ, CommandFlags::DF, 0, 512), error(Errno::Inval));
        assert_eq!(client.ask(kind::BLOCK_STATUS, NONE, 0, 512), error(Errno::Inval));
        assert_eq!(client.ask(9, NONE, 0, 512), error(Errno::Inval));
        // Neither fits into the staging memory, so they are passed over in pieces.
        for length in [5, 512, 300_000] {
            let cookie = client.write(CommandFlags::FAST_ZERO, 0, &pattern(length, 1));
            let reply = client.receive().unwrap();
            assert_eq!((reply.cookie, reply.outcome), (cookie, error(Errno::Inval)));
        }
        assert_eq!(client.ask(kind::READ, NONE, 0, 2), Outcome::Data(vec![0; 2]));
        let mut client = rig.client(Framing::Extended);
        let mut bytes = client.encode(kind::TRIM, CommandFlags::PAYLOAD_LEN, 0, 100_000);
        bytes.extend(pattern(100_000, 2));
        client.stream().write_all(&bytes).unwrap();
        assert_eq!(client.receive().unwrap().outcome, error(Errno::Inval));
        assert!(client.is_served());
    });
}

#[test]
fn a_read_beyond_the_maximum_fails_and_a_write_ends_the_connection() {
    on_every_engine(MIB, |rig| {
        let long = u64::from(MAX_PAYLOAD) + 1;
        for (framing, errno) in [
            (Framing::Simple, Errno::Inval),
            (Framing::Structured, Errno::Overflow),
            (Framing::Extended, Errno::Overflow),
        ] {
            let mut client = rig.client(framing);
            assert_eq!(client.ask(kind::READ, NONE, 0, long), error(errno));
            assert!(client.is_served());
            client.send(kind::WRITE, NONE, 0, 0xffff_ffff);
            assert!(client.receive().is_err());
        }
        assert!(rig.client(Framing::Simple).is_served());
    });
}

#[test]
fn a_failing_request_fails_alone() {
    on_every_engine(MIB, |rig| {
        for (code, errno) in [(5, Errno::Io), (28, Errno::NoSpc), (122, Errno::NoSpc)] {
            rig.storage.fail(ByteRange::between(65536, 69632), code);
            for framing in FRAMINGS {
                let mut client = rig.client(framing);
                let mut expected = HashMap::new();
                for block in 0..32u64 {
                    let cookie = client.send(kind::READ, NONE, block * 4096, 4096);
                    expected.insert(cookie, block == 16);
                    let cookie = client.write(NONE, block * 4096, &[0; 4096]);
                    expected.insert(cookie, block == 16);
                }
                for _ in 0..64 {
                    let reply = client.receive().unwrap();
                    let fails = expected.remove(&reply.cookie).unwrap();
                    assert_eq!(reply.outcome == error(errno), fails, "{:?}", reply.outcome);
                }
            }
        }
    });
}

#[test]
fn block_status_tells_holes_from_data() {
    on_every_engine(4 * MIB, |rig| {
        let mut client = rig.client(Framing::Simple);
        for at in [4096, 8192, 3 * MIB] {
            client.store(at as u64, &[1; 4096]);
        }
        for framing in [Framing::Structured, Framing::Extended] {
            let mut client = rig.client(framing);
            let all = client.ask(kind::BLOCK_STATUS, NONE, 0, 4 * MIB as u64);
            let (rest, end) = (3 * MIB as u64 - 12288, MIB as u64 - 4096);
            let expected = vec![(4096, 3), (8192, 0), (rest, 3), (4096, 0), (end, 3)];
            assert_eq!(all, Outcome::Status(expected));
            let one = client.ask(kind::BLOCK_STATUS, CommandFlags::REQ_ONE, 5000, 10_000);
            assert_eq!(one, Outcome::Status(vec![(12288 - 5000, 0)]));
        }
    });
}

/// The payload of a BLOCK_STATUS: the bytes to describe, and contexts.
fn selection(length: u64, ids: &[u32]) -> Vec<u8> {
    let ids = ids.iter().flat_map(|id| id.to_be_bytes());
    length.to_be_bytes().into_iter().chain(ids).collect()
}

#[test]
fn block_status_of_selected_contexts_is_told_by_a_payload() {
    const OFFERED: u16 = 1 << 12;
    on_every_engine(4 * MIB, |rig| {
        assert_eq!(rig.client(Framing::Structured).flags() & OFFERED, 0);
        let mut client = rig.client(Framing::Extended);
        assert_eq!(client.flags() & OFFERED, OFFERED);
        client.store(4096, &[1; 4096]);
        let mut ask = |flags, offset, payload: &[u8]| {
            let flags = flags | CommandFlags::PAYLOAD_LEN;
            let mut bytes = client.encode(kind::BLOCK_STATUS, flags, offset, payload.len() as u64);
            bytes.extend_from_slice(payload);
            // In two pieces: the payload comes after its header.
            let (first, rest) = bytes.split_at(bytes.len().min(35));
            client.stream().write_all(first).unwrap();
            client.stream().write_all(rest).unwrap();
            client.receive().unwrap().outcome
        };
        let all = ask(NONE, 0, &selection(16384, &[1]));
        assert_eq!(all, Outcome::Status(vec![(4096, 3), (4096, 0), (8192, 3)]));
        let one = ask(CommandFlags::REQ_ONE, 5000, &selection(16384, &[1]));
        assert_eq!(one, Outcome::Status(vec![(3192, 0)]));
        for refused in [
            selection(16384, &[]),
            selection(16384, &[2]),
            selection(16384, &[1, 1]),
            selection(0, &[1]),
            selection(5 * MIB as u64, &[1]),
            selection(u64::MAX, &[1]),
            vec![],
            vec![0; 11],
            vec![0; 300_000],
        ] {
            assert_eq!(ask(NONE, 5000, &refused), error(Errno::Inval), "{} bytes", refused.len());
        }
        assert!(client.is_served());
    });
}

#[test]
fn block_status_of_many_extents_comes_in_parts() {
    on_every_engine(32 * MIB, |rig| {
        let mut client = rig.client(Framing::Extended);
        for block in (0..8192).step_by(2) {
            client.write(NONE, block * 4096, &[1; 1]);
            client.receive().unwrap();
        }
        let bytes = rig.storage.content();
        let (mut at, mut parts) = (0, 0);
        while at < bytes.len() as u64 {
            let rest = bytes.len() as u64 - at;
            let outcome = client.ask(kind::BLOCK_STATUS, NONE, at, rest);
            let Outcome::Status(extents) = outcome else { panic!("{outcome:?}") };
            for (length, flags) in extents {
                let range = ByteRange::new(at, bytes.len() as u64 - at).unwrap();
                let (expected, full) = status(&bytes, range);
                assert_eq!((length, flags == 3), (full, expected == Allocation::Hole));
                at += length;
            }
            parts += 1;
        }
        assert!(parts > 4, "{parts} replies for 8192 extents");
    });
}

#[test]
fn a_flush_is_one_flush_and_covers_what_was_replied_to() {
    on_every_engine(MIB, |rig| {
        let (mut writer, mut flusher) =
            (rig.client(Framing::Extended), rig.client(Framing::Simple));
        assert_eq!(writer.flags() & 0x100, 0x100, "several connections are allowed");
        let before = rig.storage.flushes();
        writer.store(0, &[1; 512]);
        assert_eq!(flusher.ask(kind::FLUSH, NONE, 0, 0), Outcome::Done);
        assert_eq!(rig.storage.flushes(), before + 1);
    });
}

#[test]
fn disconnecting_finishes_what_is_outstanding() {
    on_every_engine(MIB, |rig| {
        rig.storage.delay(Duration::from_millis(20));
        let mut client = rig.client(Framing::Structured);
        for block in 0..50 {
            client.write(NONE, block * 4096, &[9; 4096]);
        }
        client.send(kind::DISC, NONE, 0, 0);
        for _ in 0..50 {
            assert_eq!(client.receive().unwrap().outcome, Outcome::Done);
        }
        assert_eq!(client.stream().read(&mut [0]).unwrap(), 0, "then the server closes");
        assert!(rig.storage.content()[..50 * 4096].iter().all(|&byte| byte == 9));
    });
}

#[test]
fn a_client_that_closes_its_half_still_gets_its_replies() {
    on_every_engine(MIB, |rig| {
        rig.storage.delay(Duration::from_millis(20));
        let mut client = rig.client(Framing::Simple);
        for block in 0..20 {
            client.send(kind::READ, NONE, block * 4096, 4096);
        }
        client.stream().shutdown(Shutdown::Write).unwrap();
        for _ in 0..20 {
            assert_eq!(client.receive().unwrap().outcome, Outcome::Data(vec![0; 4096]));
        }
        assert!(client.receive().is_err());
    });
}

#[test]
fn a_reset_with_64_requests_under_way_hurts_nobody() {
    on_every_engine(MIB, |rig| {
        let mut other = rig.client(Framing::Extended);
        rig.storage.delay(Duration::from_millis(30));
        for round in 0..10 {
            let mut client = rig.client(FRAMINGS[round % 3]);
            for block in 0..64 {
                match block % 2 {
                    0 => client.send(kind::READ, NONE, block * 4096, 16384),
                    _ => client.write(NONE, block * 4096, &[3; 4096]),
                };
            }
            // In the middle of a request, and with replies that are never read.
            let cut = client.encode(kind::READ, NONE, 0, 1);
            client.stream().write_all(&cut[..17]).unwrap();
            drop(client);
            assert!(other.is_served());
        }
        rig.settle();
        assert!(other.is_served());
    });
}

#[test]
fn nonsense_ends_that_connection_only() {
    on_every_engine(MIB, |rig| {
        rig.storage.delay(Duration::from_millis(10));
        let mut other = rig.client(Framing::Structured);
        for framing in FRAMINGS {
            let mut client = rig.client(framing);
            client.send(kind::READ, NONE, 0, 512);
            client.stream().write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            while client.receive().is_ok() {}
            assert!(other.is_served());
        }
    });
}

#[test]
fn a_client_that_does_not_read_is_made_to_wait() {
    on_every_engine(MIB, |rig| {
        let mut client = rig.client(Framing::Simple);
        rig.storage.delay(Duration::from_millis(5));
        // Far more than may be in flight; the rest stays in the socket.
        let requests: Vec<u8> =
            (0..1000).flat_map(|_| client.encode(kind::READ, NONE, 0, 65536)).collect();
        let mut stream = client.stream().try_clone().unwrap();
        let sender = std::thread::spawn(move || stream.write_all(&requests).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        let mut most = 0;
        wait_for("all that was let in to be done, and to wait to be sent", || {
            let (running, so_far) = rig.storage.running();
            most = so_far;
            running == 0 && most > 0
        });
        assert!(most <= Limits::default().requests, "{most} at once");
        for _ in 0..1000 {
            assert_eq!(client.receive().unwrap().outcome, Outcome::Data(vec![0; 65536]));
        }
        sender.join().unwrap();
    });
}

#[test]
fn payloads_in_flight_are_bounded() {
    for engine in crate::common::ENGINES {
        let limits = Limits { bytes: 3 * MIB, ..Limits::default() };
        let Some(rig) = Rig::start(engine, limits, 8 * MIB) else { continue };
        rig.storage.delay(Duration::from_millis(10));
        let mut client = rig.client(Framing::Extended);
        for _ in 0..12 {
            client.send(kind::READ, NONE, 0, MIB as u64);
        }
        for _ in 0..12 {
            assert!(matches!(client.receive().unwrap().outcome, Outcome::Data(_)));
        }
        let (_, most) = rig.storage.running();
        assert_eq!(most, 3, "requests of 1 MiB at once");
        // One request is let in even if it is larger than all that.
        assert!(matches!(client.ask(kind::READ, NONE, 0, 8 * MIB as u64), Outcome::Data(_)));
    }
}

#[test]
fn payloads_in_flight_on_all_connections_are_bounded() {
    for engine in crate::common::ENGINES {
        let limits = Limits { bytes_of_all: 3 * MIB, ..Limits::default() };
        let Some(rig) = Rig::start(engine, limits, 8 * MIB) else { continue };
        rig.storage.delay(Duration::from_millis(10));
        // It takes all there is, and more, and never goes on.
        let mut stuck = rig.client(Framing::Simple);
        stuck.send(kind::WRITE, NONE, 0, 8 * MIB as u64);
        let mut clients = [(); 2].map(|()| rig.client(Framing::Extended));
        for client in &mut clients {
            for _ in 0..12 {
                client.send(kind::READ, NONE, 0, MIB as u64);
            }
        }
        for client in &mut clients {
            for _ in 0..12 {
                assert!(matches!(client.receive().unwrap().outcome, Outcome::Data(_)));
            }
        }
        let (_, most) = rig.storage.running();
        assert!(most <= 3 + 1, "{most} requests of 1 MiB at once");
    }
}

/// How many bytes of the disk belong to one client of the random test.
const PART: usize = 2 * MIB;

/// Random requests, many at once, over several connections with a part of the disk each, cut into
/// random pieces on their way, against a model of the bytes.
#[test]
fn random_requests_do_what_a_model_says() {
    let seeds = random("random_requests_do_what_a_model_says");
    on_every_engine(FRAMINGS.len() * PART, |rig| {
        let mut random = seeds.clone();
        rig.storage.delay(Duration::from_micros(random.u64(..2) * 300));
        std::thread::scope(|scope| {
            for (index, framing) in FRAMINGS.into_iter().enumerate() {
                let mut random = random.fork();
                let mut client = rig.client(framing);
                scope.spawn(move || {
                    let mut model = vec![0; PART];
                    for _ in 0..30 {
                        batch(&mut client, index * PART, &mut model, &mut random);
                    }
                    client.disconnect();
                });
            }
        });
    });
}

/// One batch: up to 16 requests with a slot of the part each, so that their order does not matter.
fn batch(client: &mut Client, start: usize, model: &mut [u8], random: &mut fastrand::Rng) {
    const SLOT: usize = PART / 16;
    let mut bytes = Vec::new();
    let mut expected = HashMap::new();
    for slot in 0..random.usize(1..=16) {
        let from = slot * SLOT + random.usize(..SLOT);
        let end = from + 1 + random.usize(..(slot + 1) * SLOT - from);
        let (offset, length) = ((start + from) as u64, (end - from) as u64);
        let part = &mut model[from..end];
        let (cookie, outcome) = match random.u8(..4) {
            0 => {
                let cookie = push(&mut bytes, client, kind::READ, NONE, offset, length);
                (cookie, Outcome::Data(part.to_vec()))
            }
            1 => {
                let flags = [NONE, CommandFlags::FUA, CommandFlags::NO_HOLE][random.usize(..3)];
                part.fill(0);
                (push(&mut bytes, client, kind::WRITE_ZEROES, flags, offset, length), Outcome::Done)
            }
            _ => {
                part.copy_from_slice(&pattern(part.len(), random.u8(..)));
                let extended = client.framing() == lab_nbd::Framing::Extended;
                let payload = if extended { CommandFlags::PAYLOAD_LEN } else { NONE };
                let cookie = push(&mut bytes, client, kind::WRITE, payload, offset, length);
                bytes.extend_from_slice(part);
                (cookie, Outcome::Done)
            }
        };
        expected.insert(cookie, outcome);
    }
    let mut stream = client.stream().try_clone().unwrap();
    let mut pieces = random.fork();
    let sender = std::thread::spawn(move || {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(1 + pieces.usize(..40_000)));
            stream.write_all(piece).unwrap();
            rest = later;
        }
    });
    while !expected.is_empty() {
        let reply = client.receive().unwrap();
        let outcome = expected.remove(&reply.cookie).expect("a reply to a request of this batch");
        assert!(reply.outcome == outcome, "at {start}");
    }
    sender.join().unwrap();
}

/// Appends a request; its cookie.
fn push(
    bytes: &mut Vec<u8>,
    client: &mut Client,
    kind: u16,
    flags: CommandFlags,
    offset: u64,
    length: u64,
) -> u64 {
    let request = client.encode(kind, flags, offset, length);
    bytes.extend_from_slice(&request);
    u64::from_be_bytes(request[8..16].try_into().unwrap())
}
