//! Printed JSON. Under the name of a QEMU tool the JSON has QEMU's indentation and order of keys,
//! because scripts that parse lines depend on them. The key [`OWN`], which QEMU does not have, is
//! omitted then.

use serde_json::{Map, Value};

use crate::called_as;

/// Keys in the order in which qemu-img prints them, that of a hash of the key; other keys follow.
const ORDER: &[&str] = &[
    "ivgen-alg",
    "compat",
    "icount",
    "flags",
    "vm-clock-nsec",
    "detached-header",
    "image-end-offset",
    "name",
    "active",
    "compressed-clusters",
    "hash-alg",
    "iters",
    "compression-type",
    "compressed",
    "cid",
    "lazy-refcounts",
    "date-sec",
    "bitmaps",
    "cipher-alg",
    "refcount-bits",
    "parent-cid",
    "uuid",
    "total-clusters",
    "corruptions",
    "data-file",
    "ivgen-hash-alg",
    "corruptions-fixed",
    "check-errors",
    "children",
    "backing-filename-format",
    "date-nsec",
    "granularity",
    "required",
    "leaks",
    "create-type",
    "snapshots",
    "key-offset",
    "leaks-fixed",
    "allocated-clusters",
    "virtual-size",
    "filename",
    "cluster-size",
    "fully-allocated",
    "format",
    "encrypt",
    "actual-size",
    "format-specific",
    "data-file-raw",
    "full-backing-filename",
    "cipher-mode",
    "stripes",
    "slots",
    "vm-clock-sec",
    "payload-offset",
    "encrypted",
    "type",
    "extents",
    "master-key-iters",
    "backing-filename",
    "corrupt",
    "fragmented-clusters",
    "id",
    "vm-state-size",
    "info",
    "dirty-flag",
    "extended-l2",
    "data",
];

/// The key that QEMU does not have.
const OWN: &str = "blockhouse";

/// JSON on several lines.
pub fn pretty(value: &Value) -> String {
    match called_as::tool() {
        None => format!("{value:#}"),
        Some(_) => {
            let mut text = String::new();
            write(value, 0, &mut text);
            text
        }
    }
}

fn write(value: &Value, depth: usize, text: &mut String) {
    match value {
        Value::Object(members) => {
            let members = in_order(members);
            write_all('{', '}', members.len(), depth, text, |index, text| {
                let (key, value) = members[index];
                text.push_str(&format!("{}: ", Value::from(key)));
                write(value, depth + 1, text);
            });
        }
        Value::Array(values) => {
            write_all('[', ']', values.len(), depth, text, |index, text| {
                write(&values[index], depth + 1, text);
            });
        }
        plain => text.push_str(&plain.to_string()),
    }
}

fn write_all(
    begin: char,
    end: char,
    count: usize,
    depth: usize,
    text: &mut String,
    one: impl Fn(usize, &mut String),
) {
    let indent = |depth: usize| format!("\n{:width$}", "", width = depth * 4);
    text.push(begin);
    for index in 0..count {
        text.push_str(&indent(depth + 1));
        one(index, text);
        if index + 1 < count {
            text.push(',');
        }
    }
    text.push_str(&indent(depth));
    text.push(end);
}

fn in_order(members: &Map<String, Value>) -> Vec<(&str, &Value)> {
    let place = |key: &str| ORDER.iter().position(|known| *known == key).unwrap_or(ORDER.len());
    let members = members.iter().map(|(key, value)| (key.as_str(), value));
    let mut members: Vec<_> = members.filter(|(key, _)| *key != OWN).collect();
    members.sort_by_key(|(key, _)| place(key));
    members
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_are_in_the_order_of_qemu_img() {
        let value = json!({
            "format": "raw", "filename": "d", "virtual-size": 512, "blockhouse": {}, "children": [],
            "format-specific": { "data": {}, "type": "file" }, "z": null, "dirty-flag": false,
        });
        let mut text = String::new();
        write(&value, 0, &mut text);
        let expected = "{\n    \"children\": [\n    ],\n    \"virtual-size\": 512,\n    \"filename\": \"d\",\n    \
             \"format\": \"raw\",\n    \"format-specific\": {\n        \"type\": \"file\",\n        \"data\": {\n        \
             }\n    },\n    \"dirty-flag\": false,\n    \"z\": null\n}";
        assert_eq!(text, expected);
        let repaired = json!({
            "filename": "d", "format": "qcow2", "check-errors": 0, "leaks-fixed": 1, "corruptions-fixed": 1,
        });
        let keys: Vec<_> = in_order(repaired.as_object().expect("an object"))
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        let expected = ["corruptions-fixed", "check-errors", "leaks-fixed", "filename", "format"];
        assert_eq!(keys, expected);
    }
}
