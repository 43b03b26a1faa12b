//! The permitted values of each byte of a disk, by the changes that wrote them.
//!
//! Every change has a number and, if it stores data, a byte value of its own. The model keeps for
//! each byte the changes whose value it may show: one set for reads, and one for the content after
//! a crash. A change enters both sets when it begins. When it succeeds, the changes that had ended
//! before it began leave the set for reads. They leave the set for crashes if it was durable, or
//! when a flush that began after its end succeeds. A change that failed or was cancelled removes
//! others only where a read has seen it: a value that was read and then flushed must stay. So the
//! model requires only what the interface of a disk guarantees.
//!
//! When a process ends, the next process starts with its set for reads, and nothing is in flight:
//! every answered change has happened. After a loss of power, the next process starts with the set
//! for crashes. The content that the next process reads decides which of the permitted changes
//! happened; later processes must read the same content.

use blockhouse_core::ByteRange;

/// How many changes a model can tell apart. When a process begins, the numbers of changes that no
/// byte may show are free again.
pub(crate) const MAX_CHANGES: u32 = 63;

/// The changes that the next process finds after the end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remains {
    /// Every answered change.
    Answered,
    /// The changes that were answered as durable, in a state that may still be lost.
    Durable,
    /// The changes that were answered as durable, on stable storage: the power was lost.
    Stable,
}

/// The content that a change leaves in its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteKind {
    /// The change's own byte value.
    Data,
    /// Zeros.
    Zeros,
    /// Undefined content.
    Undefined,
}

/// A change that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    number: u32,
    range: ByteRange,
}

/// A read that has begun: what each of its bytes might show then.
pub(crate) struct Reading {
    range: ByteRange,
    permitted: Vec<u64>,
    begun: u64,
    ended: u64,
}

/// A flush that has begun: what each byte might show to reads then.
pub(crate) struct Flushing {
    visible: Vec<u64>,
    begun: u64,
}

#[derive(Clone)]
pub(crate) struct Model {
    visible: Vec<u64>,
    stable: Vec<u64>,
    begun: u64,
    ended: u64,
    /// The changes that failed or were cancelled.
    unsuccessful: u64,
    zeros: u64,
    undefined: u64,
    /// For each change, by its number: the changes that had ended when it began.
    before: [u64; u64::BITS as usize],
    /// The minimum size of the disk after a crash. Writes after a growth that failed may leave any
    /// size from this one to the largest.
    min_size: usize,
    /// The minimum size of the disk that the next process finds when this one dies.
    min_visible_size: usize,
    /// The value that a read has seen while no change of the byte was in flight: later reads must
    /// see it too.
    seen: Vec<Option<u8>>,
    /// Whether everything is stable: the power was lost, and nothing was read or changed since.
    is_all_stable: bool,
}

impl Change {
    /// The byte value of a change that stores data.
    pub(crate) fn value(&self) -> u8 {
        value_of(self.number)
    }
}

/// The change that stores `byte`, if it stores data.
fn own_bit(byte: u8) -> u64 {
    match byte {
        1..=64 => 1 << (byte - 1),
        _ => 0,
    }
}

fn value_of(number: u32) -> u8 {
    number as u8 + 1
}

impl Model {
    /// A disk of `size` bytes and the content that it begins with.
    pub(crate) fn new(size: usize) -> (Self, Vec<u8>) {
        let first = vec![1; size];
        let model = Self {
            visible: first.clone(),
            stable: first,
            begun: 1,
            ended: 1,
            unsuccessful: 0,
            zeros: 0,
            undefined: 0,
            before: [0; u64::BITS as usize],
            min_size: size,
            min_visible_size: size,
            seen: vec![None; size],
            is_all_stable: false,
        };
        (model, vec![value_of(0); size])
    }

    /// Begins a change; `None` if there were too many changes.
    pub(crate) fn begin(&mut self, range: ByteRange, kind: WriteKind) -> Option<Change> {
        let number = self.begun.trailing_ones();
        if number > MAX_CHANGES {
            return None;
        }
        let bit = 1 << number;
        self.begun |= bit;
        match kind {
            WriteKind::Data => {}
            WriteKind::Zeros => self.zeros |= bit,
            WriteKind::Undefined => self.undefined |= bit,
        }
        for index in indices(range) {
            self.visible[index] |= bit;
            self.stable[index] |= bit;
            self.seen[index] = None;
        }
        self.before[number as usize] = self.ended;
        Some(Change { number, range })
    }

    /// Begins a growth of the disk, whose new bytes are zeros. `None` if there were too many
    /// changes.
    pub(crate) fn begin_growth(&mut self, size: usize) -> Option<Change> {
        let old = self.stable.len();
        self.set_length(size);
        let new = ByteRange::between(old as u64, size as u64);
        let Some(change) = self.begin(new, WriteKind::Zeros) else {
            self.set_length(old);
            return None;
        };
        Some(change)
    }

    fn set_length(&mut self, size: usize) {
        self.visible.resize(size, 0);
        self.stable.resize(size, 0);
        self.seen.resize(size, None);
    }

    /// The disk has its new size, durably.
    pub(crate) fn complete_growth(&mut self, change: Change) {
        self.min_size = change.range.end() as usize;
        self.min_visible_size = self.min_size;
        self.succeed(change, true);
    }

    /// The change succeeded, and is stable if `is_durable`.
    pub(crate) fn succeed(&mut self, change: Change, is_durable: bool) {
        let before = self.before[change.number as usize];
        for index in indices(change.range) {
            self.visible[index] &= !before;
            if is_durable {
                self.stable[index] &= !before;
            }
        }
        self.ended |= 1 << change.number;
    }

    /// The change failed: any part of it may have happened, and nothing more of it happens later.
    pub(crate) fn fail(&mut self, change: Change) {
        self.ended |= 1 << change.number;
        self.unsuccessful |= 1 << change.number;
    }

    /// The change's future was dropped: it may still happen at any time, but once seen it stays.
    pub(crate) fn cancel(&mut self, change: Change) {
        self.unsuccessful |= 1 << change.number;
    }

    pub(crate) fn begin_flush(&self) -> Flushing {
        Flushing { visible: self.visible.clone(), begun: self.begun }
    }

    /// The flush succeeded. Bytes that the disk has gained since the flush began are left as they
    /// are.
    pub(crate) fn flushed(&mut self, flushing: &Flushing) {
        let since = self.begun & !flushing.begun;
        for (stable, visible) in self.stable.iter_mut().zip(&flushing.visible) {
            *stable &= visible | since;
        }
    }

    pub(crate) fn begin_read(&self, range: ByteRange) -> Reading {
        let permitted = self.visible[indices(range)].to_vec();
        Reading { range, permitted, begun: self.begun, ended: self.ended }
    }

    /// Checks that a read may return `bytes`, and records which changes it has seen.
    pub(crate) fn end_read(&mut self, reading: &Reading, bytes: &[u8]) -> Result<(), String> {
        let since = self.begun & !reading.begun;
        let sets = reading.permitted.iter().map(|set| set | since);
        self.check("a read saw", reading.range.offset(), bytes, sets)?;
        for ((index, &byte), set) in indices(reading.range).zip(bytes).zip(&reading.permitted) {
            let has_rested = *set == self.visible[index] && set & !reading.ended == 0;
            let set = set | since;
            let seen = own_bit(byte) & set & self.unsuccessful;
            if seen != 0 && set & self.undefined == 0 {
                self.visible[index] &= !self.before[seen.trailing_zeros() as usize];
            }
            if has_rested {
                self.seen[index] = Some(byte);
            }
        }
        Ok(())
    }

    /// The process has ended: nothing is in flight.
    pub(crate) fn end_process(&mut self, remains: Remains) {
        self.ended = self.begun;
        self.unsuccessful = 0;
        if remains != Remains::Answered {
            self.visible.clone_from(&self.stable);
            self.min_visible_size = self.min_size;
            self.seen.fill(None);
        }
        self.is_all_stable |= remains == Remains::Stable;
    }

    /// The next process has read all of the disk before it changed anything.
    pub(crate) fn begin_process(&mut self, found: &[u8]) -> Result<(), String> {
        let sizes = self.min_visible_size..=self.visible.len();
        if !sizes.contains(&found.len()) {
            return Err(format!(
                "a disk of {sizes:?} bytes, the next process found {}",
                found.len()
            ));
        }
        self.check("the next process found", 0, found, self.visible.iter().copied())?;
        let again = self
            .seen
            .iter()
            .zip(found)
            .position(|(seen, byte)| seen.is_some_and(|seen| seen != *byte));
        if let Some(index) = again {
            let (seen, byte) = (self.seen[index], found[index]);
            return Err(format!(
                "the next process found {byte} at offset {index}, where a read saw {seen:?}"
            ));
        }
        self.set_length(found.len());
        for (index, &byte) in found.iter().enumerate() {
            let set = self.visible[index];
            let own = set & self.own(byte);
            self.visible[index] = if own != 0 { own } else { set & self.undefined };
            self.seen[index] = Some(byte);
        }
        self.min_visible_size = found.len();
        if std::mem::take(&mut self.is_all_stable) {
            self.stable.clone_from(&self.visible);
            self.min_size = found.len();
        }
        self.recycle();
        Ok(())
    }

    /// Frees the numbers of changes that no byte can show.
    fn recycle(&mut self) {
        let used = self.visible.iter().chain(&self.stable).fold(0, |used, set| used | set);
        self.begun = used;
        self.ended = used;
        self.zeros &= used;
        self.undefined &= used;
    }

    /// Whether a crash may have left `image` behind.
    pub(crate) fn check_crash(&self, image: &[u8]) -> Result<(), String> {
        let sizes = self.min_size..=self.stable.len();
        if !sizes.contains(&image.len()) {
            return Err(format!("a disk of {sizes:?} bytes, found {}", image.len()));
        }
        self.check("after a crash there was", 0, image, self.stable.iter().copied())
    }

    fn check(
        &self,
        what: &str,
        offset: u64,
        bytes: &[u8],
        sets: impl Iterator<Item = u64>,
    ) -> Result<(), String> {
        for (index, (&byte, set)) in bytes.iter().zip(sets).enumerate() {
            if !self.permits(set, byte) {
                let changes: Vec<_> =
                    (0..u64::BITS).filter(|number| set >> number & 1 == 1).collect();
                return Err(format!(
                    "{what} {byte} at offset {}, permitted are the changes {changes:?} \
                     (change n stores n + 1, zero writes among them: {:#x})",
                    offset + index as u64,
                    self.zeros
                ));
            }
        }
        Ok(())
    }

    fn permits(&self, set: u64, byte: u8) -> bool {
        set & (self.own(byte) | self.undefined) != 0
    }

    /// The changes that store `byte`.
    fn own(&self, byte: u8) -> u64 {
        if byte == 0 { self.zeros } else { own_bit(byte) & !self.zeros }
    }
}

fn indices(range: ByteRange) -> std::ops::Range<usize> {
    range.offset() as usize..range.end() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: fn() -> ByteRange = || ByteRange::between(0, 4);

    #[test]
    fn a_plain_write_may_be_lost_until_a_flush_began_after_it() {
        let (mut model, first) = Model::new(4);
        let change = model.begin(ALL(), WriteKind::Data).unwrap();
        let early = model.begin_flush();
        model.succeed(change, false);
        model.flushed(&early);
        let written = [change.value(); 4];
        assert!(model.check_crash(&first).is_ok() && model.check_crash(&written).is_ok());
        let late = model.begin_flush();
        model.flushed(&late);
        assert!(model.check_crash(&first).is_err() && model.check_crash(&written).is_ok());
    }

    #[test]
    fn reads_see_the_last_write_or_those_beside_it() {
        let (mut model, first) = Model::new(4);
        let one = model.begin(ALL(), WriteKind::Data).unwrap();
        let two = model.begin(ALL(), WriteKind::Zeros).unwrap();
        model.succeed(one, false);
        model.succeed(two, false);
        let reading = model.begin_read(ALL());
        assert!(model.end_read(&reading, &first).is_err());
        assert!(model.end_read(&reading, &[one.value(), 0, 0, one.value()]).is_ok());
        let three = model.begin(ALL(), WriteKind::Data).unwrap();
        assert!(model.end_read(&reading, &[three.value(); 4]).is_ok(), "it began meanwhile");
        model.succeed(three, true);
        assert!(model.check_crash(&[0; 4]).is_err());
        assert!(model.check_crash(&[three.value(); 4]).is_ok());
    }

    #[test]
    fn a_cancelled_write_may_show_at_any_time() {
        let (mut model, _) = Model::new(4);
        let cancelled = model.begin(ALL(), WriteKind::Data).unwrap();
        model.cancel(cancelled);
        let later = model.begin(ALL(), WriteKind::Data).unwrap();
        model.succeed(later, true);
        assert!(model.check_crash(&[cancelled.value(); 4]).is_ok());
    }

    #[test]
    fn what_was_seen_and_then_flushed_is_there_to_stay() {
        let (mut model, first) = Model::new(4);
        let cancelled = model.begin(ALL(), WriteKind::Data).unwrap();
        model.cancel(cancelled);
        let reading = model.begin_read(ALL());
        assert!(model.end_read(&reading, &[cancelled.value(); 4]).is_ok());
        assert!(model.check_crash(&first).is_ok());
        let flushing = model.begin_flush();
        model.flushed(&flushing);
        assert!(model.check_crash(&first).is_err());
    }

    #[test]
    fn a_disk_that_grows_may_have_its_old_size_until_it_has_grown() {
        let (mut model, mut image) = Model::new(4);
        let growth = model.begin_growth(6).unwrap();
        assert!(model.check_crash(&image).is_ok());
        image.extend([0, 0]);
        assert!(model.check_crash(&image).is_ok() && model.check_crash(&image[..3]).is_err());
        model.complete_growth(growth);
        assert!(model.check_crash(&image).is_ok() && model.check_crash(&image[..4]).is_err());
        image[5] = 1;
        assert!(model.check_crash(&image).is_err());
    }

    #[test]
    fn a_model_runs_out_of_changes() {
        let (mut model, _) = Model::new(1);
        let range = ByteRange::between(0, 1);
        for _ in 0..MAX_CHANGES {
            assert!(model.begin(range, WriteKind::Data).is_some());
        }
        assert!(model.begin(range, WriteKind::Data).is_none());
    }

    #[test]
    fn a_dead_process_leaves_what_it_answered() {
        let (mut model, first) = Model::new(4);
        let answered = model.begin(ByteRange::between(0, 2), WriteKind::Data).unwrap();
        model.succeed(answered, false);
        let in_flight = model.begin(ByteRange::between(1, 3), WriteKind::Data).unwrap();
        model.end_process(Remains::Answered);
        let found = |bytes: [u8; 4]| model.clone().begin_process(&bytes);
        let (one, two, old) = (answered.value(), in_flight.value(), first[3]);
        assert!(found([one, one, old, old]).is_ok() && found([one, two, two, old]).is_ok());
        assert!(found([old, one, old, old]).is_err() && found([two, one, old, old]).is_err());
    }

    #[test]
    fn what_a_process_found_is_found_again_until_the_power_is_lost() {
        let (mut model, first) = Model::new(4);
        let change = model.begin(ALL(), WriteKind::Data).unwrap();
        model.end_process(Remains::Answered);
        let written = [change.value(); 4];
        model.begin_process(&written).unwrap();
        model.end_process(Remains::Answered);
        assert!(model.clone().begin_process(&first).is_err());
        assert!(model.clone().begin_process(&written).is_ok());
        // Nothing of it was flushed.
        model.end_process(Remains::Stable);
        model.begin_process(&first).unwrap();
        assert!(model.check_crash(&first).is_ok() && model.check_crash(&written).is_err());
    }

    #[test]
    fn what_is_durable_stays_whatever_dies() {
        let (mut model, first) = Model::new(4);
        let change = model.begin(ALL(), WriteKind::Data).unwrap();
        model.succeed(change, true);
        let other = model.begin(ALL(), WriteKind::Data).unwrap();
        model.succeed(other, false);
        model.end_process(Remains::Durable);
        assert!(model.clone().begin_process(&first).is_err());
        model.begin_process(&[change.value(); 4]).unwrap();
        model.end_process(Remains::Stable);
        assert!(model.clone().begin_process(&[other.value(); 4]).is_ok());
        assert!(model.begin_process(&first).is_err());
    }

    #[test]
    fn what_a_read_saw_at_rest_outlives_the_process() {
        let (mut model, _) = Model::new(4);
        let discard = model.begin(ALL(), WriteKind::Undefined).unwrap();
        model.succeed(discard, false);
        let reading = model.begin_read(ALL());
        model.end_read(&reading, &[9; 4]).unwrap();
        model.end_process(Remains::Answered);
        assert!(model.clone().begin_process(&[8; 4]).is_err());
        assert!(model.begin_process(&[9; 4]).is_ok());
    }

    #[test]
    fn processes_that_follow_each_other_never_run_out_of_changes() {
        let (mut model, _) = Model::new(4);
        for _ in 0..10 {
            let mut last = 0;
            for _ in 0..20 {
                let change = model.begin(ALL(), WriteKind::Data).unwrap();
                model.succeed(change, true);
                last = change.value();
            }
            model.end_process(Remains::Answered);
            model.begin_process(&[last; 4]).unwrap();
        }
    }
}
