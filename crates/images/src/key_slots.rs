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
    /// Erases a slot. With [`LastKey::MayGo`] it may be unused: then its area is overwritten again,
    /// because an earlier erasure may have been interrupted.
    EraseSlot {
        /// The slot's number.
        slot: u32,
        /// The index of the secret that has to open the slot; `None` for any.
        secret: Option<usize>,
    },
    /// Erases all slots that a secret opens.
    EraseSecret(usize),
}

/// Whether a change may lose the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastKey {
    /// Such a change is refused. A new key in a slot that is in use is refused, too, and the
    /// erasure of a slot that is not.
    Keep,
    /// The image may become impossible to open.
    MayGo,
}

/// Changes key slots of an image that is open for writing, durably. The open disk keeps the secret
/// that it was opened with. Blocks this thread for seconds, because it derives keys.
///
/// # Errors
/// `InvalidInput` if the image is not encrypted, there is no such slot or secret, the secret does
/// not open the slot, or `last_key` refuses the change; `Unsupported` for a version of LUKS other
/// than 1, or if no secret opens the image; or storage errors.
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
            KeySlotChange::EraseSlot { slot, secret } => {
                if let Some(secret) = secret
                    && !slots_of(header, &areas, named(secret)?).map_err(on_disk)?.contains(&slot)
                {
                    return Err(refuse(format!("the old key does not open the key slot {slot}")));
                }
                if !header.has_slot(slot) && last_key == LastKey::Keep {
                    let what = "is not in use (--force overwrites its area again)";
                    return Err(refuse(format!("the key slot {slot} {what}")));
                }
                vec![slot]
            }
            KeySlotChange::EraseSecret(secret) => {
                let found = slots_of(header, &areas, named(secret)?).map_err(on_disk)?;
                if found.is_empty() {
                    let error = refuse("the old key opens none of its key slots".into());
                    let hint = "if its erasure was interrupted, erase its slot by number";
                    return Err(error.hint(hint));
                }
                found
            }
        };
        let in_use = numbers.iter().filter(|&&number| header.has_slot(number)).count();
        if in_use > 0 && in_use == header.slots.len() && last_key == LastKey::Keep {
            let what = match change {
                KeySlotChange::EraseSlot { slot, .. } => {
                    format!("the key slot {slot} is the only one in use")
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use blockhouse_disk::ImageFormat;
    use blockhouse_engine::{EngineChoice, EventLoop};
    use blockhouse_format::NewLuks;

    use super::*;
    use crate::image_options::ImageOptions;
    use crate::open_image::open;

    /// The records of the slots 0 and 1 without the fields of their areas.
    const RECORDS: [std::ops::Range<usize>; 2] = [208..248, 256..296];

    async fn change(
        image: &Path,
        secrets: &Secrets,
        change: KeySlotChange,
        last_key: LastKey,
    ) -> Result<()> {
        let (format, secrets) = (Some(ImageFormat::Luks), secrets.clone());
        let options = ImageOptions { format, secrets: secrets.clone(), ..ImageOptions::default() };
        let disk = open(image, options).await.unwrap();
        let changed = change_key_slots(&disk, &secrets, change, last_key).await;
        disk.close().await.unwrap();
        changed
    }

    #[test]
    fn the_repeated_erasure_of_a_slot_overwrites_its_area() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new, image] = ["old", "new", "image"].map(|name| folder.path().join(name));
        fs::write(&old, "old").unwrap();
        fs::write(&new, "new").unwrap();
        let secrets: Secrets =
            [old, new].iter().map(|path| Secret::from_key_file(path).unwrap()).collect();
        let time = Duration::from_millis(1);
        let mut bytes = secrets.create_header(0, time).unwrap();
        bytes.resize(bytes.len() + (1 << 20), 0);
        fs::write(&image, bytes).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let add = KeySlotChange::Add { secret: 1, slot: Some(1), time };
            change(&image, &secrets, add, LastKey::Keep).await.unwrap();
            // A crash between the two writes of an erasure leaves this.
            let mut bytes = fs::read(&image).unwrap();
            assert_eq!(bytes[RECORDS[1].start..][..4], bytes[RECORDS[0].start..][..4]);
            bytes[RECORDS[1].clone()].fill(0);
            bytes[RECORDS[1].start + 2..][..2].copy_from_slice(&[0xde, 0xad]);
            fs::write(&image, &bytes).unwrap();
            let erase = |slot| KeySlotChange::EraseSlot { slot, secret: None };
            change(&image, &secrets, erase(1), LastKey::MayGo).await.unwrap();
            let after = fs::read(&image).unwrap();
            assert_eq!(after[..NewLuks::AREA], bytes[..NewLuks::AREA]);
            let area = NewLuks::AREA + NewLuks::AREA_LENGTH.next_multiple_of(4096);
            for at in (area..area + NewLuks::AREA_LENGTH).step_by(512) {
                assert_ne!(after[at..at + 512], bytes[at..at + 512], "offset {at}");
            }
            for (slot, words) in [(0, "only one in use"), (1, "--force"), (8, "not in use")] {
                let refused = change(&image, &secrets, erase(slot), LastKey::Keep).await;
                let error = refused.unwrap_err().to_string();
                assert!(error.contains(words), "{error}");
            }
        });
    }
}
