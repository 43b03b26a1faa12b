//! `blockhouse compare`: compares the content of two images.
//!
//! Exit status, as that of `qemu-img compare`: 0 the same; 1 different; 2 wrong usage, an image
//! cannot be opened, or the result cannot be printed; 3 the map of an image cannot be read; 4 the
//! data of an image cannot be read.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use blockhouse_core::rare;
use blockhouse_disk::{CompareJob, ImageDisk, ImageFormat, first_status_difference};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::open;
use serde_json::{Value, json};

use crate::called_as;
use crate::image_args::OutputArgs;
use crate::image_opts::ImageOptsArgs;
use crate::json_text;
use crate::open_args::{OpenArgs, SourceCacheArgs, name_format_option};
use crate::output;
use crate::parallel::{default_threads, run_parallel};
use crate::progress::{Progress, ProgressArgs};

/// The maximum number of chunks in flight, of all threads together.
const MAX_IN_FLIGHT: usize = 16;

const DIFFERENT: u8 = 1;
const NO_ANSWER: u8 = 2;
const MAP_NOT_READ: u8 = 3;
const DATA_NOT_READ: u8 = 4;

/// Arguments of `compare`.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0 the images are the same, 1 they are different, 2 wrong \
                        usage, or an image cannot be opened, or the answer cannot be printed, 3 its \
                        map cannot be read, 4 its data cannot be read.")]
pub struct Arguments {
    /// The first image's format; left out, the file's name decides (docs/formats.md; otherwise
    /// raw).
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The second image's format; left out, the file's name decides.
    #[arg(long, short = 'F', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    other_format: Option<ImageFormat>,
    /// Treat as different: images of different sizes, and ranges with other flags in 'map --json'
    /// (present, zero, data, compressed, any offset). Without it a longer image is the same if the
    /// rest is zeros.
    #[arg(long, short)]
    strict: bool,
    /// Do not lock the images: read them even while other programs write to them.
    #[arg(long, short = 'U')]
    force_share: bool,
    #[command(flatten)]
    source_cache: SourceCacheArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// An image. It and its backing files are only read.
    one: PathBuf,
    /// Another image.
    other: PathBuf,
}

impl Arguments {
    async fn open(&self, image: &Path, format: Option<ImageFormat>) -> Result<ImageDisk> {
        let named = self.image_opts.resolve_to_read(image, format)?;
        let (path, options) = self.open.read_named(named, self.force_share)?;
        Ok(open(&path, self.source_cache.apply(options)).await?)
    }
}

/// The first difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    Same,
    /// The first byte that differs.
    Content(u64),
    /// The first byte whose allocation differs.
    Status(u64),
    Size,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let started = Progress::start(arguments.progress)
        .and_then(|progress| Ok((progress, EventLoop::new(EngineChoice::Auto)?)));
    let (progress, mut event_loop) = match started {
        Ok(started) => started,
        Err(error) => return Ok(report_error(&error, NO_ANSWER)),
    };
    let opened = event_loop.block_on(async {
        let one = arguments.open(&arguments.one, arguments.format).await?;
        let other = arguments.open(&arguments.other, arguments.other_format).await;
        let other = other.map_err(|error| name_format_option(error, "--other-format"));
        anyhow::Ok((one, other?))
    });
    let (one, other) = match opened {
        Ok((one, other)) => (Arc::new(one), Arc::new(other)),
        Err(error) => return Ok(report_error(&error, NO_ANSWER)),
    };
    let difference = match difference(&mut event_loop, arguments, &progress, &one, &other) {
        Ok(difference) => difference,
        Err((error, status)) => return Ok(report_error(&error, status)),
    };
    let sizes = [one.size(), other.size()];
    let text = if arguments.output.is_json() {
        as_json(difference, sizes)
    } else {
        as_text(difference, sizes)
    };
    match output::print_unless_quiet(&text) {
        // The status is not 1, because that would mean that the images are different.
        Err(error) => Ok(report_error(&error, NO_ANSWER)),
        Ok(()) => Ok(match difference {
            Difference::Same => ExitCode::SUCCESS,
            _ => ExitCode::from(DIFFERENT),
        }),
    }
}

type Image = Arc<ImageDisk>;

fn difference(
    event_loop: &mut EventLoop,
    arguments: &Arguments,
    progress: &Progress,
    one: &Image,
    other: &Image,
) -> Result<Difference, (anyhow::Error, u8)> {
    let mut status = None;
    if arguments.strict {
        if one.size() != other.size() {
            return Ok(Difference::Size);
        }
        let found = event_loop.block_on(rare(first_status_difference(one, other)));
        status = found.map_err(|error| (error.into(), MAP_NOT_READ))?;
    }
    // Only a difference of content before that of the status is the first one.
    let size = status.unwrap_or_else(|| one.size().max(other.size()));
    let threads = default_threads();
    let max_in_flight = MAX_IN_FLIGHT.div_ceil(threads);
    let comparing = CompareJob::of_start(Arc::clone(one), Arc::clone(other), size, max_in_flight);
    run_parallel(
        event_loop,
        progress,
        threads,
        || async { Ok(comparing.work().await?) },
        || comparing.progress(),
    )
    .map_err(|error| (error, DATA_NOT_READ))?;
    let content = comparing.difference().map(Difference::Content);
    Ok(content.or(status.map(Difference::Status)).unwrap_or(Difference::Same))
}

fn report_error(error: &anyhow::Error, status: u8) -> ExitCode {
    output::tell_failure(error);
    ExitCode::from(status)
}

fn as_text(difference: Difference, [one, other]: [u64; 2]) -> String {
    match difference {
        Difference::Same if one == other => "Images are identical.".to_owned(),
        Difference::Same if called_as::is_qemu_img() => {
            "Warning: Image size mismatch!\nImages are identical.".to_owned()
        }
        Difference::Same => {
            format!(
                "Warning: Image size mismatch!\nImages are identical.\nOne has {one} bytes and the other {other}: what is \
                 more is zeros."
            )
        }
        Difference::Content(offset) => format!("Content mismatch at offset {offset}!"),
        Difference::Status(offset) => {
            format!("Strict mode: Offset {offset} block status mismatch!")
        }
        Difference::Size if called_as::is_qemu_img() => {
            "Strict mode: Image size mismatch!".to_owned()
        }
        Difference::Size => {
            format!("Strict mode: Image size mismatch!\nOne has {one} bytes and the other {other}.")
        }
    }
}

fn as_json(difference: Difference, sizes: [u64; 2]) -> String {
    let (result, offset) = match difference {
        Difference::Same => ("same", None),
        Difference::Content(offset) => ("content", Some(offset)),
        Difference::Status(offset) => ("status", Some(offset)),
        Difference::Size => ("size", None),
    };
    let mut value = json!({
        "same": difference == Difference::Same,
        "virtual-sizes": sizes,
    });
    if difference != Difference::Same {
        value["difference"] = result.into();
    }
    if let Some(offset) = offset {
        value["offset"] = Value::from(offset);
    }
    json_text::pretty(&value)
}
