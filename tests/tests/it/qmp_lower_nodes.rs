//! QMP: nodes whose backing content is another open node, as in pull backups, after changes of the
//! lower or of the upper node.

use blockhouse_tests::require;
use serde_json::{Value, json};

use crate::qmp_moments::Rig;

/// A server with an exported node `a`, and a node `t` that stands on it.
fn start() -> Result<Rig, String> {
    let mut rig = Rig::start(&["a"])?;
    rig.new_image("t");
    let mut node = rig.node("t");
    node["backing"] = "a".into();
    rig.qmp.get("blockdev-add", node);
    Ok(rig)
}

fn refused(rig: &mut Rig, command: &str, arguments: Value, words: &str) {
    let why = rig.qmp.refused(command, arguments);
    assert!(why.contains(words), "{command}: {why}");
}

/// The errors are QEMU's.
#[test]
fn a_node_below_another_one_is_not_replaced() {
    let mut rig = require!(start());
    let rig = &mut rig;
    rig.new_image("other");
    rig.add("other");
    let busy = "Node 'a' is busy: node is used as backing hd of 't'";
    let snapshot =
        json!({ "node-name": "a", "snapshot-file": rig.path("o"), "snapshot-node-name": "o" });
    refused(rig, "blockdev-snapshot-sync", snapshot, busy);
    for overlay in ["t", "other"] {
        refused(rig, "blockdev-snapshot", json!({ "node": "a", "overlay": overlay }), busy);
    }
    let mirror = |device: &str, target: &str| json!({ "job-id": "m", "device": device, "target": target, "sync": "full" });
    refused(rig, "blockdev-mirror", mirror("a", "other"), "Need a root block node");
    refused(rig, "blockdev-mirror", mirror("other", "a"), busy);
    let commit = json!({ "job-id": "c", "device": "a" });
    refused(rig, "block-commit", commit, "Need a root block node");
    rig.qmp.get("blockdev-del", json!({ "node-name": "t" }));
    rig.qmp.get("blockdev-snapshot", json!({ "node": "a", "overlay": "other" }));
}

#[test]
fn a_node_stands_on_another_one_also_below_an_overlay_and_after_it() {
    let mut rig = require!(start());
    let rig = &mut rig;
    let export = |node: &str| json!({ "type": "nbd", "id": node, "node-name": node });
    let del = |node: &str| json!({ "node-name": node });
    // The data below it would be missing in a copy.
    rig.new_image("copy");
    rig.add("copy");
    let mirror = json!({ "job-id": "m", "device": "t", "target": "copy", "sync": "full" });
    refused(rig, "blockdev-mirror", mirror, "stands on 'a'");
    let snapshot = json!({ "node": "copy", "overlay": "t" });
    refused(rig, "blockdev-snapshot", snapshot, "already has a backing image");
    rig.new_overlay("o", "t");
    let mut node = rig.node("o");
    node["backing"] = Value::Null;
    rig.qmp.get("blockdev-add", node);
    rig.qmp.get("blockdev-snapshot", json!({ "node": "t", "overlay": "o" }));
    refused(rig, "block-export-add", export("o"), "stands on 'a'");
    rig.qmp.get("blockdev-del", del("o"));
    rig.qmp.get("block-export-del", json!({ "id": "a", "mode": "hard" }));
    refused(rig, "block-export-add", export("t"), "stands on 'a'");
    refused(rig, "blockdev-del", del("a"), "used as backing hd of 't'");
    for name in ["t", "a"] {
        rig.qmp.get("blockdev-del", del(name));
    }
}
