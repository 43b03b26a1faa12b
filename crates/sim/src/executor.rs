//! A small executor whose every choice comes from one seed.
//!
//! The PRNG chooses which ready task is polled next, and whether the next event happens before it
//! (as if the processor had been busy that long). So a run explores one interleaving, and the seed
//! alone replays it.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use fastrand::Rng;
use parking_lot::Mutex;
use slab::Slab;

use crate::clock::{Clock, Oneshot};
use crate::process::Process;

/// One simulation: its tasks, its clock, its PRNG. A simulation represents one process, which may
/// die. Clones are the same simulation.
#[derive(Clone)]
pub struct Sim(Rc<Inner>);

struct Inner {
    clock: Clock,
    process: Process,
    random: RefCell<Rng>,
    tasks: RefCell<Slab<TaskState>>,
    ready: ReadyList,
}

struct TaskState {
    /// Absent while the task is being polled.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    waker: Arc<TaskWaker>,
}

type ReadyList = Arc<Mutex<Vec<Arc<TaskWaker>>>>;

/// Adds its task to the list of ready tasks, if it is not there yet.
struct TaskWaker {
    task: usize,
    is_queued: AtomicBool,
    ready: ReadyList,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::AcqRel) {
            let ready = Arc::clone(&self.ready);
            ready.lock().push(self);
        }
    }
}

impl Sim {
    /// A simulation whose choices `seed` decides.
    pub fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        Self(Rc::new(Inner {
            clock: Clock::new(random.fork()),
            process: Process::new(),
            random: RefCell::new(random),
            tasks: RefCell::default(),
            ready: ReadyList::default(),
        }))
    }

    /// The simulation's clock.
    pub fn clock(&self) -> &Clock {
        &self.0.clock
    }

    pub(crate) fn process(&self) -> &Process {
        &self.0.process
    }

    /// Makes the process die instead of making step number `step`, counted from 0. A step is the
    /// start or end of a storage operation, or a store of a word into
    /// [`SimMemory`](crate::SimMemory). Nothing happens in the simulation after that.
    pub fn kill_at(&self, step: u64) {
        self.0.process.kill_at(step);
    }

    /// Makes the process die now.
    pub fn kill(&self) {
        self.0.process.kill_at(0);
    }

    /// Whether the process is dead. An answer that a task gives in the poll in which the process
    /// dies must be ignored, because no client received it.
    pub fn is_dead(&self) -> bool {
        self.0.process.is_dead()
    }

    /// How many steps the process has made.
    pub fn steps(&self) -> u64 {
        self.0.process.steps()
    }

    /// Drops the futures of all tasks: the memory of a process that has ended. The futures may hold
    /// the simulation itself, which would otherwise never be freed.
    pub fn drop_tasks(&self) {
        let tasks = self.0.tasks.take();
        // No borrow of the tasks is held here: dropping a future runs code that may spawn or wake.
        drop(tasks);
    }

    /// A PRNG for a part of the simulation, so that its choices do not change the choices of other
    /// parts.
    pub fn fork_prng(&self) -> Rng {
        self.0.random.borrow_mut().fork()
    }

    /// Resolves after `delay` of virtual time.
    pub async fn sleep(&self, delay: Duration) {
        self.0.clock.sleep(delay).await;
    }

    /// Starts a task. It continues if its handle is dropped.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let output = Oneshot::new();
        let result = output.clone();
        let future = Box::pin(async move { result.set(future.await) });
        let mut tasks = self.0.tasks.borrow_mut();
        let place = tasks.vacant_entry();
        let (is_queued, ready) = (AtomicBool::new(false), Arc::clone(&self.0.ready));
        let waker = Arc::new(TaskWaker { task: place.key(), is_queued, ready });
        place.insert(TaskState { future: Some(future), waker: Arc::clone(&waker) });
        drop(tasks);
        Arc::clone(&waker).wake();
        Task { sim: self.clone(), waker, output }
    }

    /// Polls one ready task or lets the next event happen; `false` when there is neither, or the
    /// process is dead.
    pub fn step(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        let waker = {
            let mut ready = self.0.ready.lock();
            let mut random = self.0.random.borrow_mut();
            if ready.is_empty() || random.u8(..8) == 0 {
                None
            } else {
                let chosen = random.usize(..ready.len());
                Some(ready.swap_remove(chosen))
            }
        };
        match waker {
            Some(waker) => self.poll(&waker),
            None => match self.0.clock.advance() {
                Some(action) => action(),
                None => return !self.0.ready.lock().is_empty(),
            },
        }
        true
    }

    /// Runs until no task is ready and no event is left.
    pub fn run(&self) {
        while self.step() {}
    }

    /// Runs until `future` is ready. After that, other tasks and events stay as they are.
    ///
    /// # Panics
    /// When nothing can happen and the future still waits.
    pub fn block_on<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> T {
        let task = self.spawn(future);
        loop {
            if let Some(output) = task.output.take() {
                return output;
            }
            assert!(self.step(), "deadlock: the task waits and nothing is left to happen");
        }
    }

    fn poll(&self, queued: &Arc<TaskWaker>) {
        queued.is_queued.store(false, Ordering::Release);
        let future = match self.0.tasks.borrow_mut().get_mut(queued.task) {
            Some(state) if Arc::ptr_eq(&state.waker, queued) => state.future.take(),
            _ => None,
        };
        let Some(mut future) = future else { return };
        let waker = Waker::from(Arc::clone(queued));
        let is_ready = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        // The future is dropped after this borrow ends, because it may have handles of other tasks
        // in it.
        let mut tasks = self.0.tasks.borrow_mut();
        if is_ready {
            tasks.remove(queued.task);
        } else if let Some(state) = tasks.get_mut(queued.task) {
            state.future = Some(future);
        }
    }
}

/// A spawned task. A future of its output.
pub struct Task<T> {
    sim: Sim,
    waker: Arc<TaskWaker>,
    output: Oneshot<T>,
}

impl<T> Task<T> {
    /// Waits for the end of the task.
    pub async fn join(self) -> T {
        self.output.wait().await
    }

    /// The output, once, if the task has ended.
    pub fn output(&self) -> Option<T> {
        self.output.take()
    }

    /// Drops the task's future, whatever it waits for. Must not be called by the task itself.
    pub fn cancel(self) {
        let id = self.waker.task;
        let mut tasks = self.sim.0.tasks.borrow_mut();
        let is_ours = tasks.get(id).is_some_and(|state| Arc::ptr_eq(&state.waker, &self.waker));
        let state = is_ours.then(|| tasks.remove(id));
        // No borrow of the tasks is held here: dropping a future runs code that may spawn or wake.
        drop(tasks);
        drop(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The order in which four tasks that sleep equally long come to their end.
    fn order(seed: u64) -> Vec<u32> {
        let sim = Sim::new(seed);
        let ended = Rc::new(RefCell::new(Vec::new()));
        for id in 0..4 {
            let (sim, ended) = (sim.clone(), Rc::clone(&ended));
            sim.clone().spawn(async move {
                sim.sleep(MS).await;
                ended.borrow_mut().push(id);
            });
        }
        sim.run();
        ended.take()
    }

    #[test]
    fn a_seed_replays_and_seeds_differ() {
        assert_eq!(order(7), order(7));
        let different: std::collections::HashSet<_> = (0..100).map(order).collect();
        assert!(different.len() > 15, "of 24 orders only {} were seen", different.len());
    }

    #[test]
    fn time_jumps_to_the_next_event() {
        let sim = Sim::new(0);
        let clock = sim.clock().clone();
        let now = sim.block_on(async move {
            clock.sleep(MS * 1000).await;
            clock.sleep(MS).await;
            clock.now()
        });
        assert_eq!(now, MS * 1001);
    }

    #[test]
    fn a_cancelled_task_is_dropped_at_once() {
        let sim = Sim::new(0);
        let alive = Rc::new(());
        let (held, clock) = (Rc::clone(&alive), sim.clock().clone());
        let task = sim.spawn(async move {
            clock.sleep(MS).await;
            drop(held);
        });
        assert!(sim.step());
        assert_eq!(Rc::strong_count(&alive), 2);
        task.cancel();
        assert_eq!(Rc::strong_count(&alive), 1);
        sim.run();
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn waiting_for_nothing_is_noticed() {
        Sim::new(0).block_on(std::future::pending::<()>());
    }
}
