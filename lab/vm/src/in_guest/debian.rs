//! Turns the guest into a Debian system: unpacked on a disk, with this program in a unit that
//! starts last.
//!
//! The first script ([`super::super::base`]) starts that system's init if it finds [`NEXT`].

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};

use super::system::{self, FileSystem, Mount, tool};

/// The file that tells the first script to start the system at /mnt.
const NEXT: &str = "/next";
/// Where the package is in that system.
pub const PACKAGE: &str = "/lab/blockhouse.deb";

/// The script that the unit runs. It reports the exit status to QEMU, as for other jobs.
const SCRIPT: &str = r#"#!/bin/sh
/host/loader --library-path /host/lib /host/bin/lab-vm in-guest services >/dev/ttyS1 2>&1
status=$?
if [ $status -gt 100 ]; then status=100; fi
printf "\\$(printf %o $((status + 1)))" | dd of=/dev/port bs=1 seek=244 2>/dev/null
"#;
const UNIT: &str = "[Unit]\nDescription=What cargo xtask vm shows of services\n[Service]\nExecStart=/bin/sh /lab/run\n";
/// Any value that no other machine has; without one the system would ask for settings at its first
/// start.
const MACHINE_ID: &str = "0123456789abcdef0123456789abcdef\n";

/// Unpacks the archive on the disk `archive` to the disk `disk`, and adds the package of `size`
/// bytes that is on the disk `package`. Disks are named by their serial numbers.
pub fn prepare(archive: &str, disk: &str, (package, size): (&str, u64)) -> Result<()> {
    system::load_all(&["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"])?;
    let disk = system::disk_of(disk)?;
    FileSystem::Ext4.make(&disk)?;
    let mount = Mount::new(FileSystem::Ext4, &disk)?;
    let root = mount.place();
    let archive = system::disk_of(archive)?;
    let [archive, place] = [&archive, root].map(|path| path.to_str().unwrap_or_default());
    tool("tar", &["-x", "-f", archive, "-C", place])?;
    tool("cp", &["-r", "/host", place])?;
    std::fs::create_dir(root.join("lab"))?;
    write(root, "lab/run", SCRIPT)?;
    write(root, "etc/machine-id", MACHINE_ID)?;
    write(root, "etc/systemd/system/lab.service", UNIT)?;
    let wants = root.join("etc/systemd/system/multi-user.target.wants");
    std::fs::create_dir_all(&wants)?;
    symlink("../lab.service", wants.join("lab.service"))?;
    // Without udev the terminal's device unit never appears, and systemd would wait for it.
    symlink("/dev/null", root.join("etc/systemd/system/serial-getty@ttyS0.service"))?;
    let mut content = File::open(system::disk_of(package)?)?.take(size);
    let mut file = File::create(root.join(PACKAGE.trim_start_matches('/')))?;
    std::io::copy(&mut content, &mut file).context("cannot copy the package")?;
    std::fs::write(NEXT, "")?;
    // The file system stays mounted.
    std::mem::forget(mount);
    Ok(())
}

fn write(root: &Path, name: &str, text: &str) -> Result<()> {
    let path = root.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644))?)
}
