//! Pauses under load: nothing that a client has sent is lost or done twice, and none of its
//! replies.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_nbd::proto::Framing;
use blockhouse_nbd::proto::request::kind;
use blockhouse_nbd::{Limits, PausedConnection};

use crate::common::{self, Client, FRAMINGS, NONE, Outcome, Rig, on_every_engine, wait_for};

const MIB: usize = 1 << 20;
const TIME: Duration = Duration::from_secs(20);

/// Stops accepting, then pauses.
fn pause(rig: &Rig, time: Duration) -> Result<Vec<PausedConnection>, Vec<String>> {
    let server = rig.server();
    rig.run(move || async move {
        server.pause_accepting(time).await;
        server.pause(time).await
    })
}

/// Requests that a client has in flight, and the bytes of the disk that each has for itself.
const DEPTH: u64 = 16;
const SLOT: u64 = 128 << 10;

/// Writes and reads back at some depth until told to stop, pieces of several sizes at offsets of
/// their own.
fn verify(client: &mut Client, start: u64, is_over: &AtomicBool) {
    let mut expected: HashMap<u64, Vec<u8>> = HashMap::new();
    for round in 0u64.. {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        for slot in 0..DEPTH {
            let length = [512, 4096, 20_000, 120_001][(round + slot) as usize % 4];
            let data = vec![(round * DEPTH + slot) as u8; length];
            client.write(NONE, start + slot * SLOT + round % 7, &data);
            expected.insert(slot, data);
        }
        for _ in 0..DEPTH {
            assert_eq!(client.receive().expect("no end of file").outcome, Outcome::Done);
        }
        let mut asked = HashMap::new();
        for slot in 0..DEPTH {
            let length = expected[&slot].len() as u64;
            let cookie = client.send(kind::READ, NONE, start + slot * SLOT + round % 7, length);
            asked.insert(cookie, slot);
        }
        for _ in 0..DEPTH {
            let reply = client.receive().expect("no end of file");
            let slot = asked[&reply.cookie];
            assert!(reply.outcome == Outcome::Data(expected[&slot].clone()), "slot {slot}");
        }
    }
}

#[test]
fn a_load_goes_on_through_pauses_in_every_framing() {
    on_every_engine(8 * MIB, |rig| {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (index, framing) in (0..).zip(FRAMINGS) {
                let mut client = rig.client(framing);
                let is_over = &is_over;
                scope.spawn(move || verify(&mut client, index * DEPTH * SLOT, is_over));
            }
            let mut unparsed = 0;
            for _ in 0..25 {
                std::thread::sleep(Duration::from_millis(8));
                let paused = pause(rig, TIME).expect("clients take their replies");
                assert_eq!(paused.len(), FRAMINGS.len());
                assert_eq!(rig.storage.running().0, 0, "a request is in flight");
                unparsed += paused.iter().filter(|one| !one.session.received.is_empty()).count();
                rig.server().resume();
            }
            is_over.store(true, Ordering::Relaxed);
            assert_ne!(unparsed, 0, "no pause came in the middle of requests");
        });
    });
}

#[test]
fn a_pause_keeps_half_a_request_and_the_client_sends_the_rest() {
    on_every_engine(MIB, |rig| {
        for framing in FRAMINGS {
            let mut client = rig.client(framing);
            assert!(client.is_served());
            let data: Vec<u8> = (0..50_000).map(|at| at as u8).collect();
            let mut bytes = client.encode(kind::WRITE, NONE, 99, data.len() as u64);
            let header = bytes.len();
            bytes.extend_from_slice(&data);
            let mut sent = 0;
            for part in [header - 5, header + 7, header + 40_000, bytes.len()] {
                client.stream().write_all(&bytes[sent..part]).unwrap();
                sent = part;
                if part < bytes.len() {
                    wait_for("the part to be received", || {
                        let paused = pause(rig, TIME).expect("nothing is in flight");
                        let session = &paused[0].session;
                        assert!(session.is_used && bytes.starts_with(&session.received));
                        rig.server().resume();
                        session.received.len() == part
                    });
                }
            }
            assert_eq!(client.receive().unwrap().outcome, Outcome::Done);
            let read = client.ask(kind::READ, NONE, 99, data.len() as u64);
            assert!(read == Outcome::Data(data));
            client.disconnect();
            wait_for("the connection to be gone", || {
                let gone = pause(rig, TIME).unwrap().is_empty();
                rig.server().resume();
                gone
            });
        }
    });
}

#[test]
fn new_clients_wait_and_handshakes_end() {
    on_every_engine(MIB, |rig| {
        let mut client = rig.client(Framing::Extended);
        assert!(client.is_served());
        let mut half_open = Client::knock(&rig.path);
        let paused = pause(rig, Duration::from_secs(2)).unwrap();
        assert_eq!(paused.len(), 1);
        assert!(matches!(std::io::Read::read(&mut half_open, &mut [0; 64]), Ok(0)));
        std::thread::scope(|scope| {
            let late = scope.spawn(|| rig.client(Framing::Simple).is_served());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!late.is_finished());
            rig.server().resume();
            assert!(late.join().unwrap() && client.is_served());
        });
    });
}

#[test]
fn a_client_that_does_not_take_its_replies_is_named_and_goes_on() {
    common::with_limits(Limits::default(), 40 * MIB, |rig| {
        let mut client = rig.client(Framing::Simple);
        for _ in 0..4 {
            client.send(kind::READ, NONE, 0, 8 * MIB as u64);
        }
        let busy = pause(&rig, Duration::from_millis(200)).unwrap_err();
        assert!(busy[0].starts_with("process "), "{busy:?}");
        rig.server().resume();
        for _ in 0..4 {
            assert!(client.receive().unwrap().outcome == Outcome::Data(vec![0; 8 * MIB]));
        }
        assert!(client.is_served());
    });
}
