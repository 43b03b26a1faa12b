//! Other users of a block device: a mounted file system, or devices built on it.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Dev, Mode, OFlags, major, minor};
use rustix::io::Errno;

/// The folder of a block device in sysfs.
pub fn device_folder(device: Dev) -> PathBuf {
    format!("/sys/dev/block/{}:{}", major(device), minor(device)).into()
}

/// Describes in words the user of a block device that keeps others from writing to it; `None` if
/// the host names none. A mount in another mount namespace, or a program that has opened the device
/// exclusively, cannot be named, but [`is_in_use`] detects it.
pub fn device_user(device: Dev) -> Option<String> {
    let number = format!("{}:{}", major(device), minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = mounts.lines().find_map(|line| {
        // proc(5): id, parent, device, root, mount point.
        let mut fields = line.split(' ').skip(2);
        let is_it = fields.next() == Some(&number);
        fields.nth(1).filter(|_| is_it)
    });
    if let Some(mount) = mount {
        return Some(format!("it is mounted at '{mount}'"));
    }
    let mut holders = fs::read_dir(device_folder(device).join("holders")).ok()?.flatten();
    let holder = holders.next()?.file_name();
    Some(format!("/dev/{} is built on it", holder.display()))
}

/// Whether a block device is mounted, part of another device, or open exclusively by a program. A
/// device that this process may not open is reported as free.
pub fn is_in_use(device: Dev) -> bool {
    // The link's target is the device's folder, whose name has '!' instead of the node's '/'.
    let Ok(folder) = device_folder(device).canonicalize() else { return false };
    let name = folder.file_name().unwrap_or_default().to_string_lossy().replace('!', "/");
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(format!("/dev/{name}"), flags, Mode::empty()) {
        Err(error) => error == Errno::BUSY,
        Ok(_) => false,
    }
}

/// Holds a block device exclusively until the descriptor is closed, and writes back its page cache.
/// Programs that have the device open without O_EXCL do not matter: some scan every device. `None`
/// if the device cannot be opened, for instance because it has no node.
///
/// # Errors
/// `ResourceBusy` if the device is mounted, or used exclusively by another device or program; or
/// the error of the flush.
pub fn hold_unused(device: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let held = match rustix::fs::open(device, flags, Mode::empty()) {
        Err(Errno::BUSY) => return Err(Errno::BUSY.into()),
        Err(_) => return Ok(None),
        Ok(held) => held,
    };
    rustix::fs::fsync(&held)?;
    Ok(Some(held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_unused_can_be_held() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("device");
        assert!(hold_unused(&file).unwrap().is_none());
        fs::write(&file, b"data").unwrap();
        assert!(hold_unused(&file).unwrap().is_some());
    }
}
