//! Opens an image with its backing files, and does I/O on the disk from the program's own thread.
//!
//! ```text
//! cargo run -p blockhouse-examples --bin chain_io -- IMAGE [OFFSET TEXT]
//! ```
//!
//! It prints the chain, reads the whole disk with several requests in flight, and counts the blocks
//! that hold data. With OFFSET and TEXT it first writes the text there, durably.
#![allow(clippy::print_stdout, reason = "a program's result")]
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use blockhouse_core::{Buffer, Durability, Request, Result};
use blockhouse_disk::{Access, ImageDisk};
use blockhouse_engine::{EngineChoice, LoopThread, Submission};
use blockhouse_images::{ImageOptions, open};

/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes of one request.
const REQUEST_SIZE: u64 = 256 << 10;
/// Bytes of what is counted as one block.
const BLOCK_SIZE: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (image, write) = match arguments.as_slice() {
        [image] => (PathBuf::from(image), None),
        [image, offset, text] => (PathBuf::from(image), Some((offset.parse()?, text.clone()))),
        _ => return Err("usage: chain_io IMAGE [OFFSET TEXT]".into()),
    };

    // An event loop of its own thread does the I/O: by io_uring where the host allows it.
    let disk_loop = LoopThread::start("disk".into(), EngineChoice::Auto, |_| ())?;

    // `open` follows the backing files, each as the format that the image above names, and takes
    // QEMU's image locks. It runs on the loop because it reads files.
    let access = if write.is_some() { Access::ReadWrite } else { Access::ReadOnly };
    let options = ImageOptions { access, ..ImageOptions::default() };
    let disk = Arc::new(disk_loop.run(move || async move { open(&image, options).await })?);
    for layer in (0..).map_while(|depth| disk.image().layer_at(depth)) {
        println!("{}: {}, {} bytes", layer.name, layer.format_name, layer.size);
    }

    if let Some((offset, text)) = write {
        write_durably(&disk_loop, &disk, offset, &text)?;
    }
    let blocks = count_data_blocks(&disk_loop, &disk)?;
    println!("{blocks} blocks of {BLOCK_SIZE} bytes hold data");

    // Close makes everything durable and takes the image out of use; a disk that is only dropped
    // may leave qcow2 metadata unwritten.
    disk_loop.run(move || async move { disk.close().await })?;
    disk_loop.stop();
    Ok(())
}

/// Writes `text` at `offset`. When it returns, the text survives a loss of power (FUA).
fn write_durably(
    disk_loop: &LoopThread,
    disk: &Arc<ImageDisk>,
    offset: u64,
    text: &str,
) -> Result<()> {
    let mut buffer = Buffer::try_new(text.len())?;
    buffer.bytes_mut().copy_from_slice(text.as_bytes());
    let disk = Arc::clone(disk);
    disk_loop.run(move || async move {
        let from = buffer.lend();
        disk.submit(Request::Write { offset, from, durability: Durability::Data }).await
    })
}

/// Reads the whole disk, [`DEPTH`] requests at a time, and counts the blocks that are not zero.
fn count_data_blocks(disk_loop: &LoopThread, disk: &Arc<ImageDisk>) -> Result<usize> {
    let mut in_flight = VecDeque::new();
    let (mut next, mut count) = (0, 0);
    loop {
        while in_flight.len() < DEPTH && next < disk.size() {
            let length = REQUEST_SIZE.min(disk.size() - next);
            in_flight.push_back(start_read(disk_loop, disk, next, length as usize));
            next += length;
        }
        let Some(read) = in_flight.pop_front() else { return Ok(count) };
        let buffer = read.wait().expect("the loop runs until it is stopped")?;
        let has_data = |block: &&[u8]| block.iter().any(|byte| *byte != 0);
        count += buffer.bytes().chunks(BLOCK_SIZE).filter(has_data).count();
    }
}

/// Starts to read and returns at once. Any thread may do that; the loop is woken if it sleeps.
fn start_read(
    disk_loop: &LoopThread,
    disk: &Arc<ImageDisk>,
    offset: u64,
    length: usize,
) -> Submission<Result<Buffer>> {
    let disk = Arc::clone(disk);
    disk_loop.handle().spawn(move || async move {
        let mut buffer = Buffer::try_new(length)?;
        disk.submit(Request::Read { offset, into: buffer.lend() }).await?;
        Ok(buffer)
    })
}
