//! Random requests at the control socket, while clients verify what they read: from a fuzzer that
//! knows the schema, and from one that does not. No client sees an error, nothing leaks, and the
//! lists are true. `BLOCKHOUSE_CONTROL_SECONDS` sets the duration.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::generated::control_schema;
use blockhouse_tests::nbd::{Address, Client};
use blockhouse_tests::schema::Schema;
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd_uri, seconds_in, seeded};
use fastrand::Rng;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// The names in random requests: images and sockets that nothing else uses.
struct World {
    images: Vec<PathBuf>,
    exports: Vec<String>,
}

impl World {
    fn new(scratch: &Scratch) -> Self {
        let mut images: Vec<_> =
            (0..3).map(|index| scratch.image(&format!("{index}.img"), MIB).path().into()).collect();
        images.extend((0..3).map(|index| scratch.path(&format!("{index}.qcow2"))));
        let sockets = ["one", "two"].map(|name| scratch.socket(name));
        let uri = |name: &str, socket: &Path| nbd_uri(name, socket);
        let mut exports: Vec<_> = sockets
            .iter()
            .flat_map(|socket| ["a", "b", ""].map(|name| uri(name, socket)))
            .collect();
        exports.extend(["vu1", "vu2"].map(|name| scratch.socket(name).display().to_string()));
        Self { images, exports }
    }

    /// A value for a parameter, by its name; mostly a meaningful one.
    fn value(&self, name: &str, random: &mut Rng) -> Option<Value> {
        if random.u8(..8) == 0 {
            return None;
        }
        let image = &self.images[random.usize(..self.images.len())];
        let file = || image.file_name().expect("a name").to_string_lossy().into_owned();
        Some(match name {
            "disk" => json!(file()),
            // The default: the name of the file.
            "name" if random.bool() => Value::Null,
            "name" | "new-name" => json!(["s", "t", "u"][random.usize(..3)]),
            "path" => json!(image),
            "create" => json!(MIB),
            "size" => json!(MIB * random.u64(1..4)),
            "export" | "exports" => json!(self.exports[random.usize(..self.exports.len())]),
            "cache" => json!(["none", "writeback", "unsafe"][random.usize(..3)]),
            "format" | "snapshot" | "binary" | "allow-paths" => return None,
            _ => return None,
        })
    }
}

/// Writes and reads back until `stop`. Any error is a failure.
pub(crate) fn verify(address: &Address, region: u64, stop: &AtomicBool) -> u64 {
    let mut client = Client::open(address);
    let mut count = 0_u64;
    while !stop.load(Ordering::SeqCst) {
        count += 1;
        let (offset, bytes) = ((region * 64 + count % 64) * 4096, count.to_be_bytes().repeat(512));
        assert_eq!(client.write(offset, &bytes, 0), 0);
        assert_eq!(client.read(offset, 4096), Ok(bytes));
    }
    client.disconnect();
    count
}

/// The number of open descriptors of a server.
pub(crate) fn descriptors(server: &Server) -> usize {
    let folder = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    std::fs::read_dir(folder).expect("the server runs").count()
}

/// Sends a request that fits the schema.
fn knows_the_schema(control: &mut Control, schema: &Value, world: &World, random: &mut Rng) {
    let methods = schema["methods"].as_object().expect("methods");
    let methods: Vec<_> = methods.keys().filter(|name| *name != "server.upgrade").collect();
    let method = methods[random.usize(..methods.len())];
    let part = |part| Schema::of(schema, &format!("/methods/{method}/{part}"));
    let params = part("params").random(random, &|name, random| world.value(name, random));
    match control.call(method, params.clone()) {
        Ok(result) => {
            assert_eq!(part("result").misfit(&result), None, "{method} {params}: {result}")
        }
        Err((code, message)) => {
            assert!([-32000, -32602].contains(&code), "{method} {params}: {code} {message}");
        }
    }
}

/// A damaged line: a request with bytes changed, cut or doubled; or noise.
fn damaged(world: &World, random: &mut Rng) -> Vec<u8> {
    let image = &world.images[random.usize(..world.images.len())];
    let request = json!({
        "jsonrpc": "2.0", "id": "damaged", "method": "disk.open", "params": { "path": image, "cache": "none" },
    });
    let mut line = request.to_string().into_bytes();
    for _ in 0..random.usize(..6) {
        let at = random.usize(..line.len());
        match random.u8(..4) {
            0 => line[at] = random.u8(..),
            1 => line.truncate(at + 1),
            2 => line.extend_from_within(at..),
            _ => drop(line.remove(at)),
        }
        if line.is_empty() {
            line.push(b'{');
        }
    }
    line.retain(|byte| *byte != b'\n');
    line
}

/// Checks that the lists are true: the listed sockets listen, and no others do.
fn check(control: &mut Control, world: &World) {
    let exports = control.get("export.list", json!({}));
    let disks = control.get("disk.list", json!({}));
    let key = |list: &Value, key: &str| -> BTreeSet<String> {
        let list = list.as_array().expect("a list").iter();
        list.map(|one| one[key].as_str().expect("a name").to_owned()).collect()
    };
    let listed = key(&exports, "export");
    assert!(key(&exports, "disk").is_subset(&key(&disks, "disk")), "{exports} {disks}");
    for export in &world.exports {
        let path = export.rsplit('=').next().expect("a path");
        let is_wanted = listed.iter().any(|one| one.rsplit('=').next() == Some(path));
        let listens = || UnixStream::connect(path).is_ok();
        assert!(
            eventually(Duration::from_secs(20), || listens() == is_wanted),
            "{export}: {listed:?}"
        );
    }
}

#[test]
fn random_requests_disturb_nobody_and_leave_nothing_behind() {
    let scratch = Scratch::new();
    let image = scratch.image("served", MIB);
    let socket = scratch.socket("control");
    let server = Serve::new(&scratch, image.path()).option("--control", &socket).start();
    let world = World::new(&scratch);
    let mut control = Control::connect(&socket);
    close_all(&mut control);
    let (before, memory) = (descriptors(&server), server.resident_memory());
    let (stop, address, mut random) = (AtomicBool::new(false), server.address(), seeded());
    let requests = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..2)
            .map(|region| {
                let (address, stop) = (&address, &stop);
                scope.spawn(move || verify(address, region, stop))
            })
            .collect();
        let fuzzers: Vec<_> = (0..3)
            .map(|index| {
                let (mut random, world, schema) = (random.fork(), &world, control_schema());
                let (stop, socket) = (&stop, &socket);
                scope.spawn(move || {
                    let mut control = Control::connect(socket);
                    let mut count = 0_u64;
                    while !stop.load(Ordering::SeqCst) {
                        count += 1;
                        if index < 2 {
                            knows_the_schema(&mut control, schema, world, &mut random);
                        } else {
                            let line = damaged(world, &mut random);
                            control.send(&line).expect("it listens");
                            // A valid request gets an answer; one that has lost its id gets none.
                            control.get("server.version", json!({}));
                        }
                    }
                    count
                })
            })
            .collect();
        let deadline = Instant::now() + seconds_in("BLOCKHOUSE_CONTROL_SECONDS", 6);
        while Instant::now() < deadline && fuzzers.iter().all(|fuzzer| !fuzzer.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::SeqCst);
        let count = |threads: Vec<std::thread::ScopedJoinHandle<'_, u64>>| -> u64 {
            threads.into_iter().map(|thread| thread.join().expect("no error")).sum()
        };
        assert!(count(clients) > 0);
        count(fuzzers)
    });
    check(&mut control, &world);
    close_all(&mut control);
    check(&mut control, &world);
    let settled = eventually(Duration::from_secs(20), || descriptors(&server) <= before);
    let (now, grown) = (descriptors(&server), server.resident_memory().saturating_sub(memory));
    assert!(settled, "{now} descriptors, {before} before");
    eprintln!("{requests} requests; {before} descriptors before, {now} now; {grown} bytes more");
    server.assert_serves();
    server.stop();
}

/// Closes all disks but the one that is served, after ending the jobs and backups that keep disks
/// open.
fn close_all(control: &mut Control) {
    let jobs = |control: &mut Control| -> Vec<Value> {
        let jobs = control.get("job.list", json!({}));
        let ended = ["completed", "cancelled", "failed"];
        let jobs = jobs.as_array().expect("a list").iter();
        jobs.filter(|job| ended.iter().all(|ended| job["status"] != *ended)).cloned().collect()
    };
    for job in jobs(control) {
        // The job may end by itself meanwhile.
        let _ = control.call("job.cancel", json!({ "job": job["job"] }));
    }
    let mut left = Vec::new();
    let ended = eventually(Duration::from_secs(20), || {
        left = jobs(control);
        left.is_empty()
    });
    assert!(ended, "{left:?}");
    for backup in control.get("backup.list", json!({})).as_array().expect("a list") {
        control.get("backup.end", json!({ "backup": backup["backup"] }));
    }
    let disks = control.get("disk.list", json!({}));
    for disk in disks.as_array().expect("a list") {
        if disk["disk"] != "served" {
            control.get("disk.close", json!({ "disk": disk["disk"], "force": true }));
        }
    }
}
