//! The programs in the guest: tools from the packages, and our own binaries.
//!
//! Both kinds are linked dynamically, and against different C libraries: the packages' and this
//! host's. So each kind brings its own loader and libraries, and ours start through wrappers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::archive::Archive;
use super::packages::Packages;
use lab_tools::process::{run, stdout_of};

/// Tools that scenarios call by name.
const TOOLS: &[&str] =
    &["blkdiscard", "dmsetup", "e2fsck", "mkfs.ext4", "mkfs.xfs", "nbd-client", "xfs_repair"];
/// Names under which busybox is called.
const BUSYBOX: &[&str] = &[
    "blockdev",
    "cat",
    "cp",
    "dd",
    "fsfreeze",
    "fstrim",
    "insmod",
    "ip",
    "losetup",
    "ls",
    "mkdir",
    "mount",
    "printf",
    "sh",
    "stty",
    "switch_root",
    "tar",
    "umount",
];
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "lib/x86_64-linux-gnu";
/// Where this host's binaries and libraries are in the guest.
const HOST: &str = "host";

/// Adds the packages' tools.
pub fn add_tools(packages: &Packages, archive: &mut Archive) -> Result<()> {
    archive.copy("bin/busybox", &packages.program("busybox")?)?;
    for name in BUSYBOX {
        archive.link(&format!("bin/{name}"), "busybox");
    }
    archive.copy(LOADER, &packages.file(LOADER))?;
    let mut libraries = Vec::new();
    for name in TOOLS.iter().filter(|name| !BUSYBOX.contains(name)) {
        let Ok(program) = packages.program(name) else {
            archive.link(&format!("bin/{name}"), "busybox");
            continue;
        };
        libraries.extend(needed(packages.loader(), &program)?);
        archive.copy(&format!("bin/{name}"), &program)?;
    }
    add_libraries(archive, LIBRARIES, libraries)
}

/// Adds fio.
pub fn add_fio(packages: &Packages, archive: &mut Archive) -> Result<()> {
    let program = packages.program("fio")?;
    archive.copy("bin/fio", &program)?;
    add_libraries(archive, LIBRARIES, needed(packages.loader(), &program)?)
}

/// How a binary of this host, and the programs that it starts, find their libraries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Starts {
    /// It starts tools of the packages, so only its own loader gets the path of this host's
    /// libraries.
    Tools,
    /// It starts itself by `/proc/self/exe`, which must not be the loader: so the file names its
    /// loader, and an environment variable names the libraries.
    Itself,
}

/// Adds `binary` of this host as /bin/`name`, without its debug information.
pub fn add_binary(
    archive: &mut Archive,
    (name, binary): (&str, &Path),
    starts: Starts,
    scratch: &Path,
) -> Result<()> {
    let stripped = scratch.join(name);
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&stripped).arg(binary);
    run(strip)?;
    let mut content = std::fs::read(&stripped)?;
    std::fs::remove_file(&stripped)?;
    let words = match starts {
        Starts::Tools => format!("exec /{HOST}/loader --library-path /{HOST}/lib"),
        Starts::Itself => {
            name_loader(&mut content, &format!("/{HOST}/loader"))?;
            format!("LD_LIBRARY_PATH=/{HOST}/lib exec")
        }
    };
    archive.file(&format!("{HOST}/bin/{name}"), &content);
    let wrapper = format!("#!/bin/sh\n{words} /{HOST}/bin/{name} \"$@\"\n");
    archive.file(&format!("bin/{name}"), wrapper.as_bytes());
    Ok(())
}

/// Changes the loader that a program names, `PT_INTERP` of elf(5), a text that ends with a zero
/// byte.
fn name_loader(program: &mut [u8], loader: &str) -> Result<()> {
    let known = format!("/{LOADER}\0");
    let place = program.windows(known.len()).position(|bytes| bytes == known.as_bytes());
    let place = place.context("the program names no loader")?;
    let text = &mut program[place..place + known.len()];
    text.fill(0);
    text[..loader.len()].copy_from_slice(loader.as_bytes());
    Ok(())
}

/// Adds the loader and libraries of this host that `binaries` need.
pub fn add_host_libraries(archive: &mut Archive, binaries: &[&Path]) -> Result<()> {
    let loader = Path::new("/").join(LOADER);
    archive.copy(&format!("{HOST}/loader"), &loader)?;
    let mut libraries = Vec::new();
    for binary in binaries {
        libraries.extend(needed(Command::new(&loader), binary)?);
    }
    add_libraries(archive, &format!("{HOST}/lib"), libraries)
}

/// The libraries that `program` loads, as its loader finds them.
fn needed(mut loader: Command, program: &Path) -> Result<Vec<PathBuf>> {
    loader.arg("--list").arg(program);
    let mut libraries = Vec::new();
    for line in stdout_of(loader)?.lines() {
        // "name => path (address)"; lines without an arrow are the loader and the vDSO.
        let Some((name, path)) = line.split_once(" => ") else { continue };
        match path.split_whitespace().next() {
            Some(path) if path.starts_with('/') => libraries.push(path.into()),
            _ => bail!("{} needs {}, which is in no package", program.display(), name.trim()),
        }
    }
    Ok(libraries)
}

fn add_libraries(archive: &mut Archive, folder: &str, mut files: Vec<PathBuf>) -> Result<()> {
    files.sort();
    files.dedup();
    // The loader is among the libraries of programs that name it.
    for file in files.iter().filter(|file| !file.ends_with("ld-linux-x86-64.so.2")) {
        let name = file.file_name().and_then(|name| name.to_str()).context("a nameless library")?;
        archive.copy(&format!("{folder}/{name}"), file)?;
    }
    Ok(())
}
