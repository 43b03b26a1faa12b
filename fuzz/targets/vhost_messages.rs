//! A front-end that sends anything, with any descriptors: each message is handled or refused, or
//! ends the connection. Every reply is a whole message, memory is bounded, and no descriptor is
//! left open.
//!
//! The device's loop has ended, so all of it runs on this thread: queues start, and never pop a
//! request (`vhost_chain` fuzzes requests).
#![no_main]
#![forbid(unsafe_code)]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_disk::{Access, Disk, Options};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, Handle};
use blockhouse_fuzz::front_end::{FileKind, Message};
use blockhouse_fuzz::in_bounded_memory;
use blockhouse_storage::NullStorage;
use blockhouse_vhost_user::{Device, Export, RegisteredMemory, serve_frontend};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Bytes of a file in memory: a front-end's memory, its log, or its in-flight memory.
const FILE_BYTES: u64 = 64 << 10;
/// Bytes of a message's header: request, flags, length of the payload.
const HEADER: usize = 12;
/// The version of the protocol, and the flag of replies, in a header's flags.
const VERSION_AND_REPLY: u32 = 5;
/// The most descriptors that the kernel takes with one message.
const MAX_DESCRIPTORS: usize = 253;

/// A disk, the handle of a loop that has ended, and the files of front-ends.
struct Fixture {
    disk: Arc<Disk<NullStorage>>,
    ended_loop: Handle,
    memory: OwnedFd,
    event: OwnedFd,
    socket: OwnedFd,
}

thread_local! {
    static FIXTURE: Fixture = Fixture::new();
}

impl Fixture {
    fn new() -> Self {
        let ended_loop = {
            let choice = EngineChoice::Only(Engine::Threads);
            EventLoop::new(choice).expect("a loop").handle()
        };
        let memory = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
        rustix::fs::ftruncate(&memory, FILE_BYTES).expect("memory");
        let storage =
            NullStorage::new("null-co://?size=1M&read-zeroes=on".parse().expect("a name"));
        Self {
            disk: Arc::new(Disk::raw(storage, Options::default()).expect("whole sectors")),
            ended_loop,
            memory,
            event: eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            socket: UnixStream::pair().expect("sockets").0.into(),
        }
    }

    fn device(&self) -> Arc<Device<NullStorage>> {
        Arc::new(Device::new(Export {
            disk: Arc::clone(&self.disk),
            name: "fuzzed".into(),
            queues: 4,
            loops: vec![self.ended_loop.clone()],
            memory: RegisteredMemory::Off,
            access: Access::ReadWrite,
        }))
    }

    fn file(&self, kind: FileKind) -> BorrowedFd<'_> {
        match kind {
            FileKind::Memory | FileKind::Mixed => self.memory.as_fd(),
            FileKind::Event => self.event.as_fd(),
            FileKind::Socket => self.socket.as_fd(),
        }
    }

    /// Sends a message; says whether the socket took all of it.
    fn send(&self, socket: &UnixStream, message: &Message) -> bool {
        let mut files: Vec<_> = message.files().map(|kind| self.file(kind)).collect();
        files.truncate(MAX_DESCRIPTORS);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        }
        let bytes = message.to_bytes();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags) == Ok(bytes.len())
    }

    fn run(&self, messages: &[Message]) {
        let (mut front_end, back_end) = UnixStream::pair().expect("sockets");
        // Beyond what the socket takes, it sends no more.
        let _ = messages.iter().all(|message| self.send(&front_end, message));
        front_end.shutdown(std::net::Shutdown::Write).expect("a connection");
        serve_frontend(&self.device(), back_end).expect("descriptors");
        let mut replies = Vec::new();
        match front_end.read_to_end(&mut replies) {
            Ok(_) => check_replies(&replies),
            // The connection ended before everything was read.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

/// Every reply is a whole message.
fn check_replies(mut replies: &[u8]) {
    while !replies.is_empty() {
        let word = |at: usize| {
            let bytes = replies[at..at + 4].try_into().expect("four bytes of a header");
            u32::from_ne_bytes(bytes)
        };
        assert_eq!(word(4), VERSION_AND_REPLY);
        replies = &replies[HEADER + word(8) as usize..];
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fuzz_target!(|data: &[u8]| {
    let messages = Message::all_of(data);
    FIXTURE.with(|fixture| {
        let before = open_descriptors();
        in_bounded_memory(|| fixture.run(&messages));
        assert_eq!(open_descriptors(), before, "descriptors are left open");
    });
});
