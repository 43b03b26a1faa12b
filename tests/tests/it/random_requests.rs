//! Random requests of any alignment, many of them in flight, compared with a flat model in memory.

use std::collections::HashMap;

use blockhouse_tests::nbd::{Client, Framing, Request, command, flag};
use blockhouse_tests::{
    Cache, Engine, Scratch, Serve, model_of_zeros, on_every_engine_and_cache, random_bytes, seeded,
};
use fastrand::Rng;

const SIZE: usize = 1 << 20;
const ROUNDS: usize = 60;
const IN_FLIGHT: usize = 24;

/// The content of the image; `None` for bytes that a discard left undefined.
struct Model(Vec<Option<u8>>);

impl Model {
    #[track_caller]
    fn check(&self, offset: usize, bytes: &[u8]) {
        for (at, (&found, &expected)) in bytes.iter().zip(&self.0[offset..]).enumerate() {
            let fits = expected.is_none_or(|expected| expected == found);
            assert!(fits, "byte {}: {found} instead of {expected:?}", offset + at);
        }
    }
}

/// A request and its effect on the model.
enum Action {
    Read,
    Write(Vec<u8>),
    Zero,
    Discard,
    Nothing,
}

/// Splits the image at random offsets. The pieces do not overlap, but neighbours share sectors and
/// pages, so that unaligned requests touch the same host blocks while both are in flight.
fn pieces(random: &mut Rng) -> Vec<(usize, usize)> {
    let mut cuts: Vec<usize> = (0..2 * IN_FLIGHT)
        .map(|_| match random.u8(..4) {
            0 => random.usize(..SIZE),
            1 => random.usize(..SIZE) & !511,
            // Many cuts within a few pages.
            _ => 300_000 + random.usize(..40_000),
        })
        .chain([0, SIZE])
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut pieces: Vec<_> = cuts.windows(2).map(|cut| (cut[0], cut[1] - cut[0])).collect();
    random.shuffle(&mut pieces);
    pieces.truncate(IN_FLIGHT);
    pieces
}

fn choose(random: &mut Rng, length: usize) -> (u16, u16, Action) {
    let fua = if random.u8(..4) == 0 { flag::FUA } else { 0 };
    match random.u8(..10) {
        0..=2 => (command::READ, 0, Action::Read),
        3..=6 => (command::WRITE, fua, Action::Write(random_bytes(random, length))),
        7 => {
            let no_hole = if random.bool() { flag::NO_HOLE } else { 0 };
            (command::WRITE_ZEROES, fua | no_hole, Action::Zero)
        }
        8 => (command::TRIM, fua, Action::Discard),
        _ => (command::CACHE, 0, Action::Nothing),
    }
}

/// Sends a batch of requests on several connections, then receives all replies.
fn round(clients: &mut [Client], random: &mut Rng, model: &mut Model) {
    let mut open = HashMap::new();
    for (offset, length) in pieces(random) {
        let index = random.usize(..clients.len());
        let (command, flags, action) = choose(random, length);
        let request = Request { command, flags, offset: offset as u64, length: length as u64 };
        let payload = if let Action::Write(bytes) = &action { &bytes[..] } else { &[] };
        let cookie = clients[index].send_with(request, payload).expect("it is taken");
        open.insert((index, cookie), (offset, length, action));
    }
    for (index, client) in clients.iter_mut().enumerate() {
        for _ in 0..open.keys().filter(|key| key.0 == index).count() {
            let (cookie, reply) = client.receive().expect("a reply");
            let (offset, length, action) = &open[&(index, cookie)];
            assert_eq!(reply.error, 0, "at {offset}, {length} bytes");
            if let Action::Read = action {
                assert_eq!(reply.data.len(), *length);
                model.check(*offset, &reply.data);
            }
        }
    }
    for (offset, length, action) in open.into_values() {
        let place = &mut model.0[offset..offset + length];
        match action {
            Action::Read | Action::Nothing => {}
            Action::Write(bytes) => {
                place.iter_mut().zip(bytes).for_each(|(place, byte)| *place = Some(byte));
            }
            Action::Zero => place.fill(Some(0)),
            Action::Discard => place.fill(None),
        }
    }
}

/// Checks that the block status agrees with the content, and covers the range without a gap.
fn check_status(client: &mut Client, model: &Model) {
    let mut offset = 0;
    while offset < SIZE {
        let length = (SIZE - offset) as u64;
        let flags = 0;
        let status =
            Request { command: command::BLOCK_STATUS, flags, offset: offset as u64, length };
        let reply = client.call(status, &[]);
        assert_eq!(reply.error, 0);
        assert!(!reply.extents.is_empty());
        for (length, state) in reply.extents {
            let end = (offset + length as usize).min(SIZE);
            assert!(end > offset, "an extent without bytes");
            if state & 2 != 0 {
                model.check(offset, &vec![0; end - offset]);
            }
            offset = end;
        }
    }
}

fn any_requests_leave_what_the_model_says(engine: Engine, cache: Cache) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE as u64);
    let serve = Serve::new(&scratch, image.path()).engine(engine).cache(cache);
    let server = serve.option("--workers", "2").start();
    let mut random = seeded();
    let mut model = Model(model_of_zeros(SIZE));
    let open = |framing| Client::open_with(&server.address(), framing);
    let mut clients: Vec<_> = Framing::ALL.into_iter().map(open).collect();
    for number in 0..ROUNDS {
        round(&mut clients, &mut random, &mut model);
        if number % 10 == 0 {
            let all = clients[number % 3].read(0, SIZE as u64).expect("all of it");
            model.check(0, &all);
            check_status(&mut clients[1], &model);
            check_status(&mut clients[2], &model);
        }
    }
    assert_eq!(clients[0].flush(), 0);
    clients.into_iter().for_each(Client::disconnect);
    server.stop();
    model.check(0, &image.content());
}

on_every_engine_and_cache! {
    any_requests_leave_what_the_model_says
}
