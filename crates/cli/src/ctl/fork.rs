//! `ctl SOCKET fork`: disks continue in new overlays. Other disks can then use the old images as
//! backing files too.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::params::{absolute, absolute_image, add_given};

/// Disks to be forked.
#[derive(clap::Args)]
pub(super) struct Fork {
    /// The names of the disks: all at the same moment.
    #[arg(required = true)]
    disks: Vec<String>,
    /// The new qcow2 overlay in which the disk continues. Left out: a name beside its image. With
    /// several disks DISK=FILE, once for each.
    #[arg(long = "overlay", value_name = "FILE")]
    overlays: Vec<String>,
    /// Make another qcow2 overlay over the same layer, and open it as a new disk of this server.
    /// May be repeated. With several disks DISK:NAME=FILE. Of a disk in Ceph, a clone in its pool:
    /// NAME=rbd:POOL/IMAGE.
    #[arg(long = "child", value_name = "NAME=FILE")]
    children: Vec<String>,
    /// The same, but do not open it: the file is for any program. With several disks DISK=FILE.
    #[arg(long = "child-file", value_name = "FILE")]
    files: Vec<String>,
}

impl Fork {
    pub(super) fn params(self) -> Result<Value> {
        let disks = self.disks.iter().map(|disk| self.of(disk)).collect::<Result<Vec<_>>>()?;
        let taken = |key: &str| {
            let counted = disks.iter().map(|disk| match &disk[key] {
                Value::Array(all) => all.len(),
                Value::Null => 0,
                _ => 1,
            });
            counted.sum::<usize>()
        };
        if taken("overlay") < self.overlays.len()
            || taken("children") < self.children.len() + self.files.len()
        {
            bail!(
                "an overlay or child is of none of the disks, or a disk has two overlays; with several disks name its disk"
            );
        }
        Ok(json!({ "disks": disks }))
    }

    /// The request for one disk.
    fn of(&self, disk: &str) -> Result<Value> {
        let is_one = self.disks.len() == 1;
        let of = |text: &str, separator: char| {
            let whole = Some(text.to_owned()).filter(|_| is_one);
            let named = text.split_once(separator).filter(|(name, _)| *name == disk && !is_one);
            whole.or_else(|| named.map(|(_, rest)| rest.to_owned()))
        };
        let overlay = self.overlays.iter().find_map(|overlay| of(overlay, '='));
        let overlay = overlay.map(|path| absolute(Path::new(&path))).transpose()?;
        let mut children = Vec::new();
        for child in self.children.iter().filter_map(|child| of(child, ':')) {
            let Some((name, path)) = child.split_once('=') else {
                bail!(
                    "{child:?}: a child is NAME=FILE, or --child-file FILE where it stays a file"
                );
            };
            children.push(json!({ "name": name, "path": absolute_image(Path::new(path))? }));
        }
        for path in self.files.iter().filter_map(|file| of(file, '=')) {
            let path: PathBuf = absolute_image(Path::new(&path))?;
            children.push(json!({ "path": path }));
        }
        let mut params = json!({ "disk": disk, "children": children });
        add_given(&mut params, [("overlay", overlay.map(|path| json!(path)))]);
        Ok(params)
    }
}
