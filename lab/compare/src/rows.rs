//! The rows of the comparison: a client and its load.

use std::time::Duration;

use super::light::{Content, Load, Operation, Order};

/// The client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// fio with its NBD engine.
    Fio,
    /// Ours.
    Light,
    /// Ours, as a guest with a vhost-user-blk device.
    VhostUser,
}

/// One kind of load.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name in reports and on the command line.
    pub name: &'static str,
    /// The client.
    pub client: Client,
    /// Reads or writes.
    pub operation: Operation,
    /// Where.
    pub order: Order,
    /// Bytes in a request.
    pub block: u32,
    /// Requests in flight, over all connections.
    pub depth: u16,
    /// Connections, or queues, that share the depth.
    pub connections: u16,
}

/// A row to start from.
pub const LIGHT: Row = Row {
    name: "",
    client: Client::Light,
    operation: Operation::Read,
    order: Order::Random,
    block: 4096,
    depth: 64,
    connections: 1,
};
/// A sequential row to start from.
pub const SEQUENTIAL: Row = Row { order: Order::Sequential, block: 256 * 1024, depth: 8, ..LIGHT };

const GUEST: Row = Row { client: Client::VhostUser, ..LIGHT };
const GUEST_SEQUENTIAL: Row = Row { block: 128 * 1024, client: Client::VhostUser, ..SEQUENTIAL };

/// All rows, in the order of reports.
pub const ROWS: &[Row] = &[
    Row { name: "fio-randread-4k-d64", client: Client::Fio, ..LIGHT },
    Row { name: "fio-randread-4k-d1", client: Client::Fio, depth: 1, ..LIGHT },
    Row { name: "randread-4k-d64", ..LIGHT },
    Row { name: "randread-4k-d64-c4", connections: 4, ..LIGHT },
    Row { name: "randread-4k-d1", depth: 1, ..LIGHT },
    Row { name: "randwrite-4k-d64", operation: Operation::Write, ..LIGHT },
    Row { name: "randwrite-fua-4k-d16", operation: Operation::DurableWrite, depth: 16, ..LIGHT },
    Row { name: "seqread-256k-d8", ..SEQUENTIAL },
    Row { name: "seqwrite-256k-d8", operation: Operation::Write, ..SEQUENTIAL },
    Row { name: "vu-randread-4k-d64", ..GUEST },
    Row { name: "vu-randread-4k-d64-q2", connections: 2, ..GUEST },
    Row { name: "vu-randread-4k-d16", depth: 16, ..GUEST },
    Row { name: "vu-randread-4k-d1", depth: 1, ..GUEST },
    Row { name: "vu-randwrite-4k-d64", operation: Operation::Write, ..GUEST },
    Row { name: "vu-durable-4k-d16", operation: Operation::DurableWrite, depth: 16, ..GUEST },
    Row { name: "vu-durable-4k-d1", operation: Operation::DurableWrite, depth: 1, ..GUEST },
    Row { name: "vu-seqread-128k-d8", ..GUEST_SEQUENTIAL },
    Row { name: "vu-seqwrite-128k-d8", operation: Operation::Write, ..GUEST_SEQUENTIAL },
];

/// The export that is asked for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Export {
    /// An NBD server.
    Nbd,
    /// A vhost-user-blk device.
    VhostUser,
}

impl Client {
    /// The export.
    pub fn export(self) -> Export {
        match self {
            Self::Fio | Self::Light => Export::Nbd,
            Self::VhostUser => Export::VhostUser,
        }
    }
}

impl Row {
    /// The light client's load in this row, without a limit on requests, and without checks of what
    /// it reads.
    pub fn load(&self, generation: u64) -> Load {
        Load {
            operation: self.operation,
            order: self.order,
            block: self.block,
            depth: self.depth,
            connections: self.connections,
            warm_up: Duration::ZERO,
            duration: Duration::MAX,
            requests: u64::MAX,
            generation,
            content: Content::Nothing,
        }
    }

    /// Whether its figure is a bandwidth, not a rate of requests.
    pub fn is_bandwidth(&self) -> bool {
        self.order == Order::Sequential
    }
}
