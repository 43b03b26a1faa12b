//! `qemu-img bench`: sends requests to an image, several of them in flight, and measures the total
//! time.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use blockhouse_config::size;
use blockhouse_core::{Buffer, Durability, Request, rare};
use blockhouse_disk::{ImageDisk, ImageFormat, LoadRequest, LoadSequence, send_load};
use blockhouse_engine::{Engine, EngineChoice, EventLoop};
use blockhouse_images::open;

use crate::image_opts::ImageOptsArgs;
use crate::open_args::{OpenArgs, TargetCacheArgs};
use crate::output;

/// Arguments of `qemu-bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides.
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// How many requests.
    #[arg(long, short, default_value_t = 75_000, value_name = "N")]
    count: u32,
    /// How many of them are in flight.
    #[arg(long, short, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    depth: u32,
    /// Where the first one begins.
    #[arg(long, short, default_value = "0", value_name = "SIZE", value_parser = size::parse)]
    offset: u64,
    /// Bytes of each.
    #[arg(long, short = 's', default_value = "4K", value_name = "SIZE", value_parser = parse_buffer_size)]
    buffer_size: u64,
    /// Bytes from the start of one to that of the next; left out, the bytes of each.
    #[arg(long, short = 'S', value_name = "SIZE", value_parser = size::parse)]
    step_size: Option<u64>,
    /// Write: the image is changed.
    #[arg(long, short)]
    write: bool,
    /// The byte that is written.
    #[arg(long, default_value_t = 0, value_name = "BYTE")]
    pattern: u8,
    /// Flush after this number of writes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    flush_interval: Option<u32>,
    /// Do not wait for the writes in flight before a flush.
    #[arg(long)]
    no_drain: bool,
    /// How file operations are done: threads, native or io_uring.
    #[arg(long, short = 'i', value_name = "MODE", value_parser = crate::serve::parse_aio)]
    aio: Option<EngineChoice>,
    /// As --aio native.
    #[arg(long, short)]
    native: bool,
    /// Do not lock the image.
    #[arg(long, short = 'U', conflicts_with = "write")]
    force_share: bool,
    #[command(flatten)]
    cache: TargetCacheArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image.
    image: PathBuf,
}

fn parse_buffer_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    let is_possible = bytes > 0 && bytes <= 64 << 20;
    is_possible.then_some(bytes).ok_or_else(|| "a request has 1 byte to 64 MiB".into())
}

/// The requests not yet sent.
struct Requests<'a> {
    disk: &'a ImageDisk,
    arguments: &'a Arguments,
    left: Cell<u32>,
    next: Cell<u64>,
}

/// Runs the command.
///
/// # Errors
/// The image cannot be opened, or a request fails.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { count, depth, offset, buffer_size, write, .. } = arguments;
    if arguments.flush_interval.is_some() && !write {
        bail!("--flush-interval is only available in write tests");
    }
    if arguments.flush_interval.is_some_and(|interval| interval < *depth) {
        bail!("Flush interval can't be smaller than depth");
    }
    let native = arguments.native.then_some(EngineChoice::Only(Engine::LinuxAio));
    let engine = arguments.aio.or(native).unwrap_or(EngineChoice::Auto);
    EventLoop::new(engine)?.block_on(async {
        let disk = arguments.open().await?;
        if *offset > disk.size().saturating_sub(*buffer_size) {
            bail!("{}: has {} bytes, and no request fits there", disk.name(), disk.size());
        }
        let kind = if *write { "write" } else { "read" };
        let step = arguments.step_size.unwrap_or(*buffer_size);
        let text = format!(
            "Sending {count} {kind} requests, {buffer_size} bytes each, {depth} in parallel (starting at offset \
             {offset}, step size {step})"
        );
        output::print(&text)?;
        if let Some(interval) = arguments.flush_interval {
            output::print(&format!("Sending flush every {interval} requests"))?;
        }
        let (left, next) = (Cell::new(0), Cell::new(*offset));
        let requests = Requests { disk: &disk, arguments, left, next };
        let begun = Instant::now();
        requests.send().await?;
        let seconds = begun.elapsed().as_secs_f64();
        output::print(&format!("Run completed in {seconds:3.3} seconds."))?;
        Ok(disk.close().await?)
    })
}

impl Arguments {
    async fn open(&self) -> Result<ImageDisk> {
        if self.write {
            let named = self.image_opts.resolve_to_change(&self.image, self.format)?;
            let options = self.cache.apply(self.open.change_named(&named)?);
            return Ok(open(&named.path, options).await?);
        }
        let named = self.image_opts.resolve_to_read(&self.image, self.format)?;
        let (path, options) = self.open.read_named(named, self.force_share)?;
        Ok(open(&path, self.cache.apply(options)).await?)
    }
}

impl Requests<'_> {
    /// Sends all requests, with a flush after each group of writes.
    async fn send(&self) -> Result<()> {
        let Arguments { count, depth, buffer_size, pattern, flush_interval, no_drain, .. } =
            self.arguments;
        let mut later = *count;
        while later > 0 {
            let group = flush_interval.filter(|_| !no_drain).unwrap_or(later).min(later);
            self.left.set(group);
            later -= group;
            let mut sequences: Vec<(Box<dyn LoadSequence>, _)> = Vec::new();
            for _ in 0..group.min(*depth) {
                let mut buffer = Buffer::try_new(*buffer_size as usize)?;
                buffer.bytes_mut().fill(*pattern);
                sequences.push((Box::new(Sequence { requests: self, later }), buffer));
            }
            rare(send_load(self.disk, sequences)).await?;
            if flush_interval.is_some_and(|interval| interval == group) && !no_drain {
                rare(self.disk.submit(Request::Flush)).await?;
            }
        }
        Ok(())
    }

    /// The offset of the next request. Starts from the beginning again if the request would end
    /// past the end of the disk.
    fn offset(&self) -> u64 {
        let Arguments { buffer_size, step_size, .. } = self.arguments;
        let offset = self.next.get();
        let next = offset.saturating_add(step_size.unwrap_or(*buffer_size));
        let has_room = next.saturating_add(*buffer_size) <= self.disk.size();
        self.next.set(if has_room { next } else { 0 });
        offset
    }
}

/// Requests of a group, one after the other; `later` requests follow the group.
struct Sequence<'a> {
    requests: &'a Requests<'a>,
    later: u32,
}

impl LoadSequence for Sequence<'_> {
    fn next_request(&mut self) -> Option<LoadRequest> {
        let Arguments { write, flush_interval, no_drain, .. } = self.requests.arguments;
        let left = self.requests.left.get().checked_sub(1)?;
        self.requests.left.set(left);
        let is_last = |interval: u32| (self.later + left).is_multiple_of(interval);
        Some(LoadRequest {
            offset: self.requests.offset(),
            write: write.then_some(Durability::None),
            then_flush: *no_drain && flush_interval.is_some_and(is_last),
        })
    }
}
