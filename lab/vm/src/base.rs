//! The parts of a guest that all scenarios share: kernel, modules, tools, our binaries, and the
//! first script.
//!
//! Kernel and tools are packed once and kept in the cache; our own binaries are packed for every
//! run, because they change.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::archive::Archive;
use super::packages::{Kernel, Packages};
use super::userland::Starts;
use super::{kernel, userland};
use lab_tools::build::{Profile, binary_under_test, build_binary};
use lab_tools::workspace::Workspace;

/// Changes whenever the content of the cached archive does.
const VERSION: &str = "6";

/// The modules of the newer kernel.
const MODULES_FILE: &str = "modules.cpio";

/// Runs first in the guest: mounts the usual file systems, runs the job, and reports its exit
/// status to QEMU by the debug exit device. A status greater than 100 becomes 100. If a job leaves
/// the file /next, the script starts the system that the job has prepared at /mnt, which reports
/// the status itself (`in_guest::debian`).
const INIT: &str = r#"#!/bin/sh
export PATH=/bin DM_DISABLE_UDEV=1 RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tracefs trace /sys/kernel/tracing
mount -t tmpfs tmp /tmp
ip link set lo up
stty -F /dev/ttyS1 -opost -echo
echo guest is up >/dev/ttyS1
sh /job </dev/null >/dev/ttyS1 2>&1
status=$?
if [ $status = 0 ] && [ -e /next ]; then exec switch_root /mnt /sbin/init </dev/null >/dev/ttyS0 2>&1; fi
if [ $status -gt 100 ]; then status=100; fi
printf "\\$(printf %o $((status + 1)))" | dd of=/dev/port bs=1 seek=244 2>/dev/null
"#;
/// The port of the debug exit device in [`INIT`].
pub const EXIT_PORT: &str = "0xf4";
/// What [`INIT`] prints before it runs the job.
pub const IS_UP: &str = "guest is up";

/// Which tools a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tools {
    /// The modules for file systems and block devices.
    Usual,
    /// fio as well, whose libraries are three times as large as everything else.
    WithFio,
}

/// Which kernel a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// The kernel of the same Debian release as the tools.
    Usual,
    /// The newest kernel of the next release, for newer interfaces, and to repeat scenarios that
    /// pass with the usual kernel.
    Newer,
}

/// The parts of all guests.
pub struct Base {
    cache: PathBuf,
    packages: Packages,
    blockhouse: PathBuf,
    /// Archives, one after the other.
    archives: Vec<u8>,
    fio: PathBuf,
}

impl Base {
    /// Makes everything that is not in `cache` yet.
    pub fn prepare(workspace: &Workspace, packages: Packages, cache: PathBuf) -> Result<Self> {
        let blockhouse = binary_under_test(workspace)?;
        let fio = cache.join("fio.cpio");
        let mut base = Self { archives: Vec::new(), packages, blockhouse, cache, fio };
        base.archives = base.fixed()?;
        base.archives.extend(base.ours()?);
        Ok(base)
    }

    /// The binary under test.
    pub fn blockhouse(&self) -> &Path {
        &self.blockhouse
    }

    /// An archive with the binary under test as packages have it; the usual binary has debug
    /// assertions.
    pub fn optimized(&self, workspace: &Workspace) -> Result<Vec<u8>> {
        let binary = build_binary(workspace, Profile::Dist)?;
        let scratch = scratch(&self.cache)?;
        let mut archive = Archive::default();
        userland::add_binary(
            &mut archive,
            ("blockhouse", &binary),
            Starts::Itself,
            scratch.path(),
        )?;
        Ok(archive.finish())
    }

    /// The packages of the guest.
    pub fn packages(&self) -> &Packages {
        &self.packages
    }

    /// The kernel file that QEMU starts.
    pub fn kernel(&self, choice: KernelChoice) -> PathBuf {
        self.folder_of(choice).join("vmlinux")
    }

    fn folder_of(&self, choice: KernelChoice) -> PathBuf {
        match choice {
            KernelChoice::Usual => self.cache.clone(),
            KernelChoice::Newer => self.cache.join("newer"),
        }
    }

    /// The kernels that are available. If the newer one cannot be fetched, this is printed, or is
    /// an error on machines that are meant to have everything.
    pub fn kernels(&self) -> Result<Vec<KernelChoice>> {
        let folder = self.folder_of(KernelChoice::Newer);
        match Kernel::fetch_newer(&folder) {
            Ok(kernel) => self.prepare_newer(&folder, &kernel)?,
            Err(error) if must_have_everything() => {
                return Err(error.context("must not be skipped here"));
            }
            Err(error) => {
                println!("vm: skipped: the newer kernel: {error:#}");
                return Ok(vec![KernelChoice::Usual]);
            }
        }
        Ok(vec![KernelChoice::Usual, KernelChoice::Newer])
    }

    /// Makes what guests with the newer kernel need, unless it is in the cache.
    fn prepare_newer(&self, folder: &Path, kernel: &Kernel) -> Result<()> {
        let stamp = folder.join("base");
        let wanted = format!("{VERSION} {}", kernel.version());
        if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        println!("vm: preparing kernel {}", kernel.version());
        kernel::unpack_image(kernel, &self.kernel(KernelChoice::Newer))?;
        let mut archive = Archive::default();
        let scratch = scratch(&self.cache)?;
        kernel::add_modules(&self.packages, kernel, &mut archive, scratch.path())?;
        write(&folder.join(MODULES_FILE), archive)?;
        std::fs::write(&stamp, wanted).context("cannot write to the cache")
    }

    /// A folder for the files of a run, on a disk with enough space.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// An initramfs that runs the shell script `job` on this kernel.
    pub fn initramfs(&self, choice: KernelChoice, tools: Tools, job: &str) -> Result<Vec<u8>> {
        // Files of a later archive replace those of an earlier one.
        let modules = match choice {
            KernelChoice::Usual => Vec::new(),
            KernelChoice::Newer => read(&self.folder_of(choice).join(MODULES_FILE))?,
        };
        let more = match tools {
            Tools::Usual => Vec::new(),
            Tools::WithFio => read(&self.fio)?,
        };
        let mut archive = Archive::default();
        archive.file("job", job.as_bytes());
        Ok([&self.archives[..], &modules, &more, &archive.finish()].concat())
    }

    /// Kernel modules and tools.
    fn fixed(&self) -> Result<Vec<u8>> {
        let packages = &self.packages;
        let scratch = scratch(&self.cache)?;
        let file = self.cache.join("base.cpio");
        let stamp = self.cache.join("base");
        let version = packages.kernel().version();
        let wanted = format!("{VERSION} {version}");
        if !std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            println!("vm: preparing kernel {version}");
            kernel::unpack_image(packages.kernel(), &self.kernel(KernelChoice::Usual))?;
            let mut archive = Archive::default();
            for folder in ["proc", "sys", "dev", "tmp", "mnt"] {
                archive.folder(folder);
            }
            archive.file("init", INIT.as_bytes());
            kernel::add_modules(packages, packages.kernel(), &mut archive, scratch.path())?;
            userland::add_tools(packages, &mut archive)?;
            write(&file, archive)?;
            let mut archive = Archive::default();
            userland::add_fio(packages, &mut archive)?;
            write(&self.fio, archive)?;
            std::fs::write(&stamp, wanted)?;
        }
        read(&file)
    }

    /// An archive with the binary under test and this program, which runs the jobs in the guest.
    fn ours(&self) -> Result<Vec<u8>> {
        let scratch = scratch(&self.cache)?;
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut archive = Archive::default();
        let scratch = scratch.path();
        let binaries =
            [("blockhouse", &*self.blockhouse, Starts::Itself), ("lab-vm", &own, Starts::Tools)];
        for (name, binary, starts) in binaries {
            userland::add_binary(&mut archive, (name, binary), starts, scratch)?;
        }
        userland::add_host_libraries(&mut archive, &[&self.blockhouse, &own])?;
        Ok(archive.finish())
    }
}

/// Whether this machine is meant to have everything that tests need, as for the black-box tests.
pub fn must_have_everything() -> bool {
    std::env::var_os("BLOCKHOUSE_TESTS_SKIP").is_some_and(|is| is == "never")
}

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

fn write(file: &Path, archive: Archive) -> Result<()> {
    std::fs::write(file, archive.finish())
        .with_context(|| format!("cannot write {}", file.display()))
}

fn scratch(cache: &Path) -> Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("scratch-").tempdir_in(cache);
    folder.context("cannot make a folder for what is being prepared")
}
