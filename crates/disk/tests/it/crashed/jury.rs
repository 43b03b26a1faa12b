//! The verdict of `qemu-img` on images that a crash or an orderly end left.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_sim::{ImageState, SeedSelection};

use crate::qemu::{is_installed, output};

/// Shows some of the images to `qemu-img`.
pub struct Jury {
    one_in: u32,
    asked: AtomicU64,
}

impl Jury {
    /// A jury that is shown one of this many images, chosen at random.
    pub const fn for_one_in(one_in: u32) -> Self {
        Self { one_in, asked: AtomicU64::new(0) }
    }

    /// All where one seed is looked at closely, few in long runs.
    pub fn one_in(&self) -> u32 {
        match SeedSelection::of_this_run() {
            SeedSelection::One => 1,
            SeedSelection::Default => self.one_in,
            SeedSelection::Range => self.one_in.saturating_mul(20),
        }
    }

    /// How many images it has seen.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// The image has to be without errors and to hold those bytes. It may name one file `beside`
    /// it.
    pub fn ask(
        &self,
        image: &[u8],
        beside: Option<(&str, &[u8])>,
        state: ImageState,
        content: &[u8],
    ) -> Result<(), String> {
        if !is_installed() {
            return Ok(());
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            path
        };
        let path = file("image.qcow2", image);
        let flat = file("flat", content);
        if let Some((name, bytes)) = beside {
            file(name, bytes);
        }
        if is_dirty(image) {
            // It says itself that its refcounts are late: QEMU has to be able to make them anew.
            expect(&check(&path, &["-r", "all"]), &[0], "qemu-img check -r all")?;
        }
        let allowed: &[i32] = if state == ImageState::Crashed { &[0, 3] } else { &[0] };
        expect(&check(&path, &[]), allowed, "qemu-img check")?;
        let words = ["compare", "-f", "qcow2", "-F", "raw"].map(OsStr::new);
        let compared = words.into_iter().chain([path.as_os_str(), flat.as_os_str()]);
        let compared = qemu_img(&path, compared);
        expect(&compared, &[0], "qemu-img compare with what we read")
    }
}

fn is_dirty(image: &[u8]) -> bool {
    const IS_DIRTY: usize = 79;
    image[7] >= 3 && image[IS_DIRTY] & 1 == 1
}

fn check(image: &Path, how: &[&str]) -> Output {
    let words = ["check", "-f", "qcow2"].iter().chain(how).map(OsStr::new);
    qemu_img(image, words.chain([image.as_os_str()]))
}

/// Runs in the image's folder: that is where QEMU looks for a data file.
fn qemu_img<'a>(image: &Path, arguments: impl Iterator<Item = &'a OsStr>) -> Output {
    let folder = image.parent().expect("a folder");
    let mut command = Command::new("qemu-img");
    output(command.current_dir(folder).args(arguments)).expect("qemu-img")
}

fn expect(output: &Output, allowed: &[i32], what: &str) -> Result<(), String> {
    match output.status.code() {
        Some(code) if allowed.contains(&code) => Ok(()),
        _ => Err(format!("{what}: {output:?}")),
    }
}
