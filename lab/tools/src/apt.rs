//! The Debian packages that the tests and the comparison need, and their installation.
//!
//! A package counts as present if the parts of it that we use work, so hand-built tools count, too.
//! Packages are installed only if the user is root; other users get the exact command to run.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::backports::{self, Backports};
use crate::process::{apt_get, find_program, run, succeeds};

/// How to find out whether a package is present.
enum Probe {
    /// All these programs are on the search path.
    Programs(&'static [&'static str]),
    /// The system's Python can import this module.
    PythonModule(&'static str),
    /// pkg-config knows this library, with its headers.
    Library(&'static str),
    /// Perl has this module. Debian's `perl-base` lacks some modules of Perl.
    PerlModule(&'static str),
}

/// A package and how to find out whether it is present.
pub struct Package {
    name: &'static str,
    probe: Probe,
}

const QEMU_UTILS: Package = Package {
    name: "qemu-utils",
    probe: Probe::Programs(&["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"]),
};
const QEMU_SYSTEM: Package =
    Package { name: "qemu-system-x86", probe: Probe::Programs(&["qemu-system-x86_64"]) };
const NBDKIT: Package = Package { name: "nbdkit", probe: Probe::Programs(&["nbdkit"]) };
const STRACE: Package = Package { name: "strace", probe: Probe::Programs(&["strace"]) };
const PYTHON_LIBNBD: Package =
    Package { name: "python3-libnbd", probe: Probe::PythonModule("nbd") };
const LIBNBD: Package =
    Package { name: "libnbd-bin", probe: Probe::Programs(&["nbdinfo", "nbdcopy"]) };
const GNUTLS: Package =
    Package { name: "gnutls-bin", probe: Probe::Programs(&["certtool", "psktool"]) };
const OPENSSL: Package = Package { name: "openssl", probe: Probe::Programs(&["openssl"]) };
const FIO: Package = Package { name: "fio", probe: Probe::Programs(&["fio"]) };

/// The needs of `cargo xtask test`, the build of the binary included.
pub const FOR_TESTS: &[Package] = &[
    Package { name: "pkg-config", probe: Probe::Programs(&["pkg-config"]) },
    Package { name: "libssl-dev", probe: Probe::Library("openssl") },
    QEMU_UTILS,
    QEMU_SYSTEM,
    LIBNBD,
    PYTHON_LIBNBD,
    Package { name: "python3-jsonschema", probe: Probe::PythonModule("jsonschema") },
    Package { name: "python3-prometheus-client", probe: Probe::PythonModule("prometheus_client") },
    Package { name: "chromium", probe: Probe::Programs(&["chromium"]) },
    NBDKIT,
    FIO,
    STRACE,
    Package { name: "tmux", probe: Probe::Programs(&["tmux"]) },
    GNUTLS,
    OPENSSL,
    Package {
        name: "systemd",
        probe: Probe::Programs(&["systemd-analyze", "systemd-socket-activate"]),
    },
    Package { name: "python3-yaml", probe: Probe::PythonModule("yaml") },
    Package { name: "libvirt-clients", probe: Probe::Programs(&["virt-xml-validate"]) },
    Package { name: "libxml2-utils", probe: Probe::Programs(&["xmllint"]) },
    Package { name: "cryptsetup-bin", probe: Probe::Programs(&["cryptsetup"]) },
    Package { name: "man-db", probe: Probe::Programs(&["man"]) },
    Package { name: "mandoc", probe: Probe::Programs(&["mandoc"]) },
    Package { name: "zsh", probe: Probe::Programs(&["zsh"]) },
    Package { name: "fish", probe: Probe::Programs(&["fish"]) },
];

/// What the tests of images in Ceph need in addition: a cluster on this machine.
/// [`crate::qemu_driver`] has QEMU's client.
pub const FOR_CEPH: &[Package] = &[
    Package { name: "ceph-mon", probe: Probe::Programs(&["ceph-mon", "monmaptool"]) },
    Package { name: "ceph-osd", probe: Probe::Programs(&["ceph-osd"]) },
    Package { name: "ceph-common", probe: Probe::Programs(&["ceph", "rbd", "ceph-authtool"]) },
];

/// The needs of `cargo xtask compare --remote`: the storage of the compared servers is another
/// server.
pub const FOR_REMOTE: &[Package] = &[QEMU_UTILS, FIO];

/// The needs of the static binary of `cargo xtask dist`: OpenSSL is built from source for it.
pub const FOR_STATIC_BINARY: &[Package] = &[
    Package { name: "perl", probe: Probe::PerlModule("IPC::Cmd") },
    Package { name: "make", probe: Probe::Programs(&["make"]) },
    Package { name: "gcc", probe: Probe::Programs(&["cc"]) },
];

/// The needs of `cargo xtask dist --test`: the peers of TLS connections.
pub const FOR_TLS_TESTS: &[Package] =
    &[QEMU_UTILS, LIBNBD, PYTHON_LIBNBD, NBDKIT, FIO, GNUTLS, OPENSSL];

/// The needs of `cargo xtask compare`.
pub const FOR_COMPARISON: &[Package] = &[QEMU_UTILS, NBDKIT, FIO];

/// The needs of `cargo xtask compare --tls`.
pub const FOR_TLS: &[Package] = &[QEMU_UTILS, LIBNBD];

/// The needs of `cargo xtask compare --vmstate`.
pub const FOR_STATES: &[Package] = &[QEMU_UTILS, QEMU_SYSTEM];

/// The needs of `cargo xtask vm` on the host; it fetches the guest's content itself.
pub const FOR_GUESTS: &[Package] = &[QEMU_UTILS, QEMU_SYSTEM, STRACE];

/// What `cargo xtask vm services` needs in addition.
pub const FOR_SYSTEMS: &[Package] =
    &[Package { name: "mmdebstrap", probe: Probe::Programs(&["mmdebstrap"]) }];

/// The needs of `cargo xtask kill`.
pub const FOR_KILLS: &[Package] = &[QEMU_UTILS, PYTHON_LIBNBD];

/// The needs of `cargo xtask fuzz`: libFuzzer is compiled from C++.
pub const FOR_FUZZING: &[Package] = &[Package { name: "g++", probe: Probe::Programs(&["c++"]) }];

/// Finds a program of a package that must not be installed, because that would start a service. The
/// program is unpacked into `folder`, unless it is there already or on the search path. `path` is
/// its path in the package.
///
/// # Errors
/// When there is no such package, or it has no such program.
pub fn unpack(package: &str, path: &str, folder: &Path) -> Result<PathBuf> {
    let name = Path::new(path).file_name().expect("a program has a name");
    if let Some(found) = find_program(&name.to_string_lossy()) {
        return Ok(found);
    }
    let unpacked = folder.join(package);
    let program = unpacked.join(path);
    if program.exists() {
        return Ok(program);
    }
    extract(apt_get(&["download", package]), &unpacked)?;
    if program.exists() { Ok(program) } else { bail!("the Debian package {package} has no {path}") }
}

/// Unpacks AppArmor's parser with [`unpack`]. Debian 12 has it in another folder than later
/// releases.
///
/// # Errors
/// As [`unpack`].
pub fn unpack_apparmor(folder: &Path) -> Result<PathBuf> {
    let unpack = |path| unpack("apparmor", path, folder);
    unpack("sbin/apparmor_parser").or_else(|_| unpack("usr/sbin/apparmor_parser"))
}

/// Runs `download`, which fetches packages into its working folder, and extracts what it has
/// fetched into `folder`.
pub(crate) fn extract(mut download: Command, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    download.current_dir(folder);
    run(download)?;
    extract_all(folder, folder)
}

/// Extracts the packages in `archives` into `folder`, and removes their files.
///
/// # Errors
/// One of them cannot be read or extracted.
pub fn extract_all(archives: &Path, folder: &Path) -> Result<()> {
    for entry in archives.read_dir()? {
        let archive = entry?.path();
        // Beside packages there may be apt's lock and its folder for downloads.
        if archive.extension().is_some_and(|extension| extension == "deb") {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("--extract").arg(&archive).arg(folder);
            run(unpack)?;
            std::fs::remove_file(archive)?;
        }
    }
    Ok(())
}

/// Makes sure that all `packages` are present: installs the missing ones if we are root, else fails
/// with the command that would install them.
pub fn require(packages: &[Package]) -> Result<()> {
    let missing = missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    let by_hand = format!(
        "sudo apt-get update && sudo apt-get install --yes --no-install-recommends {names}"
    );
    if find_program("apt-get").is_none() {
        bail!("these Debian packages, or what your system calls them, are missing: {names}");
    }
    if !is_root() {
        bail!("missing: {names}; install with: {by_hand}");
    }
    run(apt_get(&["update"]))?;
    // All packages of one source package must have one version, so installing one may remove
    // another that has a different origin. So QEMU's packages come from one origin, and missing
    // ones are searched for twice.
    for _ in 0..2 {
        let missing = self::missing(packages);
        if missing.is_empty() {
            return Ok(());
        }
        let is_newer = |name: &&str| name.starts_with("qemu-") && backports::have_newer_qemu();
        let (newer, others): (Vec<_>, Vec<_>) = missing.into_iter().partition(is_newer);
        if !others.is_empty() {
            install(apt_get(&["install"]), &others)?;
        }
        if !newer.is_empty() {
            install(Backports::fetch()?.install(), &newer)?;
        }
    }
    match self::missing(packages) {
        missing if missing.is_empty() => Ok(()),
        missing => {
            bail!("installed, yet not found: {}; look at the search path", missing.join(" "))
        }
    }
}

/// Runs `install`, an `apt-get install`, with the names.
fn install(mut install: Command, names: &[&str]) -> Result<()> {
    println!("apt: installing {}", names.join(" "));
    let started = Instant::now();
    install.args(["--yes", "--no-install-recommends"]).args(names);
    run(install)?;
    println!("apt: installed in {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn missing(packages: &[Package]) -> Vec<&'static str> {
    packages.iter().filter(|package| !present(&package.probe)).map(|package| package.name).collect()
}

fn present(probe: &Probe) -> bool {
    match probe {
        Probe::Programs(programs) => programs.iter().all(|program| find_program(program).is_some()),
        Probe::PythonModule(module) => {
            let mut python = Command::new("/usr/bin/python3");
            python.args(["-c", &format!("import {module}")]);
            succeeds(python)
        }
        Probe::Library(name) => {
            let mut pkg_config = Command::new("pkg-config");
            pkg_config.args(["--exists", name]);
            succeeds(pkg_config)
        }
        Probe::PerlModule(module) => {
            let mut perl = Command::new("perl");
            perl.arg(format!("-M{module}")).args(["-e", "1"]);
            succeeds(perl)
        }
    }
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    // The owner of our own entry in /proc is our effective user.
    Path::new("/proc/self").metadata().is_ok_and(|metadata| metadata.uid() == 0)
}
