//! Small file systems that can be filled up.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{LoopDevice, Scratch, need, run, tool};

/// The kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// In memory.
    Tmpfs,
    /// On a loop device, which needs root.
    Ext4,
}

/// A small file system, mounted in the mount namespace of a separate process; others access it
/// through that process's root in /proc. Removed on drop.
pub struct SmallHost {
    holder: Child,
    folder: PathBuf,
    _device: Option<LoopDevice>,
}

impl SmallHost {
    /// A file system of `size` bytes. `Err` says why that is impossible on this machine.
    pub fn new(scratch: &Scratch, kind: FileSystem, size: u64) -> Result<Self, String> {
        need::tools(&["unshare", "mount", "sleep"])?;
        let at = scratch.path("small");
        std::fs::create_dir(&at).map_err(|error| format!("no folder: {error}"))?;
        let (device, mount) = match kind {
            FileSystem::Tmpfs => (None, format!("mount -t tmpfs -o size={size} tmpfs")),
            FileSystem::Ext4 => {
                need::tools(&["mkfs.ext4"])?;
                let image = scratch.image("file-system", size);
                run(tool("mkfs.ext4").args(["-q", "-m", "0"]).arg(image.path())).success();
                let device = LoopDevice::over(&image, &[])?;
                let mount = format!("mount -t ext4 '{}'", device.path().display());
                (Some(device), mount)
            }
        };
        let user = (!rustix::process::geteuid().is_root()).then_some("--map-root-user");
        let script = format!("{mount} '{}' && echo mounted && exec sleep 600", at.display());
        let mut unshare = Command::new("unshare");
        unshare.args(user).args(["--mount", "sh", "-c", &script]).stdout(Stdio::piped());
        let mut holder = unshare.spawn().map_err(|error| format!("no unshare: {error}"))?;
        let mut line = String::new();
        let stdout = holder.stdout.take().expect("standard output is a pipe");
        let read = BufReader::new(stdout).read_line(&mut line);
        let seen = at.strip_prefix("/").expect("an absolute path");
        let folder = Path::new("/proc").join(holder.id().to_string()).join("root").join(seen);
        let host = Self { holder, folder, _device: device };
        match read {
            Ok(_) if line == "mounted\n" => Ok(host),
            _ => Err(format!("cannot mount {kind:?} in a namespace")),
        }
    }

    /// Changes the size of a file system in memory.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[track_caller]
    pub fn resize(&self, size: u64) {
        let (process, size) = (self.holder.id().to_string(), format!("remount,size={size}"));
        let seen = self.folder.strip_prefix(format!("/proc/{process}/root")).expect("a path there");
        let mut remount = tool("nsenter");
        remount.args(["--target", &process, "--mount", "mount", "-o", &size]);
        run(remount.arg(Path::new("/").join(seen))).success();
    }

    /// The path of a file on it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Fills all free space with a new file of this name; returns its path.
    pub fn fill_up(&self, name: &str) -> PathBuf {
        let ballast = self.path(name);
        let mut file = std::fs::File::create(&ballast).expect("a file");
        for size in [1 << 20, 4096, 512] {
            while file.write(&vec![1; size]).is_ok_and(|count| count > 0) {}
        }
        ballast
    }

    /// Frees the space that [`SmallHost::fill_up`] took for the file of this name.
    ///
    /// The file is truncated before it is removed: a child of another test has copies of this
    /// process's descriptors until it calls exec, and an open file keeps its space.
    ///
    /// # Panics
    /// When there is no such file.
    #[track_caller]
    pub fn give_back(&self, name: &str) {
        let ballast = self.path(name);
        let file = std::fs::OpenOptions::new().write(true).open(&ballast).expect("it is there");
        file.set_len(0).expect("shorter");
        std::fs::remove_file(ballast).expect("it is there");
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        // The mount is removed with the last process that sees it, and before its device. Both
        // calls fail only if the process has ended by itself.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
