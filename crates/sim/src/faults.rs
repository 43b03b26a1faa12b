//! Faults: operations that fail, and operations that take long.

use std::time::Duration;

use fastrand::Rng;

use crate::OperationKind;

/// A reason for operations to fail or to take longer.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: Option<OperationKind>,
    trigger: Trigger,
    effect: Effect,
}

/// The effect of a fault on an operation.
#[derive(Clone, Copy, Debug)]
enum Effect {
    Fails(Failure),
    /// The operation takes this much longer.
    Waits(Duration),
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    /// Whether older unflushed writes may be lost too, and only this failure reports the loss.
    pub(crate) loses_older: bool,
}

impl Failure {
    /// A failure that concerns the operation's own range.
    pub(crate) fn of_range(errno: i32) -> Self {
        Self { errno, loses_older: false }
    }
}

#[derive(Clone, Debug)]
enum Trigger {
    /// After this many more matching operations, once.
    After(u64),
    /// With this probability, each time.
    Chance(f64),
}

impl Fault {
    /// The `n`-th operation from now on fails, counted from 0.
    pub fn nth(n: u64, errno: i32) -> Self {
        Self::with(Trigger::After(n), Effect::Fails(Failure::of_range(errno)))
    }

    /// The `n`-th operation from now on, counted from 0, takes `time` longer, as if it waited for
    /// a server that comes back then, or never.
    pub fn late(n: u64, time: Duration) -> Self {
        Self::with(Trigger::After(n), Effect::Waits(time))
    }

    fn with(trigger: Trigger, effect: Effect) -> Self {
        Self { kind: None, trigger, effect }
    }

    /// Each operation fails with `probability`.
    pub fn chance(probability: f64, errno: i32) -> Self {
        Self::with(Trigger::Chance(probability), Effect::Fails(Failure::of_range(errno)))
    }

    /// Limits the fault to operations of this kind.
    #[must_use]
    pub fn of(mut self, kind: OperationKind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Makes the failure the only report that older unflushed writes are lost. A durable write
    /// through a page cache fails in this way, with the errno of the host's failed writeback.
    #[must_use]
    pub fn losing_older_writes(mut self) -> Self {
        if let Effect::Fails(failure) = &mut self.effect {
            failure.loses_older = true;
        }
        self
    }
}

/// All faults of a disk.
#[derive(Default)]
pub(crate) struct FaultPlan(Vec<Fault>);

impl FaultPlan {
    pub(crate) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The failure and the extra latency of the next operation, which is of `kind`.
    pub(crate) fn decide(
        &mut self,
        kind: OperationKind,
        random: &mut Rng,
    ) -> (Option<Failure>, Duration) {
        let (mut failure, mut late) = (None, Duration::ZERO);
        self.0.retain_mut(|fault| {
            if fault.kind.is_some_and(|wanted| wanted != kind) {
                return true;
            }
            let (strikes, stays) = match &mut fault.trigger {
                Trigger::After(0) => (true, false),
                Trigger::After(left) => {
                    *left -= 1;
                    (false, true)
                }
                Trigger::Chance(probability) => (random.f64() < *probability, true),
            };
            if strikes {
                match fault.effect {
                    Effect::Fails(first) => failure = failure.or(Some(first)),
                    Effect::Waits(time) => late = late.max(time),
                }
            }
            stays
        });
        (failure, late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_operation_of_a_kind_fails_once() {
        let (mut plan, mut random) = (FaultPlan::default(), Rng::with_seed(0));
        plan.add(Fault::nth(1, 5).of(OperationKind::Flush));
        let mut next = |kind| plan.decide(kind, &mut random).0;
        assert_eq!(next(OperationKind::Flush), None);
        assert_eq!(next(OperationKind::Write), None);
        assert_eq!(next(OperationKind::Flush), Some(Failure::of_range(5)));
        assert_eq!(next(OperationKind::Flush), None);
    }

    #[test]
    fn chance_strikes_as_often_as_said() {
        let (mut plan, mut random) = (FaultPlan::default(), Rng::with_seed(1));
        plan.add(Fault::chance(0.25, 28));
        let strikes = |_: &u32| plan.decide(OperationKind::Read, &mut random).0.is_some();
        let struck = (0..4000).filter(strikes).count();
        assert!((900..1100).contains(&struck), "{struck} of 4000");
    }
}
