//! `raw` nodes of QMP over nodes of formats and over a part of a file, and exports of bitmaps that
//! were added before: compared with QEMU's own daemon.

use blockhouse_tests::image_tool::{qemu_io, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{Scratch, need, require, run, tool};
use serde_json::{Value, json};

use crate::storage_daemon::{Daemon, NAME, at_stdio, folder, ours, words};

const FILES: [&str; 6] = [
    "--blockdev",
    "file,node-name=f,filename=DIR/d",
    "--blockdev",
    "file,node-name=r,filename=DIR/r",
    "--nbd-server",
    "addr.type=unix,addr.path=DIR/s",
];

#[test]
fn a_raw_node_is_another_name_of_the_node_of_a_format() {
    require!(need::tools(&[NAME, "qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let add = |options: &str| {
        format!("{{'execute':'blockdev-add','arguments':{{'driver':'raw',{options}}}}}")
    };
    let delete =
        |node: &str| format!("{{'execute':'blockdev-del','arguments':{{'node-name':'{node}'}}}}");
    let export = |node: &str, is_writable: bool| {
        format!(
            "{{'execute':'block-export-add','arguments':{{'type':'nbd','id':'{node}','node-name':'{node}','writable':{is_writable}}}}}"
        )
    };
    let unexport =
        |id: &str| format!("{{'execute':'block-export-del','arguments':{{'id':'{id}'}}}}");
    let nodes = "{'execute':'query-named-block-nodes','arguments':{'flat':true}}".to_owned();
    let lines = [
        "{'execute':'qmp_capabilities'}".to_owned(),
        "{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'q','file':'f'}}"
            .to_owned(),
        add("'node-name':'a','file':'zz'"),
        add("'node-name':'a','file':'q','read-only':true"),
        nodes.clone(),
        delete("q"),
        export("a", true),
        export("a", false),
        "{'execute':'query-block-exports'}".to_owned(),
        delete("a"),
        unexport("a"),
        delete("a"),
        add("'node-name':'b','file':'q'"),
        export("b", true),
        unexport("b"),
        delete("b"),
        delete("q"),
        add("'node-name':'c','file':{'driver':'qcow2','node-name':'e','file':'f'}"),
        delete("c"),
        add("'node-name':'part','offset':65536,'size':131072,'file':'r'"),
        nodes,
        export("part", true),
        unexport("part"),
        delete("part"),
        add("'node-name':'part','offset':1048577,'file':'r'"),
        delete("r"),
        "{'execute':'quit'}".to_owned(),
    ];
    let lines = lines.iter().map(String::as_str).collect::<Vec<_>>();
    let [own, theirs] = [ours(&scratch), tool(NAME)].map(|program| {
        let mut answers = at_stdio(program, &words(&FILES, &folder), &lines);
        for nodes in answers.iter_mut().filter_map(|answer| answer["return"].as_array_mut()) {
            let keys = ["node-name", "drv", "ro", "id", "type", "shutting-down"];
            // The rest of a node is compared elsewhere, and so is their order.
            for node in nodes.iter_mut().filter_map(Value::as_object_mut) {
                node.retain(|key, _| keys.contains(&key.as_str()));
            }
            nodes.sort_by_key(|node| node["node-name"].to_string());
        }
        answers
    });
    for (place, (own, theirs)) in own.iter().zip(&theirs).enumerate() {
        let is_error = |answer: &Value| answer["error"].is_object();
        assert!(own == theirs || is_error(own) && is_error(theirs), "{place}: {own}, {theirs}");
    }
    assert_eq!(own.len(), theirs.len());
}

#[test]
fn raw_nodes_serve_the_disk_below_and_a_part_of_a_file() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    qemu_io("qcow2", &folder.join("d"), &["write -P 7 64k 64k"]);
    let more = [
        "--blockdev",
        "qcow2,node-name=q,file=f",
        "--blockdev",
        "raw,node-name=a,file=q",
        "--blockdev",
        "raw,node-name=part,offset=65536,size=131072,file=r",
        "--export",
        "nbd,id=a,node-name=a,writable=on",
        "--export",
        "nbd,id=q,node-name=q",
        "--export",
        "nbd,id=part,node-name=part,writable=on",
    ];
    let line = words(&[&FILES[..], &more].concat(), &folder);
    let daemon = Daemon::start(ours(&scratch), &line, &scratch.path("pid"));
    let socket = folder.join("s");
    let [mut alias, mut disk, mut part] = ["a", "q", "part"].map(|name| Client::at(&socket, name));
    assert_eq!(alias.read(64 << 10, 512), Ok(vec![7; 512]));
    assert_eq!(alias.write(0, &[8; 512], 0), 0);
    assert_eq!(disk.read(0, 512), Ok(vec![8; 512]));
    assert_eq!(part.write(512, &[9; 512], 0), 0);
    drop((alias, disk, part));
    daemon.stop();
    qemu_io("raw", &folder.join("r"), &["read -P 0 0 66048", "read -P 9 66048 512"]);
    // A part of the disk of a format is refused, and so is a second filter.
    for (options, said) in [
        ("raw,node-name=x,offset=512,file=q", "'offset' is not possible here"),
        ("raw,node-name=x,size=512,file=q", "'size' is not possible here"),
        ("raw,node-name=x,file=a", "has a filter on it"),
        (
            "raw,node-name=x,file.driver=raw,file.file.driver=qcow2,file.file.file.driver=file,file.file.file.filename=DIR/e",
            "filter is not possible",
        ),
    ] {
        let more =
            ["--blockdev", "qcow2,node-name=q,file=f", "--blockdev", "raw,node-name=a,file=q"];
        let line = words(&[&FILES[..], &more, &["--blockdev", options]].concat(), &folder);
        let outcome = run(ours(&scratch).args(line));
        assert!(!outcome.status.success() && outcome.stderr.contains(said), "{outcome:?}");
    }
}

#[test]
fn an_export_offers_a_bitmap_that_was_added_before_it() {
    require!(need::tools(&[NAME, "qemu-img", "nbdinfo"]));
    let scratch = Scratch::new();
    let mut maps = Vec::new();
    for (name, command) in [("own", ours(&scratch)), ("theirs", tool(NAME))] {
        let folder = folder(&scratch, name);
        let (socket, qmp) = (folder.join("s"), folder.join("m"));
        let monitor = format!("socket,id=m,server=on,wait=off,path={}", str(&qmp));
        let more =
            ["--blockdev", "qcow2,node-name=q,file=f", "--chardev", &monitor, "--monitor", "m"];
        let line = words(&[&FILES[..], &more].concat(), &folder);
        let daemon = Daemon::start(command, &line, &scratch.path("pid"));
        let mut qmp = Qmp::connect(&qmp);
        let export = |id: &str, bitmaps: Value| json!({ "type": "nbd", "id": id, "name": id, "node-name": "q", "writable": true, "bitmaps": bitmaps });
        qmp.get(
            "block-dirty-bitmap-add",
            json!({ "node": "q", "name": "kept", "persistent": true }),
        );
        qmp.get("block-export-add", export("e", json!(["kept"])));
        assert_eq!(Client::at(&socket, "e").write(128 << 10, &[1; 512], 0), 0);
        qmp.get("block-dirty-bitmap-add", json!({ "node": "q", "name": "later" }));
        qmp.get("block-export-add", export("second", json!([{ "node": "q", "name": "later" }])));
        assert_eq!(Client::at(&socket, "e").write(512 << 10, &[1; 512], 0), 0);
        qmp.refused("block-export-add", export("none", json!(["none"])));
        for (export, bitmap) in [("e", "kept"), ("e", "later"), ("second", "later")] {
            let uri = format!("nbd+unix:///{export}?socket={}", str(&socket));
            let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
            let outcome = run(tool("nbdinfo").args([&map, "--json", &uri]));
            maps.push((name, outcome.stdout));
        }
        // A bitmap that is offered stays.
        qmp.refused("block-dirty-bitmap-remove", json!({ "node": "q", "name": "later" }));
        qmp.get("block-export-del", json!({ "id": "second", "mode": "hard" }));
        qmp.get("block-dirty-bitmap-remove", json!({ "node": "q", "name": "later" }));
        qmp.refused("block-dirty-bitmap-remove", json!({ "node": "q", "name": "kept" }));
        drop(qmp);
        daemon.stop();
    }
    let (own, theirs) = maps.split_at(maps.len() / 2);
    let texts = |maps: &[(&str, String)]| maps.iter().map(|map| map.1.clone()).collect::<Vec<_>>();
    assert_eq!(texts(own), texts(theirs));
    assert!(own[0].1.contains("131072") && own[2].1.contains("524288"), "{own:?}");
    assert!(own[1].1.is_empty(), "not requested for this export: {own:?}");
}
