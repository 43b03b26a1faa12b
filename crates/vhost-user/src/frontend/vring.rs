//! A ring of a front-end: its settings, and the queue that runs on it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use blockhouse_engine::GuestMemory;
use futures_channel::{mpsc, oneshot};

use super::dirty_logging::DirtyLogging;
use super::eventfd::{check_eventfd, duplicate_call};
use super::paused::PausedVring;
use crate::protocol::{Result, UserAddresses, refused};
use crate::queue::{Call, Kick, QueueCommand, QueueRequest, StopMode};
use crate::ring::{Broken, RingAddresses, SplitRing};

/// A queue that runs on a loop.
pub struct RunningQueue {
    /// The channel for its commands.
    pub requests: mpsc::UnboundedSender<QueueRequest>,
    /// Receives the number of the next available entry when the queue ends. If the sender was
    /// dropped without a value, the loop has ended.
    pub end: Receiver<u16>,
}

/// A ring of the front-end.
#[derive(Default)]
pub struct Vring {
    size: u16,
    addresses: Option<UserAddresses>,
    /// The number of the next available entry.
    base: u16,
    kick: Option<Kick>,
    /// The eventfd that notifies the driver.
    call: Option<OwnedFd>,
    /// The eventfd that notifies the front-end of a broken ring.
    error: Option<OwnedFd>,
    is_enabled: bool,
    running: Option<RunningQueue>,
}

impl Vring {
    /// The number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The number of the next available entry, when the queue does not run.
    pub fn base(&self) -> u16 {
        self.base
    }

    /// The log address of the used ring, if its changes are logged.
    pub fn logged_used(&self) -> Option<u64> {
        self.addresses.and_then(|addresses| addresses.log)
    }

    /// Whether the queue runs.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether the queue can be started. If protocol features were not negotiated, rings are
    /// enabled from the start.
    pub fn can_start(&self, has_protocol_features: bool) -> bool {
        let is_enabled = self.is_enabled || !has_protocol_features;
        self.running.is_none() && self.kick.is_some() && is_enabled
    }

    /// Records that the queue was started.
    pub fn set_running(&mut self, running: RunningQueue) {
        self.running = Some(running);
    }

    /// A duplicate of the kick.
    pub fn duplicate_kick(&self) -> Result<Option<Kick>> {
        self.kick.as_ref().map(Kick::try_clone).transpose().map_err(refused)
    }

    /// A duplicate of the call eventfd.
    pub fn duplicate_call(&self) -> Result<Option<Call>> {
        duplicate_call(self.call.as_ref())
    }

    /// A duplicate of the error eventfd.
    pub fn duplicate_error(&self) -> Result<Option<Call>> {
        duplicate_call(self.error.as_ref())
    }

    /// The guest addresses of the ring's parts.
    pub fn guest_addresses(&self, memory: &GuestMemory) -> Result<RingAddresses, Broken> {
        to_guest(&self.addresses.ok_or(Broken::Misplaced("ring", 0))?, memory)
    }

    /// Sets the number of entries. It is validated when the queue starts.
    pub fn set_size(&mut self, count: u32) -> Result<()> {
        if self.is_running() {
            return Err(refused("another size for a queue that runs"));
        }
        self.size = u16::try_from(count).map_err(refused)?;
        Ok(())
    }

    /// Sets the number of the next available entry.
    pub fn set_base(&mut self, base: u32) -> Result<()> {
        if self.is_running() {
            return Err(refused("another base for a queue that runs"));
        }
        self.base = u16::try_from(base).map_err(refused)?;
        Ok(())
    }

    /// Sets the addresses of the ring. A running queue keeps its addresses until
    /// [`move_to`](Self::move_to).
    pub fn set_addresses(&mut self, addresses: UserAddresses, memory: &GuestMemory) -> Result<()> {
        if self.is_running() {
            self.check_at(&addresses, memory)?;
        }
        self.addresses = Some(addresses);
        Ok(())
    }

    /// Sets the guest's kick.
    pub fn set_kick(&mut self, kick: Kick) -> Result<()> {
        if let Kick::Event(event) = &kick {
            check_eventfd(Some(event), "kicks")?;
        }
        let copy = kick.try_clone().map_err(refused)?;
        self.send(QueueCommand::SetKick(copy)).map_err(refused)?;
        self.kick = Some(kick);
        Ok(())
    }

    /// Sets the call eventfd, which notifies the driver.
    pub fn set_call(&mut self, call: Option<OwnedFd>) -> Result<()> {
        check_eventfd(call.as_ref(), "calls")?;
        if self.is_running() {
            let command = QueueCommand::SetCall(duplicate_call(call.as_ref())?);
            self.send(command).map_err(refused)?;
        }
        self.call = call;
        Ok(())
    }

    /// Sets the error eventfd, which notifies the front-end of a broken ring.
    pub fn set_error(&mut self, error: Option<OwnedFd>) -> Result<()> {
        check_eventfd(error.as_ref(), "errors")?;
        self.error = error;
        Ok(())
    }

    /// Allows requests to be popped.
    pub fn enable(&mut self) {
        self.is_enabled = true;
    }

    /// Ends the queue. No requests are popped until [`enable`](Self::enable).
    pub fn disable(&mut self) {
        self.is_enabled = false;
        self.stop(StopMode::Graceful);
    }

    /// Checks that a running queue has its ring in this memory.
    pub fn check(&self, memory: &GuestMemory) -> Result<()> {
        match &self.addresses {
            Some(addresses) if self.is_running() => self.check_at(addresses, memory),
            _ => Ok(()),
        }
    }

    fn check_at(&self, addresses: &UserAddresses, memory: &GuestMemory) -> Result<()> {
        let addresses = to_guest(addresses, memory).map_err(refused)?;
        SplitRing::check(memory, addresses, self.size).map_err(refused)
    }

    /// Moves a running queue to the ring at its addresses in this memory, and updates its dirty
    /// logging.
    pub fn move_to(&self, memory: &GuestMemory, log: &DirtyLogging) -> Result<()> {
        let (Some(addresses), true) = (&self.addresses, self.is_running()) else { return Ok(()) };
        // Each queue has a copy of its own, so that threads do not contend for one reference count.
        let memory = Arc::new(memory.clone());
        let addresses = to_guest(addresses, &memory).map_err(refused)?;
        self.send(QueueCommand::Move(memory, addresses)).map_err(refused)?;
        self.update_log(log)
    }

    /// Updates the dirty logging of a running queue.
    pub fn update_log(&self, log: &DirtyLogging) -> Result<()> {
        if !self.is_running() {
            return Ok(());
        }
        let (log, used, call) = log.for_queue(self.logged_used());
        self.send(QueueCommand::SetLog(log, used, call)).map_err(refused)
    }

    /// Sends a command to the running queue, if there is one, and waits until it is applied.
    ///
    /// # Errors
    /// Errors of the queue. No error if the queue has ended by itself; it gets no commands.
    fn send(&self, command: QueueCommand) -> Result<(), Broken> {
        match self.post(command).map(futures_executor::block_on) {
            Some(Ok(outcome)) => outcome,
            Some(Err(oneshot::Canceled)) | None => Ok(()),
        }
    }

    /// Sends a command to the running queue, and does not wait. `None` if no queue runs that
    /// accepts commands.
    fn post(&self, command: QueueCommand) -> Option<oneshot::Receiver<Result<(), Broken>>> {
        let (done, outcome) = oneshot::channel();
        let request = QueueRequest { command, done };
        self.running.as_ref()?.requests.unbounded_send(request).ok()?;
        Some(outcome)
    }

    /// Ends the queue, if one runs, and waits for its requests.
    pub fn stop(&mut self, mode: StopMode) {
        // A stop does not fail.
        let _ = self.send(QueueCommand::Stop(mode));
        // Requests that wait for free space on the host fail now. Reason: the front-end is blocked
        // until the queue ends, so it cannot free the space.
        let _ = self.post(QueueCommand::EndHolding);
        if let Some(running) = self.running.take()
            && let Ok(base) = running.end.recv()
        {
            self.base = base;
        }
    }

    /// Requests the end of the queue, if one runs: it pops no more requests. The caller then calls
    /// [`wait_ended`](Self::wait_ended), and resumes by [`take_back_end`](Self::take_back_end).
    pub fn begin_end(&self) {
        let _ = self.post(QueueCommand::Stop(StopMode::Graceful));
    }

    /// Waits for the requested end until the deadline. Returns whether the queue has ended.
    pub fn wait_ended(&mut self, deadline: Instant) -> bool {
        let Some(running) = &self.running else { return true };
        match running.end.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(base) => self.base = base,
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {}
        }
        self.running = None;
        true
    }

    /// Cancels the requested end of the queue. If the queue has already ended, records that it no
    /// longer runs.
    pub fn take_back_end(&mut self) {
        let goes_on = self.post(QueueCommand::Continue).map(futures_executor::block_on);
        if !matches!(goes_on, Some(Ok(_)))
            && let Some(running) = self.running.take()
            && let Ok(base) = running.end.recv()
        {
            self.base = base;
        }
    }

    /// The description that another process needs to continue the ring.
    ///
    /// # Errors
    /// If no more descriptors are available.
    pub fn describe(&self, is_running: bool) -> io::Result<PausedVring> {
        let duplicate =
            |event: &Option<OwnedFd>| event.as_ref().map(OwnedFd::try_clone).transpose();
        let Self { size, addresses, base, is_enabled, .. } = *self;
        Ok(PausedVring {
            size,
            addresses,
            base,
            kick: self.kick.as_ref().map(Kick::try_clone).transpose()?,
            call: duplicate(&self.call)?,
            error: duplicate(&self.error)?,
            is_enabled,
            is_running,
        })
    }

    /// A ring from another process's description; it does not run.
    ///
    /// # Errors
    /// A descriptor that is no eventfd, or a ring that ran and is not in this memory.
    pub fn restore(paused: PausedVring, memory: &GuestMemory) -> Result<Self> {
        let PausedVring { size, addresses, base, kick, call, error, is_enabled, is_running } =
            paused;
        let event = |kick: &Kick| match kick {
            Kick::Event(event) => check_eventfd(Some(event), "kicks"),
            Kick::Polled => Ok(()),
        };
        kick.as_ref().map(event).transpose()?;
        check_eventfd(call.as_ref(), "calls")?;
        check_eventfd(error.as_ref(), "errors")?;
        let vring = Self { size, addresses, base, kick, call, error, is_enabled, running: None };
        if is_running {
            let addresses = vring.guest_addresses(memory).map_err(refused)?;
            SplitRing::check(memory, addresses, size).map_err(refused)?;
        }
        Ok(vring)
    }

    /// Ends the queue, and drops its kick and call. Returns the number of the next available entry.
    pub fn stop_and_get_base(&mut self) -> u16 {
        self.stop(StopMode::Graceful);
        (self.kick, self.call) = (None, None);
        self.base
    }
}

fn to_guest(addresses: &UserAddresses, memory: &GuestMemory) -> Result<RingAddresses, Broken> {
    let find = |name, user| memory.guest_address_of(user).ok_or(Broken::Misplaced(name, user));
    Ok(RingAddresses {
        descriptors: find("descriptor table", addresses.descriptors)?,
        available: find("available ring", addresses.available)?,
        used: find("used ring", addresses.used)?,
    })
}
