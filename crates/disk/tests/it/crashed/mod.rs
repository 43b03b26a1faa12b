//! qcow2 images that crash: what is explored, and how the image that a crash leaves is judged.
//!
//! Every image is opened again, checked by our own check and read. Of some, `qemu-img` has to find
//! the same: no error (no leak either after an orderly close), and the same bytes.

mod bitmaps;
pub mod jury;

use std::cell::RefCell;
use std::future::Future;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, ToolProgress};
use blockhouse_crypt::SectorCipher;
use blockhouse_disk::{Access, BitmapActivity, Disk, Image, ImageFormat, Options};
use blockhouse_format::NewLuks;
use blockhouse_format::qcow2::{
    self, Backing, CreateOptions, DataFile, NewEncryption, Qcow2, SideFileHeader, Switch, Version,
};
use blockhouse_sim::{
    Config, Devices, ImageState, Report, Rng, Sim, SimDisk, SystemUnderTest, Workload,
    explore_image,
};
use jury::Jury;

/// The kind of image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// Compatibility level 0.10: no zero clusters.
    Old,
    /// Refcounts are written late.
    Lazy,
    /// The guest's first content is in a backing file.
    Backed,
    /// The same in an old image, which cannot say zero.
    OldBacked,
    /// Clusters of 32 subclusters.
    Subclusters,
    /// The guest's data is in a file of its own, which crashes with the image.
    DataFile,
    /// The same, and that file is the raw disk.
    RawDataFile,
    /// Changes are recorded in bitmaps.
    Bitmaps,
    /// The same, with refcounts that are written late.
    LazyBitmaps,
    /// The guest's data is encrypted.
    Encrypted,
    /// A raw image with a side file: bitmaps, and a data file that is the raw disk.
    RawBitmaps,
}

impl Kind {
    fn is_backed(self) -> bool {
        matches!(self, Self::Backed | Self::OldBacked)
    }

    fn has_bitmaps(self) -> bool {
        matches!(self, Self::Bitmaps | Self::LazyBitmaps | Self::RawBitmaps)
    }

    fn is_raw(self) -> bool {
        matches!(self, Self::RawDataFile | Self::RawBitmaps)
    }

    fn has_data_file(self) -> bool {
        matches!(self, Self::DataFile | Self::RawDataFile | Self::RawBitmaps)
    }
}

/// A disk over a qcow2 image, as exports see it.
struct Served<'a> {
    disk: Disk<SimDisk>,
    /// The storage below the image.
    storage: SimDisk,
    least: Durability,
    base: Option<Vec<u8>>,
    data: Option<SimDisk>,
    /// The disk's content when bitmaps were added.
    checkpoint: Option<Vec<u8>>,
    kind: Kind,
    jury: &'a Jury,
    random: RefCell<Rng>,
}

/// A storage without faults, for reading images.
pub fn plain_config() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

/// Opens a qcow2 image, with its backing file and its data file where it has them.
pub async fn open(
    storage: SimDisk,
    base: Option<SimDisk>,
    data: Option<SimDisk>,
    options: Options,
) -> Result<Disk<SimDisk>> {
    let image = Image::open(storage, ImageFormat::Qcow2, options).await?;
    let image = match image.read_encryption().await? {
        Some(encryption) => image.with_cipher(encryption, cipher(), None)?,
        None => image,
    };
    let image = match data {
        Some(data) => image.with_data(data)?,
        None => image,
    };
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    Ok(Disk::new(match base {
        Some(base) => image.with_backing(&Image::raw(base, read_only)?),
        None => image,
    }))
}

/// The cipher of encrypted images, whose key slots are never opened.
fn cipher() -> SectorCipher {
    SectorCipher::new(NewLuks::CIPHER, &[7; NewLuks::KEY], 512).expect("memory for keys")
}

/// A header of LUKS in as little space as can be: its slot has one stripe, in the two sectors that
/// follow.
fn small_header() -> Vec<u8> {
    let (digest, digest_salt, salt) = ([1; 20], [2; 32], [3; 32]);
    let uuid = "00000000-0000-4000-8000-000000000000".to_owned();
    let header =
        NewLuks { uuid, digest, digest_salt, digest_iterations: 1000, salt, iterations: 1000 };
    let mut bytes = header.to_bytes();
    bytes.truncate(2 * 1024);
    bytes[248..256].copy_from_slice(&[0, 0, 0, 2, 0, 0, 0, 1]);
    bytes
}

fn options_of(kind: Kind, size: u64, block: u32, random: &mut Rng) -> CreateOptions {
    let sizes = match kind {
        Kind::Subclusters => [16_384_u64, 16_384],
        _ => [512.max(u64::from(block)), 4096],
    };
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let is_old = matches!(kind, Kind::Old | Kind::OldBacked);
    let switch = |is_on| if is_on { Switch::On } else { Switch::Off };
    CreateOptions {
        cluster_size: sizes[random.usize(..2)].max(block.into()),
        version: if is_old { Version::V2 } else { Version::V3 },
        refcount_bits: if is_old { 16 } else { [1, 16, 64][random.usize(..3)] },
        lazy_refcounts: switch(matches!(kind, Kind::Lazy | Kind::LazyBitmaps)),
        extended_l2: switch(kind == Kind::Subclusters),
        backing: kind.is_backed().then_some(backing),
        data_file: kind
            .has_data_file()
            .then(|| DataFile { name: b"data".to_vec(), raw: switch(kind.is_raw()) }),
        encryption: (kind == Kind::Encrypted).then(|| {
            if random.bool() { NewEncryption::Aes } else { NewEncryption::Luks(small_header()) }
        }),
        identity: (kind == Kind::RawBitmaps).then_some([7; 16]),
        ..CreateOptions::new(size)
    }
}

/// An image with that content, or over a file with that content; and its data file.
fn image_of(
    content: &[u8],
    kind: Kind,
    block: u32,
    random: &mut Rng,
) -> (Vec<u8>, Option<Vec<u8>>) {
    let options = options_of(kind, content.len() as u64, block, random);
    let sim = Sim::new(random.u64(..));
    let storage = SimDisk::new(&sim, plain_config(), Vec::new());
    let data = kind.has_data_file().then(|| SimDisk::new(&sim, plain_config(), Vec::new()));
    let (target, content) = (storage.clone(), content.to_vec());
    let target_data = data.clone();
    let mut bitmaps_random = kind.has_bitmaps().then(|| random.fork());
    sim.block_on(async move {
        let created =
            qcow2::create_with(&target, target_data.as_ref(), &options, &ToolProgress::default())
                .await;
        created.expect("a new image");
        if options.backing.is_some() {
            return;
        }
        let disk = open(target, None, target_data, Options::default()).await;
        let disk = disk.expect("the new image");
        let mut buffer = Buffer::new(content.len());
        buffer.bytes_mut().copy_from_slice(&content);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: 0, from, durability }).await.expect("room");
        if let Some(random) = &mut bitmaps_random {
            bitmaps::add(&disk, &content, random).await;
        }
        disk.close().await.expect("no failure");
    });
    (storage.content(), data.map(|data| data.content()))
}

impl SystemUnderTest for Served<'static> {
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>> {
        self.disk.submit(request)
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn min_durability(&self) -> Durability {
        self.least
    }

    fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
        self.disk.resize(size)
    }

    fn close(&self) -> impl Future<Output = Result<()>> {
        self.disk.close()
    }

    fn others(&self) -> Vec<SimDisk> {
        self.data.iter().cloned().collect()
    }

    fn recover(&self, image: Vec<u8>, state: ImageState) -> std::result::Result<Vec<u8>, String> {
        let sim = Sim::new(0);
        let base = self.base.as_deref();
        let storage = SimDisk::new(&sim, plain_config(), image.clone());
        let behind = base.map(|base| SimDisk::new(&sim, plain_config(), base.to_vec()));
        let mut random = self.random.borrow_mut();
        let data = self.data.as_ref().map(|data| data.crash(&mut random));
        let with = data.as_ref().map(|data| SimDisk::new(&sim, plain_config(), data.clone()));
        let checkpoint = self.checkpoint.clone();
        let has_failed = self.storage.has_failed();
        let was_closed = state == ImageState::Closed;
        let is_marked = self.kind == Kind::RawBitmaps && was_closed;
        let goes_on = (random.u8(..16) == 0).then(|| random.u64(..));
        let (found, state) = sim.block_on(async move {
            let leaks = check(&storage).await?;
            let disk = open(storage.clone(), behind, with, Options::default()).await;
            let disk = disk.map_err(|error| format!("cannot be opened again: {error}"))?;
            let bytes = read_all(&disk).await?;
            let is_any_lost = match &checkpoint {
                Some(checkpoint) => bitmaps::check(&disk, checkpoint, &bytes, has_failed).await?,
                None => false,
            };
            // A bitmap that was lost leaves the clusters that its tables were to have.
            let state = if is_any_lost { ImageState::Crashed } else { state };
            if state == ImageState::Closed && leaks > 0 {
                return Err(format!("{leaks} leaks in an image that was closed"));
            }
            if is_marked {
                check_mark(&storage).await?;
            }
            if let Some(number) = goes_on {
                go_on(disk, number).await?;
                check(&storage).await?;
            }
            Ok::<_, String>((bytes, state))
        })?;
        let is_for_qemu = self.kind != Kind::Encrypted;
        if is_for_qemu && random.u32(..).is_multiple_of(self.jury.one_in()) {
            let beside = base.map(|base| ("base", base));
            let beside = beside.or(data.as_deref().map(|data| ("data", data)));
            self.jury.ask(&image, beside, state, &found)?;
        }
        // A side file that is refused after a crash takes nothing with it.
        if self.kind.is_raw()
            && (was_closed || self.kind == Kind::RawBitmaps)
            && data.is_none_or(|data| data[..found.len()] != found)
        {
            return Err("the data file is not the raw disk".to_owned());
        }
        Ok(found)
    }
}

/// A side file that was closed has no session.
async fn check_mark(side_file: &SimDisk) -> std::result::Result<(), String> {
    let found = SideFileHeader::read(side_file).await.map_err(|error| error.to_string())?;
    match found.ok_or("the side file has no header")? {
        found if found.is_live => Err(format!("the session goes on: {found:?}")),
        _ => Ok(()),
    }
}

/// Our own check: no corruption. How many clusters leak.
async fn check(storage: &SimDisk) -> std::result::Result<u64, String> {
    // Opened for writing, so that refcounts that are late are repaired.
    let image = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await;
    let image = image.map_err(|error| format!("cannot be opened: {error}"))?;
    let report = qcow2::check(&image).await.map_err(|error| error.to_string())?;
    match report.corruptions {
        0 => Ok(report.leaks),
        _ => Err(format!("corrupt: {:?}", report.problems)),
    }
}

pub async fn read_all(disk: &Disk<SimDisk>) -> std::result::Result<Vec<u8>, String> {
    let mut buffer = Buffer::new(disk.size() as usize);
    let read = Request::Read { offset: 0, into: buffer.lend() };
    disk.submit(read).await.map_err(|error| format!("cannot be read: {error}"))?;
    Ok(buffer.bytes().to_vec())
}

/// Writes to the image that was left: it has to be as good as any other image.
async fn go_on(disk: Disk<SimDisk>, number: u64) -> std::result::Result<(), String> {
    let mut expected = read_all(&disk).await?;
    let offset = number % disk.size();
    let length = (number >> 32) % (disk.size() - offset) + 1;
    let mut buffer = Buffer::new(length as usize);
    buffer.bytes_mut().fill(0xfe);
    let (from, durability) = (buffer.lend(), Durability::Data);
    let request = Request::Write { offset, from, durability };
    disk.submit(request).await.map_err(|error| format!("cannot be written: {error}"))?;
    expected[offset as usize..(offset + length) as usize].fill(0xfe);
    if read_all(&disk).await? != expected {
        return Err(format!("a write of {length} bytes at {offset} after the crash went wrong"));
    }
    disk.close().await.map_err(|error| format!("cannot be closed: {error}"))
}

/// Explores one seed on an image of that kind; `wrap` stands between the image and the disk that
/// crashes.
///
/// # Errors
/// The forbidden content that was seen, in words.
pub fn explore_kind(
    kind: Kind,
    seed: u64,
    jury: &'static Jury,
    wrap: impl Fn(SimDisk) -> SimDisk,
) -> std::result::Result<Report, String> {
    let base = RefCell::new(None);
    let checkpoint = RefCell::new(None);
    let data = RefCell::new(None);
    let encode = |config: &Config, content: Vec<u8>, random: &mut Rng| {
        let (image, content_beside) = image_of(&content, kind, config.alignment.offset, random);
        *data.borrow_mut() = content_beside.map(|content| (config.clone(), content));
        *checkpoint.borrow_mut() = kind.has_bitmaps().then(|| content.clone());
        *base.borrow_mut() = kind.is_backed().then_some(content);
        image
    };
    let build = |sim: &Sim, storage: SimDisk, random: &mut Rng| {
        let least = if random.u8(..4) == 0 { Durability::Data } else { Durability::None };
        let bitmap_activity = if kind.has_bitmaps() {
            bitmaps::any_activity(random)
        } else {
            BitmapActivity::default()
        };
        let options = Options { durability: least, bitmap_activity, ..Options::default() };
        let base = base.borrow_mut().take();
        let behind = base.clone().map(|base| SimDisk::new(sim, plain_config(), base));
        let data = data.borrow_mut().take();
        let data = data.map(|(config, content)| SimDisk::new(sim, config, content));
        let opened =
            open(wrap(storage.clone()), behind.map(&wrap), data.clone().map(&wrap), options);
        let disk = sim.block_on(opened).expect("a good image");
        let (checkpoint, random) = (checkpoint.borrow_mut().take(), RefCell::new(random.fork()));
        Served { disk, storage, least, base, data, checkpoint, kind, jury, random }
    };
    let sectors = if kind == Kind::Subclusters { 120 } else { 40 };
    let devices = Devices::Sometimes;
    explore_image(seed, &Workload { sectors, devices, ..Workload::default() }, encode, build)
}
