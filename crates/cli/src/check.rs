//! `blockhouse check`: checks the metadata of an image, and repairs it.
//!
//! Exit status, as that of `qemu-img check`: 0 no problem found, 1 the check failed or the
//! command line is wrong, 2 the image is corrupt, 3 it has leaks only, 63 the format has
//! nothing to check. Problems are printed on standard error, sums on standard output.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use blockhouse_core::{Storage, ToolProgress, rare};
use blockhouse_disk::{CheckReport, ImageFormat, warn_of_mark};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::qcow2::{REPAIR_PASSES, Repair, RepairReport, repair_with};
use blockhouse_format::{ForeignKind, replay_vhdx_log};
use blockhouse_images::{
    IfCorrupt, ImageOptions, PendingChanges, Purpose, format_by_name, open, open_storage,
    pending_changes, replay_state,
};
use serde_json::json;

use crate::called_as;
use crate::check_words;
use crate::create::wrong_usage;
use crate::foreign_create::random_bytes;
use crate::image_args::ImageArgs;
use crate::image_opts::Named;
use crate::info::missing_as_json;
use crate::json_text;
use crate::open_args::SourceCacheArgs;
use crate::output;
use crate::progress::{Progress, ProgressArgs};
use crate::qemu_chain::check_chain;

const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;
const NOT_CHECKABLE: u8 = 63;

/// Arguments of `check`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    source_cache: SourceCacheArgs,
    /// Repair leaks only, or every error that can be repaired safely. No other program may have the
    /// image open meanwhile. Lost data then reads as zeros, and unusable snapshots are removed; a
    /// check without --repair lists both.
    #[arg(long, short, value_name = "WHAT", conflicts_with = "force_share")]
    repair: Option<RepairScope>,
    #[command(flatten)]
    progress: ProgressArgs,
}

/// The scope of a repair.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RepairScope {
    /// Clusters that waste space.
    Leaks,
    /// Everything.
    All,
}

impl From<RepairScope> for Repair {
    fn from(scope: RepairScope) -> Self {
        match scope {
            RepairScope::Leaks => Self::Leaks,
            RepairScope::All => Self::All,
        }
    }
}

/// The outcome of the command, with the format's name.
enum Outcome {
    /// There is nothing to check in this format.
    NotCheckable(&'static str),
    /// The image was checked and not changed.
    Checked(CheckReport, &'static str, Option<PendingChanges>),
    /// The image was repaired, as far as possible.
    Repaired(RepairReport, &'static str),
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let image = &arguments.image;
    let shown = Progress::start(arguments.progress)?;
    if shown.prints_on_output() && image.is_json() {
        wrong_usage(
            "-p prints on standard output, where JSON is alone; leave one of the two out (SIGUSR1 tells how far it is)",
        );
    }
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let repair = arguments.repair.map(Repair::from);
    let progress = ToolProgress::in_passes(if repair.is_some() { REPAIR_PASSES } else { 1 });
    let work = || match repair {
        None => event_loop.block_on(check(arguments, &progress)),
        Some(what) => event_loop.block_on(repair_image(arguments, what, &progress)),
    };
    let outcome = shown.beside(|| progress.get(), work)?;
    let name = image.to_string();
    let (report, repaired, format, pending) = match outcome {
        Outcome::NotCheckable(format) => {
            let why = format!("the format {format} does not support checks");
            output::tell(&if called_as::is_qemu_img() {
                "qemu-img: This image format does not support checks".to_owned()
            } else {
                format!("blockhouse: {name}: {why}")
            });
            return Ok(ExitCode::from(NOT_CHECKABLE));
        }
        Outcome::Checked(report, format, pending) => (report, None, format, pending),
        Outcome::Repaired(repaired, format) => {
            (repaired.left.clone(), Some(repaired), format, None)
        }
    };
    let found = repaired.as_ref().map_or(&report, |repaired| &repaired.found);
    let fixed = repaired.as_ref().map_or(FixCounts::default(), FixCounts::of);
    if called_as::is_qemu_img() {
        let mut lines = check_words::lines(found, repair);
        if fixed.is_any() {
            lines.extend(check_words::lines(&report, None));
        }
        lines.iter().for_each(|line| output::tell(line));
    } else {
        for problem in &found.problems {
            output::tell(&format!("blockhouse: {name}: {problem}"));
        }
    }
    for fault in repaired.iter().flat_map(|repaired| &repaired.snapshots) {
        output::tell(&format!("blockhouse: {name}: SNAPSHOT TABLE REPAIRED: {fault}"));
    }
    let text = if image.is_json() {
        as_json((&name, format), &report, fixed, pending.as_ref())
    } else {
        as_text(&report, fixed)
    };
    output::print_unless_quiet(&text)?;
    Ok(match report {
        CheckReport { corruptions: 1.., .. } => ExitCode::from(CORRUPT),
        CheckReport { leaks: 1.., .. } => ExitCode::from(LEAKS),
        _ => ExitCode::SUCCESS,
    })
}

async fn check(arguments: &Arguments, progress: &ToolProgress) -> Result<Outcome> {
    // The image is locked, so that no other program writes to it before the check ends.
    let (path, options) = arguments.image.look_only()?;
    check_chain(&path, &options).await?;
    let state = options.state.directory().cloned();
    let disk =
        open(&path, arguments.source_cache.apply(options).for_purpose(Purpose::Metadata)).await?;
    warn_of_mark(&disk).await;
    let pending = state.map_or(Ok(None), |dir| pending_changes(disk.image(), &dir))?;
    let format = disk.image().format_name();
    if called_as::is_qemu_img() && format == "vpc" {
        return Ok(Outcome::NotCheckable(format));
    }
    let report = disk.image().check_with(progress).await?.map(|report| match format {
        // qemu-img counts the clusters of no other format.
        "qcow2" => report,
        _ if called_as::is_qemu_img() => CheckReport {
            end: 0,
            total_clusters: 0,
            allocated_clusters: 0,
            fragmented_clusters: 0,
            ..report
        },
        _ => report,
    });
    Ok(report
        .map_or(Outcome::NotCheckable(format), |report| Outcome::Checked(report, format, pending)))
}

async fn repair_image(
    arguments: &Arguments,
    what: Repair,
    progress: &ToolProgress,
) -> Result<Outcome> {
    let named = arguments.image.to_change()?;
    let options = arguments.image.open.change_named(&named)?;
    let Named { path, format: said, .. } = named;
    let image = &*path;
    check_chain(image, &options).await?;
    let format = options.format.unwrap_or_else(|| format_by_name(image));
    match format {
        ImageFormat::Raw | ImageFormat::Luks => {
            if said.is_none() && format == ImageFormat::Raw {
                // The open refuses an image that looks like another format than its name says.
                let disk = open(image, options).await?;
                disk.close().await?;
                let found = disk.image().format_name();
                if found != format.as_str() {
                    bail!("{}: name its format to repair it: -f {found}", image.display());
                }
            }
            return Ok(Outcome::NotCheckable(format.as_str()));
        }
        ImageFormat::Foreign(ForeignKind::Vhdx) => {
            return replay_log(arguments, image, options, progress).await;
        }
        ImageFormat::Foreign(_) if called_as::is_qemu_img() => {
            return Ok(Outcome::NotCheckable(format.as_str()));
        }
        ImageFormat::Foreign(_) => bail!(
            "{}: {} images are checked, but not repaired: repair it with the program that made it",
            image.display(),
            format.as_str()
        ),
        ImageFormat::Qcow2 => {}
    }
    let if_corrupt = match what {
        Repair::Leaks => IfCorrupt::Fail,
        Repair::All => IfCorrupt::SetAside,
    };
    // The image is opened with its state file, which has the completed writes of a killed server.
    // Otherwise the repair would free the clusters of these writes as leaks.
    let options = ImageOptions { format: Some(format), ..options };
    replay_state(image, options.clone(), if_corrupt).await?;
    let storage = open_storage(image, options).await?;
    let repaired = rare(repair_with(&storage, what, progress)).await?;
    storage.close().await?;
    Ok(Outcome::Repaired(repaired, format.as_str()))
}

/// Replays the log of a VHDX image that was not closed cleanly, and checks the image.
async fn replay_log(
    arguments: &Arguments,
    image: &Path,
    options: ImageOptions,
    progress: &ToolProgress,
) -> Result<Outcome> {
    let storage = open_storage(image, options).await?;
    let is_replayed = replay_vhdx_log(&storage, random_bytes()?).await?;
    storage.close().await?;
    // The storage is closed first, because its lock would make the check fail.
    drop(storage);
    Ok(match check(arguments, progress).await? {
        Outcome::Checked(left, format, _) => {
            // A replayed log is counted as one corruption, as in QEMU.
            let corruptions = left.corruptions + u64::from(is_replayed);
            let found = CheckReport { corruptions, ..left.clone() };
            Outcome::Repaired(RepairReport { found, left, snapshots: Vec::new() }, format)
        }
        other => other,
    })
}

/// Counts of what was repaired.
#[derive(Clone, Copy, Default)]
struct FixCounts {
    corruptions: u64,
    leaks: u64,
}

impl FixCounts {
    fn is_any(self) -> bool {
        self.corruptions > 0 || self.leaks > 0
    }

    fn of(repaired: &RepairReport) -> Self {
        let corruptions = repaired.corruptions_fixed();
        let leaks = repaired.leaks_fixed();
        if !called_as::is_qemu_img() || repaired.left.corruptions > 0 || corruptions == 0 {
            return Self { corruptions, leaks };
        }
        // qemu-img compares flags only after the refcounts are correct.
        let CheckReport { flags_to_follow: follow, flags_to_keep: keep, .. } = repaired.found;
        Self { corruptions: (corruptions + follow).saturating_sub(keep), leaks }
    }
}

fn as_text(report: &CheckReport, fixed: FixCounts) -> String {
    let is_qemu = called_as::is_qemu_img();
    let mut lines = Vec::new();
    if is_qemu {
        lines.extend(words_of_qemu(report, fixed));
    } else {
        lines.extend(words_of(report, fixed));
    }
    let &CheckReport { total_clusters: total, .. } = report;
    if total > 0 && report.allocated_clusters > 0 {
        let CheckReport { allocated_clusters: allocated, .. } = *report;
        let share = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        lines.push(format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            share(allocated, total),
            share(report.fragmented_clusters, allocated),
            share(report.compressed_clusters, allocated)
        ));
    }
    if !is_qemu || report.end > 0 {
        lines.push(format!("Image end offset: {}", report.end));
    }
    lines.join("\n")
}

/// The findings and repairs, in the words of `qemu-img check`.
fn words_of_qemu(report: &CheckReport, fixed: FixCounts) -> Vec<String> {
    let mut lines = Vec::new();
    if fixed.is_any() {
        let FixCounts { corruptions, leaks } = fixed;
        lines.push(format!(
            "The following inconsistencies were found and repaired:\n\n    {leaks} leaked clusters\n    {corruptions} \
             corruptions\n\nDouble checking the fixed image now..."
        ));
    }
    let &CheckReport { corruptions, leaks, .. } = report;
    if corruptions == 0 && leaks == 0 {
        lines.push("No errors were found on the image.".to_owned());
    }
    if corruptions > 0 {
        lines.push(format!(
            "\n{corruptions} errors were found on the image.\nData may be corrupted, or further writes to the image \
             may corrupt it."
        ));
    }
    if leaks > 0 {
        lines.push(format!(
            "\n{leaks} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data."
        ));
    }
    lines
}

/// The findings and repairs in our own words.
fn words_of(report: &CheckReport, fixed: FixCounts) -> Vec<String> {
    let mut lines = Vec::new();
    if fixed.is_any() {
        let FixCounts { corruptions, leaks } = fixed;
        lines.push(format!("Repaired: {leaks} leaked clusters, {corruptions} corruptions."));
    }
    let &CheckReport { corruptions, leaks, .. } = report;
    if corruptions == 0 && leaks == 0 {
        lines.push("No errors were found on the image.".to_owned());
    }
    if corruptions > 0 {
        lines
            .push(format!("{corruptions} errors: data may be lost, and each write may lose more."));
    }
    if leaks > 0 {
        lines.push(format!("{leaks} leaked clusters: they waste space but harm no data."));
    }
    lines
}

/// The result as JSON. As in `qemu-img`, counts of zero are omitted.
fn as_json(
    (name, format): (&str, &str),
    report: &CheckReport,
    fixed: FixCounts,
    pending: Option<&PendingChanges>,
) -> String {
    let mut value = json!({ "filename": name, "format": format, "check-errors": 0 });
    for (key, count) in [
        ("image-end-offset", report.end),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", fixed.corruptions),
        ("leaks-fixed", fixed.leaks),
    ] {
        if count > 0 {
            value[key] = count.into();
        }
    }
    if let Some(pending) = pending {
        value["blockhouse"] = json!({ "missing-changes": missing_as_json(pending) });
    }
    json_text::pretty(&value)
}
