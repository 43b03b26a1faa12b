//! An NBD server that answers its client with anything: each request ends with an answer or an
//! error, memory is bounded, no byte around a read's memory changes, and a read that succeeds has
//! nothing but what the server sent for it.
//!
//! An input is what the server says of its export, and what it does then. It ends the connection
//! after that.
#![no_main]
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Storage, SyncMode, Unmap};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, sleep};
use blockhouse_fuzz::in_bounded_memory;
use blockhouse_nbd_protocol::Framing;
use blockhouse_nbd_protocol::reply::{EXTENDED_MAGIC, SIMPLE_MAGIC, STRUCTURED_MAGIC, chunk};
use blockhouse_nbd_protocol::request::kind;
use blockhouse_nbd_protocol::uri::{Address, NbdUri, Security};
use blockhouse_storage::NbdStorage;
use futures_util::join;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendFlags, send};

/// The read of the client, in a buffer that is longer by a block on both sides.
const READ: (u64, usize) = (4096, 16 << 10);
const BLOCK: usize = 4096;
/// The bytes around the read.
const UNTOUCHED: u8 = 0xa5;
/// Between two looks whether the server has ended.
const PAUSE: Duration = Duration::from_micros(50);
/// How long the server waits for a request.
const TAKE_TIME: Duration = Duration::from_millis(10);
/// The longest data of a chunk here.
const MAX_DATA: u32 = 20_000;

#[derive(Arbitrary, Debug)]
struct Server {
    framing: u8,
    size: u64,
    flags: u16,
    blocks: Option<[u32; 3]>,
    /// Replies to the option that chooses the export, before those that it needs.
    infos: Vec<(u32, Vec<u8>)>,
    actions: Vec<Action>,
}

#[derive(Arbitrary, Debug)]
enum Action {
    /// Wait for a request a while.
    Take,
    Simple {
        of: u8,
        error: u8,
    },
    Data {
        of: u8,
        last: bool,
        skip: u16,
        length: u16,
        byte: u8,
        lie: Option<u32>,
    },
    Hole {
        of: u8,
        last: bool,
        skip: u16,
        length: u32,
    },
    None {
        of: u8,
        last: bool,
    },
    Status {
        of: u8,
        last: bool,
        context: u8,
        extents: Vec<(u32, u32)>,
    },
    Error {
        of: u8,
        last: bool,
        kind: u16,
        error: u32,
        text: Vec<u8>,
        lie: Option<u16>,
    },
    Bytes(Vec<u8>),
}

/// A request that the client has sent.
#[derive(Clone, Copy)]
struct Taken {
    kind: u16,
    cookie: u64,
    offset: u64,
    length: u64,
}

/// The replies of the server so far.
#[derive(Default)]
struct Sent {
    /// The bytes of the range that the client reads, by their places there.
    bytes: Mutex<HashMap<usize, Vec<u8>>>,
    /// Whether anything else was sent, which may be any chunk.
    is_unknown: AtomicBool,
}

/// A connection of the server, after the greeting.
struct Session<'a> {
    client: UnixStream,
    framing: Framing,
    taken: Vec<Taken>,
    sent: &'a Sent,
}

impl Session<'_> {
    fn take(&mut self) -> io::Result<()> {
        let mut head = vec![0; self.framing.request_length()];
        self.client.read_exact(&mut head)?;
        let number = |at: usize, bytes: usize| {
            head[at..at + bytes].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        let kind = number(6, 2) as u16;
        let bytes = if self.framing == Framing::Extended { 8 } else { 4 };
        let request =
            Taken { kind, cookie: number(8, 8), offset: number(16, 8), length: number(24, bytes) };
        if kind == kind::WRITE {
            io::copy(&mut (&self.client).take(request.length), &mut io::sink())?;
        }
        self.taken.push(request);
        Ok(())
    }

    fn of(&self, index: u8) -> Taken {
        let unknown = Taken { kind: 0, cookie: u64::MAX, offset: 0, length: 0 };
        let count = self.taken.len().max(1);
        self.taken.get(usize::from(index) % count).copied().unwrap_or(unknown)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = &rest[send(&self.client, rest, SendFlags::NOSIGNAL)?..];
        }
        Ok(())
    }

    /// A chunk that says of its payload that it has `length` bytes.
    fn chunk(&self, of: Taken, kind: u16, last: bool, length: u64, data: &[u8]) -> io::Result<()> {
        let is_extended = self.framing == Framing::Extended;
        let magic = if is_extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(u16::from(last).to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(of.cookie.to_be_bytes());
        if is_extended {
            bytes.extend(of.offset.to_be_bytes());
            bytes.extend(length.to_be_bytes());
        } else {
            bytes.extend((length as u32).to_be_bytes());
        }
        bytes.extend(data);
        self.send(&bytes)
    }

    /// Remembers what a read may have got.
    fn remember(&self, of: Taken, offset: u64, length: u64, byte: u8) {
        if of.kind == kind::READ {
            let mut sent = self.sent.bytes.lock().expect("no panic");
            for place in offset..offset + length.min(1 << 16) {
                if let Some(at) = place.checked_sub(READ.0) {
                    sent.entry(at as usize).or_default().push(byte);
                }
            }
        }
    }

    fn act(&mut self, action: &Action) -> io::Result<()> {
        match *action {
            Action::Take => self.take(),
            Action::Simple { of, error } => {
                let of = self.of(of);
                let mut bytes = SIMPLE_MAGIC.to_be_bytes().to_vec();
                bytes.extend(u32::from(error).to_be_bytes());
                bytes.extend(of.cookie.to_be_bytes());
                if of.kind == kind::READ && error == 0 {
                    let length = of.length.min(1 << 20);
                    self.remember(of, of.offset, length, of.cookie as u8);
                    bytes.resize(bytes.len() + length as usize, of.cookie as u8);
                }
                self.send(&bytes)
            }
            Action::Data { of, last, skip, length, byte, lie } => {
                let of = self.of(of);
                let length = u32::from(length).min(MAX_DATA);
                let offset = of.offset + u64::from(skip);
                self.remember(of, offset, length.into(), byte);
                let data = [&offset.to_be_bytes()[..], &vec![byte; length as usize]].concat();
                if lie.is_some() {
                    self.sent.is_unknown.store(true, Relaxed);
                }
                self.chunk(of, chunk::OFFSET_DATA, last, lie.unwrap_or(length + 8).into(), &data)
            }
            Action::Hole { of, last, skip, length } => {
                let of = self.of(of);
                let offset = of.offset + u64::from(skip);
                self.remember(of, offset, length.into(), 0);
                let data = [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat();
                self.chunk(of, chunk::OFFSET_HOLE, last, 12, &data)
            }
            Action::None { of, last } => self.chunk(self.of(of), chunk::NONE, last, 0, &[]),
            Action::Status { of, last, context, ref extents } => {
                let is_extended = self.framing == Framing::Extended;
                let mut data = u32::from(context).to_be_bytes().to_vec();
                if is_extended {
                    data.extend((extents.len() as u32).to_be_bytes());
                }
                for (length, flags) in extents {
                    if is_extended {
                        data.extend(u64::from(*length).to_be_bytes());
                        data.extend(u64::from(*flags).to_be_bytes());
                    } else {
                        data.extend(length.to_be_bytes());
                        data.extend(flags.to_be_bytes());
                    }
                }
                let kind = if is_extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
                self.chunk(self.of(of), kind, last, data.len() as u64, &data)
            }
            Action::Error { of, last, kind, error, ref text, lie } => {
                let mut data = error.to_be_bytes().to_vec();
                data.extend(lie.unwrap_or(text.len() as u16).to_be_bytes());
                data.extend(text);
                let kind = kind | chunk::ERROR_BIT;
                self.chunk(self.of(of), kind, last, data.len() as u64, &data)
            }
            Action::Bytes(ref bytes) => {
                self.sent.is_unknown.store(true, Relaxed);
                self.send(bytes)
            }
        }
    }
}

/// A reply to an option.
fn reply(client: &UnixStream, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(data);
    send(client, &bytes, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Answers options until the export is chosen.
fn greet(client: &mut UnixStream, server: &Server) -> io::Result<Framing> {
    send(&*client, b"NBDMAGICIHAVEOPT\0\x03", SendFlags::NOSIGNAL)?;
    client.read_exact(&mut [0; 4])?;
    let mut framing = Framing::Simple;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four"));
        let option = number(8);
        let data = io::copy(&mut (&*client).take(number(12).into()), &mut io::sink());
        data?;
        match (option, server.framing % 3) {
            (11, 2) => framing = Framing::Extended,
            (8, 1..) if framing == Framing::Simple => framing = Framing::Structured,
            (10, 1..) => reply(client, option, 4, b"\0\0\0\x01base:allocation")?,
            (7, _) => {
                for (kind, data) in &server.infos {
                    reply(client, option, *kind, data)?;
                }
                let flags = server.flags | 1;
                let size = server.size.to_be_bytes();
                reply(client, option, 3, &[&[0, 0][..], &size, &flags.to_be_bytes()].concat())?;
                if let Some(blocks) = server.blocks {
                    let blocks = blocks.map(u32::to_be_bytes).concat();
                    reply(client, option, 3, &[&[0, 3][..], &blocks].concat())?;
                }
                reply(client, option, 1, &[])?;
                return Ok(framing);
            }
            _ => {
                reply(client, option, (1 << 31) + 1, &[])?;
                continue;
            }
        }
        reply(client, option, 1, &[])?;
    }
}

/// Serves one client; it fails when the client has had enough.
fn serve(mut client: UnixStream, server: &Server, sent: &Sent) {
    let Ok(framing) = greet(&mut client, server) else { return };
    // The client sends nothing more where it waits for all of its answers.
    client.set_read_timeout(Some(TAKE_TIME)).expect("it is not zero");
    let mut session = Session { client, framing, taken: Vec::new(), sent };
    for action in &server.actions {
        if session.act(action).is_err() {
            return;
        }
    }
}

/// Asks for a bit of everything at once, and then for the read alone.
async fn use_export(disk: &NbdStorage, buffers: &mut [Buffer; 2]) -> bool {
    let (offset, length) = READ;
    let range = ByteRange::new(0, 1 << 16).expect("it is short");
    if disk.size() < range.end() || disk.capabilities().alignment.offset > BLOCK as u32 {
        return false;
    }
    let [read, write] = buffers;
    let others = async {
        let written = disk.write(0, write.lend(), Durability::Data);
        let zeroed = disk.write_zeroes(range, Unmap::Allowed);
        let _ = join!(written, zeroed, disk.discard(range), disk.flush(SyncMode::Data));
        if let Ok((_, length)) = disk.block_status(range).await {
            assert!((1..=range.length()).contains(&length), "{length} bytes of block status");
        }
    };
    let (read, ()) = join!(disk.read(offset, read.lend_range(BLOCK, length)), others);
    read.is_ok()
}

/// The loop of the client, and the socket of the server.
struct Fixture {
    event_loop: EventLoop,
    listener: UnixListener,
    path: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("nbd-fuzz-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket");
        let event_loop =
            EventLoop::new(EngineChoice::Only(Engine::Threads)).expect("an event loop");
        Self { event_loop, listener, path }
    }

    fn run(&mut self, server: &Server) {
        let (sent, is_over) = (Sent::default(), AtomicBool::new(false));
        let mut buffers = [Buffer::new(2 * BLOCK + READ.1), Buffer::new(BLOCK)];
        buffers[0].bytes_mut().fill(UNTOUCHED);
        let address = Address::Unix(self.path.clone());
        let uri = NbdUri { security: Security::Plain, address, export: "disk".into() };
        let is_read = std::thread::scope(|scope| {
            // A client comes again where the greeting has ended its connection.
            let serving = scope.spawn(|| {
                while let Ok((client, _)) = self.listener.accept() {
                    if is_over.load(Relaxed) {
                        return;
                    }
                    serve(client, server, &sent);
                }
            });
            self.event_loop.block_on(async {
                let is_read = match NbdStorage::connect(uri.into(), Duration::ZERO).await {
                    Ok(disk) => use_export(&disk, &mut buffers).await,
                    Err(_) => false,
                };
                is_over.store(true, Relaxed);
                UnixStream::connect(&self.path).expect("the server listens");
                // The loop closes the connection.
                while !serving.is_finished() {
                    sleep(PAUSE).await;
                }
                is_read
            })
        });
        let bytes = buffers[0].bytes();
        let (before, rest) = bytes.split_at(BLOCK);
        let (read, behind) = rest.split_at(READ.1);
        let around = before.iter().chain(behind);
        assert!(around.copied().all(|byte| byte == UNTOUCHED), "bytes around the read changed");
        if is_read && !sent.is_unknown.load(Relaxed) {
            let sent = sent.bytes.lock().expect("no panic");
            for (at, byte) in read.iter().enumerate() {
                let is_sent = sent.get(&at).is_some_and(|bytes| bytes.contains(byte));
                assert!(is_sent, "byte {at} of the read was not sent: {byte}");
            }
        }
    }
}

thread_local! {
    /// It is not dropped: when the fuzzer ends, the thread's other variables are gone before.
    static FIXTURE: RefCell<ManuallyDrop<Fixture>> =
        RefCell::new(ManuallyDrop::new(Fixture::new()));
}

fuzz_target!(|server: Server| {
    FIXTURE.with_borrow_mut(|fixture| in_bounded_memory(|| fixture.run(&server)));
});
