//! `blockhouse serve`: an image as an export, from the first check to the last flush.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_core::{Error, ErrorKind};
use blockhouse_disk::{
    Access, CacheMode, DetectZeroes, Discard, Disk, ImageFormat, ImageOptions, Locking, create,
    open, open_snapshot,
};
use blockhouse_engine::{
    DEFAULT_POLLING, Engine, EngineChoice, FixedFiles, HostFile, IoPoll, Listener,
    raise_descriptor_limit,
};
use blockhouse_nbd::uri::{Address, NbdUri};
use blockhouse_nbd::{BoundSocket, Export, Exports, Limits, Server, SocketFile, bind_private};
use blockhouse_vhost_user::RegisteredMemory;
use clap::builder::ValueParser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::control::Control;
use crate::create::whole_sectors;
use crate::io_poll;
use crate::limits::{self, Limit};
use crate::offers::{Offer, Offers};
use crate::output;
use crate::size;
use crate::sockets::{self, Place};
use crate::stop_request::StopRequest;
use crate::stopping_notice::StoppingNotice;
use crate::vhost_user::{self, Served};
use crate::workers::{LoopOptions, Workers};

/// Arguments of `serve`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image: a raw or qcow2 disk image, or a block device. Several are served side by side, each named
    /// after its file unless --name says otherwise.
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, value_parser = ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Make the image with this size if it is missing (512, 64K, 20G, 1T).
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    create: Option<u64>,
    /// The export's name, where the URI has none. Left out, clients need none. For several images, give
    /// one for each, in their order.
    #[arg(long)]
    name: Vec<String>,
    /// Listen here: nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH. May be repeated. Left out,
    /// a Unix socket named after the image, in a folder of this user.
    ///
    /// Clients of a socket find the exports that its URIs name and no others. Of several images NAME says
    /// which one is served: the file's name, with or without its extension, or the image's --name. A URI
    /// without NAME serves all images under their names. Under socket activation each URI stands for the
    /// passed socket with its address; without any URI all passed sockets serve all images.
    #[arg(long, value_name = "URI", value_parser = ValueParser::new(str::parse::<NbdUri>))]
    nbd: Vec<NbdUri>,
    /// Serve the image to a virtual machine's vhost-user-blk device at this Unix socket. May be
    /// repeated; several images need one socket each, in their order, whatever their names.
    ///
    /// The machine's memory must be shared, and be a memfd or on tmpfs or hugetlbfs (QEMU: -object
    /// memory-backend-memfd,share=on). A raw image or block device that became longer is served with its
    /// new size after SIGHUP, and the guest is told.
    #[arg(long, value_name = "SOCKET")]
    vhost_user_blk: Vec<PathBuf>,
    /// What NBD clients may take, as KEY=VALUE,... Times are in seconds or have a unit (500ms, 5m, 2h).
    ///
    /// clients=256: connections at once; when all are taken, clients that hold many make room for those that
    /// hold few. memory=512M: bytes of data in flight, for all together. handshake=30: the time to choose an
    /// export. stall=30: how long a client may stand still while it receives replies or sends a request; off
    /// for ever. idle=off: how long it may ask for nothing. keepalive=60: over TCP, after how much silence the
    /// kernel asks whether the client is still there. stop=5: how long clients may go on receiving replies
    /// when the server stops; those that stand still are cut off after two seconds.
    #[arg(long = "limit", value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = ValueParser::new(limits::parse))]
    limits: Vec<Limit>,
    /// Take requests of this user at this Unix socket while the images are served: blockhouse snapshot
    /// --control SOCKET.
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// How many queues a guest may use on a vhost-user-blk device; they are spread over the workers.
    /// Left out, one for each processor.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: Option<u16>,
    /// How file operations are done: auto, io_uring, linux-aio or threads.
    #[arg(long, default_value = "auto", value_parser = ValueParser::new(str::parse::<EngineChoice>))]
    engine: EngineChoice,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe.
    #[arg(long, default_value = "none", value_parser = ValueParser::new(str::parse::<CacheMode>))]
    cache: CacheMode,
    /// How many threads serve; each connection, and each queue of a guest, stays on one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// Look out for the next request for up to this many microseconds before going to sleep, where
    /// experience says that it will come so soon; 0 to always sleep.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_POLLING.as_micros() as u32, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    poll_max_us: u32,
    /// Whether io_uring keeps open images in a table of its own, which spares the kernel a look-up for
    /// each request: on or off. Other engines have no such table.
    #[arg(long, default_value = "off", value_parser = parse_fixed_files)]
    fixed_files: FixedFiles,
    /// Whether to poll for completions instead of waiting for the disk's interrupts, at the price of a
    /// busy processor while requests are under way: on or off.
    ///
    /// Needs io_uring, --cache none or directsync, and images on disks with queues for it (nvme or
    /// virtio_blk loaded with poll_queues=N), and is refused elsewhere. Reads are polled for; writes only
    /// where the image is a block device itself, durable ones only if that has FUA or no write cache.
    #[arg(long, default_value = "off", value_parser = parse_io_poll)]
    io_poll: IoPoll,
    /// Whether the memory of vhost-user-blk guests is registered with io_uring, which spares the kernel
    /// to look its pages up for each request: on or off. Other engines know of no such thing.
    ///
    /// Registered memory is pinned: what a balloon, free page reporting or virtio-mem takes from the guest
    /// does not go back to the host, and is not used rightly if the guest gets it again. It counts against
    /// RLIMIT_MEMLOCK once for each worker; beyond that the guest is served without, and so are requests
    /// that --io-poll polls for.
    #[arg(long, default_value = "off", value_parser = parse_register_memory)]
    register_memory: RegisteredMemory,
    /// Refuse all writes.
    #[arg(long)]
    read_only: bool,
    /// Serve the disk as it was when this snapshot was taken (its name or id), for reading only.
    #[arg(long, value_name = "NAME")]
    snapshot: Option<String>,
    /// What a guest's discards do: unmap gives the space back to the host, ignore does nothing.
    #[arg(long, default_value = "unmap", value_parser = parse_discard)]
    discard: Discard,
    /// What becomes of writes of nothing but zeros: off writes them, on stores that the range is zero,
    /// unmap also gives its space back to the host.
    #[arg(long, default_value = "off", value_parser = parse_detect_zeroes)]
    detect_zeroes: DetectZeroes,
}

fn parse_detect_zeroes(name: &str) -> Result<DetectZeroes, String> {
    match name {
        "off" => Ok(DetectZeroes::Off),
        "on" => Ok(DetectZeroes::On),
        "unmap" => Ok(DetectZeroes::Unmap),
        _ => Err("use off, on or unmap".into()),
    }
}

fn parse_fixed_files(name: &str) -> Result<FixedFiles, String> {
    match name {
        "on" => Ok(FixedFiles::On),
        "off" => Ok(FixedFiles::Off),
        _ => Err("use on or off".into()),
    }
}

fn parse_io_poll(name: &str) -> Result<IoPoll, String> {
    match name {
        "on" => Ok(IoPoll::On),
        "off" => Ok(IoPoll::Off),
        _ => Err("use on or off".into()),
    }
}

fn parse_register_memory(name: &str) -> Result<RegisteredMemory, String> {
    match name {
        "on" => Ok(RegisteredMemory::On),
        "off" => Ok(RegisteredMemory::Off),
        _ => Err("use on or off".into()),
    }
}

fn parse_discard(name: &str) -> Result<Discard, String> {
    match name {
        "unmap" => Ok(Discard::Unmap),
        "ignore" => Ok(Discard::Ignore),
        _ => Err("use unmap or ignore".into()),
    }
}

impl Arguments {
    /// Ends the program where something makes no sense together: wrong usage.
    fn check(&self) {
        if self.detect_zeroes == DetectZeroes::Unmap && self.discard == Discard::Ignore {
            refuse("--detect-zeroes unmap needs --discard unmap; --detect-zeroes on does without");
        }
        let is_direct = matches!(self.cache, CacheMode::None | CacheMode::Directsync);
        if self.io_poll == IoPoll::On && !is_direct {
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
        }
        if self.create.is_some() && self.snapshot.is_some() {
            refuse("a new image has no snapshots; leave out --create or --snapshot");
        }
    }

    fn loop_options(&self) -> LoopOptions {
        LoopOptions {
            engine: self.engine,
            polling: Duration::from_micros(self.poll_max_us.into()),
            fixed_files: self.fixed_files,
            io_poll: self.io_poll,
        }
    }

    /// What is offered at which address. Wrong usage ends the program.
    fn plan(&self) -> (Offers, Vec<(Address, Vec<Offer>)>) {
        let plan = Offers::new(&self.images, &self.name).and_then(|offers| {
            let plan = offers.plan(&self.nbd)?;
            // Each image has a vhost-user socket, or none has.
            if !self.nbd.is_empty() && self.vhost_user_blk.is_empty() {
                offers.check_all_offered(plan.iter().flat_map(|(_, offers)| offers))?;
            }
            Ok((offers, plan))
        });
        plan.unwrap_or_else(|why| refuse(&why))
    }
}

/// Ends the program, which was used wrongly.
fn refuse(why: &str) -> ! {
    clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, format!("{why}\n")).exit()
}

type HostDisk = Arc<Disk<HostFile>>;

/// Everything that serves.
struct Service {
    workers: Workers,
    disks: Vec<HostDisk>,
    server: Server,
    /// Removed at the end.
    files: Vec<SocketFile>,
    devices: Vec<Served>,
    control: Option<Control>,
    /// Where clients find us.
    ready: Vec<Ready>,
}

/// The address of an export.
enum Ready {
    Nbd(NbdUri),
    VhostUser(PathBuf),
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(uri) => uri.fmt(f),
            Self::VhostUser(path) => path.display().fmt(f),
        }
    }
}

/// Runs the command.
pub fn run(arguments: Arguments, verbose: bool) -> Result<()> {
    arguments.check();
    let (offers, plan) = arguments.plan();
    let passed = sockets::from_systemd()?;
    // Before any thread starts, so that no signal is missed.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot watch for signals")?;
    // A write beyond a limit on the size of files is to fail, not to end everything.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot watch for signals")?;
    if let Err(error) = raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
    let workers = Workers::start(arguments.workers.into(), arguments.loop_options())?;
    if arguments.io_poll == IoPoll::On {
        io_poll::check(workers.report(), &arguments.images, arguments.create)?;
    }
    // Before the image: an address in use must not leave a new image behind.
    let places = listen(&arguments, &offers, plan, passed)?;
    let devices = vhost_user::listen(&arguments.vhost_user_blk)?;
    let control = arguments.control.as_deref().map(bind_private).transpose()?;
    let open = |image: &PathBuf| open_image(&workers, image, &arguments).map(Arc::new);
    let disks = arguments.images.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut service = start(workers, disks, places, limits::limits(&arguments.limits))?;
    service.add_devices(devices, &arguments, &offers)?;
    if let Some(socket) = control {
        let (images, disks) = (&arguments.images, &service.disks);
        service.control = Some(Control::start(socket, arguments.engine, images, disks)?);
    }
    service.tell(verbose);
    if let ([Ready::Nbd(uri), ..], true) = (&service.ready[..], arguments.nbd.is_empty()) {
        suggest(uri);
    }
    let stopper = Stopper::start(signals.handle())?;
    while signals.forever().next() == Some(SIGHUP) {
        service.follow_files();
    }
    let request = StopRequest::at(Instant::now());
    tracing::debug!("finishing what is in flight");
    // It was there before: at a limit on threads there might be none now.
    stopper.stop(service);
    let mut stops = signals.forever().filter(|signal| *signal != SIGHUP);
    if stops.any(|_| !request.is_repeated_at(Instant::now())) {
        bail!("quit at once on a second signal; what was in flight may be lost");
    }
    stopper.outcome().context("the server ended badly")?
}

fn open_image(workers: &Workers, image: &Path, arguments: &Arguments) -> Result<Disk<HostFile>> {
    let path = image.to_owned();
    let options = ImageOptions {
        format: arguments.format,
        access: if arguments.read_only { Access::ReadOnly } else { Access::ReadWrite },
        cache: arguments.cache,
        discard: arguments.discard,
        detect_zeroes: arguments.detect_zeroes,
        locking: Locking::Held,
    };
    let wanted = arguments.create.map(|size| whole_sectors(image, size));
    let snapshot = arguments.snapshot.clone();
    let disk = workers.run(move || async move {
        if let Some(size) = wanted
            && !path.exists()
        {
            let refused = |why| Error::new(ErrorKind::InvalidInput, why);
            let by_name = || ImageFormat::for_new(&path).map_err(refused);
            let format = options.format.map_or_else(by_name, Ok)?;
            create(&path, size, format).await?;
        }
        let opened = match snapshot {
            None => open(&path, options).await,
            Some(name) => open_snapshot(&path, options, &name).await,
        };
        opened.map_err(|error| with_hint(error, &path, options.access))
    })?;
    for layer in (0..).map_while(|depth| disk.layer(depth)) {
        if let Some(truncation) = layer.features().and_then(|qcow2| qcow2.truncation) {
            tracing::warn!("{}: {truncation}: reads of what is lost fail", layer.name());
        }
    }
    match wanted {
        Some(size) if disk.size() != size => bail!(
            "{}: exists with {} bytes, not the {size} of --create; leave --create out, or use \
             'blockhouse resize' to make it longer",
            disk.name(),
            disk.size()
        ),
        _ => Ok(disk),
    }
}

/// What can be done about an image that cannot be opened to be served, beyond what helps with any.
fn with_hint(error: Error, image: &Path, access: Access) -> Error {
    match error.errno() {
        // EACCES, EROFS.
        13 | 30 if access == Access::ReadWrite => {
            error.hint("check its permissions, or serve it with --read-only")
        }
        // ENOENT: of the image itself. What is behind one is not to be made anew.
        2 if image
            .parent()
            .is_some_and(|folder| folder.as_os_str().is_empty() || folder.exists()) =>
        {
            error.hint("check the path; 'blockhouse create' makes a new image")
        }
        _ => error,
    }
}

fn listen(
    arguments: &Arguments,
    offers: &Offers,
    plan: Vec<(Address, Vec<Offer>)>,
    passed: Vec<BoundSocket>,
) -> Result<Vec<Place>> {
    let all = || offers.all().unwrap_or_else(|why| refuse(&why));
    if !passed.is_empty() {
        let places = match plan.is_empty() {
            true => sockets::passed_for_all(passed, &all()),
            false => sockets::passed_for(passed, plan),
        };
        return Ok(places.unwrap_or_else(|why| refuse(&why)));
    }
    if plan.is_empty() && arguments.vhost_user_blk.is_empty() {
        return Ok(vec![sockets::at_default(&arguments.images[0], all())?]);
    }
    sockets::at_uris(plan)
}

fn start(
    workers: Workers,
    disks: Vec<HostDisk>,
    places: Vec<Place>,
    limits: Limits,
) -> Result<Service> {
    let server = Server::new(limits);
    let mut files = Vec::new();
    let mut ready = Vec::new();
    for Place { bound, offers } in places {
        // Of this socket alone: clients of others do not find them.
        let exports = Exports::new();
        for Offer { name, image } in &offers {
            exports.add(export(name.clone(), &disks[*image]))?;
        }
        let listener = Listener::new(bound.socket).context("cannot use the socket")?;
        let (serving, loops) = (server.clone(), workers.handles());
        drop(workers.first().spawn(move || async move {
            if let Err(error) = serving.serve(&listener, &exports, &loops).await {
                tracing::error!("cannot accept connections any more: {error}");
            }
        }));
        files.extend(bound.file);
        let address = bound.address;
        let uri = |offer: Offer| NbdUri { address: address.clone(), export: offer.name };
        ready.extend(offers.into_iter().map(uri).map(Ready::Nbd));
    }
    Ok(Service { workers, disks, server, files, devices: Vec::new(), control: None, ready })
}

/// A disk under a name. It has no description: where the image lies on the host is no business of clients.
fn export(name: String, disk: &HostDisk) -> Export<HostFile> {
    Export { name, description: String::new(), disk: Arc::clone(disk) }
}

impl Service {
    /// Serves vhost-user-blk devices: each socket has the image of its place, or the only one.
    fn add_devices(
        &mut self,
        sockets: Vec<BoundSocket>,
        arguments: &Arguments,
        offers: &Offers,
    ) -> Result<()> {
        let processors = || std::thread::available_parallelism().map_or(1, |count| count.get());
        let queues = arguments.queues.unwrap_or_else(|| processors().min(256) as u16);
        for (index, socket) in sockets.into_iter().enumerate() {
            let index = index.min(self.disks.len() - 1);
            let name = offers.label(index);
            if let Address::Unix(path) = &socket.address {
                self.ready.push(Ready::VhostUser(path.clone()));
            }
            let loops = self.workers.handles();
            let disk = &self.disks[index];
            let memory = match self.workers.report().engine {
                Engine::IoUring => arguments.register_memory,
                Engine::LinuxAio | Engine::Threads => RegisteredMemory::Off,
            };
            self.devices.push(vhost_user::serve(socket, disk, name, queues, loops, memory)?);
        }
        Ok(())
    }

    /// Takes note of images that became longer, and has guests told.
    fn follow_files(&self) {
        for disk in &self.disks {
            let following = Arc::clone(disk);
            match self.workers.run(move || async move { following.follow_file().await }) {
                Ok(Some(size)) => tracing::info!("{}: has {size} bytes now", disk.name()),
                Ok(None) => {}
                Err(error) => tracing::error!("{error}"),
            }
        }
        self.devices.iter().for_each(Served::resized);
    }

    /// Tells the world that everything listens. Nobody reading is no reason to stop.
    fn tell(&self, verbose: bool) {
        let report = self.workers.report();
        if report.refused.is_empty() {
            tracing::debug!("engine {report}");
        } else {
            tracing::info!("engine {report}");
        }
        let line = |place: &Ready| match verbose {
            false => format!("ready {place}"),
            true => {
                let disk = Arc::clone(&self.disks[0]);
                let fua = self.workers.run(move || async move { disk.capabilities().fua });
                format!("ready {place} engine={} fua={}", report.engine, fua.as_str())
            }
        };
        let lines: Vec<_> = self.ready.iter().map(line).collect();
        // Clients may find the sockets without these lines.
        let _ = output::write(&lines.join("\n"));
        // Only systemd listens, and only where it asked to be told.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }
}

/// What a person who gave no address may want to do next.
fn suggest(uri: &NbdUri) {
    output::tell(&format!(
        "Try: nbdinfo '{uri}'\n     \
         qemu-img info '{uri}'\n     \
         qemu-system-x86_64 -drive file='{uri}',format=raw,if=virtio ...\n\
         Stop with Ctrl-C."
    ));
}

/// The thread that ends the service, so that signals are heard meanwhile.
struct Stopper {
    service: mpsc::Sender<Service>,
    thread: JoinHandle<Option<Result<()>>>,
}

impl Stopper {
    /// Starts the thread. When the service has ended it closes `signals`, which ends the wait for more.
    fn start(signals: signal_hook::iterator::Handle) -> Result<Self> {
        let (service, stopping) = mpsc::channel();
        let work = move || {
            let _closing = CloseOnDrop(signals);
            let service = stopping.recv().ok()?;
            let notice = StoppingNotice::start();
            let result = end(service);
            notice.end();
            Some(result)
        };
        let thread = std::thread::Builder::new().name("blockhouse-stop".into()).spawn(work);
        Ok(Self { service, thread: thread.context("cannot start a thread")? })
    }

    fn stop(&self, service: Service) {
        // The thread waits for nothing else.
        let _ = self.service.send(service);
    }

    /// Waits for the end; `None` where the thread panicked.
    fn outcome(self) -> Option<Result<()>> {
        self.thread.join().ok().flatten()
    }
}

/// Ends the wait for signals, also if the thread panics.
struct CloseOnDrop(signal_hook::iterator::Handle);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Stop accepting, finish, flush.
fn end(service: Service) -> Result<()> {
    let Service { workers, disks, server, files, devices, control, .. } = service;
    // While the workers still carry out what it may wait for.
    control.into_iter().for_each(Control::stop);
    devices.into_iter().for_each(Served::stop);
    let draining = server.clone();
    // While the sockets still listen: see `SocketFile`.
    drop(files);
    workers.run(move || async move { draining.drain().await });
    // All of them, also when one fails.
    let close = |disk: HostDisk| workers.run(move || async move { disk.close().await });
    let outcomes: Vec<_> = disks.into_iter().map(close).collect();
    drop(server);
    workers.stop();
    Ok(outcomes.into_iter().collect::<Result<(), _>>()?)
}
