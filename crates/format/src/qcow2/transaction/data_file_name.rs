//! Changes the name of an image's data file, by one write of the header.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::header::Qcow2Header;
use crate::qcow2::layout::data_file_mark::DataFileMark;
use crate::qcow2::layout::extensions::DATA_FILE;
use crate::qcow2::layout::header::{Header, SECTOR};
use crate::qcow2::layout::limits::MAX_FILE_NAME;
use crate::qcow2::layout::options::DataFile;
use crate::qcow2::layout::table_io;

use super::backing::{free_first_sector, restore_names};

impl<S: Storage> Qcow2Header<'_, S> {
    /// Gives the data file another name, durably, by one write of the header: after a crash the
    /// image has the old name or the new name. The [facts](crate::Qcow2::facts) stay as when the
    /// image was opened; the caller closes the image after this, and renames the file.
    ///
    /// # Errors
    /// `InvalidInput` if the image names no data file, the name is empty or too long, or the header
    /// has no space for it; storage errors. After an error the image has the old name. If that
    /// could not be made sure, all later changes fail.
    pub async fn rename_data_file(&self, name: &[u8]) -> Result<()> {
        let metadata = &self.image.metadata;
        metadata.check_writable()?;
        let invalid = |what: &str| {
            Err(Error::new(
                ErrorKind::InvalidInput,
                format!("cannot name another data file: {what}"),
            )
            .on(metadata.storage().name()))
        };
        let old = metadata.lock().tables.headers.disk().clone();
        if old.data_file.is_none() || DataFileMark::of(&old).is_some() {
            return invalid("it has none that it names");
        }
        if name.is_empty() || name.len() > MAX_FILE_NAME {
            return invalid("its name must have 1 to 1023 bytes");
        }
        free_first_sector(metadata).await?;
        let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
        let old = metadata.lock().tables.headers.disk().clone();
        let mut new = old.clone();
        let named = new.extensions.iter_mut().find(|extension| extension.kind == DATA_FILE);
        named.into_iter().for_each(|extension| extension.data = name.to_vec());
        if !new.fit_extensions(&sector) {
            return invalid("the header has no room for its name");
        }
        new.data_file = new.data_file.map(|file| DataFile { name: name.to_vec(), ..file });
        let change = |header: &mut Header| header.extensions.clone_from(&new.extensions);
        metadata.autoclear().begin_changes_beside_guest_data().await?;
        if let Err(error) = metadata.rewrite_header(change).await {
            // It is unknown which name is on disk, so the old one is written again. In memory it is
            // set first, because other writes of the header repeat extensions that are not durable.
            {
                let mut state = metadata.lock();
                state.tables.headers.set_names(&old);
                state.tables.headers.restore_names(&sector);
            }
            let restored = restore_names(metadata).await;
            let _ = restored.inspect_err(|_| metadata.writer().fail(&error));
            return Err(error);
        }
        metadata.lock().tables.headers.set_names(&new);
        Ok(())
    }
}
