//! New VMDK images of several files.
//!
//! Guarantees: the files of the disk are created first, each as a new image, and the descriptor
//! that names them is created last, so an incomplete image has no descriptor. If an image is
//! replaced, its descriptor is removed first, so that a descriptor never names files of both
//! images.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockhouse_core::{Buffer, Durability, Storage, SyncMode};
use blockhouse_disk::ImageFormat;
use blockhouse_engine::NewFile;
use blockhouse_format::{
    ForeignKind, NewForeignOptions, NewVmdkFile, Subformat, vmdk_descriptor, vmdk_files,
};
use blockhouse_images::{IfExists, create_as, open_created, remove_created, rename_finished};

use crate::called_as;
use crate::foreign_create;
use crate::unfinished::unfinished;

/// The files of a new image, and the path of its descriptor.
pub struct VmdkFiles {
    pub(crate) path: PathBuf,
    pub(crate) options: NewForeignOptions,
    pub(crate) files: Vec<NewVmdkFile>,
}

impl VmdkFiles {
    /// The files of a new image at `path`; `None` if the image is one file.
    ///
    /// # Errors
    /// The options are invalid for such an image.
    pub fn of(path: &Path, kind: ForeignKind, options: &NewForeignOptions) -> Result<Option<Self>> {
        if kind != ForeignKind::Vmdk {
            return Ok(None);
        }
        let options = foreign_create::with_identity(options.clone(), path)?;
        let name = path.display().to_string();
        let files = vmdk_files(&options).map_err(|error| error.on(&name))?;
        if files.is_empty() {
            return Ok(None);
        }
        // Find invalid options before any file is created.
        vmdk_descriptor(&options, &files).map_err(|error| error.on(&name))?;
        Ok(Some(Self { path: path.to_owned(), options, files }))
    }

    pub(crate) fn is_flat(&self) -> bool {
        self.options.subformat == Subformat::Fixed
    }

    /// Creates an empty image. If a file exists, it is emptied if `is_in_place` is true; otherwise
    /// the call fails and the file is not changed.
    ///
    /// # Errors
    /// The error names the file. The files created before it are removed.
    pub async fn create(&self, is_in_place: bool) -> Result<()> {
        let mut made = Vec::new();
        let outcome = self.create_all(is_in_place, &mut made).await;
        if outcome.is_err() {
            for path in made {
                remove_created(&path).await;
            }
        }
        outcome
    }

    async fn create_all(&self, is_in_place: bool, made: &mut Vec<PathBuf>) -> Result<()> {
        if is_in_place {
            self.remove_descriptor()?;
        }
        for file in &self.files {
            let (path, length) = (self.path.with_file_name(&file.name), file.range.length());
            let is_in_place = is_in_place && path.is_file();
            let how = NewFile { is_in_place, ..called_as::new_file() };
            if self.is_flat() {
                create_as(&path, length, ImageFormat::Raw, how).await?
            } else {
                let options = self.options_of(length);
                foreign_create::create(&path, ForeignKind::Vmdk, options, how).await?;
            }
            made.push(path);
        }
        self.write_descriptor().await
    }

    /// The options of one file of a split image.
    pub(crate) fn options_of(&self, size: u64) -> NewForeignOptions {
        NewForeignOptions { size, ..self.options.clone() }
    }

    pub(crate) fn remove_descriptor(&self) -> Result<()> {
        let name = self.path.display();
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{name}: cannot be replaced"))
            }
            _ => Ok(()),
        }
    }

    /// Writes the descriptor durably, then renames it to its final name.
    pub(crate) async fn write_descriptor(&self) -> Result<()> {
        let text = vmdk_descriptor(&self.options, &self.files)?.into_bytes();
        let part = unfinished(&self.path, "remove it").await?;
        create_as(&part, 0, ImageFormat::Raw, called_as::new_file()).await?;
        let written = async {
            let storage = open_created(&part).await?;
            let mut buffer = Buffer::try_new(text.len())?;
            buffer.bytes_mut().copy_from_slice(&text);
            storage.write(0, buffer.lend(), Durability::None).await?;
            storage.flush(SyncMode::Full).await?;
            storage.close().await?;
            rename_finished(&part, &self.path, IfExists::Fail).await
        };
        let written = written.await;
        if written.is_err() {
            remove_created(&part).await;
        }
        Ok(written?)
    }
}
