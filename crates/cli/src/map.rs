//! `blockhouse map`: which parts of an image have data, and where.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};
use blockhouse_core::{ByteRange, ExtentState, Status, Storage};
use blockhouse_disk::{BlockStatus, ImageFormat, Locking};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile};
use blockhouse_format::{Intent, Qcow2};
use serde_json::json;

use crate::image_file::{self, ImageFile};

/// Arguments of `map`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Print JSON with the keys of `qemu-img map --output=json`.
    #[arg(long)]
    json: bool,
    /// The image. It is only read; nobody may change it meanwhile. Images over a backing file are
    /// refused.
    image: PathBuf,
}

/// What a part of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Data in the image's file, from `host` on.
    Data { host: u64 },
    /// A place in the image's file for data, from `host` on, that nothing was written to yet.
    Unwritten { host: u64 },
    /// Packed data.
    Compressed,
    /// Zeros that the image names; with their place in the file where that is known.
    Zero { host: Option<u64> },
    /// Nothing was ever written.
    Hole,
}

impl Content {
    fn host(self) -> Option<u64> {
        match self {
            Self::Data { host } | Self::Unwritten { host } => Some(host),
            Self::Zero { host } => host,
            Self::Compressed | Self::Hole => None,
        }
    }

    fn has_data(self) -> bool {
        matches!(self, Self::Data { .. } | Self::Unwritten { .. } | Self::Compressed)
    }

    fn is_zero(self) -> bool {
        matches!(self, Self::Unwritten { .. } | Self::Zero { .. } | Self::Hole)
    }

    /// Whether `next`, `distance` bytes on, is more of the same.
    fn goes_on(self, next: Self, distance: u64) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&next)
            && self.host().map(|host| host + distance) == next.host()
    }
}

/// A part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    guest: ByteRange,
    content: Content,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, json, image } = arguments;
    let parts = EventLoop::new(EngineChoice::Auto)?.block_on(async {
        // Locked, so that nobody writes until the map is there.
        let file = image_file::open(&image, format, Locking::Held).await?;
        if let Some(backing) = file.disk.backing_file() {
            let name = String::from_utf8_lossy(&backing.name);
            bail!(
                "{}: has the backing file '{name}', and chains cannot be mapped; map each file \
                 that stands alone, or use qemu-img map",
                image.display()
            );
        }
        parts_of(&file).await
    })?;
    let text = if json { as_json(&parts) } else { as_text(&parts, &image.display().to_string()) };
    // Nobody reading is no failure of ours.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

/// The whole disk from its start to its end, each part as long as it can be.
async fn parts_of(file: &ImageFile) -> Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut rest = ByteRange::between(0, file.disk.size());
    while !rest.is_empty() {
        let part = match &file.tables {
            Some(tables) => part_by_tables(tables, rest).await?,
            None => part_by_host(file, rest).await?,
        };
        rest = rest.skip(part.guest.length());
        match parts.last_mut() {
            Some(last) if last.content.goes_on(part.content, last.guest.length()) => {
                last.guest = ByteRange::between(last.guest.offset(), part.guest.end());
            }
            _ => parts.push(part),
        }
    }
    Ok(parts)
}

async fn part_by_tables(tables: &Qcow2<HostFile>, range: ByteRange) -> Result<Part> {
    let extent = tables.map(range, Intent::Read).await?;
    let guest = extent.guest;
    let content = match extent.state {
        ExtentState::Mapped { host } => return written_part(tables.storage(), guest, host).await,
        ExtentState::Zero => Content::Zero { host: None },
        ExtentState::Compressed { .. } => Content::Compressed,
        // Nothing stands behind the images that get here.
        ExtentState::Hole | ExtentState::Backing => Content::Hole,
    };
    Ok(Part { guest, content })
}

/// The first bytes of `guest`, which are mapped to `host`: clusters that were allocated ahead of
/// their data are holes of the file, or lie past its end.
async fn written_part(file: &HostFile, guest: ByteRange, host: u64) -> Result<Part> {
    let inside = file.size().saturating_sub(host).min(guest.length());
    let Some(range) = ByteRange::new(host, inside).filter(|range| !range.is_empty()) else {
        return Ok(Part { guest, content: Content::Unwritten { host } });
    };
    let (status, length) = file.status(range).await?;
    let content = match status {
        Status::Data => Content::Data { host },
        Status::Hole => Content::Unwritten { host },
    };
    Ok(Part { guest: guest.truncate(length), content })
}

/// In a raw image everything has its place, holes of the file as well.
async fn part_by_host(file: &ImageFile, range: ByteRange) -> Result<Part> {
    let (status, length) = file.disk.status(range).await?;
    let host = range.offset();
    let content = match status {
        BlockStatus::Data => Content::Data { host },
        BlockStatus::Hole | BlockStatus::Zero => Content::Zero { host: Some(host) },
    };
    Ok(Part { guest: range.truncate(length), content })
}

/// As `qemu-img` does: one line for each part.
fn as_json(parts: &[Part]) -> String {
    let lines = parts.iter().map(|Part { guest, content }| {
        let mut value = json!({
            "start": guest.offset(),
            "length": guest.length(),
            "depth": 0,
            "present": *content != Content::Hole,
            "zero": content.is_zero(),
            "data": content.has_data(),
            "compressed": *content == Content::Compressed,
        });
        if let Some(host) = content.host() {
            value["offset"] = host.into();
        }
        value.to_string()
    });
    format!("[{}]", lines.collect::<Vec<_>>().join(",\n"))
}

/// The parts with data.
fn as_text(parts: &[Part], image: &str) -> String {
    let line = |offset: &str, length: &str, place: &str, file: &str| {
        format!("{offset:<16}{length:<16}{place:<16}{file}")
    };
    let with_data = parts.iter().filter(|part| !part.content.is_zero()).map(|part| {
        let [offset, length] =
            [part.guest.offset(), part.guest.length()].map(|bytes| format!("{bytes:#x}"));
        let place = part.content.host().map_or("compressed".into(), |host| format!("{host:#x}"));
        line(&offset, &length, &place, image)
    });
    let heading = line("Offset", "Length", "Mapped to", "File");
    [heading].into_iter().chain(with_data).collect::<Vec<_>>().join("\n")
}
