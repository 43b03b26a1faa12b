//! The table of what was counted, with a judgement on each row.
//!
//! Not more than the bare kernel: neither more requests that make durable (FUA and flushes) nor more
//! writes. And not less than durability needs: every acknowledged write was FUA or has a flush behind it.

use anyhow::{Result, bail};

use super::direct::{BLOCK, WRITES, Way};
use super::trace::Counts;

/// Whether these requests can have made all writes durable before they were answered.
pub fn is_durable(way: Way, counts: Counts) -> bool {
    let needed = match way {
        Way::Each | Way::FlushEach | Way::Write => WRITES,
        Way::Together | Way::FlushOnce => 1,
    };
    counts.bytes >= WRITES * BLOCK as u64 && u64::from(counts.fua + counts.flushes) >= needed
}

/// What of a row depends on who comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// Nothing.
    Nothing,
    /// How many flushes the kernel's threads share: a write and a flush for each are no worse.
    Sharing,
    /// How often tables are written: the first few writes may go by FUA and have rounds of their own
    /// (three writes and two rounds of two), and one that the server reads late has one more.
    Tables,
}

/// Whether the server asks the disk for more than the bare kernel does. What of a journal is merged into
/// one request is chance everywhere: a little more counts as the same.
fn is_worse(chance: Chance, ours: Counts, floor: Counts) -> bool {
    let expensive = |counts: Counts| counts.fua + counts.flushes;
    let all = |counts: Counts| counts.total() - counts.metadata;
    let writes = WRITES as u32;
    let (most_expensive, most) = match chance {
        Chance::Nothing => (expensive(floor), all(floor)),
        Chance::Sharing => (expensive(floor).max(writes), all(floor).max(2 * writes)),
        Chance::Tables => (expensive(floor) + 6, all(floor) + 10),
    };
    expensive(ours) > most_expensive
        || all(ours) > most
        || ours.metadata > floor.metadata + floor.metadata / 10 + 2
}

/// The table, and what is wrong in it.
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

    /// A row: what we asked the disk for, beside what the bare kernel did.
    pub fn row(&mut self, name: &str, way: Way, chance: Chance, ours: Counts, floor: Counts) {
        let (verdict, is_wrong) = if !is_durable(way, ours) {
            ("NOT DURABLE", true)
        } else if is_worse(chance, ours, floor) {
            ("WORSE", true)
        } else if ours.total() - ours.metadata < floor.total() - floor.metadata {
            ("better", false)
        } else {
            ("", false)
        };
        println!("  {name:46} {ours:44} {floor:44} {verdict}");
        if is_wrong {
            self.wrong.push(format!("{}: {name}: {ours} against {floor}", self.section));
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
        for (ours, floor, is_good) in cases {
            let mut report = Report::default();
            report.row("row", Way::Each, Chance::Nothing, ours, floor);
            assert_eq!(report.finish().is_ok(), is_good, "{ours} against {floor}");
        }
    }

    #[test]
    fn chance_explains_no_more_than_it_can() {
        let bytes = WRITES * BLOCK as u64;
        let counts =
            |plain, fua, flushes| Counts { plain, fua, flushes, bytes, ..Counts::default() };
        let cases = [
            (Chance::Sharing, counts(20, 0, 20), counts(20, 0, 5), true),
            (Chance::Sharing, counts(20, 0, 21), counts(20, 0, 5), false),
            (Chance::Tables, counts(18, 8, 1), counts(21, 1, 2), true),
            (Chance::Tables, counts(20, 9, 1), counts(21, 1, 2), false),
            (Chance::Tables, counts(26, 0, 9), counts(22, 0, 3), true),
            (Chance::Tables, counts(20, 0, 20), counts(22, 0, 3), false),
        ];
        for (chance, ours, floor, is_good) in cases {
            let mut report = Report::default();
            report.row("row", Way::Together, chance, ours, floor);
            assert_eq!(report.finish().is_ok(), is_good, "{chance:?}: {ours} against {floor}");
        }
    }
}
