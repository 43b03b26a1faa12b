//! A server whose write cache is volatile, for tests of clients.
//!
//! Guarantees:
//! - Loss of power breaks all connections. Writes that neither a flush nor FUA covered are lost.
//! - An export without `SEND_FLUSH` has no cache: answered writes are stable.
//! - A held request is received, counted, and neither executed nor answered.
//!
//! It trusts its client.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Result, ensure};

use crate::handshake::{self, Export};
use crate::protocol::{command, errno, flag, transmission};
use crate::wire::{self, REQUEST};

/// A server of one export, for any export name, on a Unix socket. It ends when this is dropped.
pub struct VolatileServer {
    path: PathBuf,
    shared: Arc<Shared>,
    listening: Option<JoinHandle<()>>,
}

struct Shared {
    export: Export,
    state: Mutex<State>,
}

struct State {
    /// The bytes that reads see.
    content: Vec<u8>,
    /// The bytes that a loss of power leaves.
    stable: Vec<u8>,
    /// How often power was lost; connections from before the last loss are closed.
    losses: u64,
    is_ending: bool,
    clients: Vec<UnixStream>,
    /// The command whose requests are held.
    held: Option<u16>,
    received: HashMap<u16, usize>,
}

/// A request, with the data of a write.
struct Request {
    flags: u16,
    command: u16,
    cookie: u64,
    offset: usize,
    length: usize,
    data: Vec<u8>,
}

impl VolatileServer {
    /// Serves `size` zeros with these transmission flags.
    ///
    /// # Panics
    /// When the socket cannot be made.
    pub fn start(path: &Path, size: usize, flags: u16) -> Self {
        let state = State {
            content: vec![0; size],
            stable: vec![0; size],
            losses: 0,
            is_ending: false,
            clients: Vec::new(),
            held: None,
            received: HashMap::new(),
        };
        let export = Export { size: size as u64, flags };
        let shared = Arc::new(Shared { export, state: Mutex::new(state) });
        let mut server = Self { path: path.to_owned(), shared, listening: None };
        server.listen();
        server
    }

    /// Simulates a loss of power and its return: connections break, the cache is empty, clients may
    /// connect again.
    pub fn lose_power(&mut self) {
        self.end();
        let mut state = self.shared.state();
        state.content = state.stable.clone();
        (state.is_ending, state.held) = (false, None);
        drop(state);
        self.listen();
    }

    /// Holds requests of this command, one of [`command`], until power is lost: the server receives
    /// and counts them, and does nothing else.
    pub fn hold(&self, command: u16) {
        self.shared.state().held = Some(command);
    }

    /// How many requests of this command have been received.
    pub fn received(&self, command: u16) -> usize {
        self.shared.state().received.get(&command).copied().unwrap_or_default()
    }

    /// The bytes that reads see.
    pub fn content(&self) -> Vec<u8> {
        self.shared.state().content.clone()
    }

    /// The bytes that a loss of power would leave.
    pub fn stable(&self) -> Vec<u8> {
        self.shared.state().stable.clone()
    }

    fn listen(&mut self) {
        let listener = UnixListener::bind(&self.path).expect("a socket");
        let shared = Arc::clone(&self.shared);
        self.listening = Some(std::thread::spawn(move || shared.accept(&listener)));
    }

    fn end(&mut self) {
        let mut state = self.shared.state();
        state.is_ending = true;
        state.losses += 1;
        for client in state.clients.drain(..) {
            // The client may have disconnected.
            let _ = client.shutdown(Shutdown::Both);
        }
        drop(state);
        // Wakes the thread, which sees that the server ends.
        drop(UnixStream::connect(&self.path));
        if let Some(listening) = self.listening.take() {
            listening.join().expect("the server does not panic");
        }
        // No one else removes the socket.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Drop for VolatileServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        for client in listener.incoming() {
            let mut state = self.state();
            if state.is_ending {
                return;
            }
            let client = client.expect("a client");
            state.clients.push(client.try_clone().expect("a descriptor"));
            let (shared, losses) = (Arc::clone(self), state.losses);
            // A client may disconnect at any time.
            std::thread::spawn(move || shared.serve(client, losses).ok());
        }
    }

    fn serve(&self, mut client: UnixStream, losses: u64) -> Result<()> {
        handshake::accept(&mut client, self.export)?;
        while let Some(request) = Request::receive(&mut client)? {
            // The reply is sent under the lock: at a loss of power it was either sent or never will
            // be.
            let mut state = self.state();
            ensure!(state.losses == losses, "power was lost");
            *state.received.entry(request.command).or_default() += 1;
            if state.held != Some(request.command) {
                let answer = state.execute(self.export, request);
                client.write_all(&answer)?;
            }
        }
        Ok(())
    }
}

impl State {
    /// Executes a request and returns the reply.
    fn execute(&mut self, export: Export, request: Request) -> Vec<u8> {
        let Request { flags, command, cookie, offset, length, data } = request;
        let range = offset..offset + length;
        let mut reply = wire::reply(cookie).to_vec();
        match command {
            command::READ => reply.extend(&self.content[range]),
            command::FLUSH => self.stable.clone_from(&self.content),
            command::WRITE | command::WRITE_ZEROES | command::TRIM => {
                match command {
                    command::WRITE => self.content[range.clone()].copy_from_slice(&data),
                    _ => self.content[range.clone()].fill(0),
                }
                if flags & flag::FUA != 0 || export.flags & transmission::SEND_FLUSH == 0 {
                    self.stable[range.clone()].copy_from_slice(&self.content[range]);
                }
            }
            _ => reply[4..8].copy_from_slice(&errno::EINVAL.to_be_bytes()),
        }
        reply
    }
}

impl Request {
    /// Receives a request; `None` if the client disconnects.
    fn receive(client: &mut UnixStream) -> Result<Option<Self>> {
        let mut header = [0; REQUEST];
        client.read_exact(&mut header)?;
        let number = |at: usize, length: usize| {
            header[at..at + length].iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
        };
        let (flags, command) = (number(4, 2) as u16, number(6, 2) as u16);
        let (offset, length) = (number(16, 8) as usize, number(24, 4) as usize);
        let mut data = vec![0; if command == command::WRITE { length } else { 0 }];
        client.read_exact(&mut data)?;
        let request = Self { flags, command, cookie: number(8, 8), offset, length, data };
        Ok((command != command::DISC).then_some(request))
    }
}
