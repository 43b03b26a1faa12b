//! The result of one measurement.

use std::time::Duration;

/// Times from the submission of a request to its reply.
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

impl Measurement {
    /// Requests answered in a second.
    pub fn requests_a_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.max(Duration::from_nanos(1)).as_secs_f64()
    }

    /// MiB in a second, of requests of `block` bytes each.
    pub fn mebibytes_a_second(&self, block: u32) -> f64 {
        self.requests_a_second() * f64::from(block) / f64::from(1 << 20)
    }

    /// Microseconds of the server's processor time for each request.
    pub fn cpu_a_request(&self) -> f64 {
        self.server_cpu.as_secs_f64() * 1e6 / self.requests.max(1) as f64
    }
}

/// A time in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
