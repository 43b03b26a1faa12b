//! `blockhouse attach` and `detach`: an image as a block device of this host, served by a process in the background.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow};
use blockhouse_disk::{CacheMode, ImageFormat};
use clap::builder::ValueParser;

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
pub fn attach(arguments: &AttachArguments) -> Result<()> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command.arg("serve").arg(&arguments.image).args(["--cache", arguments.cache.as_str()]);
    if let Some(format) = arguments.format {
        command.args(["--format", format.as_str()]);
    }
    if arguments.read_only {
        command.arg("--read-only");
    }
    command.arg("--ublk").args(arguments.id.map(|id| id.to_string()));
    // Ctrl-C in this terminal is not for the server.
    command.process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = command.spawn().context("cannot start the server")?;
    let (stdout, stderr) = (server.stdout.take(), server.stderr.take());
    let (stdout, mut stderr) = stdout.zip(stderr).context("the server has no output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("cannot read from the server")?;
    match line.trim().strip_prefix("ready ") {
        Some(device) => output::print(device),
        None => {
            let mut said = String::new();
            stderr.read_to_string(&mut said).context("cannot read from the server")?;
            server.wait().context("cannot wait for the server")?;
            let why = said.trim().lines().last().unwrap_or("it said nothing").to_owned();
            Err(anyhow!("{}", why.strip_prefix("blockhouse: ").unwrap_or(&why)))
        }
    }
}

/// Runs `detach`.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    Ok(blockhouse_ublk::detach(arguments.device)?)
}
