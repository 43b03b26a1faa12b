//! The permitted content of a disk, byte by byte, given the replies of its server.
//!
//! A change that was answered has happened. If the connection ended before the answer, each byte of
//! the change may or may not be written. A discard without a defined result leaves the old byte or
//! zero. Once a read has returned one of the permitted bytes, every later read must return the
//! same. Changes and reads in flight never overlap, so the order of replies does not matter.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use anyhow::{Result, bail};

/// The content that a change leaves in its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Zero,
    /// Bytes that only this change writes.
    Data,
}

/// What a request does to its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Read,
    /// Writes data.
    Write(Content),
    /// Makes zeros.
    WriteZeroes,
    /// Discards the range.
    Discard,
}

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

impl Token {
    /// The number, from which the data of a write is made.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A byte range that may hold other bytes than the base.
#[derive(Clone, Debug)]
struct Alternative {
    range: Range<u64>,
    content: Content,
    number: u64,
}

/// A request that was begun, for the report of a loss.
struct Record {
    action: Action,
    range: Range<u64>,
    server: u32,
    outcome: &'static str,
}

/// The bytes of one disk.
pub struct Model {
    base: Vec<u8>,
    alternatives: Vec<Alternative>,
    in_flight: BTreeMap<u64, (Action, Range<u64>)>,
    /// A discard zeroes the aligned blocks of this many bytes that it covers; `None` if no discard
    /// is sure to zero anything.
    discard_unit: Option<u64>,
    records: Vec<Record>,
    server: u32,
}

/// The byte at `offset` in the data of a change.
fn word(number: u64, offset: u64) -> [u8; 8] {
    let mut bits = (number << 32) | (offset / 8);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (bits ^ (bits >> 32)).to_le_bytes()
}

/// The data that change `number` writes at `offset`.
pub fn fill(bytes: &mut [u8], offset: u64, number: u64) {
    let head = ((8 - offset % 8) % 8).min(bytes.len() as u64) as usize;
    let (first, rest) = bytes.split_at_mut(head);
    let start = (offset % 8) as usize;
    first.copy_from_slice(&word(number, offset)[start..start + head]);
    let mut offset = offset + head as u64;
    for chunk in rest.chunks_mut(8) {
        chunk.copy_from_slice(&word(number, offset)[..chunk.len()]);
        offset += 8;
    }
}

fn write_content(bytes: &mut [u8], offset: u64, content: Content, number: u64) {
    match content {
        Content::Zero => bytes.fill(0),
        Content::Data => fill(bytes, offset, number),
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    one.start.max(other.start)..one.end.min(other.end)
}

impl Model {
    /// A disk with this content. A discard zeroes the aligned blocks of `discard_unit` bytes that
    /// it covers, of which the last may be cut by the end of the disk; elsewhere it leaves the old
    /// bytes or zeros.
    pub fn new(content: Vec<u8>, discard_unit: Option<u64>) -> Self {
        Self {
            base: content,
            alternatives: Vec::new(),
            in_flight: BTreeMap::new(),
            discard_unit,
            records: Vec::new(),
            server: 0,
        }
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.base.len() as u64
    }

    /// The number of requests that were begun so far.
    pub fn requests(&self) -> u64 {
        self.records.len() as u64
    }

    /// The ranges that requests from this number on may have changed.
    pub fn changes_since(&self, first: u64) -> impl Iterator<Item = Range<u64>> {
        let records = self.records.iter().skip(first as usize);
        records.filter(|record| record.action != Action::Read).map(|record| record.range.clone())
    }

    /// Records that another server serves the disk from now on.
    pub fn next_server(&mut self) {
        self.server += 1;
    }

    /// Begins a request; `None` if a request in flight overlaps it, unless both are reads.
    pub fn begin(&mut self, action: Action, range: Range<u64>) -> Option<Token> {
        let is_in_the_way = |(other, taken): &(Action, Range<u64>)| {
            let both_read = action == Action::Read && *other == Action::Read;
            !both_read && !overlap(taken, &range).is_empty()
        };
        if range.is_empty() || self.in_flight.values().any(is_in_the_way) {
            return None;
        }
        let number = self.records.len() as u64;
        let record =
            Record { action, range: range.clone(), server: self.server, outcome: "in flight" };
        self.records.push(record);
        self.in_flight.insert(number, (action, range));
        Some(Token(number))
    }

    fn take(&mut self, token: Token, outcome: &'static str) -> (Action, Range<u64>) {
        self.records[token.0 as usize].outcome = outcome;
        self.in_flight.remove(&token.0).expect("requests end once")
    }

    /// Records that a request was answered with success.
    pub fn answered(&mut self, token: Token) {
        let (action, range) = self.take(token, "answered");
        match action {
            Action::Read => {}
            Action::Write(content) => self.set(range, content, token.0),
            Action::WriteZeroes => self.set(range, Content::Zero, token.0),
            Action::Discard => self.discarded(range, token.0),
        }
    }

    /// Records that a read was answered with `bytes`.
    ///
    /// # Errors
    /// The disk cannot hold these bytes.
    pub fn has_read(&mut self, token: Token, bytes: &[u8]) -> Result<()> {
        let (_, range) = self.take(token, "answered");
        self.verify(range.start, bytes)
    }

    /// Records that the request was refused and changed nothing.
    pub fn refused(&mut self, token: Token) {
        self.take(token, "refused");
    }

    /// Records that the connection ended before the reply: the request may have been executed.
    pub fn lost(&mut self, token: Token) {
        let (action, range) = self.take(token, "never answered");
        let content = match action {
            Action::Read => return,
            Action::Write(content) => content,
            Action::WriteZeroes | Action::Discard => Content::Zero,
        };
        self.alternatives.push(Alternative { range, content, number: token.0 });
    }

    fn discarded(&mut self, range: Range<u64>, number: u64) {
        let size = self.size();
        let zeroed = self.discard_unit.map_or(range.end..range.end, |unit| {
            let end = if range.end == size { size } else { range.end / unit * unit };
            range.start.next_multiple_of(unit).min(end)..end
        });
        if !zeroed.is_empty() {
            self.set(zeroed.clone(), Content::Zero, number);
        }
        let cut = if zeroed.is_empty() { range.end..range.end } else { zeroed };
        for part in [range.start..cut.start, cut.end..range.end] {
            if !part.is_empty() {
                let content = Content::Zero;
                self.alternatives.push(Alternative { range: part, content, number });
            }
        }
    }

    /// Records that the range holds exactly this content.
    fn set(&mut self, range: Range<u64>, content: Content, number: u64) {
        let bytes = &mut self.base[range.start as usize..range.end as usize];
        write_content(bytes, range.start, content, number);
        self.settle(&range);
    }

    /// Removes the alternative contents of a range.
    fn settle(&mut self, range: &Range<u64>) {
        let mut kept = Vec::with_capacity(self.alternatives.len());
        for alternative in self.alternatives.drain(..) {
            if overlap(&alternative.range, range).is_empty() {
                kept.push(alternative);
                continue;
            }
            let Range { start, end } = alternative.range;
            for rest in [start..range.start.max(start), range.end.min(end)..end] {
                if !rest.is_empty() {
                    kept.push(Alternative { range: rest, ..alternative });
                }
            }
        }
        self.alternatives = kept;
    }

    /// Compares the bytes that were read at `offset` with the permitted ones. From now on only
    /// these bytes are permitted there.
    ///
    /// # Errors
    /// A byte is neither of the last acknowledged change nor of an unacknowledged one after it.
    pub fn verify(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let range = offset..offset + bytes.len() as u64;
        let place = range.start as usize..range.end as usize;
        if self.base[place.clone()] != *bytes {
            self.compare(offset, bytes)?;
            self.base[place].copy_from_slice(bytes);
        }
        self.settle(&range);
        Ok(())
    }

    /// Compares byte by byte.
    fn compare(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let base = &self.base[offset as usize..];
        let mut is_right: Vec<bool> = bytes.iter().zip(base).map(|(one, two)| one == two).collect();
        let all = offset..offset + bytes.len() as u64;
        for Alternative { range, content, number } in &self.alternatives {
            let part = overlap(range, &all);
            if part.is_empty() {
                continue;
            }
            let place = (part.start - offset) as usize..(part.end - offset) as usize;
            let mut other = vec![0; place.len()];
            write_content(&mut other, part.start, *content, *number);
            for (at, byte) in place.zip(other) {
                is_right[at] |= bytes[at] == byte;
            }
        }
        let Some(first) = is_right.iter().position(|is_right| !is_right) else { return Ok(()) };
        let wrong = is_right.iter().filter(|is_right| !**is_right).count();
        let last = is_right.iter().rposition(|is_right| !is_right).unwrap_or(first);
        let what = self.describe(offset + first as u64, &bytes[first..]);
        bail!(
            "{wrong} bytes between {} and {} are wrong: {what}",
            offset + first as u64,
            offset + last as u64 + 1
        );
    }

    /// Describes a wrong byte: which change wrote the bytes that were found, and which change was
    /// acknowledged last.
    fn describe(&self, at: u64, found: &[u8]) -> String {
        let found = &found[..found.len().min(16)];
        let mut expected = vec![0; found.len()];
        let source = (0..self.records.len() as u64).rev().find(|&number| {
            fill(&mut expected, at, number);
            found.len() >= 4 && expected == found
        });
        let mut text = match source {
            Some(number) => format!("there is the data of {}", self.name(number)),
            None if found.iter().all(|byte| *byte == 0) => "there are zeros".into(),
            None => format!("there is {found:02x?}"),
        };
        let covers = |record: &Record| record.action != Action::Read && record.range.contains(&at);
        let touching = (0..).zip(&self.records).filter(|(_, record)| covers(record));
        let mut last: Vec<u64> = touching.map(|(number, _)| number).collect();
        let kept = last.split_off(last.len().saturating_sub(4));
        text += "; the last changes there: ";
        for number in kept {
            let _ = write!(text, "{}, ", self.name(number));
        }
        let _ = write!(text, "this is server {}", self.server);
        text
    }

    fn name(&self, number: u64) -> String {
        let Record { action, range, server, outcome } = &self.records[number as usize];
        format!("#{number} {action:?} {}..{} to server {server}, {outcome}", range.start, range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Action = Action::Write(Content::Data);

    fn data(number: u64, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        fill(&mut bytes, range.start, number);
        bytes
    }

    #[test]
    fn data_does_not_depend_on_how_it_is_cut() {
        let whole = data(7, 0..64);
        for (start, end) in [(1, 3), (3, 30), (8, 16), (61, 64), (5, 5)] {
            assert_eq!(data(7, start..end), whole[start as usize..end as usize]);
        }
        assert_ne!(data(8, 0..4), whole[..4]);
    }

    #[test]
    fn what_was_answered_must_be_there() {
        let mut model = Model::new(vec![0; 4096], None);
        let token = model.begin(WRITE, 100..200).unwrap();
        assert!(model.begin(WRITE, 199..300).is_none() && model.begin(WRITE, 200..300).is_some());
        model.answered(token);
        model.verify(100, &data(0, 100..200)).unwrap();
        let error = model.verify(100, &[0; 100]).unwrap_err().to_string();
        assert!(error.contains("zeros") && error.contains("#0"), "{error}");
    }

    #[test]
    fn what_was_lost_is_old_or_new_and_then_stays() {
        let mut model = Model::new(vec![0; 4096], None);
        let token = model.begin(WRITE, 0..1024).unwrap();
        model.lost(token);
        let mut bytes = data(0, 0..1024);
        bytes[512..].fill(0);
        model.verify(0, &bytes).unwrap();
        model.verify(0, &data(0, 0..512)).unwrap();
        model.verify(512, &data(0, 512..1024)).unwrap_err();
    }

    #[test]
    fn discards_zero_whole_units() {
        let mut model = Model::new(vec![1; 10_000], Some(4096));
        let token = model.begin(Action::Discard, 1000..10_000).unwrap();
        model.answered(token);
        model.verify(4096, &[1]).unwrap_err();
        model.verify(8192, &[0; 1808]).unwrap();
        model.verify(1000, &[1; 100]).unwrap();
        model.verify(1100, &[0; 100]).unwrap();
        model.verify(1100, &[1; 100]).unwrap_err();
        let token = model.begin(Action::Discard, 5000..6000).unwrap();
        model.answered(token);
        model.verify(5000, &[0; 1000]).unwrap();
        let mut model = Model::new(vec![1; 4096], None);
        let token = model.begin(Action::Discard, 0..4096).unwrap();
        model.answered(token);
        model.verify(0, &[1; 2048]).unwrap();
        model.verify(2048, &[0; 2048]).unwrap();
    }
}
