//! `blockhouse convert SOURCE... -`: a disk as raw bytes on standard output.
//!
//! Guarantees: all bytes of the disk are written in order, holes as zeros, and the exit status is 0
//! only if all bytes were written to standard output. Progress goes to standard error.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::Result;
use blockhouse_core::{Buffer, ByteRange, Request, ToolProgress, rare};
use blockhouse_disk::{ImageDisk, ImageFormat};
use blockhouse_engine::{EngineChoice, EventLoop};
use futures_util::stream::{self, StreamExt};

use super::arguments::{Arguments, open_sources};
use crate::copy_target::{IfThere, tell_of_sectors};
use crate::create::wrong_usage;
use crate::output::end_by_sigpipe;
use crate::pipe::{Reader, write_standard_output};
use crate::progress::Progress;

/// Bytes of one read.
const PIECE: u64 = 1 << 20;
/// Reads in flight.
const MAX_IN_FLIGHT: usize = 8;

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    refuse(arguments);
    let shown = Progress::start(arguments.progress)?.beside_output();
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let sources = event_loop.block_on(open_sources(arguments))?;
    sources.iter().for_each(|source| tell_of_sectors(source));
    let progress = ToolProgress::default();
    progress.begin(sources.iter().map(|source| source.size()).sum());
    let work = || event_loop.block_on(write(&sources, &progress));
    shown.beside(|| progress.get(), work)
}

/// Ends the program if an option needs a target that is an image.
fn refuse(arguments: &Arguments) {
    let is_raw = arguments.formats.of_target(&arguments.target) == ImageFormat::Raw;
    let has_options =
        !arguments.options.is_empty() || arguments.backing.is_some() || arguments.bitmaps;
    if !is_raw || arguments.compress || has_options {
        wrong_usage("standard output gets a raw disk: an image in another format needs a file");
    }
    if arguments.if_there() != IfThere::Fail || arguments.rate.is_given() {
        wrong_usage("standard output is written from its start, as fast as it is read");
    }
    if std::io::stdout().is_terminal() {
        wrong_usage("standard output is a terminal: lead it into a pipe or a file");
    }
}

async fn write(sources: &[Arc<ImageDisk>], progress: &ToolProgress) -> Result<()> {
    let mut output = write_standard_output("the disk")?;
    let pieces = sources.iter().flat_map(|source| {
        let starts = (0..source.size()).step_by(PIECE as usize);
        starts.map(move |start| (source, start))
    });
    let reads = pieces.map(|(source, start)| read(source, start));
    let mut reads = Box::pin(stream::iter(reads).buffered(MAX_IN_FLIGHT));
    let outcome = async {
        while let Some(piece) = reads.next().await {
            let piece = piece?;
            let length = piece.len() as u64;
            if output.write(piece).await == Reader::Gone {
                break;
            }
            progress.advance(length);
        }
        anyhow::Ok(())
    }
    .await;
    let written = output.finish();
    outcome?;
    match written {
        // The reader has closed the pipe. The status must not be 0, because the reader has an
        // incomplete disk.
        Err(error) if is_broken_pipe(&error) => end_by_sigpipe(),
        written => written,
    }
}

async fn read(source: &ImageDisk, start: u64) -> Result<Buffer> {
    let range = ByteRange::between(start, (start + PIECE).min(source.size()));
    let mut buffer = Buffer::try_new(range.length() as usize)?;
    rare(source.submit(Request::Read { offset: start, into: buffer.lend() })).await?;
    Ok(buffer)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}
