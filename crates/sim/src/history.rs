//! The requests and answers of an exploration, for the report of a failure.

use std::fmt;
use std::time::Duration;

use blockhouse_core::{ByteRange, Durability, ErrorKind, Request, Result};

/// The requests of a run in the order in which they began.
#[derive(Default)]
pub(crate) struct History(Vec<Entry>);

enum Entry {
    Request(RequestEntry),
    /// An event that concerns all requests.
    Event(Duration, String),
}

struct RequestEntry {
    verb: &'static str,
    range: Option<ByteRange>,
    durability: Durability,
    begun: Duration,
    ended: Option<(Duration, Outcome)>,
}

enum Outcome {
    Succeeded,
    Failed(ErrorKind),
    Cancelled,
}

impl History {
    /// Records that a request begins; returns its number.
    pub(crate) fn asked(&mut self, now: Duration, request: &Request) -> usize {
        let (verb, range, durability) = words_of(request);
        self.begun(now, verb, range, durability)
    }

    /// Records that a change of the size begins; returns its number.
    pub(crate) fn asked_to_grow(&mut self, now: Duration, size: u64) -> usize {
        self.begun(now, "grow to", ByteRange::new(0, size), Durability::Full)
    }

    /// Records that maintenance of the image begins; returns its number.
    pub(crate) fn asked_to_maintain(&mut self, now: Duration) -> usize {
        self.begun(now, "maintain", None, Durability::None)
    }

    /// Records an event that concerns all requests.
    pub(crate) fn note(&mut self, now: Duration, event: impl Into<String>) {
        self.0.push(Entry::Event(now, event.into()));
    }

    fn begun(
        &mut self,
        now: Duration,
        verb: &'static str,
        range: Option<ByteRange>,
        durability: Durability,
    ) -> usize {
        let entry = RequestEntry { verb, range, durability, begun: now, ended: None };
        self.0.push(Entry::Request(entry));
        self.0.len() - 1
    }

    /// Records that the request ended, or was cancelled.
    pub(crate) fn answered(&mut self, number: usize, now: Duration, outcome: &Option<Result<()>>) {
        let outcome = match outcome {
            Some(Ok(())) => Outcome::Succeeded,
            Some(Err(error)) => Outcome::Failed(error.kind()),
            None => Outcome::Cancelled,
        };
        if let Entry::Request(entry) = &mut self.0[number] {
            entry.ended = Some((now, outcome));
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.0 {
            let entry = match entry {
                Entry::Request(entry) => entry,
                Entry::Event(at, event) => {
                    writeln!(f, "  {at:?}: {event}")?;
                    continue;
                }
            };
            write!(f, "  {:?}: {}", entry.begun, entry.verb)?;
            if let Some(range) = entry.range {
                write!(f, " {range}")?;
            }
            if entry.durability != Durability::None {
                write!(f, " durability {:?}", entry.durability)?;
            }
            match &entry.ended {
                Some((at, Outcome::Succeeded)) => writeln!(f, " -> {at:?}: done")?,
                Some((at, Outcome::Failed(kind))) => writeln!(f, " -> {at:?}: failed, {kind:?}")?,
                Some((at, Outcome::Cancelled)) => writeln!(f, " -> {at:?}: cancelled")?,
                None => writeln!(f, " -> in flight")?,
            }
        }
        Ok(())
    }
}

fn words_of(request: &Request) -> (&'static str, Option<ByteRange>, Durability) {
    let span = |offset: u64, length: usize| ByteRange::new(offset, length as u64);
    let none = Durability::None;
    match *request {
        Request::Read { offset, ref into } => ("read", span(offset, into.len()), none),
        Request::Write { offset, ref from, durability } => {
            ("write", span(offset, from.len()), durability)
        }
        Request::WriteZeroes { range, durability, .. } => ("zero", Some(range), durability),
        Request::Discard { range, durability } => ("discard", Some(range), durability),
        Request::Flush => ("flush", None, none),
        Request::Prefetch { range } => ("prefetch", Some(range), none),
    }
}
