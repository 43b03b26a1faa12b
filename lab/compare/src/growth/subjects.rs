//! The subjects that grow, and their steps.

use crate::servers::Format;

/// Something that grows.
#[derive(Clone, Copy)]
pub struct Subject {
    /// The name in reports and on the command line.
    pub name: &'static str,
    /// The things that are counted, for reports.
    pub what: &'static str,
    /// How it is measured.
    pub work: Work,
    /// The steps. Ratios are to the first.
    pub points: &'static [u64],
}

/// The work at each step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Random reads of 4 KiB from a mapped image by this many queues, each with [`QUEUE_DEPTH`] in
    /// flight, and each on a thread of its own where the server has that.
    Queues(Format),
    /// Writes of 4 KiB all over an empty disk of this many GiB.
    Size,
    /// Random reads of 4 KiB through this many overlays, each of which has clusters of its own.
    Chain,
    /// The time until an image with this many snapshots is served.
    Open,
    /// The time that the tool needs to take one more snapshot.
    Take,
    /// Reads of [`REQUEST`] bytes, one at a time, that consist of this many extents.
    Extents,
}

/// Requests in flight for each queue.
pub const QUEUE_DEPTH: u16 = 16;

/// Bytes of a long read: the maximum that NBD servers accept.
pub const REQUEST: u32 = 32 << 20;

/// All subjects, in the order of reports.
pub const SUBJECTS: &[Subject] = &[
    Subject {
        name: "queues-raw",
        what: "queues of a guest, raw",
        work: Work::Queues(Format::Raw),
        points: &[1, 2, 4, 8],
    },
    Subject {
        name: "queues-qcow2",
        what: "queues of a guest, qcow2",
        work: Work::Queues(Format::Qcow2),
        points: &[1, 2, 4, 8],
    },
    Subject { name: "size", what: "GiB of the disk", work: Work::Size, points: &[64, 4096, 65536] },
    Subject { name: "chain", what: "overlays", work: Work::Chain, points: &[1, 8, 64] },
    Subject {
        name: "snapshots-open",
        what: "snapshots, opened",
        work: Work::Open,
        points: &[10, 1000, 10_000],
    },
    Subject {
        name: "snapshots-take",
        what: "snapshots, one more taken",
        work: Work::Take,
        points: &[10, 1000, 10_000],
    },
    Subject {
        name: "extents",
        what: "extents of a read of 32 MiB",
        work: Work::Extents,
        points: &[1, 128, 16_384],
    },
];

impl Work {
    /// The unit of its figures.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Queues(_) | Self::Size | Self::Chain => "kIOPS",
            Self::Extents => "MiB/s",
            Self::Open | Self::Take => "ms",
        }
    }
}
