//! The rows of the comparison of qcow2 images: what is done to which image.

use crate::light::Operation;
use crate::rows::{LIGHT, Row, SEQUENTIAL};
use crate::servers::Format;

/// One kind of work.
#[derive(Clone, Copy)]
pub struct Task {
    /// The name in reports and on the command line.
    pub name: &'static str,
    /// The work.
    pub work: Work,
}

/// The kinds of work.
#[derive(Clone, Copy)]
pub enum Work {
    /// A load, for a time, on an image in which every cluster is allocated.
    Mapped(Row),
    /// A load on an image without data, which is made anew for each turn. `Fill` says when the load
    /// ends.
    Empty(Row, Fill),
    /// A copy of a half-full image to this format, by the tools.
    Convert(Format),
    /// The opening of an image of 4 TiB.
    Open(Opening),
}

/// When a load on an empty image ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// All of the disk was written, once.
    Whole,
    /// After requests to random clusters; about one in thirty meets a cluster that another has
    /// allocated. The clusters fill one part in this many of the space for the image, whose disk is
    /// 16 times as large.
    Scattered(u64),
}

/// Which program opens the image.
#[derive(Clone, Copy)]
pub enum Opening {
    /// The tool's `info` command, from its start to its end.
    Info,
    /// A server, from its start until it listens.
    Serve,
}

const DURABLE: Row = Row { operation: Operation::DurableWrite, depth: 16, ..LIGHT };
const FILLING: Row = Row { operation: Operation::Write, ..SEQUENTIAL };

/// All rows, in the order of reports.
pub const TASKS: &[Task] = &[
    Task { name: "randread-4k-d64", work: Work::Mapped(LIGHT) },
    Task { name: "randwrite-fua-4k-d16", work: Work::Mapped(DURABLE) },
    Task {
        name: "alloc-4k-d32",
        work: Work::Empty(
            Row { operation: Operation::Write, depth: 32, ..LIGHT },
            Fill::Scattered(1),
        ),
    },
    Task { name: "alloc-fua-4k-d16", work: Work::Empty(DURABLE, Fill::Scattered(4)) },
    Task {
        name: "alloc-fua-4k-d1",
        work: Work::Empty(Row { depth: 1, ..DURABLE }, Fill::Scattered(16)),
    },
    Task { name: "fill-256k-d8", work: Work::Empty(FILLING, Fill::Whole) },
    Task { name: "convert-to-qcow2", work: Work::Convert(Format::Qcow2) },
    Task { name: "convert-to-raw", work: Work::Convert(Format::Raw) },
    Task { name: "open-info-4t", work: Work::Open(Opening::Info) },
    Task { name: "open-serve-4t", work: Work::Open(Opening::Serve) },
];
