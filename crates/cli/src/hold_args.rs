//! The options of `serve` and `ctl open` for writes when the host has no free space.

use blockhouse_config::threshold::Threshold;
use blockhouse_disk::OnFull;

/// The treatment of writes when the host has no free space.
#[derive(clap::Args, Clone)]
pub struct HoldArgs {
    /// The treatment of writes when the host, or the device that a qcow2 image is on, has no free
    /// space: report fails them with ENOSPC, hold makes them wait for space.
    ///
    /// Reads, and writes to allocated space, continue meanwhile. Held writes are retried every
    /// second, on SIGHUP and by 'blockhouse ctl SOCKET refresh DISK'. Left out: report.
    #[arg(long, value_name = "report|hold", value_parser = ["report", "hold"])]
    pub on_full: Option<String>,
    /// With --on-full hold: for how many seconds a write is held before it fails with ENOSPC. Left
    /// out: 300.
    #[arg(long, value_name = "N")]
    pub hold_seconds: Option<u32>,
    /// Report when less free space than this is left on the host, or on the device that a qcow2
    /// image is on: bytes (10G), or a percentage (10%). Each crossing gives the event
    /// disk.threshold and a line in the log, before writes are held or fail.
    #[arg(long, value_name = "BYTES|PERCENT", value_parser = str::parse::<Threshold>)]
    pub threshold: Option<Threshold>,
}

impl HoldArgs {
    /// The setting that --on-full and --hold-seconds give together.
    ///
    /// # Errors
    /// The mistake, in words.
    pub fn on_full(&self) -> Result<OnFull, String> {
        OnFull::new(self.on_full.as_deref() == Some("hold"), self.hold_seconds)
    }
}
