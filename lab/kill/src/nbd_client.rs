//! An NBD client with many requests in flight until its server ends.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use lab_nbd::{Address, Client, Framing, Request, command, errno, flag, handshake};

use crate::folders::Folders;
use crate::load::{Load, Phase, Planned};
use crate::model::Action;
use crate::server::Server;

/// Bytes of one read when the whole disk is read back.
const PART: u64 = 1 << 20;
/// For how long a client tries to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Connects, and agrees on some framing.
///
/// # Panics
/// When the server refuses the export or breaks the protocol.
pub fn connect(socket: &Path, random: &mut Rng) -> Client {
    let framing = Framing::ALL[random.usize(..Framing::ALL.len())];
    Client::open_with(&Address::Unix(socket.to_owned()), framing)
}

/// Connects while the server is being started. If the socket listens already, the client waits in
/// its backlog.
///
/// # Errors
/// There is no server after `CONNECT_LIMIT`.
pub fn connect_early(socket: &Path) -> Result<Client<std::os::unix::net::UnixStream>> {
    let end = Instant::now() + CONNECT_LIMIT;
    loop {
        match handshake::open(socket, "") {
            Ok((stream, export)) => return Ok(Client::new(stream, Framing::Simple, export)),
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Reads the whole disk and compares it with the model.
///
/// # Errors
/// The disk does not have the expected content.
pub fn read_back(client: &mut Client, load: &Load) -> Result<()> {
    ensure!(client.size() == load.size(), "the disk has {} bytes", client.size());
    for start in (0..load.size()).step_by(PART as usize) {
        let length = PART.min(load.size() - start);
        let bytes = client.read(start, length);
        let bytes = bytes.map_err(|error| anyhow::anyhow!("reading at {start} failed: {error}"))?;
        load.model().verify(start, &bytes).context("read back over NBD")?;
    }
    Ok(())
}

/// Reads the whole disk of a server as [`read_back`] does, over a connection of its own.
///
/// # Errors
/// As [`read_back`]; the server has panicked.
pub fn read_back_from(
    server: &Server,
    folders: &Folders,
    load: &Load,
    random: &mut Rng,
) -> Result<()> {
    let mut client = connect(&folders.in_memory("nbd"), random);
    read_back(&mut client, load)?;
    client.disconnect();
    ensure!(!server.said().contains("panicked"), "{}", server.said());
    Ok(())
}

/// The request in flight on a connection.
enum InFlight {
    Range(Planned),
    /// A request that changes nothing.
    Other,
}

/// Sends requests, up to `depth` at a time, until the server ends or the load does.
///
/// # Errors
/// A request failed, a read showed wrong bytes, or the connection ended although the server did
/// not.
pub fn run(mut client: Client, load: &Load, depth: usize, mut random: Rng) -> Result<()> {
    let mut in_flight = HashMap::new();
    let outcome = exchange(&mut client, load, depth, &mut random, &mut in_flight);
    for request in in_flight.into_values() {
        if let InFlight::Range(planned) = request {
            load.model().lost(planned.token);
        }
    }
    outcome
}

fn exchange(
    client: &mut Client,
    load: &Load,
    depth: usize,
    random: &mut Rng,
    in_flight: &mut HashMap<u64, InFlight>,
) -> Result<()> {
    let mut is_sending = true;
    loop {
        while is_sending && in_flight.len() < depth && load.phase() != Phase::Draining {
            let Some((request, data, what)) = next(client, load, random) else { break };
            let sent = client.send_with(request, &data);
            in_flight.insert(client.last_cookie(), what);
            if let Err(error) = sent {
                // Replies that the server sent before may still arrive.
                load.check(error).context("sending a request")?;
                is_sending = false;
            }
        }
        if in_flight.is_empty() {
            if load.phase() != Phase::Running {
                return Ok(());
            }
            std::thread::yield_now();
            continue;
        }
        let (cookie, reply) = match client.receive() {
            Ok(received) => received,
            Err(error) => return load.check(error).context("receiving a reply"),
        };
        let request = in_flight.remove(&cookie).context("a reply to no request")?;
        let InFlight::Range(planned) = request else {
            // A server that is ending may refuse the request.
            ensure!(reply.error == 0 || load.phase() != Phase::Running, "error {}", reply.error);
            continue;
        };
        end(load, planned, reply.error, &reply.data)?;
    }
}

/// Records the reply to a request in the model.
fn end(load: &Load, planned: Planned, error: u32, data: &[u8]) -> Result<()> {
    let Planned { action, range, token, .. } = planned;
    let mut model = load.model();
    match (error, action) {
        (0, Action::Read) => model.has_read(token, data).context("read under load"),
        (0, _) => {
            model.answered(token);
            Ok(())
        }
        (errno::ENOTSUP, Action::WriteZeroes) if is_fast(planned.variant) => {
            model.refused(token);
            Ok(())
        }
        // The server refuses a request with this error before it executes any of it.
        (errno::ESHUTDOWN, _) if load.phase() != Phase::Running => {
            model.refused(token);
            Ok(())
        }
        _ => {
            model.lost(token);
            anyhow::bail!("{action:?} of {}..{} failed with error {error}", range.start, range.end)
        }
    }
}

fn is_fast(variant: u8) -> bool {
    variant.is_multiple_of(8)
}

/// The next request, with its data.
fn next(client: &Client, load: &Load, random: &mut Rng) -> Option<(Request, Vec<u8>, InFlight)> {
    if random.u8(..16) == 0 {
        let (offset, length) = (random.u64(..load.size()), 1);
        let command = match random.u8(..4) {
            0 if load.has_flushes() => command::FLUSH,
            1 => command::CACHE,
            _ if client.framing() != Framing::Simple => command::BLOCK_STATUS,
            _ => command::CACHE,
        };
        let request = match command {
            command::FLUSH => Request { command, ..Request::default() },
            _ => Request { command, flags: 0, offset, length },
        };
        return Some((request, Vec::new(), InFlight::Other));
    }
    let planned = load.plan(random, true)?;
    let fua = if planned.is_durable { flag::FUA } else { 0 };
    let (command, flags) = match planned.action {
        Action::Read => (command::READ, 0),
        Action::Write(_) => (command::WRITE, fua),
        Action::WriteZeroes => {
            let keep = if planned.variant & 1 == 1 { flag::NO_HOLE } else { 0 };
            let fast = if is_fast(planned.variant) { flag::FAST_ZERO } else { 0 };
            (command::WRITE_ZEROES, fua | keep | fast)
        }
        Action::Discard => (command::TRIM, fua),
    };
    let (offset, length) = (planned.range.start, planned.range.end - planned.range.start);
    let data = planned.data();
    Some((Request { command, flags, offset, length }, data, InFlight::Range(planned)))
}
