//! `blockhouse snapshot`: the snapshots inside an image, also of one that is being served.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use blockhouse_core::ErrorKind;
use blockhouse_disk::{
    Access, ImageDisk, ImageFormat, ImageOptions, Locking, open_without_backing,
};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_storage::Location;

use crate::image_args::OutputArgs;
use crate::open_args::OpenArgs;
use crate::output;
use crate::snapshot_list::{as_json, as_text};
use blockhouse_daemon::control::legacy::{
    CreateReply, ListArgs, PauseReply, RenameArgs, Request, SnapshotArgs,
};
use blockhouse_daemon::control::{Listed, ask};

/// Arguments of `snapshot`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Tell which snapshots an image has.
    List {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Take a snapshot of the disk.
    Create {
        #[command(flatten)]
        image: Image,
        /// What to call it: 1 to 255 bytes, unlike all others.
        name: String,
    },
    /// Make the disk what it was when the snapshot was taken. What was written since is gone.
    Apply {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
    },
    /// Delete a snapshot.
    Delete {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
    },
    /// Give a snapshot another name.
    Rename {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
        /// What to call it from now on.
        new_name: String,
    },
}

/// The image.
#[derive(clap::Args)]
struct Image {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Ask the server that has the image, at the socket of its --control. Its guests go on, and for how
    /// long their writes were held off is printed.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["format", "state"])]
    control: Option<PathBuf>,
    #[command(flatten)]
    open: OpenArgs,
    /// The image. Without --control no other program may use it, except for `list`.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let (Action::List { image, .. }
    | Action::Create { image, .. }
    | Action::Apply { image, .. }
    | Action::Delete { image, .. }
    | Action::Rename { image, .. }) = &arguments.action;
    match image.control.clone() {
        Some(socket) => run_served(&socket, arguments.action),
        None => EventLoop::new(EngineChoice::Auto)?.block_on(run_closed(arguments.action)),
    }
}

/// On an image that no other program has open.
async fn run_closed(action: Action) -> Result<()> {
    match action {
        Action::List { image, output } => {
            let disk = open(&image, Access::ReadOnly, Locking::None).await?;
            let snapshots = disk.snapshots().list().await?;
            print_list(&snapshots.iter().map(Listed::from).collect::<Vec<_>>(), output.is_json())
        }
        Action::Create { image, name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().create(&name).await?;
            Ok(disk.close().await?)
        }
        Action::Apply { image, name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().apply(&name).await?;
            Ok(disk.close().await?)
        }
        Action::Delete { image, name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().delete(&name).await?;
            Ok(disk.close().await?)
        }
        Action::Rename { image, name, new_name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().rename(&name, &new_name).await?;
            Ok(disk.close().await?)
        }
    }
}

/// By the server that has the image.
fn run_served(socket: &std::path::Path, action: Action) -> Result<()> {
    match action {
        Action::List { image, output } => {
            let request = Request::List(ListArgs { image: Some(image.canonical()?) });
            print_list(&ask::<Vec<Listed>>(socket, &request)?, output.is_json())
        }
        Action::Create { image, name } => {
            let request = Request::Create(image.named(name)?);
            print_pause(ask::<CreateReply>(socket, &request)?.pause_us)
        }
        Action::Apply { image, name } => {
            let request = Request::Apply(image.named(name)?);
            print_pause(ask::<PauseReply>(socket, &request)?.pause_us)
        }
        Action::Delete { image, name } => {
            let request = Request::Delete(image.named(name)?);
            print_pause(ask::<PauseReply>(socket, &request)?.pause_us)
        }
        Action::Rename { image, name, new_name } => {
            let image = Some(image.canonical()?);
            let request = Request::Rename(RenameArgs { image, name, new_name });
            print_pause(ask::<PauseReply>(socket, &request)?.pause_us)
        }
    }
}

impl Image {
    /// As servers know it.
    fn canonical(&self) -> Result<PathBuf> {
        if Location::is_remote(self.image.as_os_str().as_bytes()) {
            return Ok(self.image.clone());
        }
        self.image.canonicalize().with_context(|| format!("{}", self.image.display()))
    }

    fn named(&self, name: String) -> Result<SnapshotArgs> {
        Ok(SnapshotArgs { image: Some(self.canonical()?), name })
    }
}

async fn open_to_change(image: &Image) -> Result<ImageDisk> {
    open(image, Access::ReadWrite, Locking::Held).await
}

async fn open(image: &Image, access: Access, locking: Locking) -> Result<ImageDisk> {
    let options = ImageOptions { access, locking, ..image.open.read_only(image.format)? };
    // The tables are all that is needed.
    let opened = open_without_backing(&image.image, options).await;
    Ok(opened.map_err(|error| match error.kind() {
        ErrorKind::Locked => error.hint(
            "if that is 'blockhouse serve --control SOCKET', name its socket here with --control \
             SOCKET; else stop that program first",
        ),
        _ => error,
    })?)
}

fn print_list(snapshots: &[Listed], json: bool) -> Result<()> {
    let text = if json { as_json(snapshots) } else { as_text(snapshots) };
    if text.is_empty() { Ok(()) } else { output::print(&text) }
}

fn print_pause(microseconds: u64) -> Result<()> {
    output::print(&format!("writes were held off for {microseconds} us"))
}
