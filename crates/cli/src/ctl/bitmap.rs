//! `ctl SOCKET bitmap`: the bitmaps of a served disk.

use serde_json::{Value, json};

use super::params::add_given;
use crate::bitmap::NewBitmapArgs;

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
        #[command(flatten)]
        new: NewBitmapArgs,
        /// Have it in memory alone, of a disk of any format. It is gone when the disk is closed or
        /// the server is upgraded.
        #[arg(long)]
        transient: bool,
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
            Self::Add { disk, new: NewBitmapArgs { name, granularity, disabled }, transient } => {
                let mut params = json!({ "disk": disk, "name": name, "disabled": disabled });
                let transient = transient.then_some(Value::Bool(true));
                add_given(
                    &mut params,
                    [("granularity", granularity.map(Value::from)), ("transient", transient)],
                );
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
