//! A client that fills a disk.

use std::time::Instant;

use super::{Load, Seen};
use crate::nbd::{Client, Request, command, pattern};

/// Writes in flight.
const DEPTH: usize = 16;
/// Bytes of a write: a cluster.
const BLOCK: u64 = 64 << 10;
/// One in this many blocks is read after all writes.
const READ_INTERVAL: usize = 61;
const GENERATION: u64 = 1;

/// Writes blocks of 64 KiB at depth 16, from the disk's beginning on, to unwritten space, until
/// told to stop. Then some of them are read, and must hold what was written.
///
/// # Panics
/// At the first error, end of file, or wrong byte.
pub fn fill(mut client: Client, load: &Load) -> Seen {
    let mut block = vec![0; BLOCK as usize];
    pattern::fill(&mut block, 0, GENERATION);
    let mut next = 0;
    let mut send = |client: &mut Client| {
        pattern::move_to(&mut block, next);
        let request = Request { command: command::WRITE, flags: 0, offset: next, length: BLOCK };
        client.send_with(request, &block).expect("no end of file is seen");
        next += BLOCK;
    };
    (0..DEPTH).for_each(|_| send(&mut client));
    let (mut seen, mut last, mut in_flight) = (Seen::default(), Instant::now(), DEPTH);
    while in_flight > 0 {
        let (_, reply) = client.receive().expect("no end of file is seen");
        let now = Instant::now();
        seen.reply(now - last, load);
        last = now;
        assert_eq!(reply.error, 0, "a request failed");
        if load.is_over(&seen) {
            in_flight -= 1;
        } else {
            send(&mut client);
        }
    }
    for offset in (0..next).step_by(READ_INTERVAL * BLOCK as usize) {
        let read = client.read(offset, BLOCK).expect("it can be read");
        pattern::verify(&read, offset, Some(GENERATION)).expect("what was written");
    }
    client.disconnect();
    seen
}
