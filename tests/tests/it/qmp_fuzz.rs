//! Random commands at the QMP socket, while clients verify what they read: from fuzzers that know
//! the schema, and from one that does not. No client sees an error, results fit the schema, and
//! nothing is left behind. `BLOCKHOUSE_QMP_SECONDS` sets the duration.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::qmp_schema::QmpSchema;
use blockhouse_tests::{Scratch, Serve, Server, eventually, seconds_in, seeded};
use fastrand::Rng;
use serde_json::{Value, json};

use crate::control_fuzz::{descriptors, verify};

const MIB: u64 = 1 << 20;
const CLASSES: [&str; 3] = ["GenericError", "CommandNotFound", "DeviceNotActive"];
/// The names that fuzzers use; the server makes others.
const NODES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
const JOBS: [&str; 4] = ["j1", "j2", "j3", "j4"];

/// The names in random commands: files and sockets that nothing else uses.
struct World {
    files: Vec<PathBuf>,
    sockets: Vec<PathBuf>,
}

impl World {
    fn new(scratch: &Scratch) -> Self {
        let mut files: Vec<PathBuf> =
            (0..3).map(|index| scratch.image(&format!("{index}.img"), MIB).path().into()).collect();
        files.extend((0..4).map(|index| scratch.path(&format!("{index}.qcow2"))));
        Self { files, sockets: ["one", "two", "three"].map(|name| scratch.socket(name)).into() }
    }

    /// A value for a member, by its name; mostly a meaningful one.
    fn value(&self, name: &str, random: &mut Rng) -> Option<Value> {
        if random.u8(..12) == 0 {
            return None;
        }
        Some(match name {
            "node" | "node-name" | "device" | "target" | "overlay" | "file" | "backing"
            | "base-node" | "top-node" | "data-file" | "snapshot-node-name" => {
                json!(random.choice(NODES))
            }
            "id" | "job-id" => {
                json!(random.choice(JOBS.into_iter().chain(NODES).collect::<Vec<_>>()))
            }
            "name" | "bitmap" => json!(random.choice(["x", "y", "z"])),
            "filename" | "snapshot-file" | "backing-file" => json!(random.choice(&self.files)),
            "path" => json!(random.choice(&self.sockets)),
            "driver" => json!(random.choice(["file", "file", "qcow2", "qcow2", "raw", "throttle"])),
            "sync" => json!(random.choice(["full", "none", "bitmap", "top"])),
            "size" => json!(MIB * random.u64(0..3)),
            "speed" => json!(random.u64(..4) << 20),
            "granularity" => json!(512_u64 << random.u32(..12)),
            // A node whose requests take for ever is opened and removed as late.
            "latency-ns" => json!(random.u64(..1_000_000)),
            "throttle-group" => json!(random.choice(JOBS)),
            _ => return None,
        })
    }
}

/// Sends a command that fits the schema; returns whether it succeeded.
fn knows_the_schema(qmp: &mut Qmp, schema: &QmpSchema, world: &World, random: &mut Rng) -> bool {
    let commands = schema.commands();
    let command = commands[random.usize(..commands.len())];
    if command == "quit" {
        return false;
    }
    let mut arguments =
        schema.arguments(command, random, &|name, random| world.value(name, random));
    if command == "object-add" && !arguments["id"].is_null() {
        // An id that is removed at the end: no command lists objects, and a secret keeps a
        // descriptor open.
        arguments["id"] = json!(random.choice(NODES));
    }
    let request = json!({ "execute": command, "arguments": arguments });
    let answer = qmp.ask(&request.to_string());
    qmp.events.clear();
    let Some(result) = answer.get("return") else {
        let class = answer["error"]["class"].as_str().unwrap_or_default();
        assert!(CLASSES.contains(&class), "{request}: {answer}");
        return false;
    };
    assert_eq!(schema.misfit(command, result), None, "{request}: {answer}");
    true
}

/// A damaged message: a command with bytes changed, cut or doubled.
fn damaged(world: &World, random: &mut Rng) -> Vec<u8> {
    let request = json!({
        "execute": "blockdev-add",
        "arguments": { "driver": "file", "node-name": "a", "filename": random.choice(&world.files) },
    });
    let mut text = request.to_string().into_bytes();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..text.len());
        match random.u8(..4) {
            0 => text[at] = random.u8(..),
            1 => text.truncate(at + 1),
            2 => text.extend_from_within(at..),
            _ if text.len() > 1 => drop(text.remove(at)),
            _ => {}
        }
    }
    text
}

/// Sends damaged messages over a new connection, and closes it. The server counts a client until it
/// has executed the client's last command.
fn knows_nothing(socket: &std::path::Path, world: &World, random: &mut Rng) {
    let Some(mut qmp) = Qmp::try_connect(socket) else {
        return std::thread::sleep(Duration::from_millis(20));
    };
    for _ in 0..random.usize(1..20) {
        if qmp.send(&damaged(world, random)).is_err() {
            break;
        }
    }
    qmp.hang_up();
}

/// Removes everything that commands may have made, repeatedly, because some can be removed only
/// after others.
fn remove_all(qmp: &mut Qmp) {
    let mut refusals = Vec::new();
    let mut ask = |command: &str, arguments: Value| {
        let request = json!({ "execute": command, "arguments": arguments });
        let answer = qmp.ask(&request.to_string());
        if let ("blockdev-del", Some(error)) = (command, answer.get("error")) {
            refusals.push(error["desc"].to_string());
        }
        answer["return"].clone()
    };
    let gone = eventually(Duration::from_secs(60), || {
        for job in ask("query-jobs", json!({})).as_array().into_iter().flatten() {
            for command in ["job-resume", "job-cancel", "job-dismiss"] {
                ask(command, json!({ "id": job["id"] }));
            }
        }
        for export in ask("query-block-exports", json!({})).as_array().into_iter().flatten() {
            if export["node-name"] != "first" {
                ask("block-export-del", json!({ "id": export["id"], "mode": "hard" }));
            }
        }
        ask("nbd-server-stop", json!({}));
        let nodes = ask("query-named-block-nodes", json!({ "flat": true }));
        let mut nodes: Vec<Value> = nodes.as_array().into_iter().flatten().cloned().collect();
        nodes.retain(|node| !["first", "first-file"].iter().any(|name| node["node-name"] == *name));
        for node in &nodes {
            ask("blockdev-del", json!({ "node-name": node["node-name"] }));
        }
        for id in JOBS.iter().chain(&NODES) {
            ask("object-del", json!({ "id": id }));
        }
        nodes.is_empty() && ask("query-jobs", json!({})) == json!([])
    });
    let left = ask("query-named-block-nodes", json!({ "flat": true }));
    let jobs = ask("query-jobs", json!({}));
    let last = &refusals[refusals.len().saturating_sub(4)..];
    assert!(gone, "{last:#?} {jobs:#} {left:#}");
}

/// The files that a server has open.
fn open_files(server: &Server) -> Vec<PathBuf> {
    let folder = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let entries = std::fs::read_dir(folder).expect("the server runs").flatten();
    entries.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
}

#[test]
fn random_commands_disturb_nobody_and_leave_nothing_behind() {
    let scratch = Scratch::new();
    let image = scratch.image("first", MIB);
    let socket = scratch.socket("qmp");
    let server = Serve::new(&scratch, image.path())
        .option("--qmp", &socket)
        .option("--sandbox-allow", scratch.path("."))
        .start();
    let world = World::new(&scratch);
    let mut qmp = Qmp::connect(&socket);
    let schema = QmpSchema::new(&qmp.get("query-qmp-schema", json!({})));
    let (before, memory) = (descriptors(&server), server.resident_memory());
    let (stop, address, mut random) = (AtomicBool::new(false), server.address(), seeded());
    let [carried_out, sent] = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        let (stop, world, schema, socket) = (&stop, &world, &schema, &socket);
        let mut threads: Vec<_> = (0..2)
            .map(|region| {
                let address = &address;
                scope.spawn(move || {
                    verify(address, region, stop);
                })
            })
            .collect();
        for index in 0..3 {
            let mut random = random.fork();
            let (carried_out, sent) = (&carried_out, &sent);
            threads.push(scope.spawn(move || {
                let mut qmp = Qmp::connect(socket);
                while !stop.load(Ordering::SeqCst) {
                    sent.fetch_add(1, Ordering::Relaxed);
                    if index == 2 {
                        knows_nothing(socket, world, &mut random);
                    } else if knows_the_schema(&mut qmp, schema, world, &mut random) {
                        carried_out.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }));
        }
        let deadline = Instant::now() + seconds_in("BLOCKHOUSE_QMP_SECONDS", 8);
        while Instant::now() < deadline && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::SeqCst);
        threads.into_iter().for_each(|thread| thread.join().expect("no error"));
    });
    // A client that does not read events for long is disconnected.
    drop(qmp);
    // A command of a client that has disconnected may still be in progress.
    let settled = eventually(Duration::from_secs(20), || {
        Qmp::try_connect(&socket).iter_mut().for_each(remove_all);
        descriptors(&server) <= before
    });
    let (now, grown) = (descriptors(&server), server.resident_memory().saturating_sub(memory));
    assert!(settled, "{now} descriptors, {before} before: {:#?}", open_files(&server));
    let [carried_out, sent] = [carried_out, sent].map(AtomicU64::into_inner);
    eprintln!(
        "{sent} commands, {carried_out} carried out; {before} descriptors before, {now} now; {grown} bytes more"
    );
    assert!(carried_out > 0);
    server.assert_serves();
    server.stop();
}
