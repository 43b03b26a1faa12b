//! The JSON of a LUKS2 header: one encrypted segment, and the key slots that open it.
//!
//! Containers in the middle of a reencryption, with integrity tags, or with segments of other kinds
//! are refused, each with its own error.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use blockhouse_core::ByteRange;
use serde_json::{Map, Value};

use super::header::{
    LuksCipher, LuksDigest, LuksHash, LuksHeader, LuksKdf, LuksSlot, LuksSlotKey, MAX_SALT,
    printable, slot_area,
};

/// Maximum number of key slots of a header.
const MAX_SLOTS: usize = 32;

/// The container that the JSON describes; `Err` is the reason why it cannot be opened.
pub(super) fn parse(json: &Value, uuid: &str) -> Result<LuksHeader, String> {
    check_requirements(json)?;
    let segments = object(json, "segments")?;
    let mut of_disk = segments.iter().filter(|(_, segment)| !is_backup(segment));
    let (segment_name, segment) = of_disk.next().ok_or("it has no segment with data")?;
    if of_disk.next().is_some() {
        return Err("it has several segments with data, as during a reencryption".into());
    }
    if string(segment, "type")? != "crypt" {
        return Err(format!("a segment of the type '{}'", printable(string(segment, "type")?)));
    }
    if segment.get("integrity").is_some() {
        return Err("its data has integrity tags, which are not supported".into());
    }
    let (digest, of_digest) = digest_of(json, segment_name)?;
    let slots = object(json, "keyslots")?;
    if slots.len() > MAX_SLOTS {
        return Err(format!("{} key slots are more than {MAX_SLOTS}", slots.len()));
    }
    let mut found = Vec::new();
    for (name, slot) in slots.iter().filter(|(name, _)| of_digest.contains(&name.as_str())) {
        let number = name.parse().map_err(|_| format!("a key slot '{}'", printable(name)))?;
        found.push((slot_key_bytes(slot)?, number, slot));
    }
    found.sort_by_key(|(_, number, _)| *number);
    let cipher = LuksCipher::parse(string(segment, "encryption")?)?;
    // All slots of a digest contain the same key.
    let key_bytes = match found.first() {
        Some((bytes, ..)) => cipher.check_key(*bytes)?,
        None => return Err("it has no key slot for its data".into()),
    };
    let slots = found.into_iter().map(|(_, number, slot)| LuksSlot {
        number,
        key: slot_key(slot, key_bytes as u64, &digest),
    });
    let size = match string(segment, "size")? {
        "dynamic" => None,
        size => Some(decimal(size)?),
    };
    Ok(LuksHeader {
        version: 2,
        uuid: printable(uuid),
        cipher,
        key_bytes,
        sector_size: sector_size(segment)?,
        iv_tweak: decimal(string(segment, "iv_tweak")?)?,
        payload: decimal(string(segment, "offset")?)?,
        payload_size: size,
        slots: slots.collect(),
        slot_offsets: Vec::new(),
    })
}

/// Refuses a container with mandatory requirements: this program supports none of them.
fn check_requirements(json: &Value) -> Result<(), String> {
    let requirements = json.pointer("/config/requirements/mandatory");
    let first = requirements.and_then(Value::as_array).and_then(|list| list.first());
    match first {
        Some(name) => {
            let name = printable(name.as_str().unwrap_or("?"));
            Err(format!("it requires '{name}', which is not supported"))
        }
        None => Ok(()),
    }
}

/// Whether a segment only records the previous state of another segment.
fn is_backup(segment: &Value) -> bool {
    let flags = segment.get("flags").and_then(Value::as_array);
    flags.is_some_and(|flags| {
        flags.iter().any(|flag| flag.as_str().is_some_and(|flag| flag.starts_with("backup-")))
    })
}

fn sector_size(segment: &Value) -> Result<u32, String> {
    let size = number(segment, "sector_size")?;
    match size {
        512 | 1024 | 2048 | 4096 => Ok(size),
        _ => Err(format!("sectors of {size} bytes are not 512 to 4096")),
    }
}

/// The digest of a segment's key, and the names of the slots that contain the key.
fn digest_of<'a>(json: &'a Value, segment: &str) -> Result<(LuksDigest, Vec<&'a str>), String> {
    let names = |digest: &'a Value, key| -> Vec<&'a str> {
        let list = digest.get(key).and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_str).collect()
    };
    let mut digests = object(json, "digests")?.values();
    let digest = digests
        .find(|digest| names(digest, "segments").contains(&segment))
        .ok_or("it has no digest of its key")?;
    if string(digest, "type")? != "pbkdf2" {
        return Err(format!("a digest of the type '{}'", printable(string(digest, "type")?)));
    }
    let found = LuksDigest {
        hash: LuksHash::parse(string(digest, "hash")?)?,
        iterations: number(digest, "iterations")?,
        salt: base64(string(digest, "salt")?)?,
        digest: base64(string(digest, "digest")?)?,
    };
    if found.digest.len() < 16 {
        return Err("a digest of fewer than 16 bytes".into());
    }
    Ok((found, names(digest, "keyslots")))
}

fn slot_key_bytes(slot: &Value) -> Result<u64, String> {
    number(slot, "key_size").map(u64::from)
}

fn slot_key(slot: &Value, key_bytes: u64, digest: &LuksDigest) -> Result<LuksSlotKey, String> {
    let kind = string(slot, "type")?;
    if kind != "luks2" {
        return Err(format!("it is of the type '{}'", printable(kind)));
    }
    if slot_key_bytes(slot)? != key_bytes {
        return Err("its key is not as long as those of the other slots".into());
    }
    let part = |name| slot.get(name).ok_or_else(|| format!("it has no '{name}'"));
    let (stripes, area) = (part("af")?, part("area")?);
    if string(area, "type")? != "raw" {
        return Err(format!("an area of the type '{}'", printable(string(area, "type")?)));
    }
    let cipher = LuksCipher::parse(string(area, "encryption")?)?;
    let place = ByteRange::new(decimal(string(area, "offset")?)?, decimal(string(area, "size")?)?)
        .ok_or("an area out of bounds")?;
    let stripe_count = number(stripes, "stripes")?;
    let needed = slot_area(place.offset(), key_bytes, u64::from(stripe_count))?;
    if needed.length() > place.length() {
        return Err(format!("its area of {} bytes is too short", place.length()));
    }
    Ok(LuksSlotKey {
        kdf: kdf(part("kdf")?)?,
        area: needed,
        cipher,
        area_key_bytes: cipher.check_key(u64::from(number(area, "key_size")?))?,
        stripes: stripe_count,
        stripe_hash: LuksHash::parse(string(stripes, "hash")?)?,
        digest: digest.clone(),
    })
}

fn kdf(kdf: &Value) -> Result<LuksKdf, String> {
    let salt = base64(string(kdf, "salt")?)?;
    match string(kdf, "type")? {
        "pbkdf2" => Ok(LuksKdf::Pbkdf2 {
            hash: LuksHash::parse(string(kdf, "hash")?)?,
            iterations: number(kdf, "iterations")?,
            salt,
        }),
        kind @ ("argon2i" | "argon2id") => Ok(LuksKdf::Argon2 {
            is_id: kind == "argon2id",
            passes: number(kdf, "time")?,
            memory_kib: number(kdf, "memory")?,
            lanes: number(kdf, "cpus")?,
            salt,
        }),
        kind => Err(format!("the key derivation '{}' is not supported", printable(kind))),
    }
}

fn object<'a>(json: &'a Value, name: &str) -> Result<&'a Map<String, Value>, String> {
    json.get(name).and_then(Value::as_object).ok_or_else(|| format!("it has no '{name}'"))
}

fn string<'a>(json: &'a Value, name: &str) -> Result<&'a str, String> {
    json.get(name).and_then(Value::as_str).ok_or_else(|| format!("no text '{name}'"))
}

fn number(json: &Value, name: &str) -> Result<u32, String> {
    let number = json.get(name).and_then(Value::as_u64).and_then(|number| number.try_into().ok());
    number.ok_or_else(|| format!("no number '{name}'"))
}

/// Parses a 64-bit number, which the JSON has as a decimal text.
fn decimal(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("'{}' is no number of bytes", printable(text)))
}

/// A salt or digest in Base64 (RFC 4648), at most [`MAX_SALT`] bytes.
fn base64(text: &str) -> Result<Vec<u8>, String> {
    let bytes = STANDARD.decode(text).ok().filter(|bytes| bytes.len() <= MAX_SALT);
    bytes.ok_or_else(|| format!("'{}' is no Base64 of at most {MAX_SALT} bytes", printable(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_are_base64() {
        assert_eq!(base64("aGVsbG8="), Ok(b"hello".to_vec()));
        assert_eq!(base64("//79/A=="), Ok(vec![0xff, 0xfe, 0xfd, 0xfc]));
        assert!(base64("a*b").is_err() && base64(&"A".repeat(200)).is_err());
    }
}
