//! Makes the committed corpus of `vhost_messages`: what front-ends send in their order, and what
//! none should.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --example make_front_end_corpus`
#![forbid(unsafe_code)]

use blockhouse_fuzz::front_end::Message;
use blockhouse_fuzz::images::corpus;

/// The guest's address of its memory, and the front-end's own.
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
/// Bytes of it.
const SIZE: u64 = 64 << 10;

/// Kinds of descriptors: see `front_end`.
const MEMORY: u8 = 0;
const EVENT: u8 = 1 << 6;
const SOCKET: u8 = 2 << 6;

/// Features: VERSION_1, EVENT_IDX, PROTOCOL_FEATURES, FLUSH, and LOG_ALL.
const FEATURES: u64 = 1 << 32 | 1 << 29 | 1 << 30 | 1 << 9;
const LOG_ALL: u64 = 1 << 26;

fn message(request: u8, descriptors: u8, fields: &[&[u8]]) -> Message {
    Message { request, flags: 1, descriptors, payload: fields.concat() }
}

fn number(request: u8, number: u64) -> Message {
    message(request, 0, &[&number.to_ne_bytes()])
}

fn state(request: u8, index: u32, value: u32) -> Message {
    message(request, 0, &[&index.to_ne_bytes(), &value.to_ne_bytes()])
}

/// The first messages of a front-end, up to its memory.
fn negotiated(features: u64) -> Vec<Message> {
    vec![
        message(1, 0, &[]),
        message(3, 0, &[]),
        message(15, 0, &[]),
        number(16, 0xb22b),
        message(17, 0, &[]),
        number(2, features),
        message(5, MEMORY | 1, &[&1u32.to_ne_bytes(), &[0; 4], &region()]),
    ]
}

fn region() -> Vec<u8> {
    [GUEST, SIZE, USER, 0].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// The messages that start queue `index` of 16 entries.
fn started(index: u32) -> Vec<Message> {
    let at = USER + 0x1000 * u64::from(index);
    let addresses = [at, at + 0x800, at + 0x400, GUEST + 0x800];
    let addresses: Vec<u8> = addresses.into_iter().flat_map(u64::to_ne_bytes).collect();
    let ring = u64::from(index).to_ne_bytes();
    vec![
        state(8, index, 16),
        state(10, index, 0),
        message(9, 0, &[&index.to_ne_bytes(), &1u32.to_ne_bytes(), &addresses]),
        message(14, EVENT | 1, &[&ring]),
        message(13, EVENT | 1, &[&ring]),
        message(12, EVENT | 1, &[&ring]),
        state(18, index, 1),
    ]
}

fn inflight(request: u8, descriptors: u8, size: u64) -> Message {
    let words = [size, 0].map(u64::to_ne_bytes).concat();
    message(request, descriptors, &[&words, &[4, 0, 16, 0], &[0; 4]])
}

fn main() {
    let running = || [negotiated(FEATURES), started(0), started(1)].concat();
    let log = message(6, MEMORY | 1, &[&SIZE.to_ne_bytes(), &0u64.to_ne_bytes()]);
    let slot = |request, descriptors| message(request, descriptors, &[&[0; 8], &region()]);
    let config = |offset: u32, byte: u8| {
        let words = [offset, 1, 0].map(u32::to_ne_bytes).concat();
        message(25, 0, &[&words, &[byte]])
    };
    let seeds: [(&str, Vec<Message>); 10] = [
        ("started", running()),
        ("stopped", [running(), vec![state(11, 0, 0), state(18, 1, 0)]].concat()),
        (
            "inflight",
            [vec![inflight(31, 0, 0), inflight(32, MEMORY | 1, 4096)], running()].concat(),
        ),
        (
            "migrated",
            [running(), vec![log, message(7, EVENT | 1, &[]), number(2, FEATURES | LOG_ALL)]]
                .concat(),
        ),
        (
            "slots",
            [running(), vec![message(36, 0, &[]), slot(38, 0), slot(37, MEMORY | 1)]].concat(),
        ),
        (
            "moved",
            [running(), negotiated(FEATURES)[6..].to_vec(), started(0)[2..3].to_vec()].concat(),
        ),
        ("polled", vec![number(2, 1 << 32), number(12, 1 << 8), number(12, 2 | 1 << 8)]),
        (
            "configured",
            vec![
                message(24, 0, &[&[0; 4], &60u32.to_ne_bytes(), &[0; 4], &[0; 60]]),
                config(32, 0),
                config(32, 1),
                config(0, 7),
                message(21, SOCKET | 1, &[]),
            ],
        ),
        ("reset", [running(), vec![message(34, 0, &[]), message(4, 0, &[])], started(1)].concat()),
        (
            "nonsense",
            vec![
                state(8, 99, 3),
                message(5, MEMORY | 32, &[&32u32.to_ne_bytes(), &[0; 4]]),
                message(200, EVENT | 3, &[&[1; 20]]),
                Message { request: 1, flags: 0xff, descriptors: 0, payload: vec![0; 3] },
            ],
        ),
    ];
    for (name, messages) in seeds {
        let bytes: Vec<u8> = messages.iter().flat_map(Message::to_input).collect();
        std::fs::write(corpus("vhost_messages").join(name), bytes).expect("a seed");
    }
}
