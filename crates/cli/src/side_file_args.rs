//! The options that say where a raw image's bitmaps are, for all commands that use them.

use std::path::PathBuf;

use blockhouse_images::SideFile;

/// Where the bitmaps of a raw image are.
#[derive(clap::Args, Clone, Debug)]
pub struct SideFileArgs {
    /// The file with the bitmaps of a raw image, or a folder for a file named after the image: a
    /// block device, an image in Ceph and an NBD export cannot store bitmaps themselves. A missing
    /// file is created.
    ///
    /// The file belongs to one image, and is not used if another program may have changed the image
    /// meanwhile (docs/backup.md). Left out: IMAGE.bitmaps beside a raw file.
    #[arg(id = "bitmaps_in", long = "bitmaps", value_name = "FILE|DIR")]
    pub bitmaps: Option<PathBuf>,
    /// Assume that no other program has written to the image. Its bitmaps are then used even if
    /// that is unknown, as for a device after a reboot. If one did write, a backup lacks those
    /// changes.
    #[arg(long, requires = "bitmaps_in")]
    pub trust_bitmaps: bool,
}

impl SideFileArgs {
    /// The side file that the options name.
    pub fn side_file(&self) -> Option<SideFile> {
        let path = self.bitmaps.clone()?;
        Some(SideFile { path, is_alone: self.trust_bitmaps })
    }
}
