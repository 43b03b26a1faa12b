//! Ctrl-C and SIGTERM end a measurement between two requests, so that its files are removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Whether somebody asked to stop.
#[derive(Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens to the signals from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Whether it is time to stop.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails when it is time to stop.
    ///
    /// # Errors
    /// It says so.
    pub fn check(&self) -> Result<()> {
        if self.is_asked() {
            bail!("interrupted; the files of the measurement are removed");
        }
        Ok(())
    }
}
