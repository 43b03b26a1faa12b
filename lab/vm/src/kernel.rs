//! The guest's kernel in the form that starts fastest: the bare ELF file, and only the modules that
//! are used, without debug information.
//!
//! QEMU starts an ELF kernel that has a PVH entry point directly, so nothing is decompressed under
//! emulation. A module that keeps its type information and signature loads several times slower.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::archive::Archive;
use super::packages::{Kernel, Packages};
use lab_tools::process::{line, run};

/// The guest's folder of the modules. Beside each module is the list of modules to load before it.
pub const MODULES: &str = "lib/modules";

/// The modules that the scenarios load.
const USED: &[&str] = &[
    "dm-log-writes",
    "dm-snapshot",
    "dm-thin-pool",
    "ext4",
    "loop",
    "nbd",
    "null_blk",
    "nvme",
    "nvme-loop",
    "nvme-tcp",
    "nvme_core",
    "nvmet-tcp",
    "sd_mod",
    "ublk_drv",
    "scsi_debug",
    "virtio_blk",
    "virtio_pci",
    "virtio_scsi",
    "xfs",
    "crc32c_generic",
];

/// Modules that newer kernels have built in.
const MERGED: &[&str] = &["crc32c_generic"];

/// Unpacks the kernel's image into the ELF file `to`.
pub fn unpack_image(kernel: &Kernel, to: &Path) -> Result<()> {
    let image = kernel.image();
    let bytes =
        std::fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
    let payload = payload(&bytes).with_context(|| format!("{} is cut short", image.display()))?;
    let mut elf = Vec::new();
    // The frame is followed by the uncompressed length, which the kernel's build has added.
    let mut frame = zstd::Decoder::new(payload)?.single_frame();
    frame.read_to_end(&mut elf).with_context(|| format!("{} is not zstd", image.display()))?;
    ensure!(elf.starts_with(b"\x7fELF"), "{} holds no ELF file", image.display());
    std::fs::write(to, elf).with_context(|| format!("cannot write {}", to.display()))
}

/// The compressed part of a bzImage, as the kernel's Documentation/arch/x86/boot.rst lays it out.
fn payload(image: &[u8]) -> Option<&[u8]> {
    const SETUP_SECTORS: usize = 0x1f1;
    const PAYLOAD_OFFSET: usize = 0x248;
    const PAYLOAD_LENGTH: usize = 0x24c;
    const SECTOR: usize = 512;
    let word = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let protected_mode = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR;
    let start = protected_mode + word(PAYLOAD_OFFSET)?;
    image.get(start..start + word(PAYLOAD_LENGTH)?)
}

fn decompress(packages: &Packages, compressed: &[u8]) -> Result<Vec<u8>> {
    let mut command = packages.command("xz")?;
    command.args(["--decompress", "--stdout"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {}", line(&command)))?;
    let mut input = child.stdin.take().context("xz has no standard input")?;
    let output = std::thread::scope(|scope| {
        // If the program stops reading, its exit status tells why.
        scope.spawn(move || drop(input.write_all(compressed)));
        child.wait_with_output()
    })?;
    ensure!(output.status.success(), "{} failed: {}", line(&command), output.status);
    Ok(output.stdout)
}

/// Adds the modules that the scenarios load, and for each a list of files in the order of loading.
pub fn add_modules(
    packages: &Packages,
    kernel: &Kernel,
    archive: &mut Archive,
    scratch: &Path,
) -> Result<()> {
    let folder = kernel.modules();
    let list = folder.join("modules.dep");
    let lists = match std::fs::read_to_string(&list) {
        Ok(text) => dependencies(&text),
        // The list is made at installation, so an unpacked package has none.
        Err(_) => dependencies(&run_depmod(packages, kernel)?),
    };
    let builtin = std::fs::read_to_string(folder.join("modules.builtin"))?;
    let mut added = BTreeMap::new();
    for name in USED {
        let file_name = |path: &str| module_name(path) == name.replace('-', "_");
        let Some((path, needs)) = lists.iter().find(|(path, _)| file_name(path)) else {
            let is_there = builtin.lines().any(file_name) || MERGED.contains(name);
            ensure!(is_there, "the kernel has no module {name}");
            archive.file(&format!("{MODULES}/{name}.order"), b"");
            continue;
        };
        // The list has the direct dependencies first.
        let order: Vec<String> =
            needs.iter().rev().chain([path]).map(|path| module_name(path)).collect();
        for path in needs.iter().chain([path]) {
            added.insert(module_name(path), folder.join(path));
        }
        archive.file(&format!("{MODULES}/{name}.order"), order.join("\n").as_bytes());
    }
    for (name, file) in added {
        let stripped = strip(packages, &file, scratch)?;
        archive.copy(&format!("{MODULES}/{name}.ko"), &stripped)?;
    }
    Ok(())
}

/// `kernel/fs/ext4/ext4.ko.xz` is called ext4.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

/// Each line is a module's path, a colon, and the paths of the modules that it needs.
fn dependencies(text: &str) -> BTreeMap<String, Vec<String>> {
    let entry = |line: &str| {
        let (path, needs) = line.split_once(':')?;
        Some((path.to_owned(), needs.split_whitespace().map(str::to_owned).collect()))
    };
    text.lines().filter_map(entry).collect()
}

fn run_depmod(packages: &Packages, kernel: &Kernel) -> Result<String> {
    let mut command = Command::new(packages.program("busybox")?);
    command.args(["depmod", "-n", "-b"]).arg(kernel.root()).arg(kernel.version());
    lab_tools::process::stdout_of(command)
}

fn strip(packages: &Packages, module: &Path, scratch: &Path) -> Result<PathBuf> {
    let bytes =
        std::fs::read(module).with_context(|| format!("cannot read {}", module.display()))?;
    let compressed = module.extension().is_some_and(|extension| extension == "xz");
    let bytes = if compressed { decompress(packages, &bytes)? } else { bytes };
    let file = scratch.join("module.ko");
    std::fs::write(&file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
    let mut strip = Command::new("strip");
    strip.args(["--strip-debug", "-R", ".BTF", "-R", ".BTF.ext"]).arg(&file);
    run(strip)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_and_short_images_are_refused() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&6_u32.to_le_bytes());
        image[1040..1046].copy_from_slice(b"kernel");
        assert_eq!(payload(&image), Some(&b"kernel"[..]));
        assert_eq!(payload(&image[..1045]), None);
        assert_eq!(payload(&image[..100]), None);
    }

    #[test]
    fn modules_are_called_by_their_names() {
        assert_eq!(module_name("kernel/drivers/md/dm-log-writes.ko.xz"), "dm_log_writes");
        let lists = dependencies("a/x-y.ko.xz: b/z.ko.xz c/w.ko\nb/z.ko.xz:\n");
        assert_eq!(lists["a/x-y.ko.xz"], ["b/z.ko.xz", "c/w.ko"]);
        assert!(lists["b/z.ko.xz"].is_empty());
    }
}
