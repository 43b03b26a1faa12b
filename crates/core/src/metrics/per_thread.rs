//! A block of memory for each thread, which all threads can read.

use thread_local::ThreadLocal;

/// One `T` for each thread, made at the thread's first use. When a thread ends, its block stays,
/// and the next new thread reuses it without a reset. So sums never fall, and there are at most as
/// many blocks as threads that ran at once. Boxed, so that blocks of two threads share no cache
/// line.
#[derive(Debug)]
pub struct PerThread<T: Send>(ThreadLocal<Box<Padded<T>>>);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

impl<T: Send> Default for PerThread<T> {
    fn default() -> Self {
        Self(ThreadLocal::new())
    }
}

impl<T: Send + Sync + Default> PerThread<T> {
    /// This thread's block.
    #[inline]
    pub fn mine(&self) -> &T {
        match self.0.get() {
            Some(block) => &block.0,
            None => self.make(),
        }
    }

    #[cold]
    fn make(&self) -> &T {
        &self.0.get_or_default().0
    }

    /// The blocks of all threads.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|block| &block.0)
    }

    /// The sum of `number` over all threads' blocks.
    pub fn sum(&self, number: impl Fn(&T) -> u64) -> u64 {
        self.iter().map(number).fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Counter;
    use super::*;

    #[test]
    fn nothing_is_lost_between_threads_at_once_and_in_a_row() {
        let counters = PerThread::<Counter>::default();
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| (0..10_000).for_each(|_| counters.mine().add(1)));
                }
            });
        }
        assert_eq!(counters.sum(Counter::get), 3 * 4 * 10_000);
    }
}
