//! Upgrades a server while clients verify its content, for tests and for `upgrade_gaps`.

mod fill;
mod guest;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
pub use fill::fill;
pub use guest::verify_guest;
use rustix::process::{Pid, Signal, kill_process};

use crate::nbd::{Client, Request, command, pattern};
use crate::{Outcome, Scratch, blockhouse, eventually, run_within};

/// Requests that a verifier has in flight.
const DEPTH: usize = 64;
const BLOCK: u64 = 4096;
/// The number of blocks that only one of those requests uses.
const BLOCKS: u64 = 16;
/// Bytes of the disk that a verifier needs.
pub const REGION: u64 = DEPTH as u64 * BLOCKS * BLOCK;

/// The longest time of an upgrade, also of one that fails.
const UPGRADE_LIMIT: Duration = Duration::from_secs(60);

/// The load of verifiers.
#[derive(Debug, Default)]
pub struct Load {
    stop: AtomicBool,
    /// The number of replies that a verifier has before it ends.
    replies: u64,
    /// The longest time between two replies to a verifier since the last `take_silence`, in
    /// microseconds.
    silence: AtomicU64,
}

impl Load {
    /// A load whose verifiers end only after this many replies each, however slow the host is.
    pub fn of_replies(replies: u64) -> Self {
        Self { replies, ..Self::default() }
    }

    /// Tells all verifiers to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Tells all verifiers to end when the guard is dropped. So a test that fails can end: it waits
    /// for its threads first.
    pub fn stop_at_the_end(&self) -> impl Drop + '_ {
        StopAtTheEnd(self)
    }

    /// Whether the verifiers are to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether a verifier that has seen this is to end.
    fn is_over(&self, seen: &Seen) -> bool {
        self.is_stopped() && seen.replies >= self.replies
    }

    /// The longest time between two replies to a verifier since the last call.
    pub fn take_silence(&self) -> Duration {
        Duration::from_micros(self.silence.swap(0, Ordering::Relaxed))
    }
}

struct StopAtTheEnd<'a>(&'a Load);

impl Drop for StopAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// The findings of a verifier.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Replies.
    pub replies: u64,
    /// The longest time between two replies, with all requests in flight.
    pub longest_gap: Duration,
}

impl Seen {
    /// Records a reply, which came `gap` after the one before.
    fn reply(&mut self, gap: Duration, load: &Load) {
        self.replies += 1;
        self.longest_gap = self.longest_gap.max(gap);
        load.silence.fetch_max(gap.as_micros() as u64, Ordering::Relaxed);
    }
}

/// One of the requests in flight, and the content of its blocks.
struct Slot {
    start: u64,
    /// For each block, the generation that was written last; 0: none.
    generations: [u64; BLOCKS as usize],
    block: usize,
    is_read: bool,
    cookie: u64,
}

/// Writes and reads blocks at depth 64, from byte `start` of the disk, until told to stop. Every
/// block that is read must hold what was written last.
///
/// # Panics
/// At the first error, end of file, or wrong byte.
pub fn verify(mut client: Client, start: u64, mut random: Rng, load: &Load) -> Seen {
    let mut slots = slots(start);
    let mut generation = 0;
    for slot in &mut slots {
        slot.send(&mut client, &mut random, &mut generation);
    }
    let (mut seen, mut last, mut in_flight) = (Seen::default(), Instant::now(), DEPTH);
    while in_flight > 0 {
        let (cookie, reply) = client.receive().expect("no end of file is seen");
        let now = Instant::now();
        seen.reply(now - last, load);
        last = now;
        assert_eq!(reply.error, 0, "a request failed");
        let slot = slots.iter_mut().find(|slot| slot.cookie == cookie).expect("a known cookie");
        slot.check(&reply.data);
        if load.is_over(&seen) {
            in_flight -= 1
        } else {
            slot.send(&mut client, &mut random, &mut generation)
        }
    }
    client.disconnect();
    seen
}

/// The slots from byte `start` of the disk on.
fn slots(start: u64) -> Vec<Slot> {
    let slot = |index| Slot {
        start: start + index * BLOCKS * BLOCK,
        generations: [0; BLOCKS as usize],
        block: 0,
        is_read: false,
        cookie: 0,
    };
    (0..DEPTH as u64).map(slot).collect()
}

impl Slot {
    /// Chooses the next request; returns whether it is a read. A write gets the next generation.
    fn choose(&mut self, random: &mut Rng, generation: &mut u64) -> bool {
        self.block = random.usize(..BLOCKS as usize);
        self.is_read = random.bool();
        if !self.is_read {
            *generation += 1;
            self.generations[self.block] = *generation;
        }
        self.is_read
    }

    /// Checks the data of a read.
    fn check(&self, data: &[u8]) {
        if !self.is_read {
            return;
        }
        let offset = self.offset();
        match self.generations[self.block] {
            0 => assert!(data.iter().all(|byte| *byte == 0), "zeros are at {offset}"),
            written => pattern::verify(data, offset, Some(written)).expect("what was written"),
        }
    }

    fn offset(&self) -> u64 {
        self.start + self.block as u64 * BLOCK
    }

    fn send(&mut self, client: &mut Client, random: &mut Rng, generation: &mut u64) {
        let is_read = self.choose(random, generation);
        let (offset, length) = (self.offset(), BLOCK);
        let request = |command| Request { command, flags: 0, offset, length };
        let sent = if is_read {
            client.send(request(command::READ))
        } else {
            let mut block = vec![0; BLOCK as usize];
            pattern::fill(&mut block, offset, *generation);
            client.send_with(request(command::WRITE), &block)
        };
        self.cookie = sent.expect("no end of file is seen");
    }
}

/// Runs `blockhouse upgrade` at this control socket, with more arguments.
pub fn upgrade(control: &Path, words: &[&str]) -> Outcome {
    let mut command = Command::new(blockhouse());
    command.arg("upgrade").arg("--control").arg(control).args(words);
    run_within(UPGRADE_LIMIT, &mut command)
}

/// Whether an upgrade failed because requests or the new process took longer than the server waits,
/// as on a busy host. Then the server continues, and a user would try again.
pub fn is_late(outcome: &Outcome) -> bool {
    let late = ["did not complete", "the new server did not"];
    !outcome.status.success() && late.iter().any(|late| outcome.stderr.contains(late))
}

/// As [`upgrade`], which must succeed; an upgrade that is late is tried again.
///
/// # Panics
/// When it fails for another reason, or at every try.
#[track_caller]
pub fn upgrade_in_the_end(control: &Path, words: &[&str]) -> Outcome {
    const TRIES: usize = 10;
    let mut outcome = upgrade(control, words);
    for _ in 1..TRIES {
        if !is_late(&outcome) {
            break;
        }
        outcome = upgrade(control, words);
    }
    outcome.success()
}

/// Upgrades a server under load, as [`upgrade_in_the_end`]; returns the gap in milliseconds.
pub fn upgrade_under_load(control: &Path) -> f64 {
    told_gap(&upgrade_in_the_end(control, &[]))
}

/// The gap that an upgrade reports, in milliseconds.
///
/// # Panics
/// When it reports none.
fn told_gap(outcome: &Outcome) -> f64 {
    let words: Vec<_> = outcome.stdout.split_whitespace().collect();
    let gap = words.iter().rev().nth(1).and_then(|word| word.parse().ok());
    gap.unwrap_or_else(|| panic!("{}", outcome.describe("must tell the gap")))
}

/// The servers that upgrades have started in a scratch folder; they are killed when this is
/// dropped.
pub struct Servers<'a>(pub &'a Scratch);

impl Servers<'_> {
    /// The processes that run: those whose command line names a socket of the folder.
    pub fn running(&self) -> Vec<Pid> {
        let folder = self.0.short().to_str().expect("a plain name").to_owned();
        let ids = std::fs::read_dir("/proc").expect("/proc is there").flatten();
        let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let serves = |id: &i32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let is_dead = std::fs::read_to_string(format!("/proc/{id}/stat"))
                .map_or(true, |stat| {
                    stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z"))
                });
            line.contains(" serve ") && line.contains(&folder) && !is_dead
        };
        ids.filter(serves).filter_map(Pid::from_raw).collect()
    }

    /// Waits until this many servers run.
    #[track_caller]
    pub fn wait_for(&self, count: usize) {
        let is_so = eventually(Duration::from_secs(20), || self.running().len() == count);
        assert!(is_so, "{count} servers are expected, there are {:?}", self.running());
    }

    /// Stops all servers by SIGTERM, and waits for their end.
    #[track_caller]
    pub fn stop(&self) {
        for id in self.running() {
            let _ = kill_process(id, Signal::TERM);
        }
        self.wait_for(0);
    }
}

impl Drop for Servers<'_> {
    fn drop(&mut self) {
        for id in self.running() {
            // The process may have ended meanwhile.
            let _ = kill_process(id, Signal::KILL);
        }
    }
}
