//! Serves a disk that is no file: memory with a pattern, over NBD.
//!
//! ```text
//! cargo run -p blockhouse-examples --bin custom_storage -- SOCKET
//! ```
//!
//! It implements [`Storage`]; the rest comes from the library: request checks, alignment, ordering,
//! durability, the NBD protocol. Each 8 bytes of a block that was never written hold their own
//! offset, little-endian. It serves until its standard input ends.
#![allow(clippy::print_stdout, reason = "a program's result")]
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::error::Error as StdError;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};
use blockhouse_disk::{Access, Disk, Options};
use blockhouse_engine::{EngineChoice, Listener, LoopThread};
use blockhouse_nbd::uri::{NbdUri, Security};
use blockhouse_nbd::{BoundSocket, Export, Exports, Limits, Server, bind_private};

/// Bytes of a block, the unit of this storage. The disk above reads and writes whole blocks,
/// whatever a guest asks for.
const BLOCK: usize = 4096;
/// Bytes of the disk.
const SIZE: u64 = 1 << 30;

type Block = Box<[u8; BLOCK]>;

/// Memory that reads as a pattern where nothing was written.
struct PatternStorage {
    written: Mutex<HashMap<u64, Block>>,
}

impl PatternStorage {
    fn new() -> Self {
        Self { written: Mutex::default() }
    }

    fn with_blocks<R>(&self, work: impl FnOnce(&mut HashMap<u64, Block>) -> R) -> R {
        // Each change is one insertion or removal: a thread that panicked left none half done.
        work(&mut self.written.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, what).on(self.name())
    }
}

/// The content of a block that was never written.
fn pattern(block: u64) -> Block {
    let mut bytes = Box::new([0; BLOCK]);
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let offset = block * BLOCK as u64 + index as u64 * 8;
        word.copy_from_slice(&offset.to_le_bytes());
    }
    bytes
}

/// The blocks of an aligned range, by number.
fn blocks(offset: u64, length: u64) -> std::ops::Range<u64> {
    offset / BLOCK as u64..(offset + length) / BLOCK as u64
}

impl Storage for PatternStorage {
    fn name(&self) -> &str {
        "pattern"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            // Memory has no stable storage: flushes and FUA succeed and mean nothing. A storage
            // that has one says `Native` (a write takes its durability along) or
            // `Emulated` (write, then sync).
            fua: Fua::Ignored,
            fua_cost: FuaCost::NoFlush,
            write_cache: WriteCache::Volatile,
            group_commit: GroupCommit::Never,
            alignment: Alignment { offset: BLOCK as u32, memory: 1 },
            // The disk above writes zeros as data where the storage has no operation for them.
            write_zeroes: Offload::Unavailable,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        SIZE
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        for block in blocks(offset, into.len() as u64) {
            let rest = into.split_off(BLOCK);
            self.with_blocks(|written| match written.get(&block) {
                Some(bytes) => into.copy_from(&bytes[..]),
                None => into.copy_from(&pattern(block)[..]),
            });
            into = rest;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, mut from: IoVector, _durability: Durability) -> Result<()> {
        for block in blocks(offset, from.len() as u64) {
            let rest = from.split_off(BLOCK);
            let mut bytes = Box::new([0; BLOCK]);
            from.copy_to(&mut bytes[..]);
            // A guest's shared memory can vanish while it is copied: zeros are read then, and must
            // not be stored.
            from.check_intact()?;
            self.with_blocks(|written| written.insert(block, bytes));
            from = rest;
        }
        Ok(())
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        Err(self.unsupported("cannot write zeros without data"))
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        let blocks = blocks(range.offset(), range.length());
        self.with_blocks(|written| blocks.for_each(|block| drop(written.remove(&block))));
        Ok(())
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, _size: u64) -> Result<()> {
        Err(self.unsupported("cannot change its size"))
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn StdError>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket] = arguments.as_slice() else { return Err("usage: custom_storage SOCKET".into()) };

    // A disk is an image format over a storage: here the raw format, byte for byte.
    let disk = Arc::new(Disk::raw(PatternStorage::new(), Options::default())?);
    let exports = Exports::new();
    let (name, description) = ("pattern".to_owned(), "each 8 bytes hold their offset".to_owned());
    let (bitmaps, access) = (Vec::new(), Access::ReadWrite);
    let (disk_of_export, name_of_export) = (Arc::clone(&disk), name.clone());
    exports.add(Export {
        name: name_of_export,
        description,
        disk: disk_of_export,
        bitmaps,
        access,
        has_depth: true,
    })?;

    // One loop accepts and serves; with several, connections are spread over them.
    let server_loop = LoopThread::start("nbd".into(), EngineChoice::Auto, |_| ())?;
    let BoundSocket { socket, address, file } = bind_private(Path::new(socket))?;
    let listener = Listener::new(socket)?;
    let server = Server::new(Limits::default());
    let (accepting, loops) = (server.clone(), [server_loop.handle().clone()]);
    let accepting = server_loop
        .handle()
        .spawn(move || async move { accepting.serve(&listener, &exports, &loops).await });
    println!("ready {}", NbdUri { security: Security::Plain, address, export: name });

    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;

    // The order of an orderly end: no new connections (the socket's file goes first), every request
    // in flight gets its reply, the disk is closed, the loop ends.
    drop(file);
    server_loop.run(move || async move { server.drain().await });
    accepting.wait().expect("the loop runs until it is stopped")?;
    server_loop.run(move || async move { disk.close().await })?;
    server_loop.stop();
    Ok(())
}
