//! Replays a server's state before a tool works on an image's file, below its format.
//!
//! Guarantees: when [`replay_state`] has returned, the image's file has all changes that its server
//! acknowledged before it died; or a warning names the missing changes, and the state file is kept.

use std::path::Path;

use blockhouse_core::{ErrorKind, Result, rare};
use blockhouse_storage::Location;
use futures_util::future::LocalBoxFuture;

use crate::image_options::{ImageOptions, Locking, Purpose, StateUse};
use crate::open_image::{open, open_storage};
use crate::restore::{find_state, refuse_lost_session, set_state_aside};

/// The treatment of acknowledged changes that cannot be replayed because the image is corrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfCorrupt {
    /// The state file stays, and the operation fails.
    Fail,
    /// The state file is set aside, with a warning. For work that must precede a replay, such as a
    /// repair.
    SetAside,
}

/// Replays to an image the acknowledged changes of its killed server, if a state file in
/// [`ImageOptions::state`] has any. Call it before work on the file itself. An image without state
/// is not opened. Needs the event loop of the current thread.
///
/// # Errors
/// As [`open`](crate::open); `Corrupt` with [`IfCorrupt::Fail`] only.
pub fn replay_state(
    path: &Path,
    options: ImageOptions,
    if_corrupt: IfCorrupt,
) -> LocalBoxFuture<'_, Result<()>> {
    rare(async move {
        // An image on another server has no state here.
        let is_file = matches!(Location::of(path)?, Location::File(_));
        if matches!(options.state, StateUse::Off) || !is_file {
            return Ok(());
        }
        // Locks the image, because a server that still has it open has a state file, too.
        let storage = open_storage(path, options.clone()).await?;
        let dir = options.state.directory();
        let found = storage.as_file().map_or(Ok(None), |file| find_state(file, dir))?;
        drop(storage);
        let Some(found) = found else {
            return check_lost_session(path, options).await;
        };
        if found.is_empty() {
            return Ok(());
        }
        match open(path, options.clone().for_purpose(Purpose::Image)).await {
            Ok(disk) => disk.close().await,
            Err(error)
                if error.kind() == ErrorKind::Corrupt && if_corrupt == IfCorrupt::SetAside =>
            {
                let storage = open_storage(path, options.clone()).await?;
                let aside = |file| set_state_aside(file, dir, "the image is corrupt");
                storage.as_file().map_or(Ok(()), aside)
            }
            Err(error) => Err(error),
        }
    })
}

/// Fails for an image whose state may be in another directory. If the image cannot be opened, the
/// work that follows reports the error.
async fn check_lost_session(path: &Path, options: ImageOptions) -> Result<()> {
    let (locking, state, purpose) = (Locking::None, StateUse::Off, Purpose::Metadata);
    match open(path, ImageOptions { locking, state, purpose, ..options.clone() }).await {
        Ok(disk) => refuse_lost_session(disk.image(), &options.state),
        Err(_) => Ok(()),
    }
}
