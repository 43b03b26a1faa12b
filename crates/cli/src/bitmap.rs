//! `blockhouse bitmap`: the persistent dirty bitmaps inside an image. What qemu-img calls `--add`, `--remove` and so on is
//! that here, too.

use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_core::{Error, ErrorKind};
use blockhouse_disk::{
    Access, Bitmap, BitmapAction, ImageDisk, ImageFormat, ImageOptions, Locking, NewBitmap,
    make_sidecar, open_without_backing,
};
use blockhouse_engine::{EngineChoice, EventLoop};
use serde_json::{Value, json};

use crate::create::wrong_usage;
use crate::image_args::OutputArgs;
use crate::image_opts::ImageOptsArgs;
use crate::open_args::OpenArgs;
use crate::output;
use blockhouse_daemon::size;

/// Arguments of `bitmap`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    flag: Flag,
    #[command(flatten)]
    source: MergeSource,
    /// How many bytes of the disk one bit of a new bitmap stands for.
    #[arg(short = 'g', value_name = "SIZE", value_parser = size::parse, requires = "add")]
    granularity: Option<u64>,
    #[command(flatten)]
    access: ImageAccess,
    /// The image, where one of these options says what to do. No other program may use it.
    #[arg(required = true)]
    image: Option<PathBuf>,
    /// The bitmap's name.
    #[arg(required = true)]
    name: Option<String>,
}

/// What to do, as qemu-img's users say it.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Flag {
    /// The same as 'add IMAGE NAME'.
    #[arg(long)]
    add: bool,
    /// The same as 'remove IMAGE NAME'.
    #[arg(long)]
    remove: bool,
    /// The same as 'clear IMAGE NAME'.
    #[arg(long)]
    clear: bool,
    /// The same as 'enable IMAGE NAME'.
    #[arg(long)]
    enable: bool,
    /// The same as 'disable IMAGE NAME'.
    #[arg(long)]
    disable: bool,
    /// The same as 'merge IMAGE NAME SOURCE'.
    #[arg(long, value_name = "SOURCE")]
    merge: Option<String>,
}

/// Where a bitmap that is merged lies, if in another image.
#[derive(clap::Args)]
struct MergeSource {
    /// The image of the bitmap that has them. Left out: the same image.
    #[arg(long, short = 'b', value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// The format of that image; left out, the file's name decides.
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "source_file")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    source_format: Option<ImageFormat>,
}

impl Arguments {
    /// What is to be done, however it was said.
    fn action(self) -> Action {
        let Self { action, flag, source, granularity, access, image, name } = self;
        if let Some(action) = action {
            return action;
        }
        let (Some(image), Some(name)) = (image, name) else {
            wrong_usage("which image and which bitmap is missing");
        };
        let image = Image { access, image };
        match flag {
            Flag { merge: Some(of), .. } => Action::Merge { image, name, source: of, from: source },
            Flag { add: true, .. } => {
                Action::Add { image, new: NewBitmapArgs { name, granularity, disabled: false } }
            }
            Flag { remove: true, .. } => Action::Remove(Named { image, name }),
            Flag { clear: true, .. } => Action::Clear(Named { image, name }),
            Flag { enable: true, .. } => Action::Enable(Named { image, name }),
            _ => Action::Disable(Named { image, name }),
        }
    }
}

#[derive(clap::Subcommand)]
enum Action {
    /// Tell which bitmaps an image has.
    List {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Add a bitmap, in which changes of the disk are recorded from now on.
    Add {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        new: NewBitmapArgs,
    },
    /// Remove a bitmap.
    Remove(Named),
    /// Forget the changes in a bitmap: what is recorded in it begins anew.
    Clear(Named),
    /// Record changes of the disk in a bitmap from now on.
    Enable(Named),
    /// Record nothing more in a bitmap.
    Disable(Named),
    /// Add the changes that one bitmap has to those of another one.
    Merge {
        #[command(flatten)]
        image: Image,
        /// The bitmap that gets them.
        name: String,
        /// The bitmap that has them.
        source: String,
        #[command(flatten)]
        from: MergeSource,
    },
}

/// A new bitmap, of an image or of a served disk.
#[derive(clap::Args)]
pub struct NewBitmapArgs {
    /// What to call it: 1 to 1023 bytes, unlike all others.
    pub name: String,
    /// How many bytes of the disk one bit stands for: a power of two, 512 B to 2 GiB. Left out: a cluster,
    /// but 4 KiB at least and 64 KiB at most.
    #[arg(long, short, value_name = "SIZE", value_parser = size::parse)]
    pub granularity: Option<u64>,
    /// Record nothing in it before it is enabled.
    #[arg(long)]
    pub disabled: bool,
}

/// A bitmap of an image.
#[derive(clap::Args)]
struct Named {
    #[command(flatten)]
    image: Image,
    /// The bitmap's name.
    name: String,
}

/// The image.
#[derive(clap::Args)]
struct Image {
    #[command(flatten)]
    access: ImageAccess,
    /// The image. No other program may use it, except for `list`.
    image: PathBuf,
}

/// How an image is reached.
#[derive(clap::Args)]
struct ImageAccess {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    EventLoop::new(EngineChoice::Auto)?.block_on(run_action(arguments.action()))
}

async fn run_action(action: Action) -> Result<()> {
    match action {
        Action::List { image, output } => {
            let disk = image.open(Access::ReadOnly, Locking::None).await?;
            let bitmaps = disk.bitmaps().list().await?;
            let text = if output.is_json() { as_json(&bitmaps) } else { as_text(&bitmaps) };
            if text.is_empty() { Ok(()) } else { output::print(&text) }
        }
        Action::Add { image, new: NewBitmapArgs { name, granularity, disabled } } => {
            image.make_sidecar().await?;
            let disk = image.open(Access::ReadWrite, Locking::Held).await?;
            disk.bitmaps().add(&NewBitmap { name, granularity, is_enabled: !disabled }).await?;
            Ok(disk.close().await?)
        }
        Action::Remove(named) => named.change(BitmapAction::Remove).await,
        Action::Clear(named) => named.change(BitmapAction::Clear).await,
        Action::Enable(named) => named.change(BitmapAction::Enable).await,
        Action::Disable(named) => named.change(BitmapAction::Disable).await,
        Action::Merge { image, name, source, from } => {
            let MergeSource { source_file, source_format } = from;
            let disk = image.open(Access::ReadWrite, Locking::Held).await?;
            match source_file {
                Some(file) => {
                    let options = image.options(source_format, Access::ReadOnly, Locking::Held)?;
                    let other = open(&file, options).await?;
                    disk.bitmaps().merge(&name, &other, &source).await?;
                    other.close().await?;
                }
                None => {
                    disk.bitmaps().merge(&name, &disk, &source).await?;
                }
            }
            Ok(disk.close().await?)
        }
    }
}

impl Named {
    async fn change(self, action: BitmapAction) -> Result<()> {
        let disk = self.image.open(Access::ReadWrite, Locking::Held).await?;
        disk.bitmaps().change(&self.name, action).await?;
        Ok(disk.close().await?)
    }
}

impl Image {
    async fn open(&self, access: Access, locking: Locking) -> Result<ImageDisk> {
        let ImageAccess { format, image_opts, .. } = &self.access;
        let named = match access {
            Access::ReadOnly => image_opts.resolve(&self.image, *format)?,
            Access::ReadWrite => image_opts.resolve_to_change(&self.image, *format)?,
        };
        open(&named.path, self.options(named.format, access, locking)?).await
    }

    /// A place for the bitmaps of a raw image, if it has none yet.
    async fn make_sidecar(&self) -> Result<()> {
        let ImageAccess { format, image_opts, .. } = &self.access;
        let named = image_opts.resolve_to_change(&self.image, *format)?;
        let options = self.options(named.format, Access::ReadWrite, Locking::Held)?;
        Ok(make_sidecar(&named.path, &options).await.map_err(told)?)
    }

    fn options(
        &self,
        format: Option<ImageFormat>,
        access: Access,
        locking: Locking,
    ) -> Result<ImageOptions> {
        Ok(ImageOptions { access, locking, ..self.access.open.read_only(format)? })
    }
}

async fn open(image: &Path, options: ImageOptions) -> Result<ImageDisk> {
    // The tables are all that is needed.
    Ok(open_without_backing(image, options).await.map_err(told)?)
}

fn told(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Locked => error.hint("stop the program that has it open first"),
        _ => error,
    }
}

/// By the keys of `qemu-img info`.
pub fn value_of(bitmap: &Bitmap) -> Value {
    let flags = [(bitmap.is_in_use, "in-use"), (bitmap.is_enabled, "auto")];
    let flags: Vec<_> =
        flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect();
    json!({ "flags": flags, "name": bitmap.name, "granularity": bitmap.granularity })
}

fn as_json(bitmaps: &[Bitmap]) -> String {
    format!("{:#}", Value::Array(bitmaps.iter().map(value_of).collect()))
}

/// As a table; nothing where there are none.
fn as_text(bitmaps: &[Bitmap]) -> String {
    if bitmaps.is_empty() {
        return String::new();
    }
    let line = |name: &str, granularity: &str, state: &str| {
        format!("{name:<32} {granularity:>12}  {state}")
    };
    let heading = line("NAME", "GRANULARITY", "STATE");
    let lines = bitmaps.iter().map(|bitmap| {
        // Names come from the image: escaped, they cannot control the terminal.
        let name = bitmap.name.escape_debug().to_string();
        line(&name, &size::show(bitmap.granularity), state_of(bitmap))
    });
    std::iter::once(heading).chain(lines).collect::<Vec<_>>().join("\n")
}

/// In one word.
pub fn state_of(bitmap: &Bitmap) -> &'static str {
    match (bitmap.is_inconsistent, bitmap.is_enabled) {
        (true, _) => "inconsistent",
        (false, true) => "enabled",
        (false, false) => "disabled",
    }
}
