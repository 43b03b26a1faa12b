//! `blockhouse bitmap`: the persistent dirty bitmaps inside an image. The options of qemu-img
//! (`--add`, `--remove` and so on) are accepted, too.

use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_core::{Error, ErrorKind};
use blockhouse_disk::{Access, Bitmap, BitmapAction, ImageDisk, ImageFormat, NewBitmap};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{ImageOptions, Locking, Purpose, make_side_file, remove_unused_side_file};
use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Command, FromArgMatches};
use serde_json::{Value, json};

use crate::called_as;
use crate::create::wrong_usage;
use crate::image_args::OutputArgs;
use crate::image_opts::{self, ImageOptsArgs};
use crate::json_text;
use crate::open_args::{OpenArgs, of_metadata};
use crate::output;
use crate::side_file_args::SideFileArgs;
use blockhouse_config::size;

/// Arguments of `bitmap`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    source: MergeSource,
    /// The granularity of a new bitmap: bytes of the disk for each bit.
    #[arg(short = 'g', long, value_name = "SIZE", value_parser = size::parse, requires = "add")]
    granularity: Option<u64>,
    #[command(flatten)]
    access: ImageAccess,
    /// The image, if one of these options is the action. No other program may use it.
    #[arg(required = true)]
    image: Option<PathBuf>,
    /// The bitmap's name.
    #[arg(required = true)]
    name: Option<String>,
}

/// The actions as options of qemu-img: several are carried out in the order of the command line.
struct Flags(Vec<Flag>);

/// One action as an option.
enum Flag {
    Add,
    Change(BitmapAction),
    Merge(String),
}

/// The names of the options, and the subcommands that do the same.
const FLAGS: [(&str, &str); 5] = [
    ("add", "The same as 'add IMAGE NAME'"),
    ("remove", "The same as 'remove IMAGE NAME'"),
    ("clear", "The same as 'clear IMAGE NAME'"),
    ("enable", "The same as 'enable IMAGE NAME'"),
    ("disable", "The same as 'disable IMAGE NAME'"),
];
const MERGE: &str = "merge";

impl clap::Args for Flags {
    fn augment_args(command: Command) -> Command {
        let merge = Arg::new(MERGE).long(MERGE).value_name("SOURCE").action(ArgAction::Append);
        // Each occurrence has an index, which a flag without a value would not have.
        let flags = FLAGS.map(|(name, help)| {
            let flag = Arg::new(name).long(name).help(help).action(ArgAction::Append);
            flag.num_args(0).default_missing_value(name)
        });
        let names = FLAGS.map(|(name, _)| name).into_iter().chain([MERGE]);
        let group = ArgGroup::new("flag").args(names).required(true).multiple(true);
        let merge = merge.help("The same as 'merge IMAGE NAME SOURCE'");
        command.args(flags).arg(merge).group(group)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = FLAGS.iter().flat_map(|(name, _)| {
            let indices = matches.indices_of(name).into_iter().flatten();
            indices.map(|index| (index, Flag::of(name)))
        });
        let mut flags: Vec<_> = given.collect();
        let sources = matches.get_many::<String>(MERGE).into_iter().flatten();
        let merges = matches.indices_of(MERGE).into_iter().flatten().zip(sources);
        flags.extend(merges.map(|(index, source)| (index, Flag::Merge(source.clone()))));
        flags.sort_by_key(|(index, _)| *index);
        Ok(Self(flags.into_iter().map(|(_, flag)| flag).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Flag {
    /// The flag of a name in [`FLAGS`].
    fn of(name: &str) -> Self {
        match name {
            "remove" => Self::Change(BitmapAction::Remove),
            "clear" => Self::Change(BitmapAction::Clear),
            "enable" => Self::Change(BitmapAction::Enable),
            "disable" => Self::Change(BitmapAction::Disable),
            _ => Self::Add,
        }
    }

    fn action(
        self,
        image: Image,
        name: String,
        granularity: Option<u64>,
        from: MergeSource,
    ) -> Action {
        match self {
            Self::Add => {
                Action::Add { image, new: NewBitmapArgs { name, granularity, disabled: false } }
            }
            Self::Merge(source) => Action::Merge { image, name, source, from },
            Self::Change(BitmapAction::Remove) => Action::Remove(Named { image, name }),
            Self::Change(BitmapAction::Clear) => Action::Clear(Named { image, name }),
            Self::Change(BitmapAction::Enable) => Action::Enable(Named { image, name }),
            Self::Change(BitmapAction::Disable) => Action::Disable(Named { image, name }),
        }
    }
}

/// The image of the bitmap to merge, if it is another one.
#[derive(Clone, clap::Args)]
struct MergeSource {
    /// The image of the SOURCE bitmap. Left out: the same image.
    #[arg(long, short = 'b', value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// The format of that image; left out, the file's name decides.
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "source_file")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    source_format: Option<ImageFormat>,
}

impl Arguments {
    /// The actions, in either spelling.
    fn actions(self) -> Vec<Action> {
        let Self { action, flags, source, granularity, access, image, name } = self;
        if let Some(action) = action {
            return vec![action];
        }
        let (Some(image), Some(name)) = (image, name) else {
            wrong_usage("which image and which bitmap is missing");
        };
        let image = Image { access, image };
        let action =
            |flag: Flag| flag.action(image.clone(), name.clone(), granularity, source.clone());
        flags.0.into_iter().map(action).collect()
    }
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the bitmaps of an image.
    List {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Add a bitmap, which records later changes of the disk.
    Add {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        new: NewBitmapArgs,
    },
    /// Remove a bitmap.
    Remove(Named),
    /// Clear a bitmap: it then records only later changes.
    Clear(Named),
    /// Start to record changes of the disk in a bitmap.
    Enable(Named),
    /// Stop recording changes in a bitmap.
    Disable(Named),
    /// Add the changes recorded in bitmap SOURCE to bitmap NAME.
    Merge {
        #[command(flatten)]
        image: Image,
        /// The bitmap to add to.
        name: String,
        /// The bitmap to read.
        source: String,
        #[command(flatten)]
        from: MergeSource,
    },
}

/// A new bitmap, of an image or of a served disk.
#[derive(clap::Args)]
pub struct NewBitmapArgs {
    /// The new name: 1 to 1023 bytes, which no other bitmap of the disk has.
    pub name: String,
    /// The granularity: bytes of the disk for each bit, a power of two from 512 B to 2 GiB. Left
    /// out: a cluster, but 4 KiB at least and 64 KiB at most.
    #[arg(long, short, value_name = "SIZE", value_parser = size::parse)]
    pub granularity: Option<u64>,
    /// Do not record changes until the bitmap is enabled.
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
#[derive(Clone, clap::Args)]
struct Image {
    #[command(flatten)]
    access: ImageAccess,
    /// The image. No other program may use it, except for `list`.
    image: PathBuf,
}

/// How an image is reached.
#[derive(Clone, clap::Args)]
struct ImageAccess {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    side_file: SideFileArgs,
    #[command(flatten)]
    open: OpenArgs,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let actions = arguments.actions();
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        for action in actions {
            run_action(action).await?;
        }
        Ok(())
    })
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
            let is_new = image.make_side_file().await?;
            let disk = image.open(Access::ReadWrite, Locking::Held).await?;
            let new = NewBitmap { name, granularity, is_enabled: !disabled };
            let added = disk.bitmaps().add(&new).await;
            if added.is_err() && is_new {
                image.remove_unused_side_file(&disk).await?;
            }
            added?;
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
                    // This open fails if the file lacks acknowledged changes. Reason: its bitmap
                    // would lack them too, and so would a backup made with the merged bitmap.
                    let options = image.access.open.read_image(&file, source_format, None)?;
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
        open(&named.path, self.options(&named, access, locking)?).await
    }

    /// Makes the side file for the bitmaps of a raw image, unless the image has one. Returns
    /// whether a file was made.
    async fn make_side_file(&self) -> Result<bool> {
        let ImageAccess { format, image_opts, .. } = &self.access;
        let named = image_opts.resolve_to_change(&self.image, *format)?;
        if called_as::is_qemu_img() {
            // Under the name qemu-img no side file is made: scripts use the failure to find out
            // whether an image can have bitmaps, and they would copy the image without the side
            // file.
            return Ok(false);
        }
        let options = self.options(&named, Access::ReadWrite, Locking::Held)?;
        Ok(make_side_file(&named.path, &options).await.map_err(told)?)
    }

    /// Removes the side file of a raw image if it has no use.
    async fn remove_unused_side_file(&self, disk: &ImageDisk) -> Result<()> {
        let ImageAccess { format, image_opts, .. } = &self.access;
        let named = image_opts.resolve_to_change(&self.image, *format)?;
        let options = self.options(&named, Access::ReadWrite, Locking::Held)?;
        Ok(remove_unused_side_file(disk, &named.path, &options).await?)
    }

    fn options(
        &self,
        named: &image_opts::Named,
        access: Access,
        locking: Locking,
    ) -> Result<ImageOptions> {
        let open = &self.access.open;
        let options = match access {
            Access::ReadOnly => of_metadata(open.read_image(&named.path, named.format, None)?),
            Access::ReadWrite => open.read_write(&named.path, named.format)?,
        };
        let data_file = named.data_file.clone();
        let side_file = self.access.side_file.side_file();
        Ok(ImageOptions { locking, data_file, side_file, ..options })
    }
}

async fn open(image: &Path, options: ImageOptions) -> Result<ImageDisk> {
    // Only the metadata is needed.
    Ok(blockhouse_images::open(image, options.for_purpose(Purpose::Image)).await.map_err(told)?)
}

fn told(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Locked => error.hint("stop the program that has it open first"),
        _ => error,
    }
}

/// A bitmap as JSON, with the keys of `qemu-img info`.
pub fn value_of(bitmap: &Bitmap) -> Value {
    let flags = [(bitmap.is_in_use, "in-use"), (bitmap.is_enabled, "auto")];
    let flags: Vec<_> =
        flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect();
    json!({ "flags": flags, "name": bitmap.name, "granularity": bitmap.granularity })
}

fn as_json(bitmaps: &[Bitmap]) -> String {
    json_text::pretty(&Value::Array(bitmaps.iter().map(value_of).collect()))
}

/// The bitmaps as a table; an empty text if there are none.
fn as_text(bitmaps: &[Bitmap]) -> String {
    if bitmaps.is_empty() {
        return String::new();
    }
    let line = |name: &str, granularity: &str, state: &str| {
        format!("{name:<32} {granularity:>12}  {state}")
    };
    let heading = line("NAME", "GRANULARITY", "STATE");
    let lines = bitmaps.iter().map(|bitmap| {
        // Names come from the image, so they are escaped: otherwise they could control the
        // terminal.
        let name = bitmap.name.escape_debug().to_string();
        line(&name, &size::show(bitmap.granularity), state_of(bitmap))
    });
    std::iter::once(heading).chain(lines).collect::<Vec<_>>().join("\n")
}

/// The state of a bitmap in one word.
pub fn state_of(bitmap: &Bitmap) -> &'static str {
    match (bitmap.is_inconsistent, bitmap.is_enabled) {
        (true, _) => "inconsistent",
        (false, true) => "enabled",
        (false, false) => "disabled",
    }
}
