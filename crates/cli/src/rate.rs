//! How fast a command may write: `-r`.

use std::num::NonZeroU64;

use blockhouse_daemon::size;
use blockhouse_disk::{ImageDisk, MAX_RATE, RateLimits};

/// The option of commands that copy.
#[derive(clap::Args, Clone, Copy)]
pub struct RateArgs {
    /// Write no more than so many bytes a second to the target: 512K, 100M.
    #[arg(long = "rate-limit", short = 'r', value_name = "BYTES", value_parser = parse)]
    rate: Option<NonZeroU64>,
}

fn parse(text: &str) -> Result<NonZeroU64, String> {
    let rate = NonZeroU64::new(size::parse(text)?.min(MAX_RATE));
    rate.ok_or_else(|| {
        "nothing would be written at 0; leave it out to write as fast as it goes".into()
    })
}

impl RateArgs {
    /// Whether there is a limit.
    pub fn is_given(self) -> bool {
        self.rate.is_some()
    }

    /// Has `disk` keep to it.
    pub fn apply(self, disk: &ImageDisk) {
        if self.rate.is_some() {
            disk.set_limits(RateLimits { bps_write: self.rate, ..RateLimits::default() });
        }
    }
}
