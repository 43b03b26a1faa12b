//! State for work on the file of an image, beneath its format.
//!
//! Guarantees: when [`replay_state`] has returned, the image's file has all that a server of it
//! answered before it died, or what it lacks was told and is in a file that is kept.

use std::path::Path;

use blockhouse_core::{ErrorKind, Result};
use blockhouse_storage::Location;

use super::chain::{open_metadata, open_storage, open_without_backing};
use super::image_options::{ImageOptions, Locking, StateUse};
use super::restore::{find_state, refuse_lost_session, set_state_aside};

/// The treatment of answered changes that cannot be brought to an image because it contradicts
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfCorrupt {
    /// They stay where they are, and the work fails.
    Fail,
    /// Their file is set aside, with a warning. For work that the image needs before anything can
    /// be brought to it.
    SetAside,
}

/// Brings to an image what its server answered before it died, where [`ImageOptions::state`] finds
/// anything: for work on the file itself, which follows. An image whose state is empty is not
/// opened. Needs the loop of the current thread.
///
/// # Errors
/// As [`open`](super::open); `Corrupt` with [`IfCorrupt::Fail`] only.
pub async fn replay_state(path: &Path, options: ImageOptions, if_corrupt: IfCorrupt) -> Result<()> {
    // An image on another server has no state here.
    let is_file = matches!(Location::of(path)?, Location::File(_));
    if matches!(options.state, StateUse::Off) || !is_file {
        return Ok(());
    }
    // Locked: a server that has the image open has a state file, too.
    let file = open_storage(path, options.clone())?;
    let Some(found) = find_state(&file, options.state.directory())? else {
        return check_lost_session(path, options).await;
    };
    drop(file);
    if found.is_empty() {
        return Ok(());
    }
    match open_without_backing(path, options.clone()).await {
        Ok(disk) => disk.close().await,
        Err(error) if error.kind() == ErrorKind::Corrupt && if_corrupt == IfCorrupt::SetAside => {
            let file = open_storage(path, options.clone())?;
            set_state_aside(&file, options.state.directory(), "the image is corrupt")
        }
        Err(error) => Err(error),
    }
}

/// Fails for an image whose state may be elsewhere. What is wrong with one that cannot be opened,
/// the work says.
async fn check_lost_session(path: &Path, options: ImageOptions) -> Result<()> {
    let state = StateUse::Off;
    let quick = ImageOptions { locking: Locking::None, state, ..options.clone() };
    match open_metadata(path, quick).await {
        Ok(disk) => refuse_lost_session(&disk, &options.state),
        Err(_) => Ok(()),
    }
}
