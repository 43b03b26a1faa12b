//! Folders and images that are removed at the end of their test.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::binary::temporary_folder;
use crate::deadline::TestLimit;

/// A folder for images and one for sockets, whose paths must be short (`sun_path` in unix(7)).
pub struct Scratch {
    images: TempDir,
    sockets: TempDir,
    _limit: TestLimit,
}

impl Scratch {
    /// A folder with images on a disk.
    pub fn new() -> Self {
        Self::in_folder(&temporary_folder())
    }

    /// A folder with images in memory (tmpfs), for tests of amounts that do not need a disk.
    pub fn in_memory() -> Self {
        Self::in_folder(Path::new("/dev/shm"))
    }

    fn in_folder(folder: &Path) -> Self {
        let builder = || {
            let mut builder = tempfile::Builder::new();
            builder.prefix("bh").permissions(Permissions::from_mode(0o755));
            builder
        };
        let images = builder().tempdir_in(folder).expect("a folder for images");
        let sockets = builder().tempdir_in("/tmp").expect("a folder for sockets");
        Self { images, sockets, _limit: TestLimit::new() }
    }

    /// The path of a file beside the images.
    pub fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// The path for a socket; at most 30 bytes longer than `name`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The folder of the sockets, which has a short path and which every user may enter.
    pub fn short(&self) -> &Path {
        self.sockets.path()
    }

    /// A sparse image of zeros.
    pub fn image(&self, name: &str, size: u64) -> Image {
        let image = Image(self.path(name));
        File::create(&image.0).and_then(|file| file.set_len(size)).expect("an image");
        image
    }

    /// An image with this content.
    pub fn image_of(&self, name: &str, content: &[u8]) -> Image {
        let image = Image(self.path(name));
        File::create(&image.0).and_then(|mut file| file.write_all(content)).expect("an image");
        image
    }
}

/// Removes the state files of its images, which killed servers leave.
impl Drop for Scratch {
    fn drop(&mut self) {
        let images = std::fs::read_dir(self.images.path()).into_iter().flatten().flatten();
        for image in images.filter_map(|image| image.metadata().ok()) {
            remove_state(image.dev(), image.ino());
        }
    }
}

/// Removes the state file of an image, which a killed server leaves. It is named by a file's device
/// and inode, or by a block device's number and 0.
pub(crate) fn remove_state(device: u64, inode: u64) {
    let user = rustix::process::geteuid().as_raw();
    let own = std::env::var_os("XDG_RUNTIME_DIR").unwrap_or("/run".into());
    let folders = [
        "/run/blockhouse".into(),
        format!("/dev/shm/blockhouse-{user}").into(),
        PathBuf::from(own).join("blockhouse"),
    ];
    for folder in folders {
        // Mostly there is no such file.
        let _ = std::fs::remove_file(folder.join(format!("{device:x}-{inode:x}")));
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// The file of an image, which tests access directly, not through a server.
pub struct Image(PathBuf);

impl Image {
    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of the file, for command lines and messages.
    pub fn str(&self) -> &str {
        self.0.to_str().expect("scratch folders have plain names")
    }

    /// All of its content.
    pub fn content(&self) -> Vec<u8> {
        std::fs::read(&self.0).expect("the image can be read")
    }

    /// `length` bytes from `offset` on.
    pub fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let file = File::open(&self.0).expect("the image can be opened");
        file.read_exact_at(&mut bytes, offset).expect("the image can be read");
        bytes
    }

    /// What must stay the same if the image is not changed: length, modification time, content.
    pub fn state(&self) -> (u64, i64, i64, Vec<u8>) {
        let data = std::fs::metadata(&self.0).expect("the image is there");
        (data.len(), data.mtime(), data.mtime_nsec(), self.content())
    }

    /// The bytes that are allocated for it on the host.
    pub fn allocated(&self) -> u64 {
        std::fs::metadata(&self.0).expect("the image is there").blocks() * 512
    }
}
