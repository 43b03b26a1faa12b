//! A server without storage that answers whole batches: it shows the highest rate of the light
//! client.
//!
//! It takes as many requests as one `recv` returns and answers them with one `send`; reads return
//! zeros. `lab-compare null-server` runs it in a process of its own, so that it costs the client
//! the same as any other server. It is of no other use, because it trusts its client.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result};

use lab_nbd::handshake::{self, Export};
use lab_nbd::transmission;
use lab_nbd::wire::{self, Operation};

const INBOX: usize = 1 << 20;

/// Serves an export of `size` bytes on `socket`, one thread a client, until the process is ended.
pub fn serve(socket: &Path, size: u64) -> Result<()> {
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("cannot listen on {}", socket.display()))?;
    loop {
        let (stream, _) = listener.accept().context("cannot accept")?;
        std::thread::spawn(move || {
            // A client may disconnect at any time.
            let _ = answer(stream, size);
        });
    }
}

/// Answers one client until it leaves.
pub fn answer(mut stream: UnixStream, size: u64) -> Result<()> {
    handshake::accept(&mut stream, Export { size, flags: transmission::SEND_FUA })?;
    let mut inbox = vec![0; INBOX];
    let mut filled = 0;
    // Bytes of a write's data that have not come yet.
    let mut skip = 0;
    let mut outbox = Vec::new();
    loop {
        match stream.read(&mut inbox[filled..])? {
            0 => return Ok(()),
            received => filled += received,
        }
        let mut at = 0;
        outbox.clear();
        loop {
            let skipped = skip.min(filled - at);
            at += skipped;
            skip -= skipped;
            let Some(header) = inbox[at..filled].first_chunk() else { break };
            let Some((operation, cookie, length)) = wire::parse_request(header)? else {
                return Ok(());
            };
            at += header.len();
            outbox.extend(wire::reply(cookie));
            match operation {
                Operation::Read => outbox.resize(outbox.len() + length as usize, 0),
                Operation::Write | Operation::DurableWrite => skip = length as usize,
            }
        }
        inbox.copy_within(at..filled, 0);
        filled -= at;
        stream.write_all(&outbox)?;
    }
}
