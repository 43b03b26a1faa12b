//! The header of LUKS, by the keys of `qemu-img info`.

use blockhouse_format::{LuksHeader, LuksKdf, LuksSlotKey};
use serde_json::{Value, json};

/// The header as QEMU's JSON object.
pub fn as_json(header: &LuksHeader) -> Value {
    let (algorithm, mode, vectors) = words_of(header);
    let keys = || header.slots.iter().filter_map(|slot| slot.key.as_ref().ok());
    let mut value = json!({
        "uuid": header.uuid,
        "cipher-alg": algorithm,
        "cipher-mode": mode,
        "ivgen-alg": vectors.split(':').next(),
        "detached-header": false,
        "payload-offset": header.payload,
        "slots": slots(header),
    });
    if let Some((_, hash)) = vectors.split_once(':') {
        value["ivgen-hash-alg"] = hash.into();
    }
    if let Some(LuksSlotKey { digest, .. }) = keys().next() {
        value["hash-alg"] = digest.hash.as_str().into();
        value["master-key-iters"] = digest.iterations.into();
    }
    value
}

/// The cipher, the mode and the IV generator in QEMU's words: "aes-256", "xts", "plain64".
fn words_of(header: &LuksHeader) -> (String, String, String) {
    let mut words = header.cipher.as_str().splitn(3, '-');
    let mut next = || words.next().unwrap_or_default().to_owned();
    let (name, mode, vectors) = (next(), next(), next());
    // XTS has two keys.
    let bytes = if mode == "xts" { header.key_bytes / 2 } else { header.key_bytes };
    (format!("{name}-{}", bytes * 8), mode, vectors)
}

fn slots(header: &LuksHeader) -> Value {
    let unused =
        |number: usize| json!({ "active": false, "key-offset": header.slot_offsets[number] });
    let mut slots: Vec<_> = (0..header.slot_offsets.len()).map(unused).collect();
    for slot in &header.slots {
        let mut value = json!({ "active": true });
        if let Ok(key) = &slot.key {
            value["stripes"] = key.stripes.into();
            value["key-offset"] = key.area.offset().into();
            if let LuksKdf::Pbkdf2 { iterations, .. } = key.kdf {
                value["iters"] = iterations.into();
            }
        }
        match slots.get_mut(slot.number as usize) {
            Some(place) => *place = value,
            None => slots.push(value),
        }
    }
    slots.into()
}
