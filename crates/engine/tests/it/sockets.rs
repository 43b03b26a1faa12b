//! Sockets under load and in their corner cases, on every engine.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{EventLoop, Stream, sleep, spawn};
use fastrand::Rng;

use crate::common::memory::Memory;
use crate::common::seeds::for_seeds;
use crate::common::{for_every_choice, in_time, on_every_engine};

fn list_of(buffer: &mut Buffer) -> IoVectorList {
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    list
}

/// How long this thread has run so far.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// The peer will send no more and does not read yet: the loop has nothing to do but to wait.
#[test]
fn a_send_to_a_peer_that_closed_its_half_waits_without_spinning() {
    const LEAST: Duration = Duration::from_millis(30);
    on_every_engine(|event_loop| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let spent = event_loop.block_on(async move {
            let stream = Stream::new(ours.into()).unwrap();
            let send = spawn(async move {
                let mut buffer = Buffer::new(4 << 20);
                stream.send(list_of(&mut buffer)).await.0
            });
            sleep(Duration::from_millis(20)).await;
            // A busy machine adds time to some of the waits; a loop that spins does so in each.
            let mut spent = Duration::MAX;
            for _ in 0..5 {
                let before = cpu_time();
                sleep(Duration::from_millis(300)).await;
                spent = spent.min(cpu_time() - before);
                if spent < LEAST {
                    break;
                }
            }
            std::thread::spawn(move || {
                let mut bytes = vec![0; 4 << 20];
                theirs.read_exact(&mut bytes).unwrap();
            });
            send.await.unwrap();
            spent
        });
        assert!(spent < LEAST, "{spent:?} of work in 300 ms of waiting");
    });
}

/// The byte at a place of a stream: none stands at the same distance from others twice.
fn byte_at(stream: u64, place: u64) -> u8 {
    let mixed = (place ^ stream << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

async fn send_all(stream: Stream, name: u64, mut rng: Rng) {
    let mut place = 0;
    while place < STRESS_BYTES {
        let mut list = IoVectorList::new();
        for _ in 0..rng.usize(1..6) {
            let length = rng.u64(1..=20_000).min(STRESS_BYTES - place);
            let bytes: Vec<u8> = (place..place + length).map(|at| byte_at(name, at)).collect();
            place += length;
            if length > 0 {
                list.push(Memory::with(&bytes).vector(rng.usize(100..5000)));
            }
        }
        let (result, list) = stream.send(list).await;
        result.unwrap();
        assert!(list.is_empty(), "a send that succeeded has sent everything");
        if rng.u8(..8) == 0 {
            sleep(Duration::from_micros(rng.u64(..500))).await;
        }
    }
}

async fn receive_all(stream: Stream, name: u64, mut rng: Rng) {
    let mut place = 0;
    while place < STRESS_BYTES {
        let memory = Memory::new(rng.usize(1..30_000));
        let mut list = IoVectorList::new();
        list.push(memory.vector(rng.usize(100..5000)));
        let (result, list) = stream.receive(list).await;
        drop(list);
        let count = result.unwrap();
        assert!(count > 0, "the stream {name} ended after {place} bytes");
        for &byte in &memory.bytes()[..count] {
            assert_eq!(byte, byte_at(name, place), "byte {place} of stream {name}");
            place += 1;
        }
        if rng.u8(..8) == 0 {
            sleep(Duration::from_micros(rng.u64(..500))).await;
        }
    }
}

const STRESS_BYTES: u64 = 400_000;

/// Two connected sockets with room for little, of one kind or the other.
fn pair(index: u64) -> (Stream, Stream) {
    let (one, other): (OwnedFd, OwnedFd) = if index.is_multiple_of(2) {
        let (one, other) = UnixStream::pair().unwrap();
        (one.into(), other.into())
    } else {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one.into(), listener.accept().unwrap().0.into())
    };
    for socket in [&one, &other] {
        rustix::net::sockopt::set_socket_send_buffer_size(socket, 8192).unwrap();
    }
    (Stream::new(one).unwrap(), Stream::new(other).unwrap())
}

/// Both ends of many connections are on one loop, and all send and receive at the same time, more
/// than the sockets hold.
#[test]
fn many_connections_carry_every_byte_both_ways() {
    for_every_choice(|choice| {
        for_seeds("sockets", "many_connections_carry_every_byte_both_ways", 2, |rng| {
            let mut rng = rng.fork();
            in_time(move || {
                EventLoop::new(choice).unwrap().block_on(async {
                    let mut tasks = Vec::new();
                    for index in 0..6 {
                        let (one, other) = pair(index);
                        for (name, from, to) in
                            [(2 * index, one.clone(), other.clone()), (2 * index + 1, other, one)]
                        {
                            tasks.push(spawn(send_all(from, name, rng.fork())));
                            tasks.push(spawn(receive_all(to, name, rng.fork())));
                        }
                    }
                    for task in tasks {
                        task.await;
                    }
                });
            });
        });
    });
}
