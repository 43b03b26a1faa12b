//! `blockhouse attach` and `detach`: an image as a block device of this host, served by a process in the background.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use blockhouse_disk::{CacheMode, ImageFormat};
use clap::builder::ValueParser;

use crate::background::{self, Started};
use crate::output;

/// Arguments of `attach`.
#[derive(clap::Args)]
pub struct AttachArguments {
    /// The image: a raw or qcow2 disk image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// The image's format; left out, the file's name decides.
    #[arg(long, short, value_parser = ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe.
    #[arg(long, default_value = "none", value_parser = ValueParser::new(str::parse::<CacheMode>))]
    cache: CacheMode,
    /// Refuse all writes.
    #[arg(long, short)]
    read_only: bool,
    /// The number of the device; left out, the lowest free one.
    #[arg(long, value_name = "N")]
    id: Option<u32>,
}

/// Arguments of `detach`.
#[derive(clap::Args)]
pub struct DetachArguments {
    /// The block device, as 'attach' has printed it.
    #[arg(value_name = "DEVICE", value_parser = parse_device)]
    device: u32,
}

/// The number of `/dev/ublkbN`.
fn parse_device(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("/dev/ublkb").and_then(|number| number.parse().ok());
    number.ok_or_else(|| "write the path of a ublk device, like /dev/ublkb0".into())
}

/// Runs `attach`: prints the device when it is there.
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode> {
    match background::start(words(arguments))? {
        Started::Listens(lines) => {
            let device = lines.lines().find_map(|line| line.strip_prefix("ready "));
            output::print(device.context("the server did not name its device")?)?;
            Ok(ExitCode::SUCCESS)
        }
        // It has said why.
        Started::Ended(_) => Ok(ExitCode::FAILURE),
    }
}

/// The command that serves the device.
fn words(arguments: &AttachArguments) -> Vec<OsString> {
    let mut words: Vec<OsString> =
        vec!["serve".into(), background::OPTION.into(), arguments.image.clone().into()];
    words.extend(["--cache", arguments.cache.as_str()].map(Into::into));
    if let Some(format) = arguments.format {
        words.extend(["--format", format.as_str()].map(Into::into));
    }
    if arguments.read_only {
        words.push("--read-only".into());
    }
    words.push("--ublk".into());
    words.extend(arguments.id.map(|id| id.to_string().into()));
    words
}

/// Runs `detach`.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    Ok(blockhouse_ublk::detach(arguments.device)?)
}
