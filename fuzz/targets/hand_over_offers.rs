//! A server that was taken over, and hands over anything with any descriptors: what it sends is
//! read or refused. Memory is bounded, and no descriptor is left open.
//!
//! An input is parts with 0xff between, which no JSON has: of each frame the message, the kinds of
//! its descriptors (a byte for each), and its bytes.
#![no_main]
#![forbid(unsafe_code)]

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use blockhouse_daemon::strangers::read_offer;
use blockhouse_fuzz::in_bounded_memory;
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Descriptors that come together.
const BATCH: usize = 128;
/// The most descriptors of a frame here.
const MAX_DESCRIPTORS: usize = 300;
/// Bytes of a file in memory.
const FILE_BYTES: u64 = 64 << 10;

/// The files that an offer may have.
struct Files {
    memory: OwnedFd,
    event: OwnedFd,
    socket: OwnedFd,
}

thread_local! {
    static FILES: Files = Files::new();
}

impl Files {
    fn new() -> Self {
        let memory = rustix::fs::memfd_create("file", MemfdFlags::CLOEXEC).expect("memory");
        rustix::fs::ftruncate(&memory, FILE_BYTES).expect("memory");
        Self {
            memory,
            event: eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            socket: UnixStream::pair().expect("sockets").0.into(),
        }
    }

    fn of_kind(&self, kind: u8) -> BorrowedFd<'_> {
        match kind % 3 {
            0 => self.memory.as_fd(),
            1 => self.event.as_fd(),
            _ => self.socket.as_fd(),
        }
    }

    /// Sends a frame; what the socket does not take is missing.
    fn send(&self, socket: &UnixStream, json: &[u8], kinds: &[u8], bytes: &[u8]) {
        let files: Vec<_> =
            kinds.iter().take(MAX_DESCRIPTORS).map(|kind| self.of_kind(*kind)).collect();
        let mut header = b"BHANDOVR".to_vec();
        header.extend(5_u32.to_le_bytes());
        header.extend((files.len() as u32).to_le_bytes());
        header.extend((json.len() as u64).to_le_bytes());
        header.extend((bytes.len() as u64).to_le_bytes());
        let _ = { socket }.write_all(&header);
        for batch in files.chunks(BATCH) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(batch)));
            let _ = sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL);
        }
        let _ = { socket }.write_all(json);
        let _ = { socket }.write_all(bytes);
    }

    fn run(&self, data: &[u8]) {
        let (source, destination) = UnixStream::pair().expect("sockets");
        source.set_nonblocking(true).expect("a socket");
        let parts: Vec<_> = data.split(|byte| *byte == 0xff).collect();
        for frame in parts.chunks(3) {
            let part = |index: usize| frame.get(index).copied().unwrap_or_default();
            self.send(&source, part(0), part(1), part(2));
        }
        source.shutdown(Shutdown::Write).expect("a connection");
        if let Err(error) = read_offer(destination.into()) {
            assert!(!format!("{error:#}").is_empty());
        }
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fuzz_target!(|data: &[u8]| {
    FILES.with(|files| {
        let before = open_descriptors();
        in_bounded_memory(|| files.run(data));
        assert_eq!(open_descriptors(), before, "descriptors are left open");
    });
});
