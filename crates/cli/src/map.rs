//! `blockhouse map`: the parts of an image that have data, and their locations; or the parts that
//! have changed since a snapshot.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_config::size;
use blockhouse_core::{Allocation, ByteRange, Storage, StorageChange};
use blockhouse_disk::{BlockStatusCache, ImageDisk, MapEntry, MapEntryKind};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::open;
use blockhouse_storage::{Location, NbdStorage};
use serde_json::json;

use crate::called_as;
use crate::image_args::ImageArgs;
use crate::output;

/// Arguments of `map`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    image: ImageArgs,
    /// Begin at this offset of the disk.
    #[arg(long, short, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    start_offset: u64,
    /// Map this many bytes at most.
    #[arg(long, short = 'l', value_name = "SIZE", value_parser = size::parse)]
    max_length: Option<u64>,
    /// Show only parts that were written or discarded since this snapshot. Only for a raw image in
    /// Ceph, and its younger snapshots.
    #[arg(long, value_name = "SNAPSHOT")]
    since: Option<String>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let image = &arguments.image;
    if let Some((path, context)) = image.context()? {
        return output::print(&context_of(&path, &context)?);
    }
    let text = EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let (path, options) = image.read_only()?;
        let disk = open(&path, options).await?;
        let end = arguments.start_offset.saturating_add(arguments.max_length.unwrap_or(u64::MAX));
        let size = disk.size();
        let range = ByteRange::between(arguments.start_offset.min(size), end.min(size));
        if let Some(snapshot) = &arguments.since {
            let changes = disk.snapshots().changes_since(snapshot, range).await?;
            return Ok(if image.is_json() {
                changes_as_json(&changes)
            } else {
                changes_as_text(&changes)
            });
        }
        let parts = parts_of(&disk, range).await?;
        if called_as::is_qemu_img() && !image.is_json() && parts.iter().any(is_compressed) {
            bail!("File contains external, encrypted or compressed clusters.");
        }
        anyhow::Ok(if !image.is_json() {
            as_text(&parts, &disk)
        } else if parts.is_empty() && called_as::is_qemu_img() {
            empty_as_json(arguments.start_offset)
        } else {
            as_json(&parts, &disk)
        })
    })?;
    output::print(&text)
}

/// The map of an export in a context of its server, by the two flags that base:allocation has.
fn context_of(path: &Path, context: &str) -> Result<String> {
    /// Larger numbers are treated alike: in qemu:allocation-depth they are deeper backing files.
    const MAX_FLAGS: u32 = 2;
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let Location::Nbd { uri, reconnect } = Location::of(path)? else {
            bail!("{}: only an export of a server has contexts", path.display());
        };
        let export = NbdStorage::connect_for_context(uri, reconnect, context).await?;
        let mut parts: Vec<(ByteRange, u32)> = Vec::new();
        let mut rest = ByteRange::between(0, export.size());
        while !rest.is_empty() {
            let (flags, length) = export.context_extent(rest).await?;
            let (part, flags) = (rest.truncate(length), flags.min(MAX_FLAGS));
            rest = rest.skip(length);
            match parts.last_mut() {
                Some((last, of_last)) if *of_last == flags => {
                    *last = ByteRange::between(last.offset(), part.end());
                }
                _ => parts.push((part, flags)),
            }
        }
        let lines = parts.into_iter().map(|(part, flags)| {
            let is_hole = flags & 1 != 0;
            let start = part.offset();
            let place = if is_hole { String::new() } else { format!(", \"offset\": {start}") };
            format!(
                "{{ \"start\": {start}, \"length\": {}, \"depth\": 0, \"present\": {}, \"zero\": {}, \"data\": {}, \
                 \"compressed\": false{place}}}",
                part.length(),
                !is_hole,
                flags & 2 != 0,
                !is_hole
            )
        });
        Ok(format!("[{}]", lines.collect::<Vec<_>>().join(",\n")))
    })
}

/// The parts of `rest`; neighbours of the same kind are merged.
async fn parts_of(disk: &ImageDisk, mut rest: ByteRange) -> Result<Vec<MapEntry>> {
    let mut parts: Vec<MapEntry> = Vec::new();
    let mut cache = BlockStatusCache::default();
    while !rest.is_empty() {
        let part = disk.map_entry(rest, &mut cache).await?;
        rest = rest.skip(part.guest.length());
        match parts.last_mut() {
            Some(last) if goes_on(last, &part) => {
                last.guest = ByteRange::between(last.guest.offset(), part.guest.end());
            }
            _ => parts.push(part),
        }
    }
    Ok(parts)
}

/// Whether `next` continues the part before it.
fn goes_on(last: &MapEntry, next: &MapEntry) -> bool {
    let distance = last.guest.length();
    last.depth == next.depth
        && std::mem::discriminant(&last.kind) == std::mem::discriminant(&next.kind)
        && last.kind.host().map(|host| host + distance) == next.kind.host()
}

fn is_compressed(part: &MapEntry) -> bool {
    part.kind == MapEntryKind::Compressed
}

fn has_data(kind: MapEntryKind) -> bool {
    matches!(
        kind,
        MapEntryKind::Data { .. } | MapEntryKind::Unwritten { .. } | MapEntryKind::Compressed
    )
}

fn is_zero(kind: MapEntryKind) -> bool {
    !matches!(kind, MapEntryKind::Data { .. } | MapEntryKind::Compressed)
}

/// As `qemu-img` does: one line for each part.
fn as_json(parts: &[MapEntry], disk: &ImageDisk) -> String {
    let lines = parts.iter().map(|&MapEntry { guest, depth, kind }| {
        let (start, length) = (guest.offset(), guest.length());
        let place = kind.host().map(|host| format!(", \"offset\": {}", disk.image().locate(depth, host).1));
        // Scripts depend on this order and these spaces.
        format!(
            "{{ \"start\": {start}, \"length\": {length}, \"depth\": {depth}, \"present\": {}, \"zero\": {}, \
             \"data\": {}, \"compressed\": {}{}}}",
            !matches!(kind, MapEntryKind::Hole { .. }),
            is_zero(kind),
            has_data(kind),
            kind == MapEntryKind::Compressed,
            place.unwrap_or_default(),
        )
    });
    format!("[{}]", lines.collect::<Vec<_>>().join(",\n"))
}

/// The map of a range at `start` that has no byte of the disk, as qemu-img prints it.
fn empty_as_json(start: u64) -> String {
    format!(
        "[{{ \"start\": {start}, \"length\": 0, \"depth\": 0, \"present\": false, \"zero\": false, \
         \"data\": false, \"compressed\": false}}]"
    )
}

/// A number as `%#x` of C, and so QEMU, prints it: 0 has no `0x`.
fn hexadecimal(number: u64) -> String {
    if number == 0 { "0".into() } else { format!("{number:#x}") }
}

/// The parts with data, and the files that have it.
fn as_text(parts: &[MapEntry], disk: &ImageDisk) -> String {
    let line = |offset: &str, length: &str, place: &str, file: &str| {
        format!("{offset:<16}{length:<16}{place:<16}{file}")
    };
    let with_data = parts.iter().filter(|part| !is_zero(part.kind)).map(|part| {
        let [offset, length] = [part.guest.offset(), part.guest.length()].map(hexadecimal);
        let data_name = disk.image().layer_at(part.depth).map_or("", |layer| layer.data_name);
        let (file, place) = match part.kind.host() {
            Some(host) => {
                let (file, offset) = disk.image().locate(part.depth, host);
                (file, hexadecimal(offset))
            }
            None => (data_name, "compressed".into()),
        };
        line(&offset, &length, &place, file)
    });
    let heading = line("Offset", "Length", "Mapped to", "File");
    [heading].into_iter().chain(with_data).collect::<Vec<_>>().join("\n")
}

/// The changes as JSON in the form of the map, without locations in the image's files.
fn changes_as_json(changes: &[StorageChange]) -> String {
    let lines = changes.iter().map(|&StorageChange { range, allocation }| {
        let has_data = allocation == Allocation::Data;
        json!({
            "start": range.offset(),
            "length": range.length(),
            "present": has_data,
            "zero": !has_data,
            "data": has_data,
        })
        .to_string()
    });
    format!("[{}]", lines.collect::<Vec<_>>().join(",\n"))
}

/// The changed parts, and their current state.
fn changes_as_text(changes: &[StorageChange]) -> String {
    let line = |offset: &str, length: &str, now: &str| format!("{offset:<16}{length:<16}{now}");
    let lines = changes.iter().map(|&StorageChange { range, allocation }| {
        let [offset, length] = [range.offset(), range.length()].map(|bytes| format!("{bytes:#x}"));
        let now = if allocation == Allocation::Data { "data" } else { "zeros" };
        line(&offset, &length, now)
    });
    [line("Offset", "Length", "Now")].into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}
