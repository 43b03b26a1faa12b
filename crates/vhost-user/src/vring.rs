//! One of a front-end's rings: what was said of it, and the queue that runs by it.

use std::os::fd::OwnedFd;

use blockhouse_engine::{GuestMemory, Submission};
use futures_channel::{mpsc, oneshot};

use crate::queue::{Errand, Kick, Manner, Order};
use crate::ring::{Addresses, Broken};

/// A ring's parts in the front-end's own addresses.
#[derive(Clone, Copy, Debug)]
pub struct UserAddresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// What the driver makes available.
    pub available: u64,
    /// What the device has used.
    pub used: u64,
    /// The guest's address of the used ring, if changes of it are to be logged.
    pub log: Option<u64>,
}

impl UserAddresses {
    /// The same in the guest's addresses.
    pub fn in_guest(&self, memory: &GuestMemory) -> Result<Addresses, Broken> {
        let find = |name, user| memory.guest_of_user(user).ok_or(Broken::Misplaced(name, user));
        Ok(Addresses {
            descriptors: find("descriptor table", self.descriptors)?,
            available: find("available ring", self.available)?,
            used: find("used ring", self.used)?,
        })
    }
}

/// A queue that runs on a loop.
pub struct Running {
    /// What it is told by.
    pub errands: mpsc::UnboundedSender<Errand>,
    /// Its end, and the next available entry then.
    pub end: Submission<u16>,
}

/// A ring of the front-end.
#[derive(Default)]
pub struct Vring {
    /// How many entries.
    pub size: u16,
    /// Where it is.
    pub addresses: Option<UserAddresses>,
    /// The next available entry.
    pub next_available: u16,
    /// How the guest kicks.
    pub kick: Option<Kick>,
    /// How the driver is notified.
    pub call: Option<OwnedFd>,
    /// How the front-end is told that the ring is broken.
    pub error: Option<OwnedFd>,
    /// Whether it may be used.
    pub enabled: bool,
    /// The queue.
    pub running: Option<Running>,
}

impl Vring {
    /// Gives the running queue, if there is one, an order and waits until it is in force.
    ///
    /// # Errors
    /// What the queue answered. One that has ended by itself is not asked any more.
    pub fn tell(&self, order: Order) -> Result<(), Broken> {
        let Some(running) = &self.running else { return Ok(()) };
        let (done, outcome) = oneshot::channel();
        if running.errands.unbounded_send((order, done)).is_err() {
            return Ok(());
        }
        futures_executor::block_on(outcome).unwrap_or(Ok(()))
    }

    /// Has no more requests taken until it is enabled.
    pub fn disable(&mut self) {
        self.enabled = false;
        self.stop(Manner::Orderly);
    }

    /// Ends the queue, if one runs, and waits for its requests.
    pub fn stop(&mut self, manner: Manner) {
        // It obeys this order in any case.
        let _ = self.tell(Order::Stop(manner));
        if let Some(running) = self.running.take()
            && let Some(next) = running.end.wait()
        {
            self.next_available = next;
        }
    }
}
