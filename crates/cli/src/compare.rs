//! `blockhouse compare`: do two images have the same content?
//!
//! Exit status, as that of `qemu-img compare`: 0 the same, 1 different, 2 wrong usage, or an image
//! cannot be opened, or the answer cannot be printed, 3 its map cannot be read, 4 its data cannot be read.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use blockhouse_disk::{Comparing, Disk, ImageFormat, first_status_difference, open};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile};
use serde_json::{Value, json};

use crate::crew::{default_threads, work_together};
use crate::looked_at::read_only;
use crate::output::{self, ReaderGone};

/// Pieces under way in all.
const TOGETHER: usize = 16;

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
    /// The first image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The second image's format; left out, the file's name decides.
    #[arg(long, short = 'F', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    other_format: Option<ImageFormat>,
    /// Images of different sizes are different, and so are holes, zeros that take space, and data
    /// that is zeros. Without it a longer image is the same if all it has more is zeros.
    #[arg(long, short)]
    strict: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// An image. It is only read, with all files behind it.
    one: PathBuf,
    /// Another image.
    other: PathBuf,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    /// The first byte that differs.
    Content(u64),
    /// The first byte that is stored in another way.
    Status(u64),
    Size,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut event_loop = match EventLoop::new(EngineChoice::Auto) {
        Ok(event_loop) => event_loop,
        Err(error) => return Ok(failed(&error.into(), NO_ANSWER)),
    };
    let opened = event_loop.block_on(async {
        let one = open(&arguments.one, read_only(arguments.format)).await?;
        anyhow::Ok((one, open(&arguments.other, read_only(arguments.other_format)).await?))
    });
    let (one, other) = match opened {
        Ok((one, other)) => (Arc::new(one), Arc::new(other)),
        Err(error) => return Ok(failed(&error, NO_ANSWER)),
    };
    let verdict = match verdict(&mut event_loop, arguments, &one, &other) {
        Ok(verdict) => verdict,
        Err((error, status)) => return Ok(failed(&error, status)),
    };
    let sizes = [one.size(), other.size()];
    let text = if arguments.json { as_json(verdict, sizes) } else { as_text(verdict, sizes) };
    match output::print(&text) {
        Err(error) if error.is::<ReaderGone>() => Err(error),
        // A status of 1 would say that the images are different.
        Err(error) => Ok(failed(&error, NO_ANSWER)),
        Ok(()) => Ok(match verdict {
            Verdict::Same => ExitCode::SUCCESS,
            _ => ExitCode::from(DIFFERENT),
        }),
    }
}

type Image = Arc<Disk<HostFile>>;

fn verdict(
    event_loop: &mut EventLoop,
    arguments: &Arguments,
    one: &Image,
    other: &Image,
) -> Result<Verdict, (anyhow::Error, u8)> {
    if arguments.strict {
        if one.size() != other.size() {
            return Ok(Verdict::Size);
        }
        let found = event_loop.block_on(first_status_difference(one, other));
        if let Some(offset) = found.map_err(|error| (error.into(), MAP_NOT_READ))? {
            return Ok(Verdict::Status(offset));
        }
    }
    let threads = default_threads();
    let comparing = Comparing::new(Arc::clone(one), Arc::clone(other), TOGETHER.div_ceil(threads));
    work_together(threads, || async { Ok(comparing.work().await?) }, || comparing.progress())
        .map_err(|error| (error, DATA_NOT_READ))?;
    Ok(comparing.difference().map_or(Verdict::Same, Verdict::Content))
}

fn failed(error: &anyhow::Error, status: u8) -> ExitCode {
    output::tell(&format!("blockhouse: {error:#}"));
    ExitCode::from(status)
}

fn as_text(verdict: Verdict, [one, other]: [u64; 2]) -> String {
    match verdict {
        Verdict::Same if one == other => "The images are the same.".to_owned(),
        Verdict::Same => {
            format!("The images are the same but for zeros at the end ({one} and {other} bytes).")
        }
        Verdict::Content(offset) => {
            format!("The images are different, from offset {offset} ({offset:#x}) on.")
        }
        Verdict::Status(offset) => {
            format!("The images are stored differently, from offset {offset} ({offset:#x}) on.")
        }
        Verdict::Size => format!("The images have different sizes: {one} and {other} bytes."),
    }
}

fn as_json(verdict: Verdict, sizes: [u64; 2]) -> String {
    let (result, offset) = match verdict {
        Verdict::Same => ("same", None),
        Verdict::Content(offset) => ("content", Some(offset)),
        Verdict::Status(offset) => ("status", Some(offset)),
        Verdict::Size => ("size", None),
    };
    let mut value = json!({
        "same": verdict == Verdict::Same,
        "virtual-sizes": sizes,
    });
    if verdict != Verdict::Same {
        value["difference"] = result.into();
    }
    if let Some(offset) = offset {
        value["offset"] = Value::from(offset);
    }
    format!("{value:#}")
}
