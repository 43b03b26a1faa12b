//! Crashes at chosen steps of a hand-over, for tests: in builds with debug assertions only.
//!
//! The environment variable `BLOCKHOUSE_HAND_OVER_FAULT` names a step, such as `source-offered`, at
//! which the process kills itself. `version` makes the destination use another version of the
//! format.

/// A step of a hand-over.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// The source has sent its offer.
    SourceOffered,
    /// The source has stopped executing requests.
    SourceSettled,
    /// The source has sent [`Message::Yours`](super::format::Message::Yours).
    SourceGave,
    /// The source has received the report that the destination took over.
    SourceGaveUp,
    /// The destination has received the offer.
    DestinationOffered,
    /// The destination has reported that it is ready.
    DestinationReady,
    /// The destination has received the permission to take over.
    DestinationMay,
    /// The destination has opened the images.
    DestinationOpened,
    /// The destination has reported that it took over.
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

/// Marks a step: the process ends here if a test has chosen this step.
#[cfg(debug_assertions)]
pub fn reach(step: Step) {
    if wanted(step.name()) {
        use rustix::process::{Signal, getpid, kill_process};
        // No process survives this signal.
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

#[cfg(not(debug_assertions))]
pub fn reach(_: Step) {}

/// The version of the format that the destination must use, if not its own.
#[cfg(debug_assertions)]
pub fn version() -> Option<u32> {
    (wanted("version")).then_some(super::format::VERSION + 1)
}

#[cfg(not(debug_assertions))]
pub fn version() -> Option<u32> {
    None
}
