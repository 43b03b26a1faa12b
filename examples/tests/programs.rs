//! Each example program, run as its user runs it, and what it did seen from outside.
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use blockhouse_core::{Storage, SyncMode};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile, PageCache};
use blockhouse_format::qcow2::{Backing, CreateOptions, create};
use blockhouse_tests::guest::Guest;
use blockhouse_tests::nbd::{Address, Client, command};
use blockhouse_tests::{run, wait_for_exit};
use blockhouse_vhost_user::driver::Options;
use tempfile::TempDir;

const BLOCK: usize = 4096;
/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);

/// A program that runs until its standard input ends; killed when the test panics.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts the program and waits until it is ready.
    fn start(program: &str, arguments: &[&Path]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut running = Self { child, output };
        let line = running.line();
        assert!(line.starts_with("ready "), "{line:?}");
        running
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Sends an empty line and returns the one that answers it.
    fn ask(&mut self) -> String {
        self.child.stdin.as_mut().expect("a pipe").write_all(b"\n").expect("the program reads");
        self.line()
    }

    /// Ends the input and waits for the end, which must be a success.
    fn stop(mut self) {
        drop(self.child.stdin.take());
        let status = wait_for_exit(&mut self.child, LONG).expect("the program ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already unless the test panics.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A raw image with one block of data, and a qcow2 image over it.
fn chain(folder: &TempDir) -> (PathBuf, PathBuf) {
    let (base, overlay) = (folder.path().join("base.img"), folder.path().join("overlay.qcow2"));
    let mut content = vec![0; 256 * BLOCK];
    content[7 * BLOCK] = 1;
    std::fs::write(&base, content).expect("a base image");
    let backing = Backing { name: b"base.img".to_vec(), format: Some("raw".into()) };
    let options =
        CreateOptions { backing: Some(backing), ..CreateOptions::new(256 * BLOCK as u64) };
    let path = overlay.clone();
    let mut event_loop = EventLoop::new(EngineChoice::Auto).expect("an engine");
    event_loop
        .block_on(async move {
            let file = HostFile::create(&path, 0, PageCache::Used)?;
            create(&file, &options).await?;
            file.flush(SyncMode::Full).await
        })
        .expect("an overlay");
    (base, overlay)
}

#[test]
fn chain_io_reads_through_the_chain_and_writes_to_its_top() {
    let folder = tempfile::tempdir().expect("a folder");
    let (base, overlay) = chain(&folder);
    let before = std::fs::read(&base).expect("the base image");
    let run_on = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_chain_io"));
        let outcome = run(command.arg(&overlay).args(arguments));
        assert!(outcome.status.success(), "{}", outcome.stderr);
        outcome.stdout
    };
    let (top, bottom) = (overlay.display(), base.display());
    let layers = format!("{top}: qcow2, 1048576 bytes\n{bottom}: raw, 1048576 bytes\n");
    let blocks = |count| format!("{layers}{count} blocks of 4096 bytes hold data\n");
    assert_eq!(run_on(&[]), blocks(1));
    // It crosses a block's border, and starts at no multiple of anything.
    assert_eq!(run_on(&["40955", "durable text"]), blocks(3));
    assert_eq!(run_on(&[]), blocks(3));
    assert_eq!(std::fs::read(&base).expect("the base image"), before);
}

#[test]
fn custom_storage_serves_its_pattern_and_keeps_what_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("nbd.sock");
    let program = Running::start(env!("CARGO_BIN_EXE_custom_storage"), &[&socket]);
    let mut client = Client::open(&Address::Unix(socket.clone()));
    assert_eq!(client.size(), 1 << 30);
    let pattern = |offset: u64| offset.to_le_bytes().to_vec();
    let last = (1 << 30) - 8;
    assert_eq!(client.read(last, 8), Ok(pattern(last)));
    assert_eq!(client.write(10_003, b"text", 0), 0);
    assert_eq!(client.read(10_003, 4), Ok(b"text".to_vec()));
    assert_eq!(client.read(10_008, 8), Ok(pattern(10_008)), "its block keeps the rest");
    assert_eq!(client.simple(command::WRITE_ZEROES, 0, 1 << 20, 0), 0);
    assert_eq!(client.read(4096, 8), Ok(vec![0; 8]));
    assert_eq!(client.simple(command::TRIM, 0, 1 << 20, 0), 0);
    assert_eq!(client.read(4096, 8), Ok(pattern(4096)), "a discarded block has its pattern again");
    assert_eq!(client.flush(), 0);
    client.disconnect();
    program.stop();
    assert!(!socket.exists());
}

#[test]
fn vhost_user_blk_serves_a_guest_beside_the_programs_own_thread() {
    let folder = tempfile::tempdir().expect("a folder");
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("vu.sock"));
    std::fs::write(&image, vec![0; 256 * BLOCK]).expect("an image");
    let mut program = Running::start(env!("CARGO_BIN_EXE_vhost_user_blk"), &[&image, &socket]);
    let mut guest = Guest::connect(&socket, Options { queues: 2, ..Options::default() });
    for queue in 0..2 {
        guest.write(queue, 100 + queue as u64, 7 + queue as u64);
    }
    assert_eq!(program.ask(), "0 reads, 2 writes, 0 flushes");
    drop(guest);
    program.stop();
    assert!(!socket.exists());
    let content = std::fs::read(&image).expect("the image");
    let number = |block: usize| content[block * BLOCK..][..8].to_vec();
    assert_eq!([number(100), number(101)], [7u64, 8].map(|number| number.to_le_bytes().to_vec()));
}
