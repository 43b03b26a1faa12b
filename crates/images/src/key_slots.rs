//! Changes of the key slots of an encrypted image.

use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, rare};
use blockhouse_crypt::{Secret, new_slot, slot_wipe, slots_of};
use blockhouse_disk::ImageDisk;
use futures_util::future::LocalBoxFuture;

use crate::unlock::Secrets;

/// A change of key slots. A secret is given by its index in the list of secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySlotChange {
    /// Adds a slot that a secret opens.
    Add {
        /// The secret's index.
        secret: usize,
        /// The slot's number; `None` chooses the first free slot.
        slot: Option<u32>,
        /// The time that opening the slot is to take.
        time: Duration,
    },
    /// Erases a slot.
    EraseSlot(u32),
    /// Erases all slots that a secret opens.
    EraseSecret(usize),
}

/// Whether a change may lose the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastKey {
    /// Such a change is refused. A new key in a slot that is in use is refused, too.
    Keep,
    /// The image may become impossible to open.
    MayGo,
}

/// Changes key slots of an image that is open for writing, durably. The open disk keeps the secret
/// that it was opened with. Blocks this thread for seconds, because it derives keys.
///
/// # Errors
/// `InvalidInput` if the image is not encrypted, there is no such slot or secret, the slot is in
/// use, or the last key would be lost; `Unsupported` for a version of LUKS other than 1, or if no
/// secret opens the image; or storage errors.
pub fn change_key_slots<'a>(
    disk: &'a ImageDisk,
    secrets: &'a Secrets,
    change: KeySlotChange,
    last_key: LastKey,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        let refuse = |what: String| Error::new(ErrorKind::InvalidInput, what).on(disk.name());
        disk.check_writable()?;
        let Some(encryption) = disk.image().read_encryption().await? else {
            return Err(refuse("is not encrypted, so it has no key slots".into()));
        };
        let storage = disk.format().storage();
        let Some(encryption) = encryption.luks() else {
            return Err(refuse("is encrypted without LUKS, so it has no key slots".into()));
        };
        let areas = encryption.read_areas(storage).await?;
        let header = encryption.header();
        let named = |index: usize| -> Result<&Arc<Secret>> {
            secrets.all().get(index).ok_or_else(|| refuse("there is no such key".into()))
        };
        let on_disk = |error: Error| error.on(disk.name());
        let numbers = match change {
            KeySlotChange::Add { secret, slot, time } => {
                let number = match slot.or_else(|| header.free_slot()) {
                    None => return Err(refuse("all its key slots are in use; erase one".into())),
                    Some(number) if header.has_slot(number) && last_key == LastKey::Keep => {
                        return Err(refuse(format!(
                            "the key slot {number} is in use; erase it first"
                        )));
                    }
                    Some(number) => number,
                };
                let openers: Vec<&Secret> = secrets.all().iter().map(AsRef::as_ref).collect();
                let slot =
                    new_slot(header, &areas, &openers, named(secret)?, time).map_err(on_disk)?;
                return encryption.set_slot(storage, number, &slot).await.map_err(on_disk);
            }
            KeySlotChange::EraseSlot(number) if header.has_slot(number) => vec![number],
            KeySlotChange::EraseSlot(number) => {
                return Err(refuse(format!("the key slot {number} is not in use")));
            }
            KeySlotChange::EraseSecret(secret) => {
                let found = slots_of(header, &areas, named(secret)?).map_err(on_disk)?;
                if found.is_empty() {
                    return Err(refuse("the old key opens none of its key slots".into()));
                }
                found
            }
        };
        if numbers.len() == header.slots.len() && last_key == LastKey::Keep {
            let what = match change {
                KeySlotChange::EraseSlot(number) => {
                    format!("the key slot {number} is the only one in use")
                }
                _ => "the old key opens all key slots in use".to_owned(),
            };
            return Err(refuse(format!("{what}: without it all data would be lost (--force)")));
        }
        for number in numbers {
            let wipe = slot_wipe(header).map_err(on_disk)?;
            encryption.erase_slot(storage, number, &wipe).await.map_err(on_disk)?;
        }
        Ok(())
    })
}
