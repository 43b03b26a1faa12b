//! Where commands look for what a killed server of an image left (docs/durability.md).

use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_daemon::setup::StateSetup;
use blockhouse_disk::{StateDir, StateUse};

/// The option of all commands that open images, `serve` excepted, which has its own.
#[derive(clap::Args, Clone)]
pub struct StateArgs {
    /// Where the image's server keeps what outlives it, as its --state says. If it was killed, commands that change
    /// the image begin with what it answered last, and those that only read it warn. By default they look where
    /// servers have it by default; off looks nowhere.
    #[arg(long, value_name = "DIR|off")]
    state: Option<PathBuf>,
}

impl StateArgs {
    /// How an image is opened.
    ///
    /// # Errors
    /// The directory that was named cannot be used.
    pub fn state_use(&self) -> Result<StateUse> {
        let found = match state_setup(self.state.as_deref()) {
            StateSetup::Off => None,
            StateSetup::Dir(path) => Some(StateDir::open(&path)?),
            StateSetup::Usual => StateDir::find_default(),
        };
        Ok(found.map_or(StateUse::Off, StateUse::Replay))
    }
}

/// What a value of `--state` means.
pub fn state_setup(value: Option<&Path>) -> StateSetup {
    match value {
        Some(off) if off == Path::new("off") => StateSetup::Off,
        Some(path) => StateSetup::Dir(path.to_owned()),
        None => StateSetup::Usual,
    }
}
