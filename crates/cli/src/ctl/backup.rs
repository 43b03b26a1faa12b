//! `ctl SOCKET backup`: serves the state of disks at one moment, for programs that copy it.

use std::path::PathBuf;

use anyhow::Result;
use blockhouse_config::size;
use serde_json::{Value, json};

use super::params::{absolute, add_given};

#[derive(clap::Subcommand)]
pub(super) enum BackupAction {
    /// Freeze disks at one moment, and serve them for reading while their guests continue.
    Begin(Begin),
    /// Stop serving the disks of a backup. The bitmaps that it added stay.
    End {
        /// The backup's name, as `backup list` shows it.
        backup: String,
    },
    /// List the active backups, where their disks are served, and the size of their scratch files.
    List,
}

/// A backup to be begun.
#[derive(clap::Args)]
pub(super) struct Begin {
    /// The names of the disks.
    #[arg(required = true)]
    disks: Vec<String>,
    /// Serve them here, each under its own name: an NBD URI without a name.
    #[arg(long, value_name = "URI")]
    export: String,
    /// Add this bitmap to each disk at that moment, for the next increment.
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,
    /// Offer clients the changes recorded in this bitmap: the metadata context
    /// qemu:dirty-bitmap:NAME. If only some disks have the bitmap, the others are copied in full.
    #[arg(long, value_name = "NAME")]
    since: Option<String>,
    /// The folder of the scratch files, which store the old data that guests overwrite meanwhile.
    /// Left out: that of each disk's image.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// The maximum size of each scratch file (64M, 20G). If a guest needs more, the backup fails
    /// and the guest continues. Left out: the size of its disk.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    scratch_size: Option<u64>,
    /// The new backup's name, which no other backup has. Left out: the server chooses one.
    #[arg(long, value_name = "NAME")]
    backup: Option<String>,
}

impl BackupAction {
    /// The method and its parameters.
    pub(super) fn request(self) -> Result<(&'static str, Value)> {
        Ok(match self {
            Self::List => ("backup.list", json!({})),
            Self::End { backup } => ("backup.end", json!({ "backup": backup })),
            Self::Begin(begin) => ("backup.begin", begin.params()?),
        })
    }
}

impl Begin {
    fn params(self) -> Result<Value> {
        let mut params = json!({ "disks": self.disks, "export": self.export });
        let scratch = self.scratch.map(|folder| absolute(&folder)).transpose()?;
        let optional = [
            ("bitmap", self.bitmap.map(Value::from)),
            ("since", self.since.map(Value::from)),
            ("scratch", scratch.map(|folder| json!(folder))),
            ("scratch-size", self.scratch_size.map(Value::from)),
            ("backup", self.backup.map(Value::from)),
        ];
        add_given(&mut params, optional);
        Ok(params)
    }
}
