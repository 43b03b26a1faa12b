//! Builds an initramfs: an uncompressed cpio archive ("newc") that the kernel unpacks at boot.
//!
//! The kernel takes several archives one after the other, each padded to four bytes; so an archive
//! of what never changes is made once, and an archive for one run is appended to it. Format: the
//! kernel's Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

const ALIGNMENT: usize = 4;
const TRAILER: &str = "TRAILER!!!";

/// Type and permissions of an entry.
const FOLDER: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// An archive that entries are added to.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Adds a file with `content` that may be executed. `path` has no leading slash.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.folders_above(path);
        self.entry(path, EXECUTABLE, content);
    }

    /// Adds a copy of the host's `file`.
    pub fn copy(&mut self, path: &str, file: &Path) -> Result<()> {
        let content =
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        self.file(path, &content);
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.folders_above(path);
        self.entry(path, LINK, target.as_bytes());
    }

    /// Adds an empty folder.
    pub fn folder(&mut self, path: &str) {
        self.folders_above(path);
        if self.folders.insert(path.to_owned()) {
            self.entry(path, FOLDER, &[]);
        }
    }

    fn folders_above(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            if self.folders.insert(path[..at].to_owned()) {
                self.entry(&path[..at], FOLDER, &[]);
            }
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = 1;
        // Inode, mode, owner, group, links, time, size, device and special device, name, checksum.
        let (size, name) = (content.len() as u32, path.len() as u32 + 1);
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
    }

    /// The finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_it() {
        if lab_tools::process::find_program("cpio").is_none() {
            println!("skipped: cpio is not there");
            return;
        }
        let mut archive = Archive::default();
        archive.file("bin/deep/tool", b"12345");
        archive.link("bin/other", "deep/tool");
        archive.folder("bin");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % ALIGNMENT, 0);
        let mut cpio = Command::new("cpio");
        cpio.args(["--list", "--verbose", "--quiet"]);
        let mut child =
            cpio.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cpio starts");
        child.stdin.take().expect("a pipe").write_all(&bytes).expect("cpio reads");
        let output = child.wait_with_output().expect("cpio ends");
        let list = String::from_utf8(output.stdout).expect("text");
        let names: Vec<_> =
            list.lines().filter_map(|line| line.split_whitespace().nth(8)).collect();
        assert_eq!(names, ["bin", "bin/deep", "bin/deep/tool", "bin/other"], "{list}");
        assert!(list.lines().any(|line| line.starts_with("-rwxr-xr-x")), "{list}");
    }
}
