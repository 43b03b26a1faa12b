//! The options of where the bitmaps of a raw image are, of all commands that use them.

use std::path::PathBuf;

use blockhouse_disk::SideFile;

/// Where the bitmaps of a raw image are.
#[derive(clap::Args, Clone, Debug)]
pub struct SideFileArgs {
    /// The bitmaps of a raw image are in this file, or in this folder, in a file named after the
    /// image: of a block device, an image in Ceph or an export of an NBD server, which have no
    /// room for them. It is made if it is missing.
    ///
    /// The file belongs to one image, and is not used where something else may have changed the
    /// image meanwhile (docs/backup.md). Left out: IMAGE.bitmaps beside a raw file.
    #[arg(id = "bitmaps_in", long = "bitmaps", value_name = "FILE|DIR")]
    pub bitmaps: Option<PathBuf>,
    /// Nobody else writes to the image: use its bitmaps also where nothing tells whether somebody
    /// did, as of a device after a restart of the host. A backup by them lacks what somebody
    /// did write.
    #[arg(long, requires = "bitmaps_in")]
    pub trust_bitmaps: bool,
}

impl SideFileArgs {
    /// The side file that they name.
    pub fn side_file(&self) -> Option<SideFile> {
        let path = self.bitmaps.clone()?;
        Some(SideFile { path, is_alone: self.trust_bitmaps })
    }
}
