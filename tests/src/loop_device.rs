//! Block devices that are files.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::scratch::remove_state;
use crate::{Image, eventually, need, run, tool};

/// The longest time for which the test of another process has the device.
const LIMIT: Duration = Duration::from_secs(60);

/// A loop device; detached on drop.
pub struct LoopDevice {
    path: PathBuf,
    /// The largest request that the device took before it was limited, in KiB.
    unlimited: Option<String>,
}

impl LoopDevice {
    /// Makes a block device of an image; `options` are losetup's. `Err` says why that is impossible
    /// on this machine.
    pub fn over(image: &Image, options: &[&str]) -> Result<Self, String> {
        Self::over_file(image.path(), options)
    }

    /// As [`over`](Self::over), of any file.
    pub fn over_file(file: &Path, options: &[&str]) -> Result<Self, String> {
        need::root()?;
        need::tools(&["losetup"])?;
        let mut attach = tool("losetup");
        attach.args(["--find", "--show"]).args(options).arg(file);
        let outcome = run(&mut attach);
        if !outcome.status.success() {
            return Err(format!("no loop device: {}", outcome.stderr.trim()));
        }
        Ok(Self { path: outcome.stdout.trim().into(), unlimited: None })
    }

    /// Detaches the device and attaches it to a file again, under the same name. If the test of
    /// another process gets the free device first, this waits for it.
    #[track_caller]
    pub fn attach_again(&self, file: &Path) {
        run(tool("losetup").arg("--detach").arg(&self.path)).success();
        let attach = || run(tool("losetup").arg(&self.path).arg(file)).status.success();
        assert!(eventually(LIMIT, attach), "{} is in use", self.path.display());
    }

    /// Makes the device longer by `bytes`, as a volume manager does: appends them to its `file`,
    /// then the kernel reads the size again.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[track_caller]
    pub fn lengthen(&self, file: &Path, bytes: &[u8]) {
        let mut file = OpenOptions::new().append(true).open(file).expect("the device's file");
        file.write_all(bytes).expect("there is room");
        run(tool("losetup").arg("--set-capacity").arg(&self.path)).success();
    }

    /// Limits the kernel's requests to one page. The loop driver (Linux 6.18) calls a request
    /// complete if the file takes only the begin of it, as a full host does, so without this
    /// limit the device loses data and reports nothing. `Err` says why that is impossible.
    pub fn split_requests(&mut self) -> Result<(), String> {
        let limit = self.limit();
        let failed = |error| format!("{}: {error}", limit.display());
        let old = std::fs::read_to_string(&limit).map_err(failed)?;
        let page_kib = rustix::param::page_size() >> 10;
        std::fs::write(&limit, page_kib.to_string()).map_err(failed)?;
        self.unlimited = Some(old);
        Ok(())
    }

    /// The file with the largest request of the device, in KiB.
    fn limit(&self) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default();
        Path::new("/sys/class/block").join(name).join("queue/max_sectors_kb")
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Some(unlimited) = &self.unlimited {
            let _ = std::fs::write(self.limit(), unlimited.trim())
                .inspect_err(|error| eprintln!("the limit of a loop device stays: {error}"));
        }
        // The device of the next test may have the same number, and must not find this state file.
        self.path.metadata().iter().for_each(|device| remove_state(device.rdev(), 0));
        let outcome = run(tool("losetup").arg("--detach").arg(&self.path));
        if !outcome.status.success() {
            eprintln!("{}", outcome.describe("a loop device is left over"));
        }
    }
}
