//! `blockhouse amend`: changes options of an image in place.
//!
//! Guarantees: each of these changes is made completely or not at all: `compat` and
//! `lazy_refcounts` (one write of the header), the name of a data file (`data_file`), and a larger
//! `size`. An option whose value would not change is accepted. For any other option, the error
//! names the command that changes it, and the image is not changed.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_config::size;
use blockhouse_disk::{Amendments, Features, ImageDisk, ImageFormat, amend, rename_data_file};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::qcow2::{Preallocation, Switch};
use blockhouse_images::{Purpose, note_data_file, open};

use crate::create_options;
use crate::create_setting::Setting;
use key_slots::KeySlotOption;

mod key_slots;

use crate::image_opts::ImageOptsArgs;
use crate::open_args::{OpenArgs, TargetCacheArgs};
use crate::output;
use crate::progress::{Progress, ProgressArgs};

/// Arguments of `amend`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Options as NAME=VALUE,...: compat, lazy_refcounts, size, data_file. 'help' explains them.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...", required = true, value_parser = parse)]
    options: Vec<Changes>,
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Allow the loss of the last key of an encrypted image, or of the key of a slot in use.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    target_cache: TargetCacheArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image. No other program may use it.
    #[arg(required_unless_present = "options")]
    image: Option<PathBuf>,
}

/// The output of `-o help`.
const HELP: &str = "\
Options that change in place:
  compat=1.1                          version 3 of the format, for an image of version 2
  compat=0.10                         version 2, for an image that has nothing of version 3 but zero clusters,
                                      which become unallocated, or are written where there is a backing file
  lazy_refcounts=on|off               write refcounts late; after a crash they are counted anew
  size=SIZE                           a larger disk, as 'blockhouse resize' makes it
  data_file=FILE                      another name of the image's data file, which you give it then ('mv')
Key slots of encrypted images, in LUKS containers as well (there without 'encrypt.'); keys are named by --object:
  encrypt.state=active                add a key: encrypt.new-secret=ID[,encrypt.keyslot=N][,encrypt.iter-time=MS]
  encrypt.state=inactive              erase it: encrypt.keyslot=N, or encrypt.old-secret=ID in all slots; both: ID opens N;
                                      --force: N may be unused, because an interrupted erasure left its area
The others need another image ('blockhouse convert -o OPTION=VALUE IMAGE NEW') or another command
('blockhouse rebase' for the backing file).";

/// The changes that the `-o` options request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Changes {
    Help,
    These(Vec<Change>),
}

/// One option.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    /// The size of the disk in bytes.
    Size(u64),
    /// An option that is also an option of `create`.
    Setting(Setting),
    /// An option of key slots, and its value.
    KeySlot(KeySlotOption, String),
}

fn parse(text: &str) -> Result<Changes, String> {
    if matches!(text, "help" | "?") {
        return Ok(Changes::Help);
    }
    let change = |part: String| match (part.strip_prefix("size="), key_slots::option(&part)) {
        (Some(bytes), _) => size::parse(bytes).map(Change::Size),
        (None, Some((option, value))) => Ok(Change::KeySlot(option, value)),
        (None, None) => create_options::parse_one(&part).map(Change::Setting),
    };
    create_options::split(text)
        .into_iter()
        .map(change)
        .collect::<Result<_, _>>()
        .map(Changes::These)
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut changes = Vec::new();
    for option in &arguments.options {
        match option {
            Changes::Help => return output::print(HELP),
            Changes::These(these) => changes.extend(these.iter().cloned()),
        }
    }
    let Some(image) = &arguments.image else {
        crate::create::wrong_usage("which image to change is missing");
    };
    let progress = Progress::start(arguments.progress)?;
    let named = arguments.image_opts.resolve_to_change(image, arguments.format)?;
    let options = arguments.target_cache.apply(arguments.open.change_named(&named)?);
    let path = named.path;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    // The progress is 0 of 1 until the end, because the changes report no progress.
    let work = || {
        event_loop.block_on(async {
            let disk = open(&path, options.for_purpose(Purpose::Image)).await?;
            match key_slots::change(&changes)? {
                Some(change) => {
                    key_slots::run(&disk, arguments.open.keys(), change, arguments.force).await
                }
                None => change(&disk, &path, changes).await,
            }
        })
    };
    progress.beside(|| (0, 1), work)
}

/// Makes the changes in this order: a larger size, the options in the header, the name of the data
/// file. An error ends the sequence, so a larger size may be the only change that is made.
async fn change(disk: &ImageDisk, path: &Path, changes: Vec<Change>) -> Result<()> {
    let (mut amendments, mut size, mut data_file) = (Amendments::default(), None, None);
    let Some(features) = disk.image().features().filter(|_| disk.image().format_name() == "qcow2")
    else {
        bail!(
            "{}: a {} image has no options that can be changed",
            disk.name(),
            disk.image().format_name()
        );
    };
    for change in changes {
        match change {
            Change::Size(bytes) => size = Some(bytes.next_multiple_of(512)),
            Change::Setting(Setting::Compat(version)) => amendments.version = Some(version),
            Change::Setting(Setting::LazyRefcounts(switch)) => {
                amendments.lazy_refcounts = Some(switch);
            }
            Change::Setting(Setting::DataFile(name)) if disk.image().data_file().is_some() => {
                data_file = Some(name);
            }
            Change::Setting(other) => check_same(disk, &features, &other)?,
            Change::KeySlot(..) => bail!("{}: say encrypt.state=active or inactive", disk.name()),
        }
    }
    if let Some(size) = size.filter(|&size| size != disk.size()) {
        if size < disk.size() || disk.image().backing_file().is_some() {
            bail!(
                "{}: 'blockhouse resize' changes its size (--shrink to make it shorter)",
                disk.name()
            );
        }
        disk.resize(size).await?;
    }
    amend(disk, amendments).await?;
    if let Some(name) = data_file {
        rename_data_file(disk, name.as_bytes()).await?;
        note_data_file(path, name.as_bytes());
    }
    Ok(disk.close().await?)
}

/// Refuses an option that cannot be changed, unless it has this value already.
fn check_same(disk: &ImageDisk, features: &Features, setting: &Setting) -> Result<()> {
    let backing = disk.image().backing_file();
    let data_file = disk.image().data_file();
    let (name, is_same) = match setting {
        Setting::ClusterSize(size) => ("cluster_size", disk.image().cluster_size() == Some(*size)),
        Setting::RefcountBits(bits) => ("refcount_bits", features.refcount_bits == *bits),
        Setting::ExtendedL2(switch) => ("extended_l2", features.extended_l2 == *switch),
        Setting::CompressionType(kind) => ("compression_type", features.compression == *kind),
        Setting::Preallocation(mode) => ("preallocation", *mode == Preallocation::Off),
        Setting::DataFile(_) => ("data_file", false),
        Setting::RawDataFile(switch) => {
            ("data_file_raw", data_file.map_or(Switch::Off, |file| file.raw) == *switch)
        }
        Setting::BackingFile(name) => {
            ("backing_file", backing.is_some_and(|backing| backing.name == name.as_bytes()))
        }
        Setting::BackingFormat(format) => {
            ("backing_fmt", backing.is_some_and(|backing| backing.format.as_ref() == Some(format)))
        }
        Setting::Encrypt(_) => ("encrypt.format", false),
        Setting::EncryptionSwitch(_) => ("encryption", false),
        Setting::EncryptIterTime(_) => ("encrypt.iter-time", false),
        Setting::KeySecret(_) | Setting::UsualLuks => ("encrypt", false),
        Setting::NoCopyOnWrite(_) => ("nocow", false),
        Setting::ExtentSize(_) => ("extent_size_hint", false),
        Setting::Size(size) => ("size", *size == disk.size()),
        Setting::Foreign(name, _) => (*name, false),
        Setting::Refused(refusal) => bail!("{}", refusal.words),
        Setting::Compat(_) | Setting::LazyRefcounts(_) => return Ok(()),
    };
    if is_same {
        return Ok(());
    }
    match name {
        "backing_file" | "backing_fmt" => bail!(
            "{}: 'blockhouse rebase -b FILE -F FORMAT' gives it another backing file with the same content, and \
             'rebase -u' stores another name only",
            disk.name()
        ),
        _ => bail!(
            "{}: {name} cannot change in place; 'blockhouse convert -O qcow2 -o {name}=VALUE IMAGE NEW' makes another \
             image",
            disk.name()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_options_here() {
        let Ok(Changes::These(changes)) = parse("size=1G,lazy_refcounts=on") else { panic!() };
        let lazy = Change::Setting(Setting::LazyRefcounts(Switch::On));
        assert_eq!(changes, [Change::Size(1 << 30), lazy]);
        assert_eq!(parse("help"), Ok(Changes::Help));
        assert!(parse("encrypted=on").unwrap_err().contains("compat"));
    }
}
