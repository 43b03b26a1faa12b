//! The limit on a command's writes, `-r`.

use std::num::NonZeroU64;

use blockhouse_config::size;
use blockhouse_disk::{MAX_RATE, RateLimits, Throttle};

/// The option of commands that copy.
#[derive(clap::Args, Clone, Copy, Default)]
pub struct RateArgs {
    /// Limit writes to the target, in bytes a second: 512K, 100M; 0 is no limit.
    #[arg(long = "rate-limit", short = 'r', value_name = "BYTES", value_parser = parse)]
    rate: Option<Rate>,
}

/// Bytes a second; `None` is no limit.
#[derive(Clone, Copy)]
struct Rate(Option<NonZeroU64>);

fn parse(text: &str) -> Result<Rate, String> {
    Ok(Rate(NonZeroU64::new(size::parse(text)?.min(MAX_RATE))))
}

impl RateArgs {
    /// Whether there is a limit.
    pub fn is_given(self) -> bool {
        self.rate.is_some_and(|Rate(rate)| rate.is_some())
    }

    /// Sets the limit of a disk or a new image.
    pub fn apply(self, throttle: &Throttle) {
        if let Some(Rate(bps_write @ Some(_))) = self.rate {
            throttle.set_limits(RateLimits { bps_write, ..RateLimits::default() });
        }
    }
}
