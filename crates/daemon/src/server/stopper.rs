//! The orderly end of the server, on a thread of its own.

use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};

use crate::process::stopping_notice::StoppingNotice;
use crate::service::Service;

/// The thread that ends the service, while the main thread continues to receive signals.
pub(crate) struct Stopper {
    service: mpsc::Sender<Service>,
    thread: JoinHandle<Option<Result<()>>>,
}

impl Stopper {
    /// Starts the thread. When the service has ended, the thread closes `signals`, which ends the
    /// wait for more signals.
    pub(crate) fn start(signals: signal_hook::iterator::Handle) -> Result<Self> {
        let (service, stopping) = mpsc::channel();
        let work = move || {
            let _closing = CloseOnDrop(signals);
            let service: Service = stopping.recv().ok()?;
            let notice = StoppingNotice::start();
            let result = service.end();
            notice.end();
            Some(result)
        };
        let thread = std::thread::Builder::new().name("blockhouse-stop".into()).spawn(work);
        Ok(Self { service, thread: thread.context("cannot start a thread")? })
    }

    /// Tells the thread to end the service.
    pub(crate) fn stop(&self, service: Service) {
        // The thread waits for this message only.
        let _ = self.service.send(service);
    }

    /// Waits for the end; `None` if the thread panicked or had no service to end.
    pub(crate) fn outcome(self) -> Option<Result<()>> {
        self.thread.join().ok().flatten()
    }
}

/// Ends the wait for signals, also if the thread panics.
struct CloseOnDrop(signal_hook::iterator::Handle);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}
