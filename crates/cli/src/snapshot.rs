//! `blockhouse snapshot`: internal and external snapshots of a closed or a served image. `-l`,
//! `-c`, `-a` and `-d` mean the same as in qemu-img.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_core::ErrorKind;
use blockhouse_disk::{Access, ImageDisk, ImageFormat};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{ImageOptions, Purpose, fork_image};
use blockhouse_storage::Location;

use crate::called_as;
use crate::create::wrong_usage;
use crate::image_args::OutputArgs;
use crate::image_opts::ImageOptsArgs;
use crate::open_args::{OpenArgs, look_locking, of_metadata};
use crate::output;
use crate::qemu_chain::check_chain;
use crate::snapshot_list::{as_json, as_qemu_table, as_text};
use crate::snapshot_name::{SnapshotName, name_in};
use blockhouse_daemon::control::{Connection, Listed};
use serde_json::{Value, json};

/// Arguments of `snapshot`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    flag: Flag,
    #[command(flatten)]
    access: ImageAccess,
    /// The image, if one of these options is the action. Without --control no other program may use
    /// it, except for -l.
    #[arg(required = true)]
    image: Option<PathBuf>,
}

/// An action as qemu-img's users give it.
#[derive(clap::Args)]
#[group(multiple = false)]
struct Flag {
    /// List the snapshots, in qemu-img's columns. This is the default action.
    #[arg(short = 'l')]
    list: bool,
    /// The same as 'create IMAGE NAME'.
    #[arg(short = 'c', value_name = "NAME")]
    create: Vec<String>,
    /// The same as 'apply IMAGE NAME'.
    #[arg(short = 'a', value_name = "NAME")]
    apply: Vec<String>,
    /// The same as 'delete IMAGE NAME'.
    #[arg(short = 'd', value_name = "NAME")]
    delete: Vec<String>,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the snapshots of an image.
    List {
        #[command(flatten)]
        image: Image,
        #[command(flatten)]
        style: ListStyle,
    },
    /// Take a snapshot of the disk.
    Create {
        #[command(flatten)]
        image: Image,
        /// The new name: 1 to 255 bytes, which no other snapshot of the disk has.
        #[arg(required_unless_present = "external", conflicts_with = "external")]
        name: Option<String>,
        /// Take an external snapshot, of an image of any format: the disk continues in this new
        /// qcow2 overlay, and the image keeps the disk's present state.
        #[arg(long, value_name = "FILE")]
        external: Option<PathBuf>,
    },
    /// Return the disk to a snapshot. Everything written since is lost.
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
        /// The new name.
        new_name: String,
    },
}

/// The image.
#[derive(clap::Args)]
struct Image {
    #[command(flatten)]
    access: ImageAccess,
    /// The image. Without --control no other program may use it, except for `list`.
    image: PathBuf,
}

/// How an image is reached.
#[derive(clap::Args)]
struct ImageAccess {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Under the name qemu-img: list the snapshots of an image that another program uses.
    #[arg(short = 'U', hide = true)]
    force_share: bool,
    /// Ask the server that has the image open, at its --control socket. Guests continue; the
    /// command prints how long their writes were paused.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["format", "state"])]
    control: Option<PathBuf>,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, flag, access, image } = arguments;
    let action = match (action, image) {
        (Some(action), _) => action,
        (None, Some(image)) => flag.of(Image { access, image }),
        (None, None) => wrong_usage("which image is missing"),
    };
    let (Action::List { image, .. }
    | Action::Create { image, .. }
    | Action::Apply { image, .. }
    | Action::Delete { image, .. }
    | Action::Rename { image, .. }) = &action;
    match image.access.control.clone() {
        Some(socket) => run_served(&socket, action),
        None => EventLoop::new(EngineChoice::Auto)?.block_on(run_closed(action)),
    }
}

impl Flag {
    /// The action that the flag stands for.
    fn of(self, image: Image) -> Action {
        let Self { list: _, create, apply, delete } = self;
        let once = |mut names: Vec<String>| match names.len() {
            0 | 1 => names.pop(),
            _ => wrong_usage("one action at a time: -l, -c, -a or -d"),
        };
        match [create, apply, delete].map(once) {
            [name @ Some(_), ..] => Action::Create { image, name, external: None },
            [_, Some(name), _] => Action::Apply { image, name },
            [.., Some(name)] => Action::Delete { image, name },
            _ => Action::List { image, style: ListStyle { is_qemu: true, ..Default::default() } },
        }
    }
}

/// How a list is printed.
#[derive(clap::Args, Default)]
struct ListStyle {
    #[command(flatten)]
    output: OutputArgs,
    /// In the columns of qemu-img.
    #[arg(skip)]
    is_qemu: bool,
}

/// Runs an action without a server. Only `List` may run while the image is in use.
async fn run_closed(action: Action) -> Result<()> {
    match action {
        Action::List { image, style } => {
            let disk = open(&image, Access::ReadOnly).await?;
            let snapshots = match disk.snapshots().list().await {
                // As in qemu-img, the list of a format without snapshots is empty.
                Err(error) if error.kind() == ErrorKind::Unsupported && style.is_qemu => Vec::new(),
                listed => listed?,
            };
            print_list(&snapshots.iter().map(Listed::from).collect::<Vec<_>>(), &style)
        }
        Action::Create { image, external: Some(overlay), .. } => fork(&image, &overlay).await,
        Action::Create { image, name, .. } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().create(&name.unwrap_or_default()).await?;
            Ok(disk.close().await?)
        }
        Action::Apply { image, name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().apply(&meant(&disk, name, true).await?).await?;
            Ok(disk.close().await?)
        }
        Action::Delete { image, name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().delete(&meant(&disk, name, false).await?).await?;
            Ok(disk.close().await?)
        }
        Action::Rename { image, name, new_name } => {
            let disk = open_to_change(&image).await?;
            disk.snapshots().rename(&name, &new_name).await?;
            Ok(disk.close().await?)
        }
    }
}

/// Resolves `name` as qemu-img does, if the program is called so: -a prefers an id to a name, and
/// -d accepts only names.
async fn meant(disk: &ImageDisk, name: String, takes_ids: bool) -> Result<String> {
    if !called_as::is_qemu_img() {
        return Ok(name);
    }
    let wanted = match takes_ids {
        true => SnapshotName::IdOrName(name),
        false => SnapshotName::Exact { id: None, name: Some(name) },
    };
    Ok(name_in(disk, &wanted).await?)
}

/// Runs an action on the server that has the image open.
fn run_served(socket: &Path, action: Action) -> Result<()> {
    match action {
        Action::List { image, style } => {
            let listed = image.served_by(socket)?.call("snapshot.list", json!({}))?;
            print_list(&serde_json::from_value::<Vec<Listed>>(listed)?, &style)
        }
        Action::Create { image, external: Some(overlay), .. } => {
            let mut disk = image.served_by(socket)?;
            let overlay = std::path::absolute(overlay)?;
            let fork = json!({ "disks": [{ "disk": disk.name, "overlay": overlay }] });
            print_pause(&disk.server.call("disk.fork", fork)?)
        }
        Action::Create { image, name, .. } => {
            let name = name.unwrap_or_default();
            print_pause(&image.served_by(socket)?.call("snapshot.create", json!({ "name": name }))?)
        }
        Action::Apply { image, name } => {
            image.served_by(socket)?;
            bail!(
                "{}: is being served, and its bytes must not change while guests use them; stop the server, then \
                 apply {name:?}",
                image.image.display()
            )
        }
        Action::Delete { image, name } => {
            print_pause(&image.served_by(socket)?.call("snapshot.delete", json!({ "name": name }))?)
        }
        Action::Rename { image, name, new_name } => {
            let params = json!({ "name": name, "new-name": new_name });
            print_pause(&image.served_by(socket)?.call("snapshot.rename", params)?)
        }
    }
}

/// A disk of a running server.
struct ServedDisk {
    server: Connection,
    name: Value,
}

impl ServedDisk {
    /// Calls a method for this disk.
    fn call(&mut self, method: &str, mut params: Value) -> Result<Value> {
        params["disk"] = self.name.clone();
        self.server.call(method, params)
    }
}

/// Creates an overlay of an image that no other program has open.
async fn fork(image: &Image, overlay: &Path) -> Result<()> {
    let Image { access: reach, image } = image;
    let named = reach.image_opts.resolve_to_change(image, reach.format)?;
    let options = reach.open.change_named(&named)?;
    fork_image(&named.path, options, overlay).await.map_err(with_hint)?;
    Ok(())
}

impl Image {
    /// The disk of this image, on the server that listens at `socket`.
    fn served_by(&self, socket: &Path) -> Result<ServedDisk> {
        let path = if Location::is_remote(self.image.as_os_str().as_bytes()) {
            self.image.clone()
        } else {
            self.image.canonicalize().with_context(|| self.image.display().to_string())?
        };
        let mut server = Connection::open(socket)?;
        let disks = server.call("disk.list", json!({}))?;
        let of = |disk: &Value| disk["path"].as_str().unwrap_or_default().to_owned();
        let disks = disks.as_array().map(Vec::as_slice).unwrap_or_default();
        match disks.iter().find(|disk| Path::new(&of(disk)) == path) {
            Some(disk) => Ok(ServedDisk { name: disk["disk"].clone(), server }),
            None => bail!(
                "{}: is not served here; these are: {}",
                path.display(),
                disks.iter().map(of).collect::<Vec<_>>().join(", ")
            ),
        }
    }
}

async fn open_to_change(image: &Image) -> Result<ImageDisk> {
    open(image, Access::ReadWrite).await
}

async fn open(image: &Image, access: Access) -> Result<ImageDisk> {
    let Image { access: reach, image } = image;
    let (path, options) = match access {
        Access::ReadOnly => {
            let named = reach.image_opts.resolve(image, reach.format)?;
            let locking = look_locking(&named.path, reach.force_share || named.is_shared);
            let (path, options) = reach.open.read_named(named, reach.force_share)?;
            (path, ImageOptions { locking, ..of_metadata(options) })
        }
        Access::ReadWrite => {
            let named = reach.image_opts.resolve_to_change(image, reach.format)?;
            let options = reach.open.change_named(&named)?;
            (named.path, options)
        }
    };
    check_chain(&path, &options).await?;
    // The backing files are not needed.
    let options = options.for_purpose(Purpose::Image);
    let opened = blockhouse_images::open(&path, options).await;
    Ok(opened.map_err(with_hint)?)
}

fn with_hint(error: blockhouse_core::Error) -> blockhouse_core::Error {
    match error.kind() {
        ErrorKind::Locked => error.hint(
            "if that is 'blockhouse serve --control SOCKET', name its socket here with --control \
             SOCKET; else stop that program first",
        ),
        _ => error,
    }
}

fn print_list(snapshots: &[Listed], style: &ListStyle) -> Result<()> {
    let text = match style {
        ListStyle { is_qemu: true, .. } => as_qemu_table(snapshots),
        ListStyle { output, .. } if output.is_json() => as_json(snapshots),
        ListStyle { .. } => as_text(snapshots),
    };
    if text.is_empty() { Ok(()) } else { output::print(&text) }
}

fn print_pause(result: &Value) -> Result<()> {
    output::print(&format!("writes were held off for {} us", result["pause-us"]))
}
