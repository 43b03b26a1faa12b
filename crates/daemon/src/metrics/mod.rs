//! Metrics of the running server, as OpenMetrics, as Prometheus' older text, and as JSON.
//!
//! - `families`: the names, kinds and meanings of all metrics, in one table; docs/metrics.md
//!   explains them.
//! - `gather`(gather()): the values, read from the disks at each request; no reading is stored.
//! - `text`, `json`: the formats.
//! - `http`, `server`: the socket of `--metrics`.
//! - `stream`: the figures and events of the page, whose own files are in the folder `page`.

mod families;
mod gather;
pub(crate) mod http;
mod json;
mod server;
mod stream;
mod text;

pub use families::{FAMILIES, Family, Kind};
pub use gather::{MeasuredDisk, Sample, Samples, StartTime, Value, gather};
pub use json::to_json;
pub(crate) use server::{MetricsServer, bind};
pub(crate) use stream::Observed;
pub use text::{Form, to_text};
