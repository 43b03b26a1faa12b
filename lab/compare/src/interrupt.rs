//! Ctrl-C and SIGTERM: a comparison ends in order, so that its servers, devices and files are
//! removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Records that a signal asked the program to end. [`Default`] installs no signal handler.
#[derive(Default)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handlers of this process.
    pub fn install() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&asked))
                .context("cannot handle signals")?;
        }
        Ok(Self { asked })
    }

    /// Fails once a signal has come.
    pub fn check(&self) -> Result<()> {
        if self.asked.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}
