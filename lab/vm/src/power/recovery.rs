//! From a log to verdicts: rebuilds the disk at each mark, and checks the image on it.
//!
//! The caller recovers the file system and extracts the image, because that differs.

use std::path::Path;

use anyhow::{Result, ensure};

use super::history::{AckMeaning, History, Writes};
use super::log::{Event, Log};
use super::{MARKS, SEED, round_of};

/// The disk that is rebuilt.
pub trait ReplayTarget {
    /// Writes data that became stable.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()>;

    /// The image after the loss of power. An inner error is a verdict on the disk: it does not
    /// recover, or is not clean.
    fn image(&mut self) -> Result<Result<Vec<u8>, String>>;
}

/// The verdicts on the marks.
#[derive(Default)]
pub struct Verdicts {
    /// The number of marks that were replayed to.
    pub marks: usize,
    /// The faults, one line for each mark that was bad.
    pub bad: Vec<String>,
}

impl Verdicts {
    /// Whether every acknowledgement of a whole history was kept.
    pub fn are_good(&self) -> bool {
        self.marks >= MARKS && self.bad.is_empty()
    }

    /// The verdicts in one line.
    pub fn describe(&self) -> String {
        let first = self.bad.first().map_or(String::new(), |first| format!("; {first}"));
        format!("{} of {} marks good{first}", self.marks - self.bad.len(), self.marks)
    }
}

/// Replays the log at `path` on `disk`, which is all zeros, and checks the disk at each mark.
/// `writes` is what the server guarantees.
pub fn verdicts(path: &Path, writes: Writes, disk: &mut impl ReplayTarget) -> Result<Verdicts> {
    let mut history = History::new(SEED, writes);
    let mut rounds = 0;
    let mut verdicts = Verdicts::default();
    replay(path, disk, |marked, image| {
        while rounds <= marked {
            let round = history.next_round();
            ensure!(
                rounds < marked || round.acknowledged == AckMeaning::Durable,
                "round {rounds} was marked, but acknowledges nothing"
            );
            rounds += 1;
        }
        verdicts.marks += 1;
        if let Err(what) = image.and_then(|image| history.check(&image)) {
            verdicts.bad.push(format!("round {marked}: {what}"));
        }
        Ok(())
    })?;
    Ok(verdicts)
}

/// Replays the log at `path` on `disk`, which is all zeros. Calls `found` at each mark, with the
/// number of its round and the image.
pub fn replay(
    path: &Path,
    disk: &mut impl ReplayTarget,
    mut found: impl FnMut(usize, Result<Vec<u8>, String>) -> Result<()>,
) -> Result<()> {
    for event in Log::open(path)? {
        match event? {
            Event::Write { offset, data } => disk.write(offset, &data)?,
            Event::Discard { offset, length } => disk.write(offset, &vec![0; length as usize])?,
            Event::Mark(mark) => match round_of(&mark) {
                Some(round) => found(round, disk.image()?)?,
                // The kernel's own mark of an orderly end; before it the kernel logs writes that
                // were never flushed.
                None => break,
            },
        }
    }
    Ok(())
}
