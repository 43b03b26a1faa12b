//! One file serves loops on several threads and engines at the same time.

use std::sync::{Arc, Barrier};

use blockhouse_core::{Buffer, Durability, Storage, SyncMode};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile, PageCache, spawn};

use crate::common::for_every_choice;

const BLOCK: usize = 4096;
const TASKS: usize = 16;
const ROUNDS: usize = 20;

/// The mark of a writer in a block.
fn mark(writer: usize, block: usize, round: usize) -> [u8; 3] {
    [writer as u8 + 1, block as u8, round as u8]
}

/// Every task of every loop has a block of its own, writes it again and again and reads it back.
fn work(choice: EngineChoice, writer: usize, file: &Arc<HostFile>) {
    let file = Arc::clone(file);
    EventLoop::new(choice).unwrap().block_on(async move {
        let task = |index: usize| {
            let file = Arc::clone(&file);
            let block = writer * TASKS + index;
            let offset = (block * BLOCK) as u64;
            async move {
                let mut buffer = Buffer::new(BLOCK);
                for round in 0..ROUNDS {
                    buffer.bytes_mut()[..3].copy_from_slice(&mark(writer, block, round));
                    let durability =
                        if round % 7 == 0 { Durability::Data } else { Durability::None };
                    file.write(offset, buffer.lend(), durability).await.unwrap();
                    buffer.bytes_mut().fill(0);
                    file.read(offset, buffer.lend()).await.unwrap();
                    assert_eq!(buffer.bytes()[..3], mark(writer, block, round));
                }
                file.flush(SyncMode::Data).await.unwrap();
            }
        };
        let tasks: Vec<_> = (0..TASKS).map(|index| spawn(task(index))).collect();
        for task in tasks {
            task.await;
        }
    });
}

#[test]
fn loops_on_several_threads_and_engines_share_a_file() {
    let mut choices = Vec::new();
    for_every_choice(|choice| choices.extend([choice, choice]));
    for cache in [PageCache::Used, PageCache::Bypassed] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let size = (choices.len() * TASKS * BLOCK) as u64;
        let file = HostFile::create(&folder.path().join("disk"), size, cache).unwrap();
        let file = Arc::new(file);
        let together = Barrier::new(choices.len());
        std::thread::scope(|scope| {
            for (writer, &choice) in choices.iter().enumerate() {
                let (file, together) = (&file, &together);
                scope.spawn(move || {
                    together.wait();
                    work(choice, writer, file);
                });
            }
        });
        let bytes = std::fs::read(file.name()).unwrap();
        for (block, bytes) in bytes.chunks(BLOCK).enumerate() {
            assert_eq!(bytes[..3], mark(block / TASKS, block, ROUNDS - 1));
        }
    }
}
