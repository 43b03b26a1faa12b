//! The result of one measurement.

use std::time::Duration;

/// Times from handing a request over to its answer.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Half are faster.
    pub median: Duration,
    /// One in a hundred is slower.
    pub p99: Duration,
}

/// The result of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    /// Requests answered.
    pub requests: u64,
    /// Wall time.
    pub elapsed: Duration,
    /// Processor time of the server, all threads.
    pub server_cpu: Duration,
    /// Processor time of the client.
    pub client_cpu: Duration,
    /// Over all requests.
    pub latency: Latency,
    /// Requests whose data was checked; fio checks none.
    pub verified: u64,
}
