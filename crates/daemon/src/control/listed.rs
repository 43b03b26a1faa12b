//! Lists of snapshots, with the keys of `qemu-img info`.

use blockhouse_disk::Snapshot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A snapshot.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Listed {
    /// The id: a number, mostly.
    pub id: String,
    /// The name.
    pub name: String,
    /// Bytes of the machine's state.
    pub vm_state_size: u64,
    /// When it was taken: seconds since 1970.
    pub date_sec: u64,
    /// And nanoseconds.
    pub date_nsec: u32,
    /// The time of the machine's clock: seconds.
    pub vm_clock_sec: u64,
    /// And nanoseconds.
    pub vm_clock_nsec: u32,
    /// How many instructions the machine had executed, where that is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

impl From<&Snapshot> for Listed {
    fn from(one: &Snapshot) -> Self {
        Self {
            id: one.id.clone(),
            name: one.name.clone(),
            vm_state_size: one.vm_state_size,
            date_sec: one.created.as_secs(),
            date_nsec: one.created.subsec_nanos(),
            vm_clock_sec: one.vm_clock.as_secs(),
            vm_clock_nsec: one.vm_clock.subsec_nanos(),
            icount: one.instruction_count,
        }
    }
}
