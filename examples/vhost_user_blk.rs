//! A vhost-user-blk device inside another program, as a virtual machine monitor would have it.
//!
//! ```text
//! cargo run -p blockhouse-examples --bin vhost_user_blk -- IMAGE SOCKET
//! ```
//!
//! Guests' queues are served by two event loops, each on a thread of its own; the program's main
//! thread stays free. Here it answers each line on standard input with the disk's counters, and
//! stops the device when the input ends.
#![allow(clippy::print_stdout, reason = "a program's result")]
#![forbid(unsafe_code)]

use std::error::Error;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use blockhouse_disk::Access;
use blockhouse_engine::{EngineChoice, LoopThread};
use blockhouse_images::{ImageOptions, open};
use blockhouse_vhost_user::{Device, Export, RegisteredMemory, Server};

/// Threads that serve queues, and queues that a guest may use: each stays on one thread.
const LOOPS: u16 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, socket] = arguments.as_slice() else {
        return Err("usage: vhost_user_blk IMAGE SOCKET".into());
    };

    let start = |index| LoopThread::start(format!("queue-{index}"), EngineChoice::Auto, |_| ());
    let loops = (0..LOOPS).map(start).collect::<Result<Vec<_>, _>>()?;
    let image = PathBuf::from(image);
    let opened = loops[0].run(move || async move { open(&image, ImageOptions::default()).await });
    let disk = Arc::new(opened?);

    let device = Device::new(Export {
        disk: Arc::clone(&disk),
        name: "example".into(),
        queues: LOOPS,
        loops: loops.iter().map(|one| one.handle().clone()).collect(),
        memory: RegisteredMemory::Off,
        access: Access::ReadWrite,
    });
    // The messages of front-ends are handled on a further thread, which `start` creates.
    let server = Server::start(device, UnixListener::bind(socket)?.into())?;
    println!("ready {socket}");

    for line in std::io::stdin().lines() {
        line?;
        let counters = disk.stats().counters();
        println!(
            "{} reads, {} writes, {} flushes",
            counters.reads, counters.writes, counters.flushes
        );
    }

    // The order of an orderly end: the guest's requests in flight complete, the disk is closed, the
    // loops end.
    std::fs::remove_file(socket)?;
    server.stop();
    loops[0].run(move || async move { disk.close().await })?;
    loops.into_iter().for_each(LoopThread::stop);
    Ok(())
}
