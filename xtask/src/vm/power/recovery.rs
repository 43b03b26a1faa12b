//! From a log to verdicts: the disk at each mark, and what of the image is on it.
//!
//! How a file system recovers and the image is taken out of it differs, so it is the caller's part.

use std::path::Path;

use anyhow::Result;

use super::history::{Acknowledged, History};
use super::log::{Event, Log};
use super::{MARKS, SEED, round_of};

/// The disk that is built again.
pub trait Replayed {
    /// Stores what became stable.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()>;

    /// The image, as whoever starts after the loss of power finds it. An inner error is a verdict
    /// on the disk: it does not recover, or is not clean.
    fn image(&mut self) -> Result<Result<Vec<u8>, String>>;
}

/// What became of the marks.
#[derive(Default)]
pub struct Verdicts {
    /// How many were replayed to.
    pub marks: usize,
    /// What was wrong, one line for each mark that was bad.
    pub bad: Vec<String>,
}

impl Verdicts {
    /// Whether every acknowledgement of a whole history was kept.
    pub fn are_good(&self) -> bool {
        self.marks >= MARKS && self.bad.is_empty()
    }

    /// In one line.
    pub fn describe(&self) -> String {
        let first = self.bad.first().map_or(String::new(), |first| format!("; {first}"));
        format!("{} of {} marks good{first}", self.marks - self.bad.len(), self.marks)
    }
}

/// Replays the log at `path` on `disk`, which is all zeros, and looks at it at each mark.
pub fn verdicts(path: &Path, disk: &mut impl Replayed) -> Result<Verdicts> {
    let mut history = History::new(SEED);
    let mut rounds = 0;
    let mut verdicts = Verdicts::default();
    for event in Log::open(path)? {
        let mark = match event? {
            Event::Write { offset, data } => {
                disk.write(offset, &data)?;
                continue;
            }
            Event::Discard { offset, length } => {
                disk.write(offset, &vec![0; length as usize])?;
                continue;
            }
            Event::Mark(mark) => mark,
        };
        // The kernel marks the orderly end, before which it notes what was never flushed.
        let Some(marked) = round_of(&mark) else { break };
        while rounds <= marked {
            let round = history.next_round();
            anyhow::ensure!(
                rounds < marked || round.acknowledged == Acknowledged::Durable,
                "round {rounds} was marked, but acknowledges nothing"
            );
            rounds += 1;
        }
        verdicts.marks += 1;
        if let Err(what) = disk.image()?.and_then(|image| history.check(&image)) {
            verdicts.bad.push(format!("{mark}: {what}"));
        }
    }
    Ok(verdicts)
}
