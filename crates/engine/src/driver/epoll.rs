//! The engines for hosts without io_uring. Sockets use readiness (epoll). Files use Linux AIO where
//! that is truly asynchronous, otherwise worker threads.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::driver::broken_wait::BrokenWait;
use crate::driver::fixed_files::{FileId, FixedFiles};
use crate::driver::io_poll::IoPoll;
use crate::driver::linux_aio::LinuxAio;
use crate::driver::loop_shared::LoopShared;
use crate::driver::operation::{Operation, OperationTable, Token};
use crate::driver::registrations::Registrations;
use crate::driver::system_call::{FileCall, run_inline, try_socket};
use crate::driver::thread_pool::ThreadPool;
use crate::driver::watches::WatchKey;
use crate::driver::{Completion, Driver, Wait};
use crate::mapping::Mapping;

/// Event data that is not a socket's descriptor.
const NOTIFIER: u64 = u64::MAX;
const AIO: u64 = u64::MAX - 1;
/// Flag in the event data of watches. The low bits are the key.
const WATCH: u64 = 1 << 32;

/// Events taken by one system call.
const MAX_EVENTS: usize = 128;

/// Pause after the kernel refused a submission for lack of space, if no operation in flight can
/// free space by its completion.
const AIO_RETRY: Duration = Duration::from_millis(1);

pub(crate) struct Epoll {
    epoll: OwnedFd,
    shared: Arc<LoopShared>,
    pool: Arc<ThreadPool>,
    aio: Option<LinuxAio>,
    /// Waiters by descriptor. An entry stays when no operation waits: the next operation needs it
    /// again, and there are no more entries than descriptors.
    sockets: HashMap<RawFd, SocketWaiters>,
    /// Results that are known before the next `poll`.
    ready: Vec<Completion>,
    events: Vec<epoll::Event>,
    /// Events of watches that were not reported yet.
    watched: Vec<WatchKey>,
    broken_wait: BrokenWait,
}

/// The operations that wait for a socket, in order.
#[derive(Default)]
struct SocketWaiters {
    input: VecDeque<Token>,
    output: VecDeque<Token>,
}

impl Epoll {
    /// Opens the engine, with `aio` for the files that it can serve.
    pub(crate) fn open(shared: &Arc<LoopShared>, aio: Option<LinuxAio>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        // Edge-triggered: each write is a separate event, and the counters need not be read.
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, shared.notifier(), EventData::new_u64(NOTIFIER), flags)?;
        if let Some(aio) = &aio {
            epoll::add(&epoll, aio.event(), EventData::new_u64(AIO), flags)?;
        }
        Ok(Self {
            epoll,
            shared: Arc::clone(shared),
            pool: ThreadPool::shared(),
            aio,
            sockets: HashMap::new(),
            ready: Vec::new(),
            events: Vec::with_capacity(MAX_EVENTS),
            watched: Vec::new(),
            broken_wait: BrokenWait::default(),
        })
    }

    /// Tries a socket operation, unless earlier ones of its direction wait.
    fn attempt_on_socket(&mut self, operation: &Operation) -> Option<i32> {
        if let Operation::Accept { socket } = operation {
            // Two loops may be notified of one connection: the second must not block.
            if let Err(error) = rustix::io::ioctl_fionbio(socket, true) {
                return Some(-error.raw_os_error());
            }
        }
        let waiters = self.sockets.get_mut(&socket_of(operation).as_raw_fd());
        if waiters.is_some_and(|waiters| !waiters.queue_of(operation).is_empty()) {
            return None;
        }
        let result = try_socket(operation);
        (result != -libc::EAGAIN).then_some(result)
    }

    fn wait_for_socket(&mut self, token: Token, operation: &Operation) {
        let socket = socket_of(operation);
        let waiters = self.sockets.entry(socket.as_raw_fd()).or_default();
        waiters.queue_of(operation).push_back(token);
        if let Err(error) = watch(&self.epoll, socket, waiters) {
            self.remove_waiter(token, operation);
            self.ready.push(Completion { token, result: -error.raw_os_error() });
        }
    }

    /// Removes a token from its socket's queues. Returns whether it was there.
    fn remove_waiter(&mut self, token: Token, operation: &Operation) -> bool {
        let socket = socket_of(operation).as_raw_fd();
        let Some(waiters) = self.sockets.get_mut(&socket) else { return false };
        let before = waiters.input.len() + waiters.output.len();
        waiters.input.retain(|&other| other != token);
        waiters.output.retain(|&other| other != token);
        waiters.input.len() + waiters.output.len() < before
    }

    fn wait(&mut self, wait: Wait) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = match wait {
            _ if !self.ready.is_empty() => Some(now),
            Wait::Never => Some(now),
            Wait::Event => None,
            Wait::AtMost(left) => {
                let (tv_sec, tv_nsec) = (left.as_secs() as i64, i64::from(left.subsec_nanos()));
                Some(Timespec { tv_sec, tv_nsec })
            }
        };
        self.events.clear();
        let buffer = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, buffer, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => self.broken_wait.worked(),
            Err(error) => self.broken_wait.failed("epoll_wait", &error.into()),
        }
    }

    fn serve_socket(
        &mut self,
        socket: RawFd,
        flags: EventFlags,
        operations: &OperationTable,
        done: &mut Vec<Completion>,
    ) {
        let Some(waiters) = self.sockets.get_mut(&socket) else { return };
        // On an error or hang-up, operations of both directions are tried and detect it.
        let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if broken || flags.contains(EventFlags::IN) {
            try_all(&mut waiters.input, operations, done);
        }
        if broken || flags.contains(EventFlags::OUT) {
            try_all(&mut waiters.output, operations, done);
        }
        if let Some(&token) = waiters.input.front().or(waiters.output.front()) {
            let watched = watch(&self.epoll, socket_of(operations.operation(token)), waiters);
            if let Err(error) = watched {
                let result = -error.raw_os_error();
                let all = waiters.input.drain(..).chain(waiters.output.drain(..));
                done.extend(all.map(|token| Completion { token, result }));
            }
        }
    }
}

impl SocketWaiters {
    fn queue_of(&mut self, operation: &Operation) -> &mut VecDeque<Token> {
        match operation {
            Operation::Send(_) => &mut self.output,
            _ => &mut self.input,
        }
    }
}

impl Driver for Epoll {
    fn try_inline(&mut self, operation: &Operation) -> Option<i32> {
        match operation {
            // There is no system call for a command.
            Operation::Command(_) => Some(-libc::EOPNOTSUPP),
            _ if operation.is_on_socket() => self.attempt_on_socket(operation),
            _ => run_inline(operation),
        }
    }

    /// This engine's system calls identify files by descriptors only.
    fn set_fixed_files(&mut self, _: FixedFiles) {}

    fn unregister_file(&mut self, _: &FileId) {}

    /// The kernel has no other way to poll for completions than a ring.
    fn io_poll(&mut self, _: IoPoll) {}

    fn is_polling(&self) -> bool {
        false
    }

    /// This engine's system calls identify memory by addresses only.
    fn register_memory(&mut self, _: &Registrations<Mapping>) -> io::Result<()> {
        Ok(())
    }

    fn unregister_memory(&mut self, _: &Mapping) {}

    fn unregister_all_memory(&mut self) {}

    fn start(&mut self, token: Token, operation: &Operation) {
        let Some(call) = FileCall::of(operation) else {
            return self.wait_for_socket(token, operation);
        };
        match &mut self.aio {
            Some(aio) if LinuxAio::serves(operation) => aio.queue(token, call),
            // SAFETY: the operation stays in the loop's table (`Driver::start`).
            _ => unsafe { self.pool.run_file(call, token, &self.shared) },
        }
    }

    fn cancel(&mut self, token: Token, operation: &Operation) {
        if self.remove_waiter(token, operation) {
            self.ready.push(Completion { token, result: -libc::ECANCELED });
        }
    }

    fn may_have_events(&mut self) -> bool {
        true
    }

    fn watch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let data = EventData::new_u64(WATCH | u64::from(key.0));
        // Edge-triggered, as the notifier's eventfd.
        Ok(epoll::add(&self.epoll, descriptor, data, EventFlags::IN | EventFlags::ET)?)
    }

    fn unwatch(&mut self, _key: WatchKey, descriptor: BorrowedFd<'_>) {
        // The call fails only for a descriptor that could not be added.
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    fn next_event(&mut self) -> Option<WatchKey> {
        self.watched.pop()
    }

    fn poll(&mut self, mut wait: Wait, operations: &OperationTable, done: &mut Vec<Completion>) {
        if let Some(aio) = &mut self.aio {
            aio.submit(&mut self.ready);
            aio.reap(&mut self.ready);
            if aio.is_stuck() {
                wait = wait.not_longer(AIO_RETRY);
            }
        }
        self.wait(wait);
        done.append(&mut self.ready);
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match event.data.u64() {
                NOTIFIER => {}
                AIO => self.aio.iter_mut().for_each(|aio| aio.reap(done)),
                watch if watch & WATCH != 0 => self.watched.push(WatchKey(watch as u32)),
                socket => self.serve_socket(socket as RawFd, event.flags, operations, done),
            }
        }
        // Keeps the capacity of the vector.
        self.events = events;
    }
}

/// Makes epoll notify once when a waiter of the socket may continue. The peer's end of stream is
/// reported as input. It is not watched separately, because it does not let a waiting send
/// continue.
fn watch(
    epoll: &OwnedFd,
    socket: BorrowedFd<'_>,
    waiters: &SocketWaiters,
) -> rustix::io::Result<()> {
    let mut flags = EventFlags::ONESHOT;
    flags.set(EventFlags::IN, !waiters.input.is_empty());
    flags.set(EventFlags::OUT, !waiters.output.is_empty());
    let data = EventData::new_u64(socket.as_raw_fd() as u64);
    match epoll::modify(epoll, socket, data, flags) {
        Err(rustix::io::Errno::NOENT) => epoll::add(epoll, socket, data, flags),
        other => other,
    }
}

/// Tries the waiters of one direction until one would block.
fn try_all(queue: &mut VecDeque<Token>, operations: &OperationTable, done: &mut Vec<Completion>) {
    while let Some(&token) = queue.front() {
        let result = try_socket(operations.operation(token));
        if result == -libc::EAGAIN {
            return;
        }
        queue.pop_front();
        done.push(Completion { token, result });
    }
}

fn socket_of(operation: &Operation) -> BorrowedFd<'_> {
    match operation {
        Operation::Receive(message) | Operation::Send(message) => message.socket.as_fd(),
        Operation::Accept { socket } => socket.as_fd(),
        Operation::Read(transfer) | Operation::Write(transfer, _) => transfer.file.as_fd(),
        Operation::Sync { file, .. } | Operation::Allocate { file, .. } => file.as_fd(),
        Operation::Command(command) => command.file.as_fd(),
    }
}
