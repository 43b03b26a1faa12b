//! Crashes at chosen steps of a hand-over, for tests: in builds with debug assertions only.
//!
//! The environment variable `BLOCKHOUSE_HAND_OVER_FAULT` names a step, as `source-offered`: there
//! the process kills itself. `version` makes the destination use another version of the format.

/// A step of a hand-over.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// The source has sent its offer.
    SourceOffered,
    /// The source executes nothing.
    SourceSettled,
    /// The source has sent what it stopped to serve.
    SourceGave,
    /// The source has read that the destination took over.
    SourceGaveUp,
    /// The destination has received the offer.
    DestinationOffered,
    /// The destination has said that it is ready.
    DestinationReady,
    /// The destination may take over.
    DestinationMay,
    /// The destination has opened the images.
    DestinationOpened,
    /// The destination has said that it took over.
    DestinationTook,
}

impl Step {
    #[cfg(debug_assertions)]
    fn name(self) -> &'static str {
        match self {
            Self::SourceOffered => "source-offered",
            Self::SourceSettled => "source-settled",
            Self::SourceGave => "source-gave",
            Self::SourceGaveUp => "source-gave-up",
            Self::DestinationOffered => "destination-offered",
            Self::DestinationReady => "destination-ready",
            Self::DestinationMay => "destination-may",
            Self::DestinationOpened => "destination-opened",
            Self::DestinationTook => "destination-took",
        }
    }
}

#[cfg(debug_assertions)]
fn wanted(name: &str) -> bool {
    std::env::var_os("BLOCKHOUSE_HAND_OVER_FAULT").is_some_and(|wanted| wanted == name)
}

/// Reaches a step: the process ends here if a test wants it to.
#[cfg(debug_assertions)]
pub fn reach(step: Step) {
    if wanted(step.name()) {
        use rustix::process::{Signal, getpid, kill_process};
        // Nothing survives this signal.
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

#[cfg(not(debug_assertions))]
pub fn reach(_: Step) {}

/// The version of the format that the destination is to speak, where that is not its own.
#[cfg(debug_assertions)]
pub fn version() -> Option<u32> {
    (wanted("version")).then_some(super::format::VERSION + 1)
}

#[cfg(not(debug_assertions))]
pub fn version() -> Option<u32> {
    None
}
