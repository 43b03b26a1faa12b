//! `ctl SOCKET bitmap`: the bitmaps of a served disk.

use serde_json::{Value, json};

use super::params::add_given;
use crate::bitmap::NewBitmapArgs;

#[derive(clap::Subcommand)]
pub(super) enum BitmapAction {
    /// List the bitmaps of a disk, and how many bytes each records as changed.
    List {
        /// The disk's name.
        disk: String,
    },
    /// Add a bitmap, which records later changes of the disk.
    Add {
        /// The disk's name.
        disk: String,
        #[command(flatten)]
        new: NewBitmapArgs,
        /// Keep the bitmap in memory only. This works with every format. It is gone when the disk
        /// is closed or the server is upgraded.
        #[arg(long)]
        transient: bool,
    },
    /// Remove a bitmap.
    Remove(Named),
    /// Clear a bitmap: it then records only later changes.
    Clear(Named),
    /// Start to record changes of the disk in a bitmap.
    Enable(Named),
    /// Stop recording changes in a bitmap.
    Disable(Named),
    /// Add the changes recorded in bitmap SOURCE to bitmap NAME.
    Merge {
        /// The disk's name.
        disk: String,
        /// The bitmap to add to.
        name: String,
        /// The bitmap to read.
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
