//! A server that was taken over, and asks its launcher for anything: no process is started, each
//! request is answered or ends the connection, and no descriptor is left open. The same bytes as a
//! table of mounts are read or refused.
//!
//! An input is requests with 0xff between, which no JSON has. Each comes with a descriptor.
#![no_main]
#![forbid(unsafe_code)]

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use blockhouse_daemon::strangers::{read_mounts, serve_stranger};
use blockhouse_fuzz::in_bounded_memory;
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

fn run(data: &[u8]) {
    let (server, launcher) = UnixStream::pair().expect("sockets");
    server.set_nonblocking(true).expect("a socket");
    launcher.set_nonblocking(true).expect("a socket");
    for request in data.split(|byte| *byte == 0xff) {
        let _ = { &server }.write_all(&(request.len() as u32).to_le_bytes());
        let _ = { &server }.write_all(request);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [server.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        let _ = sendmsg(&server, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL);
    }
    server.shutdown(Shutdown::Write).expect("a connection");
    let _ = serve_stranger(launcher);
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    assert!(children.is_empty(), "a process was started");
    read_mounts(data);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fuzz_target!(|data: &[u8]| {
    let before = open_descriptors();
    in_bounded_memory(|| run(data));
    assert_eq!(open_descriptors(), before, "descriptors are left open");
});
