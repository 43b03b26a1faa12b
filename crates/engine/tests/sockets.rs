//! Sockets under load and in their corner cases, on every engine.

mod common;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{Stream, sleep, spawn};
use common::on_every_engine;

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
            let before = cpu_time();
            sleep(Duration::from_millis(300)).await;
            let spent = cpu_time() - before;
            std::thread::spawn(move || {
                let mut bytes = vec![0; 4 << 20];
                theirs.read_exact(&mut bytes).unwrap();
            });
            send.await.unwrap();
            spent
        });
        assert!(spent < Duration::from_millis(30), "{spent:?} of work in 300 ms of waiting");
    });
}
