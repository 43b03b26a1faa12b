//! Which operations fail, and with what.

use fastrand::Rng;

use crate::OperationKind;

/// A reason for operations to fail.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: Option<OperationKind>,
    trigger: Trigger,
    errno: i32,
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
        Self { kind: None, trigger: Trigger::After(n), errno }
    }

    /// Each operation fails with `probability`.
    pub fn chance(probability: f64, errno: i32) -> Self {
        Self { kind: None, trigger: Trigger::Chance(probability), errno }
    }

    /// Only operations of this kind count.
    #[must_use]
    pub fn of(mut self, kind: OperationKind) -> Self {
        self.kind = Some(kind);
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

    /// The errno that the next operation, one of `kind`, fails with.
    pub(crate) fn decide(&mut self, kind: OperationKind, random: &mut Rng) -> Option<i32> {
        let mut errno = None;
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
                errno = errno.or(Some(fault.errno));
            }
            stays
        });
        errno
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_operation_of_a_kind_fails_once() {
        let (mut plan, mut random) = (FaultPlan::default(), Rng::with_seed(0));
        plan.add(Fault::nth(1, 5).of(OperationKind::Flush));
        let mut next = |kind| plan.decide(kind, &mut random);
        assert_eq!(next(OperationKind::Flush), None);
        assert_eq!(next(OperationKind::Write), None);
        assert_eq!(next(OperationKind::Flush), Some(5));
        assert_eq!(next(OperationKind::Flush), None);
    }

    #[test]
    fn chance_strikes_as_often_as_said() {
        let (mut plan, mut random) = (FaultPlan::default(), Rng::with_seed(1));
        plan.add(Fault::chance(0.25, 28));
        let struck =
            (0..4000).filter(|_| plan.decide(OperationKind::Read, &mut random) == Some(28)).count();
        assert!((900..1100).contains(&struck), "{struck} of 4000");
    }
}
