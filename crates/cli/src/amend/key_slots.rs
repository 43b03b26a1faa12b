//! Options of `amend` that change key slots of an encrypted image, with QEMU's names.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use blockhouse_disk::ImageDisk;
use blockhouse_images::{KeySlotChange, LastKey, change_key_slots};

use super::Change;
use crate::called_as;
use crate::create_setting::Setting;
use crate::open_args::KeyArgs;

/// An option of key slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySlotOption {
    /// Whether a slot becomes active or inactive.
    State,
    /// The key to add.
    NewSecret,
    /// The key of an active slot.
    OldSecret,
    /// The slot's number.
    KeySlot,
}

/// The option and value in `[encrypt.]NAME=VALUE`, if NAME is an option of key slots.
pub fn option(text: &str) -> Option<(KeySlotOption, String)> {
    let (name, value) = text.split_once('=')?;
    let option = match name.strip_prefix("encrypt.").unwrap_or(name) {
        "state" => KeySlotOption::State,
        "new-secret" => KeySlotOption::NewSecret,
        "old-secret" => KeySlotOption::OldSecret,
        "keyslot" => KeySlotOption::KeySlot,
        _ => return None,
    };
    Some((option, value.to_owned()))
}

/// A change of key slots, with the names of keys.
#[derive(Debug, PartialEq, Eq)]
pub enum NamedChange {
    Add { secret: String, slot: Option<u32>, time: Duration },
    EraseSlot { slot: u32, secret: Option<String> },
    EraseSecret(String),
}

/// The change of key slots that these options describe; `None` if no option concerns key slots.
///
/// # Errors
/// The options contradict each other, or one is missing.
pub fn change(changes: &[Change]) -> Result<Option<NamedChange>> {
    const USUAL_TIME: u32 = 2000;
    let value = |wanted: KeySlotOption| {
        changes.iter().rev().find_map(|change| match change {
            Change::KeySlot(option, value) if *option == wanted => Some(value.as_str()),
            _ => None,
        })
    };
    if !changes.iter().any(|change| matches!(change, Change::KeySlot(..))) {
        return Ok(None);
    }
    let mut iter_time = None;
    for change in changes {
        match change {
            Change::Setting(Setting::EncryptIterTime(given)) => iter_time = Some(*given),
            Change::KeySlot(..) => {}
            _ => bail!("options of key slots are changed alone"),
        }
    }
    let slot = value(KeySlotOption::KeySlot).map(str::parse::<u32>).transpose();
    let slot = slot.ok().filter(|slot| slot.is_none_or(|slot| slot < 8));
    let slot = slot.ok_or_else(|| anyhow!("key slots have the numbers 0 to 7"))?;
    let (new, old) = (value(KeySlotOption::NewSecret), value(KeySlotOption::OldSecret));
    let time = Duration::from_millis(iter_time.unwrap_or(USUAL_TIME).into());
    match (value(KeySlotOption::State), new, old, slot) {
        (Some("active"), _, Some(_), _) => bail!("old-secret is of a key to erase: leave it out"),
        (Some("active"), Some(new), None, slot) => {
            Ok(Some(NamedChange::Add { secret: new.to_owned(), slot, time }))
        }
        (Some("active"), None, None, _) => bail!("which key to add is missing: new-secret=ID"),
        (Some("inactive"), Some(_), ..) => bail!("new-secret is of a key to add: leave it out"),
        (Some("inactive"), ..) if iter_time.is_some() => {
            bail!("iter-time is of a key to add: leave it out")
        }
        (Some("inactive"), None, old, Some(slot)) => {
            Ok(Some(NamedChange::EraseSlot { slot, secret: old.map(str::to_owned) }))
        }
        (Some("inactive"), None, Some(old), None) => {
            Ok(Some(NamedChange::EraseSecret(old.to_owned())))
        }
        (Some("inactive"), None, None, None) => {
            bail!("which key to erase is missing: keyslot=N or old-secret=ID")
        }
        _ => bail!("say state=active or state=inactive"),
    }
}

/// Makes the change.
///
/// # Errors
/// There is no key of this name; otherwise as [`change_key_slots`].
pub async fn run(
    disk: &ImageDisk,
    keys: &KeyArgs,
    change: NamedChange,
    is_forced: bool,
) -> Result<()> {
    let change = match change {
        NamedChange::Add { secret, slot, time } => {
            KeySlotChange::Add { secret: keys.index_of(&secret)?, slot, time }
        }
        NamedChange::EraseSlot { slot, secret } => {
            let secret = secret.map(|secret| keys.index_of(&secret)).transpose()?;
            KeySlotChange::EraseSlot { slot, secret }
        }
        NamedChange::EraseSecret(secret) => KeySlotChange::EraseSecret(keys.index_of(&secret)?),
    };
    let last_key = if is_forced { LastKey::MayGo } else { LastKey::Keep };
    let changed = change_key_slots(disk, &keys.secrets()?, change, last_key).await;
    let Err(error) = changed else { return Ok(()) };
    let text = error.to_string();
    if !called_as::is_qemu_img() {
        return Err(error.into());
    }
    Err(words(&text).map_or_else(|| error.into(), |words| anyhow!(words)))
}

/// The text that qemu-img prints for this error.
fn words(text: &str) -> Option<String> {
    let number = || text.split_once("the key slot ")?.1.split(' ').next();
    Some(match text {
        _ if text.contains("all its key slots are in use") => {
            "Can't add a keyslot - all keyslots are in use".to_owned()
        }
        _ if text.contains("is in use; erase it first") => {
            format!("Refusing to overwrite active keyslot {} - please erase it first", number()?)
        }
        _ if text.contains("is the only one in use") => format!(
            "Attempt to erase the only active keyslot {} which will erase all the data in the image irreversibly - \
             refusing operation",
            number()?
        ),
        _ if text.contains("opens all key slots in use") => {
            "All the active keyslots match the (old) password that was given and erasing them will erase all the data \
             in the image irreversibly - refusing operation"
                .to_owned()
        }
        _ if text.contains("is not in use") => {
            format!("Given keyslot {} is already erased (inactive) ", number()?)
        }
        _ if text.contains("the old key does not open") => format!(
            "Given keyslot {} doesn't contain the given old password for erase operation",
            number()?
        ),
        _ if text.contains("the old key opens none") => {
            "No keyslots match given (old) password for erase operation".to_owned()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Option<NamedChange>> {
        let Ok(super::super::Changes::These(changes)) = super::super::parse(text) else { panic!() };
        change(&changes)
    }

    #[test]
    fn options_are_one_change() {
        let erased_slot = |secret| NamedChange::EraseSlot { slot: 2, secret };
        let time = Duration::from_millis(10);
        let added = NamedChange::Add { secret: "b".into(), slot: Some(3), time };
        let text =
            "encrypt.state=active,encrypt.new-secret=b,encrypt.keyslot=3,encrypt.iter-time=10";
        assert_eq!(of(text).unwrap(), Some(added));
        assert_eq!(of("state=inactive,keyslot=2").unwrap(), Some(erased_slot(None)));
        assert_eq!(
            of("state=inactive,keyslot=2,old-secret=a").unwrap(),
            Some(erased_slot(Some("a".into())))
        );
        let erased = NamedChange::EraseSecret("a".into());
        assert_eq!(of("state=inactive,old-secret=a").unwrap(), Some(erased));
        assert_eq!(of("lazy_refcounts=on").unwrap(), None);
        for text in [
            "state=active",
            "state=inactive",
            "keyslot=1",
            "state=active,new-secret=a,keyslot=8",
            "state=active,new-secret=a,old-secret=b",
            "state=inactive,new-secret=a",
        ] {
            assert!(of(text).is_err(), "{text}");
        }
        assert!(of("state=inactive,keyslot=1,lazy_refcounts=on").is_err());
    }
}
