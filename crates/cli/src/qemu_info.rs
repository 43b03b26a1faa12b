//! The output of `qemu-img info`, for scripts that look for its lines, made from the object that
//! `info --json` prints.

use std::fmt::Write;

use blockhouse_config::size;
use serde_json::{Map, Value};

/// The text of an image, without a newline at the end. `snapshots` is its snapshot table.
pub fn text_of(info: &Value, snapshots: &str) -> String {
    let mut text = String::new();
    node(&mut text, info, 0, snapshots);
    children(&mut text, info, 0, "/");
    text.truncate(text.trim_end_matches('\n').len());
    text
}

/// A node of QEMU's graph: an image, or the file or device below it.
fn node(text: &mut String, info: &Value, depth: usize, snapshots: &str) {
    let is_file = depth > 0 && is_empty(&info["children"]);
    let words = if is_file {
        ["filename", "protocol type", "file length"]
    } else {
        ["image", "file format", "virtual size"]
    };
    let virtual_size = info["virtual-size"].as_u64().unwrap_or(0);
    let actual = info["actual-size"].as_u64().map_or("unavailable".into(), size::show);
    line(text, depth, words[0], &plain(&info["filename"]));
    line(text, depth, words[1], &plain(&info["format"]));
    let bytes = format!("{} ({virtual_size} bytes)", size::show(virtual_size));
    line(text, depth, words[2], &bytes);
    line(text, depth, "disk size", &actual);
    if info["encrypted"] == true {
        line(text, depth, "encrypted", "yes");
    }
    if !info["cluster-size"].is_null() {
        line(text, depth, "cluster_size", &plain(&info["cluster-size"]));
    }
    if info["dirty-flag"] == true {
        line(text, depth, "cleanly shut down", "no");
    }
    if let Some(name) = info["backing-filename"].as_str() {
        let full = plain(&info["full-backing-filename"]);
        let full = if full == name { String::new() } else { format!(" (actual path: {full})") };
        line(text, depth, "backing file", &format!("{name}{full}"));
        if let Some(format) = info["backing-filename-format"].as_str() {
            line(text, depth, "backing file format", format);
        }
    }
    if !snapshots.is_empty() {
        text.push_str(snapshots);
        text.push('\n');
    }
    for (key, heading) in
        [("format-specific", "Format specific information"), ("limits", "Block limits")]
    {
        let data = if key == "limits" { &info[key] } else { &info[key]["data"] };
        if !is_empty(data) {
            let _ = writeln!(text, "{:1$}{heading}:", "", depth * 4);
            dump(text, depth + 1, data);
        }
    }
}

fn children(text: &mut String, info: &Value, depth: usize, path: &str) {
    for child in info["children"].as_array().into_iter().flatten() {
        let name = plain(&child["name"]);
        let _ = writeln!(text, "{:1$}Child node '{path}{name}':", "", depth * 4);
        node(text, &child["info"], depth + 1, "");
        children(text, &child["info"], depth + 1, &format!("{path}{name}/"));
    }
}

fn line(text: &mut String, depth: usize, key: &str, value: &str) {
    let _ = writeln!(text, "{:1$}{key}: {value}", "", depth * 4);
}

/// Writes a line for each entry of an object or list. The entries of a nested object or list
/// follow its line.
fn dump(text: &mut String, depth: usize, value: &Value) {
    let mut entry = |key: &str, value: &Value| match value {
        Value::Object(_) | Value::Array(_) => {
            let _ = writeln!(text, "{:1$}{key}:", "", depth * 4);
            dump(text, depth + 1, value);
        }
        _ => line(text, depth, key, &plain(value)),
    };
    match value {
        Value::Object(members) => {
            for (key, value) in in_order(members) {
                entry(&key.replace('-', " "), value);
            }
        }
        Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                entry(&format!("[{index}]"), value);
            }
        }
        _ => {}
    }
}

/// The members in QEMU's order, which is the order of its hash table (`qobject/qdict.c`). Scripts
/// expect this order.
fn in_order(members: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut ordered: Vec<_> = members.iter().collect();
    ordered.sort_by_key(|(key, _)| bucket(key));
    ordered
}

fn bucket(key: &str) -> u32 {
    const BUCKETS: u32 = 512;
    let start = 0x238f_13af_u32.wrapping_mul(key.len() as u32);
    let add = |value: u32, (index, byte): (u32, u8)| {
        value.wrapping_add(u32::from(byte) << (index * 5 % 24))
    };
    let value = (0..).zip(key.bytes()).fold(start, add);
    value.wrapping_mul(1_103_515_243).wrapping_add(12345) % BUCKETS
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.is_empty(),
        Value::Array(values) => values.is_empty(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_text_is_that_of_qemu_img() {
        let info = json!({
            "filename": "d.vmdk", "format": "vmdk", "virtual-size": 4_194_304, "actual-size": 8192,
            "dirty-flag": false, "cluster-size": 65536, "backing-filename": "b", "full-backing-filename": "b",
            "format-specific": { "type": "vmdk", "data": {
                "cid": 1, "parent-cid": 2, "create-type": "monolithicSparse",
                "extents": [{ "filename": "d.vmdk", "virtual-size": 4_194_304, "cluster-size": 65536, "format": "" }],
            } },
            "children": [{ "name": "file", "info": {
                "filename": "d.vmdk", "format": "file", "virtual-size": 512, "children": [],
                "format-specific": { "type": "file", "data": {} },
            } }],
        });
        let expected = "image: d.vmdk\nfile format: vmdk\nvirtual size: 4 MiB (4194304 bytes)\ndisk size: 8 KiB\n\
            cluster_size: 65536\nbacking file: b\nFormat specific information:\n    cid: 1\n    parent cid: 2\n    \
            create type: monolithicSparse\n    extents:\n        [0]:\n            virtual size: 4194304\n            \
            filename: d.vmdk\n            cluster size: 65536\n            format: \nChild node '/file':\n    \
            filename: d.vmdk\n    protocol type: file\n    file length: 512 B (512 bytes)\n    disk size: unavailable";
        assert_eq!(text_of(&info, ""), expected);
    }

    #[test]
    fn keys_have_the_order_of_qemu() {
        let keys = [
            "extended-l2",
            "corrupt",
            "refcount-bits",
            "lazy-refcounts",
            "compression-type",
            "compat",
        ];
        let members = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
        let ordered: Vec<_> = in_order(&members).into_iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(ordered, keys.into_iter().rev().collect::<Vec<_>>());
    }
}
