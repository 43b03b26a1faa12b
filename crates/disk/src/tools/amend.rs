//! Changes the options of an image.

use blockhouse_core::{Result, Storage, rare};
use blockhouse_format::Amendments;

use crate::disk::Disk;

/// Changes options of the image, durably: see
/// [`ImageHeader::amend`](blockhouse_format::ImageHeader::amend). The caller then closes the disk
/// and reopens it. No request may be in flight.
///
/// # Errors
/// As there; `ReadOnly`.
pub async fn amend<S: Storage>(disk: &Disk<S>, amendments: Amendments) -> Result<()> {
    disk.check_writable()?;
    rare(disk.format().header().amend(amendments)).await
}

/// Gives the image's data file another name, durably: see
/// [`ImageHeader::rename_data_file`](blockhouse_format::ImageHeader::rename_data_file). As after
/// [`amend`], the caller closes the disk.
///
/// # Errors
/// As there; `ReadOnly`.
pub async fn rename_data_file<S: Storage>(disk: &Disk<S>, name: &[u8]) -> Result<()> {
    disk.check_writable()?;
    rare(disk.format().header().rename_data_file(name)).await
}
