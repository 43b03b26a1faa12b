//! Flushes before a pause, in which changes are held off, so that the pause has little to flush.
//!
//! A round writes and flushes everything that was changed before it, while requests continue. The
//! next round handles only the changes made during this round, so it takes less time. The pause
//! handles the changes made during the last round. Rounds end:
//!
//! - with a quick round; from round [`ENOUGH_ROUNDS`] on, also with a round that is shorter than
//!   all before it, because no round is quick while guests write all the time;
//! - after [`MAX_ROUNDS`] rounds, or with the first round that ends after [`MAX_TIME`];
//! - after one round outside of event loops, because only event loops have timers.
//!
//! The pause makes the rest durable. So the rounds affect only the length of the pause.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use blockhouse_core::{Result, Storage, SyncMode};
use blockhouse_engine::has_timers;
use futures_util::future::join_all;

use super::{Disk, QuiescedGuard};
use crate::options::Access;

/// The maximum duration of a quick round: data written in so short a time is flushed quickly.
const QUICK_ROUND: Duration = Duration::from_millis(5);
const ENOUGH_ROUNDS: u32 = 3;
const MAX_ROUNDS: u32 = 12;
const MAX_TIME: Duration = Duration::from_secs(1);

/// The flushes before a pause.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlushedAhead {
    /// The number of rounds.
    pub rounds: u32,
    /// Duration of all rounds. Requests were carried out during them.
    pub length: Duration,
    /// Duration of the last round.
    pub last: Duration,
}

/// Writes and flushes the dirty state of these disks, in rounds, until little is left. Requests
/// continue. On return, all writes that completed before the call are durable, as after a flush.
///
/// # Errors
/// The first error of a storage: the rounds end with it.
pub async fn flush_ahead<S: Storage>(disks: &[&Disk<S>], sync: SyncMode) -> Result<FlushedAhead> {
    let round = async || {
        let outcomes = join_all(disks.iter().map(|disk| flush_round(disk, sync))).await;
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(ControlFlow::<Infallible>::Continue(()))
    };
    match flush_in_rounds(round).await? {
        ControlFlow::Continue(ahead) => Ok(ahead),
        ControlFlow::Break(never) => match never {},
    }
}

/// As [`flush_ahead`], for any data that `round` writes and flushes; `round` may end the rounds
/// early.
///
/// # Errors
/// The first error of a round.
pub(crate) async fn flush_in_rounds<B>(
    mut round: impl AsyncFnMut() -> Result<ControlFlow<B>>,
) -> Result<ControlFlow<B, FlushedAhead>> {
    let began = Instant::now();
    let mut rounds = Rounds::default();
    loop {
        let begin = Instant::now();
        if let ControlFlow::Break(outcome) = round().await? {
            return Ok(ControlFlow::Break(outcome));
        }
        let is_last = rounds.end(begin.elapsed(), began.elapsed());
        if is_last || !has_timers() {
            let FlushedAhead { rounds, length, last } = rounds.ahead;
            tracing::debug!(
                "flushed {rounds} times in {length:?} before a pause, last in {last:?}"
            );
            return Ok(ControlFlow::Continue(FlushedAhead { rounds, length, last }));
        }
    }
}

/// The rounds so far.
#[derive(Default)]
struct Rounds {
    ahead: FlushedAhead,
    shortest: Duration,
}

impl Rounds {
    /// Records a round that took `length`; all rounds so far took `in_all`. Returns whether it is
    /// the last round.
    fn end(&mut self, length: Duration, in_all: Duration) -> bool {
        let rounds = self.ahead.rounds + 1;
        let is_shortest = rounds > 1 && length < self.shortest;
        self.shortest = if rounds == 1 { length } else { self.shortest.min(length) };
        self.ahead = FlushedAhead { rounds, length: in_all, last: length };
        length <= QUICK_ROUND
            || is_shortest && rounds >= ENOUGH_ROUNDS
            || rounds >= MAX_ROUNDS
            || in_all >= MAX_TIME
    }
}

async fn flush_round<S: Storage>(disk: &Disk<S>, sync: SyncMode) -> Result<()> {
    let image = disk.begin_use();
    match image.access() {
        Access::ReadWrite => {
            image.layer().opened().flush(sync).await?;
            image.format().flush_all(sync).await
        }
        Access::ReadOnly => Ok(()),
    }
}

/// [Flushes](flush_ahead) the disk ahead, and then quiesces it as `Disk::quiesce`. For changes of
/// the image that write and flush while the guest's writes are held off.
///
/// # Errors
/// As `Disk::quiesce`; errors of the storage.
pub async fn quiesce_flushed<S: Storage>(
    disk: &Disk<S>,
    sync: SyncMode,
) -> Result<QuiescedGuard<'_>> {
    flush_ahead(&[disk], sync).await?;
    disk.quiesce().await
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::{EngineChoice, EventLoop, sleep};

    use super::*;

    fn rounds(lengths: &[u64]) -> u32 {
        let (mut rounds, mut in_all) = (Rounds::default(), Duration::ZERO);
        for &length in lengths {
            let length = Duration::from_millis(length);
            in_all += length;
            if rounds.end(length, in_all) {
                return rounds.ahead.rounds;
            }
        }
        panic!("more rounds than {lengths:?}");
    }

    #[test]
    fn rounds_end_with_a_quick_one_or_the_shortest_of_several() {
        assert_eq!(rounds(&[5]), 1);
        assert_eq!(rounds(&[40, 20, 4, 3]), 3);
        assert_eq!(rounds(&[40, 20, 10, 3]), 3);
        assert_eq!(rounds(&[20, 40, 30, 21, 19, 18]), 5);
    }

    #[test]
    fn rounds_are_bounded_in_number_and_time() {
        assert_eq!(rounds(&[20; 20]), MAX_ROUNDS);
        assert_eq!(rounds(&[300; 20]), 4);
        assert_eq!(rounds(&[5000, 1]), 1);
    }

    #[test]
    fn a_slow_flush_is_followed_by_another_one_where_time_is_known() {
        let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        let ahead = event_loop.block_on(async {
            let mut lengths = [4 * QUICK_ROUND, 2 * QUICK_ROUND].into_iter();
            let round = async || {
                sleep(lengths.next().unwrap_or_default()).await;
                Ok(ControlFlow::<Infallible>::Continue(()))
            };
            flush_in_rounds(round).await
        });
        let Ok(ControlFlow::Continue(ahead)) = ahead else { panic!("no round fails") };
        assert!((3..=MAX_ROUNDS).contains(&ahead.rounds), "{ahead:?}");
        assert!(ahead.length >= 6 * QUICK_ROUND, "{ahead:?}");
    }
}
