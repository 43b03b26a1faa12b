//! `blockhouse attach` and `detach`: an image as a block device of this host, served by a process
//! in the background.
//!
//! The device is a ublk device. If the kernel has no ublk driver, it is a device of the kernel's
//! NBD client, and a message says so.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_daemon::runtime_folder;
use blockhouse_disk::ImageFormat;
use blockhouse_images::CacheMode;
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_ublk::Detach;
use clap::builder::ValueParser;

use crate::background::{self, Started};
use crate::output;

/// The maximum number of ublk devices. Device numbers are less than this.
const UBLK_DEVICES: i64 = 1 << 20;

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
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..UBLK_DEVICES))]
    id: Option<u32>,
}

/// Arguments of `detach`.
#[derive(clap::Args)]
pub struct DetachArguments {
    /// The block device, as 'attach' has printed it.
    #[arg(value_name = "DEVICE", value_parser = parse_device)]
    device: Device,
    /// Remove the device even if it is mounted, or if its server has other exports, which end too.
    ///
    /// Users of the device get I/O errors, and data that is not yet written to it is lost.
    #[arg(long)]
    force: bool,
}

/// A block device that `attach` has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    /// `/dev/ublkbN`.
    Ublk(u32),
    /// `/dev/nbdN`, by the kernel's NBD client.
    KernelNbd(u32),
}

fn parse_device(text: &str) -> Result<Device, String> {
    let number = |start| text.strip_prefix(start).and_then(|number| number.parse().ok());
    let ublk = number("/dev/ublkb").map(Device::Ublk);
    let device = ublk.or_else(|| number("/dev/nbd").map(Device::KernelNbd));
    device.ok_or_else(|| "write the path of a block device, like /dev/ublkb0 or /dev/nbd0".into())
}

/// Runs `attach`. Prints the device's path when the device exists.
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode> {
    match blockhouse_ublk::check_driver() {
        Err(error) if error.has_no_driver() => attach_by_nbd(arguments, error),
        // Other errors are reported when the device is made.
        _ => attach_by_ublk(arguments),
    }
}

fn attach_by_ublk(arguments: &AttachArguments) -> Result<ExitCode> {
    let mut export: Vec<OsString> = vec!["--ublk".into()];
    export.extend(arguments.id.map(|id| id.to_string().into()));
    match background::start(words(arguments, export))? {
        Started::Listens(lines) => {
            let device = lines.lines().find_map(|line| line.strip_prefix("ready "));
            output::print(device.context("the server did not name its device")?)?;
            Ok(ExitCode::SUCCESS)
        }
        // The server has printed the reason.
        Started::Ended(_) => Ok(ExitCode::FAILURE),
    }
}

/// Attaches without the ublk driver; `why` is the reason why the driver cannot be used. The server
/// listens on a Unix socket, and the kernel's NBD client connects to it.
fn attach_by_nbd(arguments: &AttachArguments, why: blockhouse_ublk::Error) -> Result<ExitCode> {
    if let Err(error) = blockhouse_kernel_nbd::check_driver() {
        bail!("{why}; nor can a device be had otherwise: {error}");
    }
    let socket = new_socket()?;
    let (security, address) = (Security::Plain, Address::Unix(socket.clone()));
    let uri = NbdUri { security, address, export: String::new() };
    let export = vec!["--nbd".into(), uri.to_string().into()];
    let Some(number) = connect(words(arguments, export), &socket, arguments.id)? else {
        return Ok(ExitCode::FAILURE);
    };
    output::tell(&format!(
        "no ublk driver here: /dev/nbd{number} is a device of the kernel's NBD client, which costs more and does not \
         outlive its server (docs/ublk.md)"
    ));
    output::print(&format!("/dev/nbd{number}"))?;
    Ok(ExitCode::SUCCESS)
}

/// A path for the socket of a device's server, which no other process uses.
///
/// # Errors
/// The folder for sockets cannot be made.
pub fn new_socket() -> Result<PathBuf> {
    Ok(runtime_folder()?.join(format!("attach-{}.sock", std::process::id())))
}

/// Starts a server in the background, which listens at `socket` by its arguments `words`, and makes
/// a device of the kernel's NBD client from it, with this number or the lowest free one. Returns
/// the number; `None` if the server has ended, and has printed the reason.
fn connect(words: Vec<OsString>, socket: &Path, number: Option<u32>) -> Result<Option<u32>> {
    let Started::Listens(_) = background::start(words)? else { return Ok(None) };
    let outcome = blockhouse_kernel_nbd::attach(socket, number);
    Ok(Some(outcome.inspect_err(|_| drop(blockhouse_kernel_nbd::end_server(socket)))?))
}

/// `qemu-nbd -c`: connects the device with this number to a server in the background, which listens
/// at `socket` by its arguments `words`.
pub fn connect_as_qemu_nbd(words: Vec<OsString>, socket: &Path, number: u32) -> Result<ExitCode> {
    blockhouse_kernel_nbd::check_driver()?;
    let connected = connect(words, socket, Some(number))?;
    Ok(if connected.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `qemu-nbd -d`: disconnects a device, whichever program has connected it. A device that is not
/// connected is no error, as for qemu-nbd.
///
/// # Errors
/// The path names no device, or the device is in use. Unlike qemu-nbd, this function refuses a
/// device with a mounted file system.
pub fn disconnect_as_qemu_nbd(device: &Path) -> Result<()> {
    use blockhouse_kernel_nbd::{Detach, Error};
    let name = device.display();
    std::fs::metadata(device).with_context(|| format!("Cannot open {name}"))?;
    let number = parse_kernel_nbd(&name.to_string()).map_err(|why| anyhow!("{name}: {why}"))?;
    match blockhouse_kernel_nbd::detach(number, Detach::UnusedOfAny) {
        Ok(()) | Err(Error::Missing(_)) => {
            output::print_unless_quiet(&format!("{name} disconnected"))
        }
        Err(error) => Err(error.into()),
    }
}

/// The number of a device of the kernel's NBD client, from its path or that of a symbolic link.
///
/// # Errors
/// The path names another file, or none.
pub fn parse_kernel_nbd(text: &str) -> Result<u32, String> {
    let target = std::fs::canonicalize(text).unwrap_or_else(|_| text.into());
    match parse_device(&target.to_string_lossy()) {
        Ok(Device::KernelNbd(number)) => Ok(number),
        _ => Err("write the path of a device of the kernel's NBD client, like /dev/nbd0".into()),
    }
}

/// The arguments of the `serve` command with this export.
fn words(arguments: &AttachArguments, export: Vec<OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> =
        vec!["serve".into(), background::OPTION.into(), arguments.image.clone().into()];
    words.extend(["--cache", arguments.cache.as_str()].map(Into::into));
    if let Some(format) = arguments.format {
        words.extend(["--format", format.as_str()].map(Into::into));
    }
    if arguments.read_only {
        words.push("--read-only".into());
    }
    words.extend(export);
    words
}

/// Runs `detach`.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    let is_forced = arguments.force;
    match arguments.device {
        Device::Ublk(number) => {
            let how = if is_forced { Detach::Forced } else { Detach::Unused };
            Ok(blockhouse_ublk::detach(number, how)?)
        }
        Device::KernelNbd(number) => {
            use blockhouse_kernel_nbd::Detach;
            let how = if is_forced { Detach::Forced } else { Detach::Unused };
            Ok(blockhouse_kernel_nbd::detach(number, how)?)
        }
    }
}
