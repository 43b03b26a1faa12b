//! All measurements of the rows on one storage.

use crate::measurement::Measurement;
use crate::rows::Row;
use crate::servers::Kind;
use crate::storage::Storage;

/// One row on one storage: the rounds of each server.
pub struct RowResult {
    /// The load.
    pub row: Row,
    /// A server and one measurement per round; no measurements if the server does not support the
    /// client.
    pub servers: Vec<(Kind, Vec<Measurement>)>,
}

/// All rows on one storage.
pub struct StorageResult {
    /// The storage.
    pub storage: Storage,
    /// In the order of [`ROWS`](crate::rows::ROWS).
    pub rows: Vec<RowResult>,
}
