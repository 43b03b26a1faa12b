//! QEMU's tools, and disks over host files.

use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use blockhouse_core::{Buffer, Request};
use blockhouse_disk::{Access, DetectZeroes, Discard};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{CacheMode, ImageOptions, Locking, StateUse};
use blockhouse_sim::Rng;
use parking_lot::{Mutex, MutexGuard};

/// Leaves a test where QEMU's tools are missing.
#[macro_export]
macro_rules! require_qemu {
    () => {
        if !$crate::qemu::is_installed() {
            return;
        }
    };
}

/// A child process has, until its `exec`, the descriptors of all tests, and with them their image
/// locks. So only one test has images at a time, and no other test starts a program meanwhile.
static ALONE: Mutex<()> = Mutex::new(());

/// Whether QEMU's tools are installed. Prints one line when they are not.
pub fn is_installed() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let _alone = ALONE.lock();
        let found = Command::new("qemu-img").arg("--version").output().is_ok();
        if !found {
            eprintln!("SKIPPED: qemu-img is not installed");
        }
        found
    })
}

/// A folder on a disk, gone with the test.
pub struct Folder {
    folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Folder {
    pub fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { folder, _alone: ALONE.lock() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// For how long an image's lock may outlive who held it, and how often that is looked at.
const AFTERLIFE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// Runs a program, once the lock of its image is free: the kernel closes a ring's files a little
/// after the ring.
///
/// # Panics
/// When it fails.
pub fn run<A: AsRef<OsStr> + std::fmt::Debug>(program: &str, arguments: &[A]) -> String {
    let until = Instant::now() + AFTERLIFE;
    let output = loop {
        let output = Command::new(program).args(arguments).output().expect(program);
        let is_locked =
            String::from_utf8_lossy(&output.stderr).contains("Is another process using");
        if !is_locked || Instant::now() > until {
            break output;
        }
        std::thread::sleep(PAUSE);
    };
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    out
}

/// `qemu-img create`, over what was there.
pub fn create(image: &Path, arguments: &[&str], size: u64) {
    let (image, size) = (image.to_str().unwrap(), size.to_string());
    run("qemu-img", &[&["create", "-q", "-f", "qcow2"], arguments, &[image, &size]].concat());
}

/// `qemu-img convert`.
pub fn convert(arguments: &[&str], from: &Path, to: &Path) {
    let files = [from.to_str().unwrap(), to.to_str().unwrap()];
    run("qemu-img", &[&["convert"], arguments, &files].concat());
}

/// Commands of `qemu-io` on an image.
pub fn qemu_io(image: &Path, commands: &[String]) {
    let mut arguments = vec!["-f", "qcow2"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(image.to_str().unwrap());
    let out = run("qemu-io", &arguments);
    assert!(!out.contains("failed") && !out.contains("error"), "{commands:?}: {out}");
}

/// Writes, zeroes and discards by `seed`.
pub fn scribble(image: &Path, size: u64, seed: u64, has_zero_clusters: bool) {
    let mut random = Rng::with_seed(seed);
    let sectors = size / 512;
    let commands: Vec<String> = (0..40)
        .map(|_| {
            let start = random.u64(..sectors);
            let most = if random.bool() { 20 } else { 600 };
            let length = random.u64(1..=most).min(sectors - start);
            let (start, length) = (start * 512, length * 512);
            match random.u8(..8) {
                0 if has_zero_clusters => format!("write -z {start} {length}"),
                1 if has_zero_clusters => format!("write -z -u {start} {length}"),
                2 => format!("discard {start} {length}"),
                _ => format!("write -P {} {start} {length}", random.u8(1..)),
            }
        })
        .collect();
    qemu_io(image, &commands);
}

/// Options for reading.
pub fn options(cache: CacheMode) -> ImageOptions {
    ImageOptions {
        format: None,
        access: Access::ReadOnly,
        cache,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Off,
        locking: Locking::Held,
        state: StateUse::Off,
        ..ImageOptions::default()
    }
}

/// Runs a future on an event loop.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(future)
}

/// All bytes of an image, read in pieces of many sizes.
pub fn read_all(image: &Path, cache: CacheMode) -> Vec<u8> {
    block_on(async {
        let disk = blockhouse_images::open(image, options(cache)).await.unwrap();
        let mut bytes = Vec::new();
        for length in [512_u64, 4096, 3, 70_000, 65_536, 1 << 20].into_iter().cycle() {
            let offset = bytes.len() as u64;
            let mut buffer = Buffer::new(length.min(disk.size() - offset) as usize);
            buffer.bytes_mut().fill(0xaa);
            disk.submit(Request::Read { offset, into: buffer.lend() }).await.unwrap();
            bytes.extend_from_slice(buffer.bytes());
            if bytes.len() as u64 == disk.size() {
                break;
            }
        }
        bytes
    })
}

/// Takes the name of the backing file's format out of an image's header.
pub fn forget_backing_format(image: &Path) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 0).unwrap();
    let magic = 0xe279_2aca_u32.to_be_bytes();
    let at = header.windows(4).position(|bytes| bytes == magic).expect("it is named");
    // An unknown extension.
    file.write_all_at(&0x1234_5678_u32.to_be_bytes(), at as u64).unwrap();
}

/// Where the first compressed cluster is in the file: the first L2 table's first entry.
pub fn host_of_compressed(image: &Path) -> usize {
    let bytes = std::fs::read(image).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let offset_bits = (1_u64 << 56) - 512;
    let l1 = word(40) as usize;
    let entry = word((word(l1) & offset_bits) as usize);
    assert_ne!(entry & (1 << 62), 0, "it is compressed");
    let cluster_bits = u32::from_be_bytes(bytes[20..24].try_into().unwrap());
    (entry & ((1 << (62 - (cluster_bits - 8))) - 1)) as usize
}
