//! An NBD client that breaks the protocol: garbage instead of a handshake, invalid requests,
//! payloads that never come, replies that it never reads.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use fastrand::Rng;
use socket2::Socket;

use crate::nbd::{Address, Client, Framing, Greeted, Request, command, connect};

/// The number of connections that are kept open and silent.
const SILENT: usize = 8;

/// Connects, misbehaves and connects again until `until`. `name` is an existing export.
pub fn client(address: &Address, name: &str, random: &mut Rng, until: Instant) {
    let mut silent: Vec<Socket> = Vec::new();
    while Instant::now() < until {
        match random.u8(..8) {
            0 => garbage(address, random),
            1 => negotiate_anything(address, random),
            2 => {
                silent.truncate(SILENT - 1);
                silent.insert(0, never_read(address, name, random));
            }
            _ => transmit_anything(address, name, random),
        }
    }
}

fn bytes(random: &mut Rng, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; random.usize(1..most)];
    random.fill(&mut bytes);
    bytes
}

/// Reads for a short time what comes.
fn drain(socket: &mut Socket, random: &mut Rng) {
    let limit = Duration::from_millis(random.u64(1..5));
    // Fails if the connection has ended.
    let _ = socket.set_read_timeout(Some(limit));
    let mut buffer = [0; 65536];
    for _ in 0..random.u8(1..8) {
        match socket.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

fn garbage(address: &Address, random: &mut Rng) {
    let mut socket = connect(address);
    let _ = socket.write_all(&bytes(random, 4096));
    drain(&mut socket, random);
}

fn negotiate_anything(address: &Address, random: &mut Rng) {
    let mut greeted = Greeted::new(address);
    for _ in 0..random.u8(1..20) {
        let data = bytes(random, 300);
        let length = match random.u8(..6) {
            0 => random.u32(..),
            _ => data.len() as u32,
        };
        let number = if random.u8(..8) == 0 { random.u32(..) } else { random.u32(..13) };
        let sent = greeted.send_head(number, length).and_then(|()| greeted.0.write_all(&data));
        if sent.is_err() {
            return;
        }
    }
    drain(&mut greeted.0, random);
}

fn open(address: &Address, name: &str, random: &mut Rng) -> Client {
    Greeted::new(address).go(name, Framing::ALL[random.usize(..3)])
}

/// Requests much data and reads none of it.
fn never_read(address: &Address, name: &str, random: &mut Rng) -> Socket {
    let mut client = open(address, name, random);
    let _ = client.socket.set_write_timeout(Some(Duration::from_millis(20)));
    for _ in 0..random.u8(1..64) {
        let length = random.u64(1..1 << 22);
        let request = Request { command: command::READ, flags: 0, offset: 0, length };
        if client.send(request).is_err() {
            break;
        }
    }
    client.socket
}

fn transmit_anything(address: &Address, name: &str, random: &mut Rng) {
    let mut client = open(address, name, random);
    let _ = client.socket.set_write_timeout(Some(Duration::from_millis(50)));
    let size = client.size();
    for _ in 0..random.u8(1..64) {
        let length = match random.u8(..6) {
            0 => u64::from(random.u32(..)),
            1 => random.u64(..1 << 25),
            _ => random.u64(..1 << 14),
        };
        let offset = match random.u8(..6) {
            0 => random.u64(..),
            _ => random.u64(..size),
        };
        let command = if random.u8(..16) == 0 { random.u16(..) } else { random.u16(..8) };
        let flags = if random.u8(..4) == 0 { random.u16(..) } else { 0 };
        let payload = match command {
            command::WRITE if length < 1 << 20 => vec![random.u8(..); length as usize],
            _ => Vec::new(),
        };
        if client.send_with(Request { command, flags, offset, length }, &payload).is_err() {
            return;
        }
    }
    if random.u8(..4) == 0 {
        let _ = client.socket.write_all(&bytes(random, 64));
    }
    drain(&mut client.socket, random);
}
