//! Retries changes that got ENOSPC: the disk's side of [`Hold`](super::hold::Hold).
//!
//! A change is retried as a whole, like a new one, with its original bytes. While the change waits,
//! it is in flight for its client, but not for the disk: no snapshot, resize or close waits for it.
//! Its retry fails like any other change if the disk has become read-only.
//!
//! Requests of the disk's own jobs are not retried, because jobs handle ENOSPC themselves. Requests
//! that can no longer succeed, because a flush has failed, are not retried either.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Fallback, KeptVector, Request, Result, Storage, Unmap,
    errno,
};

use blockhouse_engine::current_party;

use super::Disk;
use super::hold::{Hold, Wake};
use super::in_flight::RequestInFlight;
use crate::image::Image;
use crate::options::OnFull;

/// A change that can be carried out once more.
pub(super) struct KeptChange {
    limit: Duration,
    /// The hold's number of releases before the change was tried.
    seen: u64,
    what: What,
}

enum What {
    Write { offset: u64, bytes: KeptVector, durability: Durability },
    WriteZeroes { range: ByteRange, unmap: Unmap, fallback: Fallback, durability: Durability },
    Discard { range: ByteRange, durability: Durability },
    Flush,
}

impl What {
    /// The request, and its copy for a retry; no copy of a read or a prefetch.
    fn of(request: Request) -> (Request, Option<Self>) {
        match request {
            Request::Write { offset, from, durability } => {
                let (from, bytes) = from.keep();
                let what = Self::Write { offset, bytes, durability };
                (Request::Write { offset, from, durability }, Some(what))
            }
            Request::WriteZeroes { range, unmap, fallback, durability } => {
                let what = Self::WriteZeroes { range, unmap, fallback, durability };
                (request, Some(what))
            }
            Request::Discard { range, durability } => {
                (request, Some(Self::Discard { range, durability }))
            }
            Request::Flush => (request, Some(Self::Flush)),
            Request::Read { .. } | Request::Prefetch { .. } => (request, None),
        }
    }

    /// The same request once more; `None` while an operation may still use its bytes.
    fn again(&mut self) -> Option<Request> {
        Some(match self {
            Self::Write { offset, bytes, durability } => {
                Request::Write { offset: *offset, from: bytes.lend()?, durability: *durability }
            }
            Self::WriteZeroes { range, unmap, fallback, durability } => Request::WriteZeroes {
                range: *range,
                unmap: *unmap,
                fallback: *fallback,
                durability: *durability,
            },
            Self::Discard { range, durability } => {
                Request::Discard { range: *range, durability: *durability }
            }
            Self::Flush => Request::Flush,
        })
    }
}

/// The held changes of one party, such as a guest's queue. The end of a queue must not wait for
/// free space.
pub struct PartyHold<S: Storage> {
    disk: Arc<Disk<S>>,
    party: usize,
}

impl<S: Storage> PartyHold<S> {
    /// The held changes of the current party.
    pub fn of_current(disk: &Arc<Disk<S>>) -> Self {
        Self { disk: Arc::clone(disk), party: current_party() }
    }

    /// Fails the party's held changes with ENOSPC, and each later one that gets ENOSPC.
    pub fn end(&self) {
        self.disk.hold().end_party(self.party);
    }
}

impl<S: Storage> Drop for PartyHold<S> {
    fn drop(&mut self) {
        self.disk.hold().forget_party(self.party);
    }
}

impl<S: Storage> Disk<S> {
    /// The disk's changes that wait for free space.
    pub fn hold(&self) -> &Hold {
        &self.hold
    }
}

impl KeptChange {
    /// The request to `disk`, and its copy for a retry; `None` if it is not retried.
    pub(super) fn of<S: Storage>(disk: &Disk<S>, request: Request) -> (Request, Option<Self>) {
        let OnFull::Hold(limit) = disk.images.first().options.on_full else {
            return (request, None);
        };
        let seen = disk.hold.releases();
        let (request, what) = What::of(request);
        (request, what.map(|what| Self { limit, seen, what }))
    }

    /// Retries a change that failed with `error`, until it succeeds or its limit is reached.
    /// Returns the error at once if waiting does not help.
    #[cold]
    pub(super) async fn retry<S: Storage>(
        self,
        failed: RequestInFlight<'_, S>,
        mut error: Error,
    ) -> Result<()> {
        let Self { limit, seen, mut what } = self;
        let disk = failed.disk;
        if !may_find_room(disk.image(), &error) {
            return Err(error);
        }
        let Some(mut held) = disk.hold.begin(seen, limit, || error.to_string()) else {
            return Err(error);
        };
        loop {
            let waited = failed.wait(pin!(held.wait())).await;
            // All operations of a failed request have ended, so its bytes can be used again.
            let Some(request) = what.again().filter(|_| waited == Wake::Retry) else {
                return Err(error);
            };
            match failed.carry_out(request).await {
                Err(again) if may_find_room(disk.image(), &again) => error = again,
                outcome => {
                    if outcome.is_ok() {
                        held.found_room();
                    }
                    return outcome;
                }
            }
        }
    }
}

/// Whether a change with this error may succeed when the host has more free space.
fn may_find_room<S: Storage>(image: &Image<S>, error: &Error) -> bool {
    let storages = [image.format().storage(), image.format().data()];
    error.kind() == ErrorKind::NoSpace
        // EFBIG: the file system does not support files of that length, however much space is free.
        && error.errno() != errno::EFBIG
        && storages.iter().all(|storage| storage.failure().is_none())
}
