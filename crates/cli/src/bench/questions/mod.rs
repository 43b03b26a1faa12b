//! The questions that can be measured: a file for each, with its cases and published figures.

mod datasync;
pub mod fixed_files;
mod fua;
mod random;
pub mod vmstate;
pub mod wakeup;

use std::time::Duration;

use clap::ValueEnum;

use super::rows::Cases;
use super::testbed::Testbed;

/// A question that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Question {
    /// Durable writes as one request, against a write and then a flush.
    Fua,
    /// Overwrites from one end to the other: not durable, with a flush each, as one request.
    Datasync,
    /// Small reads with the file in the ring's own table, and by its descriptor.
    FixedFiles,
    /// A machine's state in small pieces into an image, one by one and through the stream.
    Vmstate,
    /// Requests from another thread, with the wake-up of the loop and without.
    Wakeup,
    /// Small reads and writes, per engine.
    Random,
    /// All of these.
    All,
}

impl Question {
    /// The single questions that this one consists of.
    pub fn parts(self) -> Vec<Self> {
        match self {
            Self::All => {
                Self::value_variants().iter().copied().filter(|&one| one != Self::All).collect()
            }
            one => vec![one],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Fua => "fua",
            Self::Datasync => "datasync",
            Self::FixedFiles => "fixed-files",
            Self::Vmstate => "vmstate",
            Self::Wakeup => "wakeup",
            Self::Random => "random",
            Self::All => "all",
        }
    }

    /// The measured operations, as the beginning of the sentence that gives the result.
    pub fn subject(self) -> &'static str {
        match self {
            Self::Fua => "Durable writes are",
            Self::Datasync => "Overwrites in order are",
            Self::FixedFiles => "Small reads are",
            Self::Vmstate => "Saving a machine's state is",
            Self::Wakeup => "Requests from another thread are",
            Self::Random => "Small reads and writes are",
            Self::All => "",
        }
    }

    /// The text about one part, for the page of results.
    pub fn about(self) -> &'static str {
        match self {
            Self::Fua => fua::ABOUT,
            Self::Datasync => datasync::ABOUT,
            Self::FixedFiles => fixed_files::ABOUT,
            Self::Vmstate => vmstate::ABOUT,
            Self::Wakeup => wakeup::ABOUT,
            Self::Random => random::ABOUT,
            Self::All => "",
        }
    }

    /// The cases of one part.
    pub fn cases(self, testbed: &Testbed) -> Cases<'_> {
        match self {
            Self::Fua => fua::cases(testbed),
            Self::Datasync => datasync::cases(testbed),
            Self::FixedFiles => fixed_files::cases(testbed),
            Self::Vmstate => vmstate::cases(testbed),
            Self::Wakeup => wakeup::cases(testbed),
            Self::Random => random::cases(testbed),
            Self::All => Cases::all([]),
        }
    }

    /// The time limit if the user gives none.
    pub fn usual_time(self) -> Duration {
        Duration::from_secs(if self == Self::All { 120 } else { 30 })
    }
}
