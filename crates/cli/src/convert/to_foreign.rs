//! `blockhouse convert SOURCE... TARGET.vmdk`: a disk as an image of another program's format.

use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::{ForeignKind, Subformat};
use blockhouse_images::CacheMode;

use super::arguments::{Arguments, open_sources};
use crate::called_as;
use crate::copy_target::{IfThere, whole};
use crate::create::{open_backing, wrong_usage};
use crate::create_options;
use crate::create_setting::Setting;
use crate::foreign_create;
use crate::foreign_options;
use crate::foreign_target::{ForeignTarget, sector_of_copy};
use crate::progress::Progress;
use crate::vmdk_files::VmdkFiles;

/// Runs the command.
pub fn run(arguments: &Arguments, kind: ForeignKind, settings: &[Setting]) -> Result<()> {
    let options = foreign_options::of(kind, 0, settings);
    let options = options.unwrap_or_else(|why| arguments.refuse_option(kind.as_str(), &why));
    refuse(arguments, kind, options.subformat);
    let progress = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let sources = event_loop.block_on(open_sources(arguments))?;
    let size = sources.iter().try_fold(0_u64, |sum, source| sum.checked_add(source.size()));
    let Some(size) = size else { bail!("the sources are longer than a disk can be") };
    let mut options = blockhouse_format::NewForeignOptions { size, ..options };
    options.sector_size = sector_of_copy(kind, &sources);
    let parent = match foreign_options::parent_of(settings) {
        Some(backing) => {
            let allowed = arguments.open.allowed_paths(std::iter::empty())?;
            let opened = open_backing(&arguments.target, &backing, allowed);
            let parent = event_loop.block_on(opened)?;
            options.parent = Some(foreign_create::parent(&parent, &backing)?);
            Some(Arc::new(parent))
        }
        None => None,
    };
    if let Some(files) = VmdkFiles::of(&arguments.target, kind, &options)? {
        if options.parent.is_some() {
            bail!("{}: an overlay is one file", arguments.target.display());
        }
        let how = (arguments.if_there(), arguments.how(), &arguments.open);
        return files.copy(&mut event_loop, &progress, &whole(&sources), how);
    }
    let target = ForeignTarget {
        path: &arguments.target,
        kind,
        options,
        parent,
        file: create_options::new_file(settings),
        if_there: arguments.if_there(),
        is_flushed: arguments.cache != Some(CacheMode::Unsafe),
    };
    target.copy(&mut event_loop, &progress, whole(&sources), arguments.how())
}

/// Ends the program if an option requests a feature that such an image does not have.
fn refuse(arguments: &Arguments, kind: ForeignKind, subformat: Subformat) {
    let format = kind.as_str();
    if !matches!(arguments.if_there(), IfThere::Fail | IfThere::Replace) {
        wrong_usage(&format!(
            "{format} images are made anew, and never written to: leave -n and --resume out"
        ));
    }
    // qemu-img accepts `-c` for sparse VMDK images, and leaves their blocks uncompressed.
    let is_left_out =
        called_as::is_qemu_img() && kind == ForeignKind::Vmdk && subformat == Subformat::Sparse;
    if arguments.compress && subformat != Subformat::Stream && !is_left_out {
        wrong_usage(
            "only qcow2 images have compressed clusters (-c), and VMDK streams (-o subformat=streamOptimized)",
        );
    }
}
