//! The kernel's files about a block device's request queue, in /sys (its
//! Documentation/ABI/stable/sysfs-block).

use std::fs;
use std::path::PathBuf;

use rustix::fs::{FileType, Stat};

/// The queue of the block device that a file is or lies on.
pub(crate) struct RequestQueue {
    /// The device's folder. `None` if the file system has no device: such a file system has the
    /// major number 0 and no folder.
    device: Option<PathBuf>,
}

impl RequestQueue {
    /// The queue of the device of a file with this status.
    pub(crate) fn of_file(status: &Stat) -> Self {
        let number = match FileType::from_raw_mode(status.st_mode) {
            FileType::BlockDevice => status.st_rdev,
            _ => status.st_dev,
        };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let folder = || format!("/sys/dev/block/{major}:{minor}").into();
        Self { device: (major != 0).then(folder) }
    }

    /// An attribute, without surrounding white space. `None` if the kernel has no such attribute,
    /// or the file system is on no known block device.
    pub(crate) fn attribute(&self, name: &str) -> Option<String> {
        let device = self.device.as_ref()?;
        // A partition has no queue of its own: its disk's folder is the parent.
        let read = |queue: &str| fs::read_to_string(device.join(queue).join(name));
        let text = read("queue").or_else(|_| read("../queue")).ok()?;
        Some(text.trim().to_owned())
    }

    /// Whether the device's completed writes are stable.
    pub(crate) fn has_no_cache(&self) -> bool {
        self.attribute("write_cache").is_some_and(|text| text == "write through")
    }

    /// Whether a write can be durable by itself (FUA).
    pub(crate) fn has_fua(&self) -> bool {
        self.attribute("fua").is_some_and(|text| text == "1")
    }

    /// Whether it has queues that raise no interrupts.
    pub(crate) fn has_polled(&self) -> bool {
        self.attribute("io_poll").is_some_and(|text| text == "1")
    }

    /// The device's name in /sys: a disk or a partition.
    pub(crate) fn device_name(&self) -> Option<String> {
        let place = fs::canonicalize(self.device.as_ref()?).ok()?;
        Some(place.file_name()?.to_string_lossy().into_owned())
    }
}
