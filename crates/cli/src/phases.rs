//! The progress of a command with several phases, each of which has a progress of its own.
//!
//! Guarantee: every phase is the same share of the whole, so that the percentage never decreases.

use parking_lot::Mutex;

/// The bytes done, and their total.
type Position = Box<dyn Fn() -> (u64, u64) + Send>;

/// The phases of a command.
pub struct Phases {
    count: u64,
    current: Mutex<(u64, Option<Position>)>,
}

impl Phases {
    /// A command with this number of phases.
    pub fn of(count: u64) -> Self {
        Self { count, current: Mutex::new((0, None)) }
    }

    /// Begins the next phase, or the first one.
    pub fn begin(&self, position: impl Fn() -> (u64, u64) + Send + 'static) {
        let mut current = self.current.lock();
        let index = if current.1.is_some() { current.0 + 1 } else { 0 };
        *current = (index.min(self.count - 1), Some(Box::new(position)));
    }

    /// The position of the whole command, in units of the current phase's bytes. The total is 0 if
    /// it is not known.
    pub fn position(&self) -> (u64, u64) {
        let current = self.current.lock();
        let (index, Some(position)) = &*current else { return (0, 0) };
        let (done, total) = position();
        (index * total + done, self.count * total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_equal_shares() {
        let phases = Phases::of(2);
        assert_eq!(phases.position(), (0, 0));
        phases.begin(|| (30, 100));
        assert_eq!(phases.position(), (30, 200));
        phases.begin(|| (1, 10));
        assert_eq!(phases.position(), (11, 20));
    }
}
