//! The header of an image: what it states about the disk and other files, and changes of it.

use blockhouse_core::{Result, Storage};

use crate::luks::LuksEncryption;
use crate::qcow2::{DataFileMark, EncryptionKind, Qcow2};
use crate::{
    Amendments, Backing, Compression, DataFile, Encryption, Features, Flat, Format, VmdkFacts,
};

/// The header of an open image.
pub struct ImageHeader<'a, S: Storage> {
    format: &'a Format<S>,
}

impl<S: Storage> Format<S> {
    /// The image's header; a raw image has an empty one.
    pub fn header(&self) -> ImageHeader<'_, S> {
        ImageHeader { format: self }
    }
}

impl<'a, S: Storage> ImageHeader<'a, S> {
    /// The image, if it is qcow2. The header of a raw image's side file does not count as the
    /// image's header.
    fn qcow2(&self) -> Option<&'a Qcow2<S>> {
        match self.format {
            Format::Flat(_) => None,
            Format::Qcow2(qcow2) => Some(qcow2),
        }
    }

    fn qcow2_with(&self, what: &str) -> Result<&'a Qcow2<S>> {
        match self.format {
            Format::Flat(flat) => Err(flat.lacks(what)),
            Format::Qcow2(qcow2) => Ok(qcow2),
        }
    }

    /// How clusters are compressed; `None` if the format has no compressed clusters.
    pub fn compression(&self) -> Option<Compression> {
        self.qcow2().map(|qcow2| qcow2.facts().compression)
    }

    /// The backing file that the image names.
    pub fn backing_file(&self) -> Option<&'a Backing> {
        match self.format {
            Format::Flat(Flat::Foreign(foreign)) => foreign.backing(),
            _ => self.qcow2()?.facts().backing.as_ref(),
        }
    }

    /// Refuses `backing` as the backing file if `backing` does not match the properties that this
    /// image has recorded.
    ///
    /// # Errors
    /// `Corrupt` if `backing` was changed since the image was made, `InvalidInput` if it has
    /// another format.
    pub fn check_backing(&self, backing: &Format<S>) -> Result<()> {
        match (self.format, backing) {
            (Format::Flat(Flat::Foreign(foreign)), Format::Flat(Flat::Foreign(backing))) => {
                foreign.check_backing(Some(backing))
            }
            (Format::Flat(Flat::Foreign(foreign)), _) => foreign.check_backing(None),
            _ => Ok(()),
        }
    }

    /// Gives the image another backing file, or none: see
    /// [`Qcow2Header::set_backing`](crate::qcow2::Qcow2Header::set_backing).
    ///
    /// # Errors
    /// As there; `Unsupported` if the format has no backing files.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        self.qcow2_with("backing file")?.header().set_backing(backing).await
    }

    /// Changes options of the image: see
    /// [`Qcow2Header::amend`](crate::qcow2::Qcow2Header::amend).
    ///
    /// # Errors
    /// As there; `Unsupported` if the format has no options.
    pub async fn amend(&self, amendments: Amendments) -> Result<()> {
        let qcow2 = self.qcow2_with("options that could be changed")?;
        qcow2.header().amend(amendments).await
    }

    /// Gives the image's data file another name: see
    /// [`Qcow2Header::rename_data_file`](crate::qcow2::Qcow2Header::rename_data_file).
    ///
    /// # Errors
    /// As there; `Unsupported` if the format has no data files.
    pub async fn rename_data_file(&self, name: &[u8]) -> Result<()> {
        self.qcow2_with("data file")?.header().rename_data_file(name).await
    }

    /// The external data file that the image names, if it has one.
    pub fn data_file(&self) -> Option<&'a DataFile> {
        self.format.qcow2()?.facts().data_file.as_ref()
    }

    /// The mark of the raw image in the header of its side file.
    pub fn data_file_mark(&self) -> Option<DataFileMark> {
        self.format.qcow2()?.header().data_file_mark()
    }

    /// The names of the files that together have the disk's data, as bytes of the host's file
    /// system, relative to the image's folder; empty if the data is in the image itself, or in a
    /// [`data_file`](Self::data_file).
    pub fn extent_files(&self) -> &'a [Vec<u8>] {
        match self.format {
            Format::Flat(Flat::Foreign(foreign)) => foreign.extent_files(),
            Format::Flat(_) | Format::Qcow2(_) => &[],
        }
    }

    /// The descriptor of a VMDK image; `None` for other formats.
    pub fn vmdk_facts(&self) -> Option<VmdkFacts> {
        match self.format {
            Format::Flat(Flat::Foreign(foreign)) => foreign.vmdk_facts(),
            Format::Flat(_) | Format::Qcow2(_) => None,
        }
    }

    /// The properties of a qcow2 image.
    pub fn features(&self) -> Option<Features> {
        self.qcow2().map(|qcow2| qcow2.header().features())
    }

    /// The sector size of the disk in bytes, a power of two; 512 if the image does not state it.
    pub fn logical_block_size(&self) -> u64 {
        match self.format {
            Format::Flat(Flat::Foreign(foreign)) => foreign.sector_size(),
            Format::Flat(_) | Format::Qcow2(_) => 512,
        }
    }

    /// How the guest's data is encrypted; `None` if it [is not](Format::is_encrypted).
    ///
    /// # Errors
    /// As [`LuksHeader::read`](crate::LuksHeader::read).
    pub async fn read_encryption(&self) -> Result<Option<Encryption>> {
        match self.format {
            Format::Flat(Flat::Luks(luks)) => Ok(Some(Encryption::Luks(luks.encryption()))),
            Format::Flat(_) => Ok(None),
            Format::Qcow2(qcow2) => match qcow2.facts().encryption {
                Some(EncryptionKind::Luks(location)) => {
                    let keys = LuksEncryption::of_clusters(qcow2.storage(), location).await?;
                    Ok(Some(Encryption::Luks(keys)))
                }
                Some(EncryptionKind::Aes) => Ok(Some(Encryption::Aes)),
                None => Ok(None),
            },
        }
    }
}
