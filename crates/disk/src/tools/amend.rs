//! Other options for an image.

use blockhouse_core::{Result, Storage};
use blockhouse_format::Amendments;

use crate::disk::Disk;

/// Changes options of the image, durably: see
/// [`ImageHeader::amend`](blockhouse_format::ImageHeader::amend). The caller closes the disk and
/// opens it anew after this. No request may be in flight.
///
/// # Errors
/// As there; `ReadOnly`.
pub async fn amend<S: Storage>(disk: &Disk<S>, amendments: Amendments) -> Result<()> {
    disk.check_access(0)?;
    disk.format().header().amend(amendments).await
}
