//! `ctl SOCKET bitmap`: the persistent bitmaps of a served disk.

use blockhouse_daemon::size;
use serde_json::{Value, json};

use super::params::add_given;

#[derive(clap::Subcommand)]
pub(super) enum BitmapAction {
    /// Tell which bitmaps a disk has, and how much of it each says to have changed.
    List {
        /// The disk's name.
        disk: String,
    },
    /// Add a bitmap, in which changes of the disk are recorded from now on.
    Add {
        /// The disk's name.
        disk: String,
        /// What to call it: 1 to 1023 bytes, unlike all others.
        name: String,
        /// How many bytes of the disk one bit stands for: a power of two, 512 B to 2 GiB. Left out: a cluster,
        /// but 4 KiB at least and 64 KiB at most.
        #[arg(long, short, value_name = "SIZE", value_parser = size::parse)]
        granularity: Option<u64>,
        /// Record nothing in it before it is enabled.
        #[arg(long)]
        disabled: bool,
    },
    /// Remove a bitmap.
    Remove(Named),
    /// Forget the changes in a bitmap: what is recorded in it begins anew.
    Clear(Named),
    /// Record changes of the disk in a bitmap from now on.
    Enable(Named),
    /// Record nothing more in a bitmap.
    Disable(Named),
    /// Add the changes that one bitmap has to those of another one.
    Merge {
        /// The disk's name.
        disk: String,
        /// The bitmap that gets them.
        name: String,
        /// The bitmap that has them.
        source: String,
    },
}

/// A bitmap of a disk.
#[derive(clap::Args)]
pub(super) struct Named {
    /// The disk's name.
    disk: String,
    /// The bitmap's name.
    name: String,
}

impl Named {
    fn params(&self) -> Value {
        json!({ "disk": self.disk, "name": self.name })
    }
}

impl BitmapAction {
    /// The method and its parameters.
    pub(super) fn request(self) -> (&'static str, Value) {
        match self {
            Self::List { disk } => ("bitmap.list", json!({ "disk": disk })),
            Self::Add { disk, name, granularity, disabled } => {
                let mut params = json!({ "disk": disk, "name": name, "disabled": disabled });
                add_given(&mut params, [("granularity", granularity.map(Value::from))]);
                ("bitmap.add", params)
            }
            Self::Remove(named) => ("bitmap.remove", named.params()),
            Self::Clear(named) => ("bitmap.clear", named.params()),
            Self::Enable(named) => ("bitmap.enable", named.params()),
            Self::Disable(named) => ("bitmap.disable", named.params()),
            Self::Merge { disk, name, source } => {
                ("bitmap.merge", json!({ "disk": disk, "name": name, "source": source }))
            }
        }
    }
}
