//! The options of writes that find no room, of `serve` and `ctl open`.

use blockhouse_config::threshold::Threshold;
use blockhouse_disk::OnFull;

/// The treatment of writes that find no room on the host.
#[derive(clap::Args, Clone)]
pub struct HoldArgs {
    /// Writes that find no room on the host, or at the end of the device that a qcow2 image is on:
    /// report fails them with ENOSPC, hold has them wait until there is room.
    ///
    /// Reads, and writes to what has its place already, go on meanwhile. Held writes are tried
    /// again every second, on SIGHUP and by 'blockhouse ctl SOCKET refresh DISK'. Left out:
    /// report.
    #[arg(long, value_name = "report|hold", value_parser = ["report", "hold"])]
    pub on_full: Option<String>,
    /// With --on-full hold: for how many seconds a write is held before it fails with ENOSPC. Left
    /// out: 300.
    #[arg(long, value_name = "N")]
    pub hold_seconds: Option<u32>,
    /// Tell when less than this is left on the host, or on the device that a qcow2 image is on:
    /// bytes (10G), or a part of all (10%). The event disk.threshold, and a line in the log,
    /// once for each crossing; before writes are held or fail.
    #[arg(long, value_name = "BYTES|PERCENT", value_parser = str::parse::<Threshold>)]
    pub threshold: Option<Threshold>,
}

impl HoldArgs {
    /// Their common meaning.
    ///
    /// # Errors
    /// The mistake, in words.
    pub fn on_full(&self) -> Result<OnFull, String> {
        OnFull::new(self.on_full.as_deref() == Some("hold"), self.hold_seconds)
    }
}
