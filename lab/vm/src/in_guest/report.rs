//! The table of the counted requests, with a judgement on each row.
//!
//! The server may not cause more than the bare kernel does: neither more requests that make durable
//! (FUA and flushes) nor more writes. And not less than durability needs: every acknowledged write
//! was FUA or is followed by a flush.

use anyhow::{Result, bail};

use super::direct::{BLOCK, WRITES, WriteMethod};
use super::trace::Counts;

/// Whether these requests can have made all writes durable before they were answered.
pub fn is_durable(method: WriteMethod, counts: Counts) -> bool {
    let needed = match method {
        WriteMethod::Each | WriteMethod::FlushEach | WriteMethod::Write => WRITES,
        WriteMethod::Together | WriteMethod::FlushOnce => 1,
    };
    counts.bytes >= WRITES * BLOCK as u64 && u64::from(counts.fua + counts.flushes) >= needed
}

/// How far a row may exceed the baseline because the counts depend on scheduling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// Not at all.
    None,
    /// The number of writes that share a flush may vary: a write and a flush for each count as the
    /// same.
    FlushSharing,
    /// The number of writebacks of metadata may vary: the first few writes may use FUA and have
    /// writebacks of their own (three writes and two writebacks of two), and a write that the
    /// server receives late has one more.
    Metadata,
}

/// Whether the server asks the disk for more than the bare kernel does. How many requests of a
/// journal the kernel merges varies, so a few more of them count as the same.
fn is_worse(tolerance: Tolerance, ours: Counts, baseline: Counts) -> bool {
    let expensive = |counts: Counts| counts.fua + counts.flushes;
    let all = |counts: Counts| counts.total() - counts.metadata;
    let writes = WRITES as u32;
    let (most_expensive, most) = match tolerance {
        Tolerance::None => (expensive(baseline), all(baseline)),
        Tolerance::FlushSharing => (expensive(baseline).max(writes), all(baseline).max(2 * writes)),
        Tolerance::Metadata => (expensive(baseline) + 6, all(baseline) + 10),
    };
    expensive(ours) > most_expensive
        || all(ours) > most
        || ours.metadata > baseline.metadata + baseline.metadata / 10 + 2
}

/// The table, and its wrong rows.
#[derive(Default)]
pub struct Report {
    wrong: Vec<String>,
    section: String,
}

impl Report {
    /// Begins a part of the table.
    pub fn section(&mut self, title: &str) {
        println!("{title:48} {:44} bare kernel", "Blockhouse");
        title.clone_into(&mut self.section);
    }

    /// Adds a row: the requests of our server beside those of the bare kernel.
    pub fn row(
        &mut self,
        name: &str,
        method: WriteMethod,
        tolerance: Tolerance,
        ours: Counts,
        baseline: Counts,
    ) {
        let (verdict, is_wrong) = if !is_durable(method, ours) {
            ("NOT DURABLE", true)
        } else if is_worse(tolerance, ours, baseline) {
            ("WORSE", true)
        } else if ours.total() - ours.metadata < baseline.total() - baseline.metadata {
            ("better", false)
        } else {
            ("", false)
        };
        println!("  {name:46} {ours:44} {baseline:44} {verdict}");
        if is_wrong {
            self.wrong.push(format!("{}: {name}: {ours} against {baseline}", self.section));
        }
    }

    /// # Errors
    /// Rows are wrong.
    pub fn finish(self) -> Result<()> {
        if !self.wrong.is_empty() {
            bail!("{} rows are wrong:\n{}", self.wrong.len(), self.wrong.join("\n"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_and_too_little_are_wrong() {
        let bytes = WRITES * BLOCK as u64;
        let fua = Counts { fua: 20, bytes, ..Counts::default() };
        let twice = Counts { flushes: 20, ..fua };
        let plain = Counts { plain: 20, bytes, ..Counts::default() };
        let less = Counts { bytes: bytes - 1, ..fua };
        let cases =
            [(fua, twice, true), (twice, fua, false), (plain, fua, false), (less, fua, false)];
        for (ours, baseline, is_good) in cases {
            let mut report = Report::default();
            report.row("row", WriteMethod::Each, Tolerance::None, ours, baseline);
            assert_eq!(report.finish().is_ok(), is_good, "{ours} against {baseline}");
        }
    }

    #[test]
    fn chance_explains_no_more_than_it_can() {
        let bytes = WRITES * BLOCK as u64;
        let counts =
            |plain, fua, flushes| Counts { plain, fua, flushes, bytes, ..Counts::default() };
        let cases = [
            (Tolerance::FlushSharing, counts(20, 0, 20), counts(20, 0, 5), true),
            (Tolerance::FlushSharing, counts(20, 0, 21), counts(20, 0, 5), false),
            (Tolerance::Metadata, counts(18, 8, 1), counts(21, 1, 2), true),
            (Tolerance::Metadata, counts(20, 9, 1), counts(21, 1, 2), false),
            (Tolerance::Metadata, counts(26, 0, 9), counts(22, 0, 3), true),
            (Tolerance::Metadata, counts(20, 0, 20), counts(22, 0, 3), false),
        ];
        for (tolerance, ours, baseline, is_good) in cases {
            let mut report = Report::default();
            report.row("row", WriteMethod::Together, tolerance, ours, baseline);
            assert_eq!(
                report.finish().is_ok(),
                is_good,
                "{tolerance:?}: {ours} against {baseline}"
            );
        }
    }
}
