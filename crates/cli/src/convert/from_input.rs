//! `blockhouse convert - TARGET`: a raw disk from standard input.
//!
//! Guarantees: a new target is as long as the stream, rounded up to whole sectors; an existing
//! target keeps its size. An empty stream is an error, because it is what a failed command at the
//! other end of the pipe produces. A stream that looks like an image of another format is copied
//! only with `-f raw`.

use std::io;
use std::os::fd::AsFd;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::{Buffer, Error, ToolProgress};
use blockhouse_disk::{ImageFormat, STREAM_PIECE, StreamOptions, copy_stream};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::probe;
use blockhouse_images::{check_apart_from, check_new_apart_from, is_device, keeps_its_place};
use futures_util::stream;
use rustix::fs::{FileType, SeekFrom, fstat, seek};

use super::arguments::{Arguments, settings};
use crate::copy_target::{IfThere, Target};
use crate::create::wrong_usage;
use crate::create_setting::{self, Setting};
use crate::image_args::resolve_relative;
use crate::output;
use crate::pipe::{Chunks, read_standard_input};
use crate::progress::Progress;

/// The name of the stream in messages.
const INPUT: &str = "standard input";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let format = arguments.formats.of_target(&arguments.target);
    let settings = settings(arguments, format);
    refuse(arguments, format, &settings);
    let shown = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    // The stream is checked before the target is created, because otherwise the target would have
    // to be removed after an error.
    let input = event_loop.block_on(begin(arguments))?;
    // An existing data file, and a target that is not replaced by a new file, are emptied.
    if is_device(&arguments.target) || keeps_its_place(&arguments.target) {
        check_new_apart_from(&arguments.target, io::stdin().as_fd(), INPUT)?;
    }
    if let Some(data) = create_setting::data_file(&settings) {
        let data = resolve_relative(&arguments.target, data.as_bytes());
        check_new_apart_from(&data, io::stdin().as_fd(), INPUT)?;
    }
    let spec = arguments.target_spec(format, settings, 0, &[]);
    let spec = crate::copy_target::TargetSpec { can_resume: false, ..spec };
    let target = event_loop.block_on(spec.build())?;
    if let Err(error) = check_apart_from(&target.disk, io::stdin().as_fd(), INPUT) {
        return event_loop.block_on(target.finish(Err(error.into())));
    }
    arguments.rate.apply(target.disk.throttle());
    let progress = ToolProgress::default();
    progress.begin(known_length().unwrap_or(0));
    let work = || event_loop.block_on(copy(arguments, input, &target, &progress));
    let copied = shown.beside(|| progress.get(), work);
    event_loop.block_on(target.finish(copied))
}

/// Ends the program if an option does not work with a stream as the source.
fn refuse(arguments: &Arguments, format: ImageFormat, settings: &[Setting]) {
    let is_of_image = arguments.snapshot.is_some() || arguments.bitmaps;
    let is_preallocated = |one: &Setting| matches!(one, Setting::Preallocation(_));
    let is_backing = |one: &Setting| matches!(one, Setting::BackingFile(_));
    if arguments.sources.len() > 1 {
        wrong_usage("standard input ('-') is the only source, or none");
    }
    if arguments.formats.source_format.is_some_and(|format| format != ImageFormat::Raw) {
        wrong_usage(
            "only a raw disk can be read from a pipe: put the image into a file, and convert that",
        );
    }
    if is_of_image || arguments.image_opts.is_used() {
        wrong_usage("a raw disk on standard input has no snapshots, bitmaps or options");
    }
    if arguments.if_there() == IfThere::Resume {
        wrong_usage("a copy from a pipe cannot be resumed: run the command again without --resume");
    }
    if format == ImageFormat::Luks && arguments.if_there() != IfThere::Overwrite {
        wrong_usage(
            "the size of a LUKS container cannot change, and how much comes is not known: make it (create), and say -n",
        );
    }
    if settings.iter().any(is_preallocated) {
        wrong_usage("how much comes is not known before: leave preallocation out");
    }
    if settings.iter().any(is_backing) {
        wrong_usage("what comes from a pipe is a whole disk, and no overlay (-B) of another");
    }
}

/// The number of bytes left in standard input, if that is a file.
fn known_length() -> Option<u64> {
    let input = io::stdin();
    let status = fstat(&input).ok()?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return None;
    }
    let at = seek(&input, SeekFrom::Current(0)).ok()?;
    u64::try_from(status.st_size).ok()?.checked_sub(at)
}

/// Reads the first piece. Refuses an empty stream and an image that is not raw.
async fn begin(arguments: &Arguments) -> Result<(Buffer, Chunks)> {
    let mut chunks = read_standard_input(STREAM_PIECE)?;
    let first = next(&mut chunks).await?;
    let Some(first) = first else {
        bail!("{INPUT}: is empty; see whether the command before the pipe has failed");
    };
    if arguments.formats.source_format.is_none()
        && let Some(name) = probe::name_of(&first.bytes()[..first.len().min(probe::LENGTH)])
    {
        bail!(
            "{INPUT}: looks like {name}, and a raw disk is read from a pipe; put the image into a file and convert that, or \
             say --source-format raw if the bytes are meant as they are"
        );
    }
    Ok((first, chunks))
}

async fn copy(
    arguments: &Arguments,
    (first, chunks): (Buffer, Chunks),
    target: &Target,
    progress: &ToolProgress,
) -> Result<()> {
    let options = StreamOptions {
        target_content: target.content,
        compress: arguments.compress,
        writes_zeros: arguments.sparse == Some(0),
        resize: target.is_new,
    };
    let rest = stream::unfold((Some(first), chunks), |(first, mut chunks)| async move {
        let piece = match first {
            Some(first) => Some(Ok(first)),
            None => next(&mut chunks).await.map_err(|error| host_error(&error)).transpose(),
        };
        piece.map(|piece| (piece, (None, chunks)))
    });
    let length = copy_stream(&target.disk, Box::pin(rest), options, progress).await?;
    let whole = length.next_multiple_of(512);
    if whole != length {
        output::tell(&format!(
            "blockhouse: {INPUT}: ended within a sector, which is filled up with zeros: {whole} bytes"
        ));
    }
    Ok(())
}

/// The next bytes, in memory that suits the storage.
async fn next(chunks: &mut Chunks) -> Result<Option<Buffer>> {
    let Some(chunk) = chunks.next().await else { return Ok(None) };
    let chunk = chunk.context(INPUT).map_err(|error| anyhow!("{error:#}"))?;
    let mut buffer = Buffer::try_new(chunk.len().next_multiple_of(512))?;
    buffer.set_len(chunk.len());
    buffer.bytes_mut().copy_from_slice(&chunk);
    chunks.recycle(chunk);
    Ok(Some(buffer))
}

fn host_error(error: &anyhow::Error) -> Error {
    Error::host("cannot read the disk", io::Error::other(error.to_string())).on(INPUT)
}
