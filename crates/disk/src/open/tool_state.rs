//! Replays a server's state before a tool works on an image's file, below its format.
//!
//! Guarantees: when [`replay_state`] has returned, the image's file has all changes that its server
//! acknowledged before it died; or a warning named those that are missing, and the state file is
//! kept.

use std::path::Path;

use blockhouse_core::{ErrorKind, Result, rare};
use blockhouse_storage::Location;
use futures_util::future::LocalBoxFuture;

use super::image_options::{ImageOptions, Locking, Purpose, StateUse};
use super::open_image::{open, open_storage};
use super::restore::{find_state, refuse_lost_session, set_state_aside};

/// The treatment of answered changes that cannot be brought to an image because it contradicts
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfCorrupt {
    /// They stay where they are, and the operation fails.
    Fail,
    /// Their file is set aside, with a warning. For work that the image needs before anything can
    /// be brought to it.
    SetAside,
}

/// Replays to an image the answered changes of its killed server, if [`ImageOptions::state`] leads
/// to any: before work on the file itself. An image without state is not opened. Needs the loop of
/// the current thread.
///
/// # Errors
/// As [`open`](super::open); `Corrupt` with [`IfCorrupt::Fail`] only.
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
        // Locked: a server that has the image open has a state file, too.
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

/// Fails for an image whose state may be elsewhere. If it cannot be opened, the work that follows
/// reports the error.
async fn check_lost_session(path: &Path, options: ImageOptions) -> Result<()> {
    let (locking, state, purpose) = (Locking::None, StateUse::Off, Purpose::Metadata);
    match open(path, ImageOptions { locking, state, purpose, ..options.clone() }).await {
        Ok(disk) => refuse_lost_session(disk.image(), &options.state),
        Err(_) => Ok(()),
    }
}
