//! The arguments of `blockhouse serve`, and their contradictions.

use std::fs::File;
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow};
use blockhouse_config::control_socket::ControlSocket;
use blockhouse_config::disk::{DiskConfig, OnFullName, check_bitmaps, check_filling};
use blockhouse_config::file;
use blockhouse_config::limits::{self, LimitArgument, LimitsConfig};
use blockhouse_config::metrics_address::MetricsAddress;
use blockhouse_config::offers::{Offer, Offers};
use blockhouse_config::server::{ServerConfig, StateSetup};
use blockhouse_config::setup::{Setup, UblkSetup};
use blockhouse_config::size;
use blockhouse_config::socket_options::SocketMode;
use blockhouse_config::switch::on_or_off;
use blockhouse_config::user_options::{GroupName, UserName};
use blockhouse_disk::{DetectZeroes, Discard, ImageFormat};
use blockhouse_engine::{DEFAULT_POLLING, EngineChoice, EventLoop};
use blockhouse_images::{
    BackingUse, CacheMode, FilePart, ImageOptions, Locking, Probing, Purpose, StateUse,
    format_by_name, probe_nameless,
};
use blockhouse_nbd::uri::{Address, NbdUri};
use blockhouse_storage::Location;
use clap::ArgAction;
use clap::builder::ValueParser;

use crate::block_size_args::BlockSizeArgs;
use crate::called_as;
use crate::create::{make_overlay, whole_sectors, wrong_usage};
use crate::hold_args::HoldArgs;
use crate::open_args::{KeyArgs, ReferenceArgs, read_only};
use crate::serve::nbd_habits::NbdHabits;
use crate::serve::tls_args::TlsArgs;
use crate::side_file_args::SideFileArgs;
use crate::snapshot_name::find_name;

/// The options that --config excludes, because the configuration file contains them.
const OTHER_OPTIONS: [&str; 52] = [
    "images",
    "format",
    "create",
    "name",
    "nbd",
    "socket",
    "vhost_user_blk",
    "ublk",
    "limits",
    "tls",
    "tls_certificates",
    "tls_psk",
    "tls_allow",
    "socket_mode",
    "socket_group",
    "control",
    "qmp",
    "pid_file",
    "metrics",
    "queues",
    "engine",
    "cache",
    "workers",
    "poll_max_us",
    "fixed_files",
    "io_poll",
    "register_memory",
    "user",
    "group",
    "sandbox",
    "sandbox_allow",
    "state",
    "read_only",
    "snapshot",
    "bitmap",
    "bitmaps_in",
    "trust_bitmaps",
    "discard",
    "detect_zeroes",
    "logical_block_size",
    "physical_block_size",
    "discard_granularity",
    "on_full",
    "hold_seconds",
    "threshold",
    "copy_on_read",
    "prefetch",
    "allow_path",
    "allow_remote",
    "no_references",
    "key_file",
    "passphrase_file",
];

/// The error of qemu-nbd for too many or too few files.
const WRONG_NUMBER: &str =
    "Invalid number of arguments\nTry `qemu-nbd --help' for more information.";

/// Arguments of `serve`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image: a raw or qcow2 disk image, or a block device. Several are served side by side,
    /// each named after its file unless --name says otherwise. null-co://?size=SIZE reads as zeros
    /// and drops writes: for benchmarks without a disk.
    #[arg(required_unless_present_any = ["config", "list"], value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// The use of the backing file, as the image's options (--image-opts) say.
    #[arg(skip)]
    backing_use: BackingUse,
    /// The data file of the image, as its options (--image-opts) say.
    #[arg(skip)]
    data_file: Option<PathBuf>,
    /// The part of the file that the image's options (--image-opts) and -o select.
    #[arg(skip)]
    part: Option<FilePart>,
    /// Whether the image's options have the driver `compress`.
    #[arg(skip)]
    compress: bool,
    /// Listen here: nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH; with TLS, nbds:// or
    /// nbds+unix://. May be repeated. Left out, a Unix socket named after the image, in a
    /// folder of this user.
    ///
    /// Clients of a socket find the exports that its URIs name and no others. With several images,
    /// NAME selects the image: by the file's name, with or without its extension, or by the image's
    /// --name. A URI without NAME serves all images under their names. Under socket activation each
    /// URI stands for the passed socket with its address; without any URI all passed sockets serve
    /// all images.
    #[arg(long, value_name = "URI", value_parser = ValueParser::new(str::parse::<NbdUri>))]
    pub(super) nbd: Vec<NbdUri>,
    #[command(flatten)]
    habits: NbdHabits,
    /// Serve the image to a virtual machine's vhost-user-blk device at this Unix socket. May be
    /// repeated; several images need one socket each, in their order, whatever their names.
    ///
    /// The machine's memory must be shared, and be a memfd or on tmpfs or hugetlbfs (QEMU: -object
    /// memory-backend-memfd,share=on). After SIGHUP a raw image or block device that has grown is
    /// served with its new size, and the guest sees it.
    #[arg(long, value_name = "SOCKET")]
    pub(super) vhost_user_blk: Vec<PathBuf>,
    /// Serve the image to this host, as the block device /dev/ublkbN: N is ID, or the lowest free
    /// number. May be repeated; several images need one each, in their order.
    ///
    /// Needs the kernel's driver (modprobe ublk_drv, Linux 6.5 or later), root's rights and
    /// io_uring. The device is removed when the server ends, so unmount it first. If the server is
    /// killed, the device stays, and its users wait: start the server again with the same image and
    /// ID, and it continues, requests in flight included. docs/ublk.md has the details.
    #[arg(long, value_name = "ID", num_args = 0..=1, default_missing_value = "any", value_parser = ValueParser::new(str::parse::<UblkId>))]
    pub(super) ublk: Vec<UblkId>,
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Refuse all writes.
    #[arg(long, short)]
    read_only: bool,
    /// Create the image with this size if it is missing (512, 64K, 20G, 1T).
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    create: Option<u64>,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe.
    #[arg(long, default_value = "none", value_parser = ValueParser::new(str::parse::<CacheMode>))]
    cache: CacheMode,
    /// Accept requests of this user at this Unix socket while the images are served: blockhouse ctl
    /// SOCKET, blockhouse snapshot --control SOCKET, blockhouse upgrade --control SOCKET.
    ///
    /// Options follow the path: mode=0660 and group=GROUP let others connect, read-only allows only
    /// methods that change nothing, and methods=disk.list+snapshot.* only these methods
    /// (docs/control.md). A comma in the path is written twice.
    #[arg(long, value_name = "SOCKET[,OPTION...]", value_parser = ValueParser::new(str::parse::<ControlSocket>))]
    control: Option<ControlSocket>,
    /// Accept commands of QEMU's monitor protocol, QMP, at this Unix socket while the images are
    /// served: those of qemu-storage-daemon that docs/qmp.md lists. Each disk is a node with the
    /// disk's name.
    ///
    /// Options follow the path as for --control: a command exists if the socket allows all control
    /// methods that it calls. An upgrade disconnects QMP clients.
    #[arg(long, value_name = "SOCKET[,OPTION...]", value_parser = ValueParser::new(str::parse::<ControlSocket>))]
    qmp: Option<ControlSocket>,
    /// Serve in the background: print the addresses when everything listens, then return and leave
    /// the server running. Its later warnings are lost: a service (docs/operations.md) keeps them.
    /// See --pid-file.
    #[arg(long)]
    pub(super) fork: bool,
    /// The export's name, where the URI has none. Left out, clients need none. For several images,
    /// give one for each, in their order.
    #[arg(long)]
    name: Vec<String>,
    /// Limits on NBD clients, and on the rates of disks, as KEY=VALUE,... May be repeated. Times
    /// are in seconds or have a unit (500ms, 5m, 2h).
    ///
    /// Clients: clients=256: connections at once; when all are in use, clients that hold many lose
    /// some to those that hold few. memory=512M: bytes of data in flight, for all together.
    /// handshake=30: the time to choose an export. stall=30: how long a client may make no progress
    /// while it receives replies or sends a request; off: no limit. idle=off: how long it may send
    /// no request. keepalive=60: over TCP, after how much silence the kernel probes the client.
    /// stop=5: how long clients may still receive replies when the server stops; those without
    /// progress are disconnected after two seconds.
    ///
    /// Disks, over all exports: iops=N, iops-read=N, iops-write=N: operations a second. bps=SIZE,
    /// bps-read=SIZE, bps-write=SIZE: bytes a second (100M). burst=FACTOR: after a rest, FACTOR
    /// times these rates for burst-seconds=1. disk=NAME: the image that the limits are for, by its
    /// --name or its file; may be repeated; left out, all images that no other --limit names.
    /// group=NAME: these images share the limits fairly; left out, each has its own. All given
    /// limits apply at once. Flushes are not limited. docs/limits.md has the details.
    #[arg(long = "limit", value_name = "KEY=VALUE,...", value_parser = ValueParser::new(limits::parse))]
    limits: Vec<LimitArgument>,
    /// Offer this persistent bitmap of the image to NBD clients, as the metadata context
    /// qemu:dirty-bitmap:NAME: the changes since it was added or cleared. May be repeated; each of
    /// several images must have all these bitmaps.
    ///
    /// An enabled bitmap changes while the image is written: a client sees all changes that were
    /// acknowledged before it asked. docs/backup.md says how a backup gets a point in time.
    #[arg(long, short = 'B', value_name = "NAME")]
    bitmap: Vec<String>,
    #[command(flatten)]
    side_file: SideFileArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Serve the disk as it was when this snapshot was taken (its name or id), for reading only.
    #[arg(long, value_name = "NAME")]
    snapshot: Option<String>,
    /// The effect of a guest's discards: unmap (the default, except under the name qemu-nbd) gives
    /// the space back to the host, ignore does nothing.
    #[arg(long, value_parser = parse_discard)]
    discard: Option<Discard>,
    /// The treatment of writes of zeros: off writes the zeros, on stores that the range is zero,
    /// unmap also gives the range's space back to the host.
    #[arg(long, default_value = "off", value_parser = parse_detect_zeroes)]
    detect_zeroes: DetectZeroes,
    #[command(flatten)]
    block_sizes: BlockSizeArgs,
    #[command(flatten)]
    hold: HoldArgs,
    /// Store data that is read from the backing file in the image, so that each cluster is fetched
    /// once: for a slow or remote backing file (docs/jobs.md).
    #[arg(long)]
    copy_on_read: bool,
    /// Copy the backing file's data into the image in the background, at this many bytes a second
    /// (20M; 0: no limit). Then detach the backing file.
    #[arg(long, value_name = "RATE", value_parser = size::parse)]
    prefetch: Option<u64>,
    /// The directory of the server's state files, which outlive its process. It is in memory
    /// (tmpfs), private to this user, and created if missing. off: no state files.
    ///
    /// Each image has a file there while it is served. If the server is killed, the next one with
    /// the same directory knows every acknowledged change of a qcow2 image, also those that were
    /// not flushed, and whether a flush has failed. The files are lost at a reboot of the host.
    /// Left out: /run/blockhouse for root, $XDG_RUNTIME_DIR/blockhouse for others; where that is
    /// not in memory, /dev/shm/blockhouse-UID. Commands that read and change images look there,
    /// too.
    #[arg(long, value_name = "DIR|off")]
    state: Option<PathBuf>,
    #[command(flatten)]
    references: ReferenceArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Serve the disks that this file describes (TOML, docs/operations.md), in place of images and
    /// options. SIGHUP and 'blockhouse ctl SOCKET reload' read it again: the server closes removed
    /// disks, opens new ones, and leaves the others alone.
    #[arg(long, value_name = "FILE", conflicts_with_all = OTHER_OPTIONS)]
    config: Option<PathBuf>,
    /// Serve metrics in the format of OpenMetrics to Prometheus and 'blockhouse top' here:
    /// 127.0.0.1:PORT, or unix:PATH for this user only, or unix:PATH,mode=0660,group=GROUP for more
    /// users.
    ///
    /// The metrics are at /metrics, as JSON at /metrics.json, and on a page for a browser at /.
    /// docs/metrics.md says what each one means.
    #[arg(long, value_name = "127.0.0.1:PORT|unix:PATH", value_parser = ValueParser::new(str::parse::<MetricsAddress>))]
    metrics: Option<MetricsAddress>,
    /// Write the process id to this file when everything listens; it is removed at the end.
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,
    /// The mode of the NBD and vhost-user-blk sockets, octal like 0660. A socket never has wider
    /// permissions, not even while it is created. Left out: as the umask says. The sockets of
    /// --control and --metrics have modes of their own.
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<SocketMode>,
    /// The group of these NBD and vhost-user-blk sockets, by its name or number; this user must be
    /// a member. Without --socket-mode the mode is 0660.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<GroupName>,
    /// Switch to this user, by name or number, once everything is open: the user who starts the
    /// server, mostly root, opens images and sockets. The server drops its supplementary groups.
    ///
    /// This user then owns the Unix sockets and the state directory: /dev/shm/blockhouse-UID if
    /// --state is left out. Files that are read again (TLS), opened later, or removed at the end
    /// need this user's rights.
    #[arg(long, value_name = "NAME|UID", value_parser = ValueParser::new(str::parse::<UserName>))]
    user: Option<UserName>,
    /// With --user, switch to this group; left out, the user's.
    #[arg(long, value_name = "NAME|GID", value_parser = ValueParser::new(str::parse::<GroupName>))]
    group: Option<GroupName>,
    /// Whether the server confines itself once everything is open: on or off.
    ///
    /// In its sandbox it makes only the system calls that serving needs, executes nothing, creates
    /// no new rings, and can open only the files that it needs. With --control it can still open
    /// disks and sockets: in the folders of those on the command line, and below --sandbox-allow.
    /// Off is for debugging. docs/security.md has the limits of the sandbox.
    #[arg(long, default_value = "on", value_parser = on_or_off, action = ArgAction::Set)]
    sandbox: bool,
    /// Let requests at the control socket open disks and sockets below this folder, too, or this
    /// block device. May be repeated.
    #[arg(long, value_name = "DIR")]
    sandbox_allow: Vec<PathBuf>,
    /// Let upgrades start the program that is at this path at that time: /usr/bin/blockhouse, for
    /// the next version of a package.
    ///
    /// Left out, an upgrade starts only the running program again. The program must be where the
    /// server cannot write. May be repeated: the first is the default of 'blockhouse upgrade'. Goes
    /// with --config.
    #[arg(long, value_name = "PROGRAM")]
    upgrade_to: Vec<PathBuf>,
    /// How file operations are done: auto, io_uring, linux-aio or threads.
    #[arg(long, default_value = "auto", value_parser = ValueParser::new(str::parse::<EngineChoice>))]
    engine: EngineChoice,
    /// How many threads serve; each connection, and each queue of a guest, stays on one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// How many queues a guest may use on a vhost-user-blk device; they are spread over the
    /// workers. Left out, one for each processor.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: Option<u16>,
    /// Busy-poll for up to N microseconds before sleeping, if a request is expected that soon; 0 =
    /// never.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_POLLING.as_micros() as u32, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    poll_max_us: u32,
    /// Whether the memory of vhost-user-blk guests is registered with io_uring, so that the kernel
    /// need not look up its pages for each request: on or off. No effect with other engines.
    ///
    /// Registered memory is pinned: memory that a balloon, free page reporting or virtio-mem takes
    /// from the guest does not go back to the host, and requests use its old pages if the guest
    /// gets it again. It counts against RLIMIT_MEMLOCK once for each worker; beyond that the
    /// guest's memory is not registered. Requests that --io-poll polls for do not use registered
    /// memory.
    #[arg(long, default_value = "off", value_parser = on_or_off, action = ArgAction::Set)]
    register_memory: bool,
    /// Whether open images are registered with io_uring (fixed files), which saves the kernel a
    /// look-up for each request: on or off. No effect with other engines.
    #[arg(long, default_value = "off", value_parser = on_or_off, action = ArgAction::Set)]
    fixed_files: bool,
    /// Whether to poll for completions instead of waiting for the disk's interrupts: on or off.
    /// Polling keeps a processor busy while requests are in flight.
    ///
    /// Needs io_uring, --cache none or directsync, and images on disks with poll queues (nvme or
    /// virtio_blk loaded with poll_queues=N), and is refused elsewhere. It applies to reads; to
    /// writes only if the image is a block device, and to durable writes only if that has FUA or no
    /// write cache.
    #[arg(long, default_value = "off", value_parser = on_or_off, action = ArgAction::Set)]
    io_poll: bool,
    /// Print an empty line when everything listens.
    #[arg(long, hide = true)]
    pub(super) in_background: bool,
    /// Take over the disks and exports of the process that started this one ('blockhouse upgrade').
    #[arg(long, hide = true)]
    hand_over: bool,
}

/// The number of a ublk device.
#[derive(Clone, Copy, Debug)]
pub(super) struct UblkId(Option<u32>);

impl FromStr for UblkId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "any" => Ok(Self(None)),
            // The driver supports no larger device numbers.
            _ => match text.parse() {
                Ok(id @ ..1_048_576) => Ok(Self(Some(id))),
                _ => Err("write the number of a device, or nothing and the image before it".into()),
            },
        }
    }
}

fn parse_detect_zeroes(name: &str) -> Result<DetectZeroes, String> {
    match name {
        "off" => Ok(DetectZeroes::Off),
        "on" => Ok(DetectZeroes::On),
        "unmap" => Ok(DetectZeroes::Unmap),
        _ => Err("use off, on or unmap".into()),
    }
}

fn parse_discard(name: &str) -> Result<Discard, String> {
    match name {
        "unmap" | "on" => Ok(Discard::Unmap),
        "ignore" | "off" => Ok(Discard::Ignore),
        _ => Err("use unmap or ignore".into()),
    }
}

impl Arguments {
    /// The effect of discards. qemu-nbd ignores them unless an option says otherwise.
    fn discard(&self) -> Discard {
        let usual = if called_as::is_qemu_nbd() { Discard::Ignore } else { Discard::Unmap };
        self.discard.unwrap_or(usual)
    }

    /// Translates qemu-nbd's options into options of `serve`. Wrong usage ends the program.
    pub(super) fn obey_habits(&mut self) {
        self.nbd.extend(self.habits.uri().unwrap_or_else(|why| refuse(&why)));
        self.name.extend(self.habits.name().map(str::to_owned));
        if self.habits.nocache {
            self.cache = CacheMode::None;
        }
        if let Some(id) = &self.habits.tls_creds {
            self.tls.use_object(id).unwrap_or_else(|why| refuse(&why.to_string()));
        }
        self.engine = self.habits.aio.unwrap_or(self.engine);
        if let Some(seconds) = self.habits.handshake_limit {
            // In QEMU 0 means no limit; here it means an hour.
            let limit =
                if seconds == 0 { "handshake=1h".into() } else { format!("handshake={seconds}") };
            self.limits.push(limits::parse(&limit).unwrap_or_else(|why| refuse(&why)));
        }
        if called_as::is_qemu_nbd() && self.images.len() > 1 {
            wrong_usage(WRONG_NUMBER);
        }
        let are_several = self.images.len() > 1;
        for image in &mut self.images {
            let named = self.habits.image_opts.resolve_to_serve(image, self.format);
            let named = named.unwrap_or_else(|why| refuse(&why.to_string()));
            *image = named.path;
            self.format = named.format;
            self.part = named.part;
            self.compress = named.is_compressed;
            self.data_file = named.data_file.map(absolute_unless_address);
            if are_several && self.data_file.is_some() {
                refuse("data-file.* is of one image: serve that one alone");
            }
            if called_as::is_qemu_nbd() && self.format.is_none() {
                let is_read = self.read_only || named.is_read_only;
                let how = if is_read { Probing::ToRead } else { Probing::ByContent };
                let found = probe_nameless(image, self.part, how);
                self.format = found.unwrap_or_else(|why| refuse(&why.to_string()));
                if self.format.is_some() {
                    self.references.follow_only_allowed();
                }
            }
            if let Some(offset) = self.habits.offset {
                let format = self.format.unwrap_or_else(|| format_by_name(image));
                if format != ImageFormat::Raw {
                    refuse("-o is of raw images: serve the whole disk");
                }
                let FilePart { offset: start, size } =
                    named.part.unwrap_or(FilePart { offset: 0, size: None });
                let size = size.map(|size| size.saturating_sub(offset));
                self.part = Some(FilePart { offset: start.saturating_add(offset), size });
            }
            self.backing_use = named.backing_use;
            self.read_only |= named.is_read_only;
            self.discard = named.space.discard.or(self.discard);
            self.detect_zeroes = named.space.detect_zeroes.unwrap_or(self.detect_zeroes);
        }
    }

    /// Finds the snapshot that qemu-nbd's -l names.
    ///
    /// # Errors
    /// The image cannot be opened, or has no such snapshot.
    pub(super) fn find_snapshot(&mut self) -> Result<()> {
        if let Some(wanted) = self.habits.load_snapshot.take() {
            let [image] = &self.images[..] else { refuse("-l is of one image: serve that alone") };
            let options = read_only(self.format, StateUse::Off).for_purpose(Purpose::Image);
            let (part, data_file) = (self.part, self.data_file.clone());
            let options = ImageOptions { locking: Locking::None, part, data_file, ..options };
            let found = find_name(image, options, &wanted);
            self.snapshot = Some(EventLoop::new(EngineChoice::Auto)?.block_on(found)?);
        }
        Ok(())
    }

    /// The URI of the server whose exports `--list` shows, if it is given.
    pub(super) fn listed_server(&self) -> Option<String> {
        if !self.habits.list {
            return None;
        }
        if !self.images.is_empty() {
            wrong_usage("List mode is incompatible with a file name");
        }
        if self.format.is_some() || self.habits.is_of_export() {
            wrong_usage("List mode is incompatible with per-device settings");
        }
        Some(self.habits.listed_uri().unwrap_or_else(|why| refuse(&why)))
    }

    /// The device to disconnect, if `--disconnect` is given.
    pub(super) fn disconnected(&self) -> Option<&Path> {
        match &self.images[..] {
            _ if !self.habits.disconnect => None,
            [device] => Some(device),
            _ => wrong_usage(WRONG_NUMBER),
        }
    }

    /// The device that `--connect` names, and the socket for its server if `-k` names one; `None`
    /// in the background process that serves.
    pub(super) fn connected(&self) -> Option<(u32, Option<&Path>)> {
        let number = self.habits.device().filter(|_| !self.in_background)?;
        Some((number, self.habits.socket()))
    }

    /// Whether the server ends with its last client: with a device (-c), or as qemu-nbd without -t,
    /// if there are no control socket and no other devices.
    fn ends_with_clients(&self) -> bool {
        if self.habits.device().is_some() {
            return true;
        }
        let has_others = self.control.is_some() || !self.vhost_user_blk.is_empty();
        called_as::is_qemu_nbd() && !self.habits.persistent && !has_others && self.ublk.is_empty()
    }

    /// With qemu-nbd -s: serves an overlay, an unlinked temporary file, in place of the image. So
    /// writes do not change the image.
    ///
    /// # Errors
    /// The overlay cannot be made.
    pub(super) fn serve_overlay(&mut self) -> Result<()> {
        if !self.habits.is_temporary {
            return Ok(());
        }
        let [image] = &mut self.images[..] else { refuse("-s is of one image") };
        if self.snapshot.is_some() {
            refuse("-s is of an image as it is; leave -l out");
        }
        let base = std::path::absolute(&*image)?;
        let format = self.format.unwrap_or_else(|| format_by_name(&base));
        let name = match self.part.take() {
            Some(part) => part.name_of(&base, format).map_err(|why| anyhow!(why))?.into(),
            None => base.clone(),
        };
        let file = format!("blockhouse-{}.qcow2", std::process::id());
        let overlay = std::env::temp_dir().join(file);
        make_overlay(&overlay, &name, format, self.references.allowed_paths()?)?;
        let file = File::options().read(true).write(true).open(&overlay);
        let removed = std::fs::remove_file(&overlay).and(file);
        let file = removed.with_context(|| format!("{}: cannot be used", overlay.display()))?;
        // The file stays open while the process runs.
        let overlay = PathBuf::from(format!("/proc/self/fd/{}", file.into_raw_fd()));
        self.references.allow.allow_path.push(base);
        (*image, self.format) = (overlay, Some(ImageFormat::Qcow2));
        self.state = Some("off".into());
        Ok(())
    }

    /// Ends the program if options contradict each other: wrong usage.
    pub(super) fn check(&self) {
        if self.detect_zeroes == DetectZeroes::Unmap && self.discard() == Discard::Ignore {
            refuse("--detect-zeroes unmap needs --discard unmap; --detect-zeroes on does without");
        }
        self.block_sizes.sizes().unwrap_or_else(|why| refuse(&format!("--{why}")));
        self.hold.on_full().unwrap_or_else(|why| refuse(&format!("--{why}")));
        let is_direct = matches!(self.cache, CacheMode::None | CacheMode::Directsync);
        if self.io_poll && !is_direct {
            refuse(
                "--io-poll on needs direct I/O; use --cache none or directsync, or leave it out",
            );
        }
        if let [_, _, ..] = self.images[..] {
            if self.create.is_some() {
                refuse("--create makes one image; name just that one");
            }
            let sockets = self.vhost_user_blk.len();
            if sockets != 0 && sockets != self.images.len() {
                refuse("several images need one --vhost-user-blk socket each");
            }
            if !self.ublk.is_empty() && self.ublk.len() != self.images.len() {
                refuse("several images need one --ublk each");
            }
        }
        let is_read_only = self.read_only || self.snapshot.is_some();
        check_filling(self.copy_on_read, self.prefetch, is_read_only)
            .unwrap_or_else(|why| refuse(&why));
        check_bitmaps(&self.bitmap, self.snapshot.as_deref())
            .unwrap_or_else(|why| refuse(&format!("--bitmap: {why}")));
        if self.create.is_some() && self.snapshot.is_some() {
            refuse("a new image has no snapshots; leave out --create or --snapshot");
        }
    }

    /// Whether the command line names no NBD address, so that the server prints a hint on how to
    /// connect.
    pub(super) fn wants_hint(&self) -> bool {
        self.nbd.is_empty() && self.config.is_none()
    }

    /// The setup of the server. Wrong usage ends the program.
    ///
    /// # Errors
    /// The configuration cannot be read, or is wrong.
    pub(super) fn setup(&self) -> Result<Setup> {
        if let Some(path) = &self.config {
            // A reload reads the file again, maybe from another working directory.
            let path = std::path::absolute(path)?;
            let (upgrade_to, hand_over) = (self.upgrade_to.clone(), self.hand_over);
            return Ok(Setup { upgrade_to, hand_over, ..file::read(&path)? });
        }
        let (offers, nbd) = self.plan();
        let server = self.server();
        Ok(Setup {
            disks: self.disks(&offers),
            offers: Some(offers),
            nbd,
            max_connections: self.habits.max_connections(),
            devices: self.devices(),
            ublk: self.ublk_devices(),
            tls: server.tls(&self.nbd).unwrap_or_else(|why| refuse(&why)),
            user: server.user().unwrap_or_else(|why| refuse(&why)),
            server,
            ends_with_clients: self.ends_with_clients(),
            ends_at_hangup: called_as::is_qemu_nbd() && !called_as::has_word("--fork"),
            storage_daemon: None,
            upgrade_to: self.upgrade_to.clone(),
            config: None,
            hand_over: self.hand_over,
        })
    }

    /// The configuration of the server as a whole.
    pub(super) fn server(&self) -> ServerConfig {
        let clients: Vec<_> = self.limits.iter().flat_map(|one| one.clients.clone()).collect();
        let server = ServerConfig {
            control: self.control.clone(),
            qmp: self.qmp.clone(),
            pid_file: self.pid_file.clone(),
            metrics: self.metrics.clone(),
            state: StateSetup::at(self.state.as_deref()),
            socket_mode: self.socket_mode,
            socket_group: self.socket_group,
            workers: self.workers,
            queues: self.queues,
            engine: self.engine,
            poll_max_us: self.poll_max_us,
            fixed_files: self.fixed_files,
            io_poll: self.io_poll,
            register_memory: self.register_memory,
            user: self.user,
            group: self.group,
            sandbox: self.sandbox,
            sandbox_allow: self.sandbox_allow.clone(),
            limits: limits::client_limits(&clients),
            ..ServerConfig::default()
        };
        self.tls.add_to(server)
    }

    /// The vhost-user-blk sockets, each with the index of its image: socket N serves image N, or
    /// all sockets serve the only image.
    fn devices(&self) -> Vec<(PathBuf, usize)> {
        let last = self.images.len() - 1;
        let sockets = self.vhost_user_blk.iter().enumerate();
        sockets.map(|(index, path)| (path.clone(), index.min(last))).collect()
    }

    /// As [`devices`](Self::devices).
    fn ublk_devices(&self) -> Vec<UblkSetup> {
        let last = self.images.len().saturating_sub(1);
        let devices = self.ublk.iter().enumerate();
        devices.map(|(index, UblkId(id))| UblkSetup { id: *id, disk: index.min(last) }).collect()
    }

    /// The disks, each with a unique name: `--name` or the file's name, or the path if another disk
    /// has the same name.
    fn disks(&self, offers: &Offers) -> Vec<DiskConfig> {
        let labels: Vec<_> = (0..self.images.len()).map(|image| offers.label(image)).collect();
        let is_unique = |label: &String| labels.iter().filter(|other| *other == label).count() == 1;
        let name = |(image, label): (&PathBuf, &String)| {
            if is_unique(label) { label.clone() } else { image.display().to_string() }
        };
        let rates: Vec<_> = self.limits.iter().filter_map(|one| one.rates.clone()).collect();
        let limits = limits::plan(&rates, &labels);
        let limits = limits.unwrap_or_else(|why| refuse(&format!("--limit: {why}")));
        let names = self.images.iter().zip(&labels).map(name);
        let named = self.images.iter().zip(names).zip(limits);
        named.map(|((image, name), limits)| self.disk(image, name, limits)).collect()
    }

    fn disk(&self, image: &Path, name: String, limits: LimitsConfig) -> DiskConfig {
        // With a hand-over, the image exists already.
        let create = self.create.filter(|_| !self.hand_over);
        let on_full = self.hold.on_full().unwrap_or_else(|why| refuse(&why));
        let keys = self.keys.files();
        DiskConfig {
            name: Some(name),
            path: image.to_owned(),
            format: self.format,
            read_only: self.read_only,
            cache: self.cache,
            discard: self.discard(),
            detect_zeroes: self.detect_zeroes,
            logical_block_size: self.block_sizes.logical_block_size,
            physical_block_size: self.block_sizes.physical_block_size,
            discard_granularity: self.block_sizes.discard_granularity,
            on_full: OnFullName::of(on_full),
            hold_seconds: on_full.seconds(),
            threshold: self.hold.threshold,
            copy_on_read: self.copy_on_read,
            prefetch: self.prefetch,
            create: create.map(|size| whole_sectors(image, size)),
            snapshot: self.snapshot.clone(),
            allow_paths: self.references.paths(),
            allow_remote: self.references.allow.allow_remote,
            no_references: self.references.no_references,
            without_backing: self.backing_use == BackingUse::LeftOut,
            data_file: self.data_file.clone(),
            key_files: keys.keys,
            passphrase_files: keys.passphrases,
            bitmaps: self.bitmap.clone(),
            // As in qemu-nbd, bitmaps that the image lacks are looked up in its backing files.
            bitmaps_behind: called_as::is_qemu_nbd(),
            bitmaps_in: self.side_file.bitmaps.clone(),
            trust_bitmaps: self.side_file.trust_bitmaps,
            limits,
            exports: Vec::new(),
            is_inactive: false,
            compress: self.compress,
            part: self.part,
        }
    }

    /// The exports of each address. Wrong usage ends the program.
    fn plan(&self) -> (Offers, Vec<(Address, Vec<Offer>)>) {
        let plan = Offers::new(&self.images, &self.name).and_then(|offers| {
            let offers = offers.with_options(self.habits.export_options());
            let plan = offers.plan(&self.nbd)?;
            // Either each image has a device, or no image has one.
            let has_devices = !self.vhost_user_blk.is_empty() || !self.ublk.is_empty();
            if !self.nbd.is_empty() && !has_devices {
                offers.check_all_offered(plan.iter().flat_map(|(_, offers)| offers))?;
            }
            Ok((offers, plan))
        });
        plan.unwrap_or_else(|why| refuse(&why))
    }
}

/// The name of a file, from the root on, or of an image on another server.
fn absolute_unless_address(name: PathBuf) -> PathBuf {
    let is_address = Location::is_remote(name.as_os_str().as_bytes());
    if is_address { name } else { std::path::absolute(&name).unwrap_or(name) }
}

/// Ends the program: wrong usage.
pub(super) fn refuse(why: &str) -> ! {
    wrong_usage(why)
}
