//! `blockhouse dd`: a part of a disk as a new image, in the words of dd(1) and qemu-img dd.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target). Block sizes are only units of the
//! other operands; the copied range does not depend on how the copy is divided into requests.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use blockhouse_config::size;
use blockhouse_core::ByteRange;
use blockhouse_disk::ImageFormat;
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::NewForeignOptions;
use blockhouse_images::{behind_links, open};

use crate::called_as;
use crate::copy_target::{CopyFormats, How, IfThere, TargetSpec, copy};
use crate::create::{whole_sectors, wrong_usage};
use crate::foreign_target::{ForeignTarget, sector_of_copy};
use crate::image_opts::ImageOptsArgs;
use crate::open_args::{OpenArgs, name_format_option};
use crate::output;
use crate::progress::{Progress, ProgressArgs};

/// Bytes of a block if bs= is not given.
const BLOCK: u64 = 512;

/// Arguments of `dd`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    formats: CopyFormats,
    /// Do not lock the source: copy it even while another program writes to it. The copy may mix
    /// several points in time.
    #[arg(long, short = 'U')]
    force_share: bool,
    /// Replace a target that exists, once the copy is complete; or overwrite a block device.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// if=SOURCE, of=TARGET, which is a new image; bs=SIZE, bytes of a block (512); skip=N, blocks
    /// to leave out at the start; count=N, blocks to copy; isize=SIZE, bytes to copy at most.
    #[arg(required = true, value_name = "OPERAND=VALUE", value_parser = parse_operand)]
    operands: Vec<Operand>,
}

/// The value of one operand.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operand {
    Source(PathBuf),
    Target(PathBuf),
    BlockSize(u64),
    Skip(u64),
    Count(u64),
    Bytes(u64),
}

fn parse_operand(text: &str) -> Result<Operand, String> {
    const NAMES: &str = "if=, of=, bs=, skip=, count= and isize=";
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("'{text}' is not one of {NAMES}"))?;
    let number = || size::parse(value);
    Ok(match name {
        "if" => Operand::Source(value.into()),
        "of" => Operand::Target(value.into()),
        "bs" => match number()? {
            0 => return Err("a block has a byte at least".into()),
            bytes => Operand::BlockSize(bytes),
        },
        "skip" => Operand::Skip(number()?),
        "count" => Operand::Count(number()?),
        "isize" => Operand::Bytes(number()?),
        _ => return Err(format!("there is no '{name}='; use {NAMES}")),
    })
}

/// The values of all operands. If an operand is repeated, the last one is used.
#[derive(Default)]
struct Operands {
    source: Option<PathBuf>,
    target: Option<PathBuf>,
    block: Option<u64>,
    skip: u64,
    count: Option<u64>,
    bytes: Option<u64>,
}

impl Operands {
    fn of(all: &[Operand]) -> Self {
        let mut operands = Self::default();
        for operand in all.iter().cloned() {
            match operand {
                Operand::Source(path) => operands.source = Some(path),
                Operand::Target(path) => operands.target = Some(path),
                Operand::BlockSize(bytes) => operands.block = Some(bytes),
                Operand::Skip(blocks) => operands.skip = blocks,
                Operand::Count(blocks) => operands.count = Some(blocks),
                Operand::Bytes(bytes) => operands.bytes = Some(bytes),
            }
        }
        operands
    }

    /// The range that is copied of a disk of `size` bytes; `None` if the range begins past its end.
    fn part_of(&self, size: u64) -> Option<ByteRange> {
        let block = self.block.unwrap_or(BLOCK);
        let start = self.skip.checked_mul(block).filter(|&start| start <= size)?;
        let counted = self.count.map_or(u64::MAX, |count| count.saturating_mul(block));
        let length = (size - start).min(counted).min(self.bytes.unwrap_or(u64::MAX));
        Some(ByteRange::between(start, start + length))
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let operands = Operands::of(&arguments.operands);
    let (Some(source), Some(path)) = (&operands.source, &operands.target) else {
        wrong_usage(
            "both a source (if=) and a target (of=) are needed; with a pipe it is 'blockhouse convert SOURCE -' or \
             'blockhouse convert - TARGET'",
        );
    };
    let path = &behind_links(path);
    let progress = Progress::start(arguments.progress)?;
    let named = arguments.image_opts.resolve_to_read(source, arguments.formats.source_format)?;
    let (source, options) = arguments.open.read_named(named, arguments.force_share)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let source = event_loop.block_on(open(&source, options));
    let source = source.map_err(|error| name_format_option(error, "--source-format"))?;
    let part = operands.part_of(source.size()).unwrap_or_else(|| {
        let name = source.name();
        output::tell(&if called_as::is_qemu_img() {
            format!("qemu-img: {name}: cannot skip to specified offset")
        } else {
            format!("blockhouse: {name}: has {} bytes, and all of them are skipped", source.size())
        });
        ByteRange::between(0, 0)
    });
    let format = arguments.formats.of_target(path);
    let size = whole_sectors(path, part.length());
    let if_there =
        if arguments.force || called_as::is_qemu_img() { IfThere::Replace } else { IfThere::Fail };
    if let ImageFormat::Foreign(kind) = format {
        let parts = vec![(Arc::new(source), part)];
        let sources: Vec<_> = parts.iter().map(|(source, _)| Arc::clone(source)).collect();
        let sector_size = sector_of_copy(kind, &sources);
        let options = NewForeignOptions { sector_size, ..NewForeignOptions::new(size) };
        let (file, parent, is_flushed) = (called_as::new_file(), None, true);
        let target = ForeignTarget { path, kind, options, parent, file, if_there, is_flushed };
        return target.copy(&mut event_loop, &progress, parts, How::default());
    }
    let spec = TargetSpec::new(path, format, size, &arguments.open, vec![&source]);
    let spec = TargetSpec { if_there, ..spec };
    let target = event_loop.block_on(spec.build())?;
    let parts = vec![(Arc::new(source), part)];
    let copied = copy(&mut event_loop, &progress, parts, &target, How::default());
    event_loop.block_on(target.finish(copied))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(words: &str, size: u64) -> Option<(u64, u64)> {
        let operands: Vec<_> =
            words.split_whitespace().map(|word| parse_operand(word).unwrap()).collect();
        Operands::of(&operands).part_of(size).map(|part| (part.offset(), part.length()))
    }

    #[test]
    fn operands_name_a_part_of_the_disk() {
        for (words, expected) in [
            ("", Some((0, 5000))),
            ("count=2", Some((0, 1024))),
            ("bs=1K skip=1 count=2", Some((1024, 2048))),
            ("bs=4K skip=1", Some((4096, 904))),
            ("bs=1 skip=5000", Some((5000, 0))),
            ("bs=1 skip=5001", None),
            ("bs=1E skip=1E", None),
            ("bs=1E count=1E", Some((0, 5000))),
            ("isize=700 count=2", Some((0, 700))),
            ("isize=1K bs=100 skip=1 count=3 count=4", Some((100, 400))),
        ] {
            assert_eq!(part(words, 5000), expected, "{words}");
        }
    }

    #[test]
    fn what_is_no_operand_is_told() {
        for (word, said) in [("bs=0", "byte"), ("conv=notrunc", "skip="), ("disk.img", "if=")] {
            let error = parse_operand(word).unwrap_err();
            assert!(error.contains(said), "{word}: {error}");
        }
    }
}
