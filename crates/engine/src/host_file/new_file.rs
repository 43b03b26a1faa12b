//! The mode of a new file, and hints about it for its file system, before it has any data.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` of `<linux/fs.h>`.
const GET_ATTRIBUTES: libc::Ioctl = 0x801c_581f_u32 as libc::Ioctl;
const SET_ATTRIBUTES: libc::Ioctl = 0x401c_5820_u32 as libc::Ioctl;
/// `FS_XFLAG_EXTSIZE`: the field with the extent size is valid.
const HAS_EXTENT_SIZE: u32 = 0x800;

/// `struct fsxattr` of `<linux/fs.h>`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    reserved: [u8; 8],
}

/// How the file of a new image is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewFile {
    /// Whether writes change the file in place on a copy-on-write file system (btrfs).
    pub no_copy_on_write: bool,
    /// The unit in bytes in which the file system allocates space to the file (XFS).
    pub extent_size: Option<u32>,
    /// Whether other users may read the file, as far as the umask lets them (mode 0644). Otherwise
    /// its owner alone may (0600).
    pub is_for_all: bool,
    /// Whether an existing file is emptied instead, which keeps its name, owner and mode.
    pub is_in_place: bool,
}

impl NewFile {
    /// Passes the hints to the file system. If it does not support them, nothing happens, as in
    /// QEMU; for an extent size, which is always explicit, this is logged.
    pub(super) fn apply(self, file: BorrowedFd<'_>, path: &Path) {
        if self.no_copy_on_write
            && let Ok(flags) = ioctl_getflags(file)
        {
            let _ = ioctl_setflags(file, flags | IFlags::NOCOW);
        }
        if let Some(size) = self.extent_size.filter(|size| *size > 0)
            && let Err(error) = set_extent_size(file, size)
        {
            let path = path.display();
            tracing::warn!("{path}: the file system does not take a size of extents: {error}");
        }
    }
}

fn set_extent_size(file: BorrowedFd<'_>, size: u32) -> std::io::Result<()> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes a `struct fsxattr`, as long as `attributes`, which lives until the
    // call ends; the borrow keeps the file open.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if got != 0 {
        return Err(std::io::Error::last_os_error());
    }
    attributes.flags |= HAS_EXTENT_SIZE;
    attributes.extent_size = size;
    // SAFETY: the kernel reads a `struct fsxattr`, as long as `attributes`; the borrow keeps the
    // file open.
    match unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const attributes) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn wishes_that_a_file_system_does_not_take_are_no_errors() {
        let path = std::env::temp_dir().join(format!("blockhouse-new-file-{}", std::process::id()));
        let file = std::fs::File::create(&path).expect("a file");
        let wishes =
            NewFile { no_copy_on_write: true, extent_size: Some(1 << 20), ..NewFile::default() };
        wishes.apply(file.as_fd(), &path);
        std::fs::remove_file(&path).expect("it is ours");
        assert_eq!(size_of::<Attributes>(), 28);
    }
}
