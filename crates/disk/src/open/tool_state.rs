//! State for work on the file of an image, beneath its format.
//!
//! Guarantees: when [`replay_state`] has returned, the image's file has all that a server of it answered before it
//! died, or what it lacks was told and is in a file that is kept.

use std::path::Path;

use blockhouse_core::{ErrorKind, Result};

use super::chain::{open_storage, open_without_backing};
use super::image_options::{ImageOptions, Locking};
use super::restore::{has_state, set_state_aside};

/// What becomes of answered changes that cannot be brought to an image because it contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfCorrupt {
    /// They stay where they are, and the work fails.
    Fail,
    /// Their file is set aside, with a warning. For work that the image needs before anything can be brought to it.
    SetAside,
}

/// Brings to an image what its server answered before it died, where [`ImageOptions::state`] finds anything: for
/// work on the file itself, which follows. An image whose state is empty is not opened. Needs the loop of the
/// current thread.
///
/// # Errors
/// As [`open`](super::open); `Corrupt` with [`IfCorrupt::Fail`] only.
pub async fn replay_state(path: &Path, options: ImageOptions, if_corrupt: IfCorrupt) -> Result<()> {
    let Some(dir) = options.state.directory() else { return Ok(()) };
    let unlocked = ImageOptions { locking: Locking::None, ..options.clone() };
    if !has_state(&open_storage(path, unlocked)?, dir)? {
        return Ok(());
    }
    match replay(path, options.clone()).await {
        Err(error) if error.kind() == ErrorKind::Corrupt && if_corrupt == IfCorrupt::SetAside => {
            // Locked: a server that was started meanwhile has a state file of its own.
            let file = open_storage(path, options.clone())?;
            set_state_aside(&file, dir, "the image is corrupt")
        }
        replayed => replayed,
    }
}

async fn replay(path: &Path, options: ImageOptions) -> Result<()> {
    open_without_backing(path, options).await?.close().await
}
