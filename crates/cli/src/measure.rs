//! `blockhouse measure`: how long the file of a new image would be, before it is made.
//!
//! Guarantees: nothing is written. The `required` length suffices for a copy of the image without
//! compression. The `fully allocated` length suffices for all later writes of the guest, but not
//! for snapshots and bitmaps. The figures are those of `qemu-img measure`, with one difference:
//! parts of a cluster that were never written are counted as zeros here, as in a copy.

use std::path::PathBuf;

use anyhow::Result;
use blockhouse_config::size;
use blockhouse_core::ByteRange;
use blockhouse_disk::{Bitmap, BlockStatusCache, ImageDisk, ImageFormat, MapEntryKind};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::NewLuks;
use blockhouse_format::qcow2::{CreateOptions, NewEncryption, Preallocation, Version};
use serde_json::json;

use crate::create::{chosen_encryption, wrong_usage};
use crate::create_options::{self, ChosenEncryption, Settings};
use crate::create_setting::Setting;
use crate::image_args::OutputArgs;
use crate::image_opts::ImageOptsArgs;
use crate::json_text;
use crate::open_args::OpenArgs;
use crate::output;
use crate::snapshot_name::{SnapshotName, open_snapshot, parse_snapshot};

/// Bytes of an entry of the bitmap directory without the name, and the alignment of entries
/// (qcow2.txt, section *Bitmap directory*).
const DIRECTORY_ENTRY: u64 = 24;
const DIRECTORY_ALIGNMENT: u64 = 8;

/// Arguments of `measure`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The format of the new image.
    #[arg(long, short = 'O', default_value = "raw", value_name = "FORMAT")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    target_format: ImageFormat,
    /// Options of the new image, as those of 'create'.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...")]
    #[arg(value_parser = create_options::parse)]
    options: Vec<Settings>,
    /// The size of a new disk, in the place of an image to copy: 512, 64K, 1.5G, 1T.
    #[arg(long, value_parser = size::parse, conflicts_with = "image")]
    size: Option<u64>,
    /// The format of the image to copy; left out, the file's name decides.
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Measure the disk of this snapshot (its name or id).
    #[arg(long, short = 'l', value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    snapshot: Option<SnapshotName>,
    #[command(flatten)]
    output: OutputArgs,
    /// Do not lock the image: read it even while another program writes to it.
    #[arg(long, short = 'U')]
    force_share: bool,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image to copy.
    #[arg(required_unless_present = "size")]
    image: Option<PathBuf>,
}

/// Bytes of the new file.
struct Figures {
    required: u64,
    fully_allocated: u64,
    /// The additional space of a copy of the bitmaps; `None` if the image or its copy cannot have
    /// bitmaps.
    bitmaps: Option<u64>,
}

impl Figures {
    /// The figures of a file with a header of this many bytes before the data.
    fn behind(self, header: u64) -> Self {
        let Self { required, fully_allocated, bitmaps } = self;
        Self { required: required + header, fully_allocated: fully_allocated + header, bitmaps }
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Some(settings) = Settings::join(arguments.options.clone()) else {
        return output::print(&create_options::help(Some(arguments.target_format), false));
    };
    let figures = match arguments.target_format {
        ImageFormat::Raw => {
            create_options::raw(&settings).unwrap_or_else(|why| wrong_usage(&why));
            raw(&arguments)?
        }
        ImageFormat::Qcow2 => {
            let encryption = chosen_encryption(&settings);
            let options = create_options::qcow2(0, settings);
            let mut options = options.unwrap_or_else(|why| wrong_usage(&why));
            // The header is replaced by zeros of the same length.
            options.encryption = encryption.map(|encryption| match encryption {
                ChosenEncryption::Aes => NewEncryption::Aes,
                ChosenEncryption::Luks(_) => NewEncryption::Luks(vec![0; NewLuks::LENGTH]),
            });
            qcow2(&arguments, options)?
        }
        ImageFormat::Luks => {
            // The length of a container does not depend on when its space is allocated.
            let settings: Vec<_> = settings
                .into_iter()
                .filter(|setting| !matches!(setting, Setting::Preallocation(_)))
                .collect();
            create_options::luks(&settings).unwrap_or_else(|why| wrong_usage(&why));
            raw(&arguments)?.behind(NewLuks::LENGTH as u64)
        }
        format @ ImageFormat::Foreign(_) => wrong_usage(&format.not_made()),
    };
    output::print(&if arguments.output.is_json() { as_json(&figures) } else { as_text(&figures) })
}

/// A raw image is as long as its disk.
fn raw(arguments: &Arguments) -> Result<Figures> {
    let size = match arguments.size {
        Some(size) => size.next_multiple_of(512),
        None => with_image(arguments, async |disk| Ok(disk.size()))?,
    };
    Ok(Figures { required: size, fully_allocated: size, bitmaps: None })
}

fn qcow2(arguments: &Arguments, mut options: CreateOptions) -> Result<Figures> {
    let cluster = options.cluster_size;
    let (size, data, bitmaps) = match arguments.size {
        Some(size) => (size.next_multiple_of(512), 0, None),
        None => with_image(arguments, async |disk| {
            let clusters = clusters_with_data(disk, cluster).await?;
            let bitmaps = match disk.image().features() {
                Some(source) if [source.version, options.version] == [Version::V3; 2] => {
                    let bitmaps = disk.bitmaps().list().await?;
                    Some(size_of_bitmaps(&bitmaps, disk.size(), cluster))
                }
                _ => None,
            };
            Ok((disk.size(), clusters * cluster, bitmaps))
        })?,
    };
    options.size = size;
    let fully_allocated = options.full_length().unwrap_or_else(|why| wrong_usage(&why));
    let disk = size.next_multiple_of(cluster);
    // How much of an overlay's data its backing file will provide is unknown.
    let is_full = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full)
        || (options.backing.is_some() && arguments.size.is_none());
    let required = match options.data_file {
        // With a data file, the image contains no data.
        Some(_) => fully_allocated,
        None => fully_allocated - disk + if is_full { disk } else { data },
    };
    Ok(Figures { required, fully_allocated, bitmaps })
}

/// Opens the image to copy, and calls `look` with it.
fn with_image<T>(
    arguments: &Arguments,
    look: impl AsyncFnOnce(&ImageDisk) -> Result<T>,
) -> Result<T> {
    let Some(image) = &arguments.image else { wrong_usage("which image to copy is missing") };
    let named = arguments.image_opts.resolve_to_read(image, arguments.format)?;
    let (path, options) = arguments.open.read_named(named, arguments.force_share)?;
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        look(&open_snapshot(&path, options, arguments.snapshot.as_ref()).await?).await
    })
}

/// How many clusters of this size contain data, by the image's metadata.
async fn clusters_with_data(disk: &ImageDisk, cluster: u64) -> Result<u64> {
    let mut cache = BlockStatusCache::default();
    let mut rest = ByteRange::between(0, disk.size());
    let (mut clusters, mut counted_to) = (0, 0);
    while !rest.is_empty() {
        let part = disk.map_entry(rest, &mut cache).await?;
        rest = rest.skip(part.guest.length());
        if matches!(part.kind, MapEntryKind::Data { .. } | MapEntryKind::Compressed) {
            let first = (part.guest.offset() / cluster).max(counted_to);
            counted_to = part.guest.end().div_ceil(cluster);
            clusters += counted_to.saturating_sub(first);
        }
    }
    Ok(clusters)
}

/// Bytes that a copy of the bitmaps takes at most: their bits, a table for each, and the directory.
fn size_of_bitmaps(bitmaps: &[Bitmap], size: u64, cluster: u64) -> u64 {
    let mut directory = 0;
    let mut all = 0;
    for bitmap in bitmaps.iter().filter(|bitmap| !bitmap.is_inconsistent) {
        let bytes = size.div_ceil(bitmap.granularity).div_ceil(8);
        let clusters = bytes.div_ceil(cluster);
        all += clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        directory +=
            (DIRECTORY_ENTRY + bitmap.name.len() as u64).next_multiple_of(DIRECTORY_ALIGNMENT);
    }
    all + directory.next_multiple_of(cluster)
}

fn as_json(figures: &Figures) -> String {
    let mut value =
        json!({ "required": figures.required, "fully-allocated": figures.fully_allocated });
    if let Some(bitmaps) = figures.bitmaps {
        value["bitmaps"] = bitmaps.into();
    }
    json_text::pretty(&value)
}

fn as_text(figures: &Figures) -> String {
    let Figures { required, fully_allocated, bitmaps } = figures;
    let mut text = format!("required size: {required}\nfully allocated size: {fully_allocated}");
    if let Some(bitmaps) = bitmaps {
        text.push_str(&format!("\nbitmaps size: {bitmaps}"));
    }
    text
}
