//! QEMU's vhost-user-blk with every kind of memory: requests and rings are in huge pages, and in
//! memory that is hot-plugged and unplugged while requests are in flight on several queues.

use std::path::Path;

use blockhouse_tests::qemu_device::{QemuMachine, QemuQueue, QemuRequest, READ, WRITE};
use blockhouse_tests::{Scratch, Serve, need, random_bytes, require, seeded};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
/// Bytes of the machine's memory, and of the memory that is plugged.
const MEMORY: u64 = 64 * MIB;
const HUGE_PAGE: u64 = 2 * MIB;
/// Requests that are in flight on a queue.
const REQUESTS: u64 = 8;
const LENGTH: u32 = 64 << 10;
const QUEUES: u16 = 3;

/// The pages that a test adds to the host's pool of huge pages; removed on drop.
struct HugePages {
    before: u64,
}

const POOL: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    /// Makes sure that `count` pages are free; `Err` says why that is impossible.
    fn reserve(count: u64) -> Result<Self, String> {
        need::root()?;
        let number = |path: &str| std::fs::read_to_string(path).map_err(|error| error.to_string());
        let before: u64 = number(POOL)?.trim().parse().map_err(|_| "no pool of huge pages")?;
        let made = Self { before };
        std::fs::write(POOL, (before + count).to_string())
            .map_err(|error| format!("{POOL}: {error}"))?;
        let memory = number("/proc/meminfo")?;
        let of = |key| {
            let line = memory.lines().find_map(|line: &str| line.strip_prefix(key));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
        };
        if of("Hugepagesize:") != Some(HUGE_PAGE >> 10) {
            return Err("huge pages of another size than 2 MiB".into());
        }
        let free = of("HugePages_Free:").unwrap_or_default();
        if free < count { Err(format!("{free} huge pages, not {count}")) } else { Ok(made) }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // The kernel keeps pages in use until they are free.
        let _ = std::fs::write(POOL, self.before.to_string());
    }
}

/// A machine, the expected content of its disk, and its queues.
struct Used {
    machine: QemuMachine,
    model: Vec<u8>,
    queues: Vec<QemuQueue>,
}

impl Used {
    /// Requests of a queue with their data from an address on. Their buffers cross page boundaries,
    /// and each queue has its own part of the disk.
    fn requests(kind: u32, queue: u64, address: u64) -> Vec<QemuRequest> {
        let request = |number| QemuRequest {
            kind,
            sector: (queue * REQUESTS + number) * u64::from(LENGTH) / 512,
            data: address + queue * 4 * MIB + number * (u64::from(LENGTH) + 4096) + 512,
            length: LENGTH,
        };
        (0..REQUESTS).map(request).collect()
    }

    fn send(&mut self, kind: u32, address: u64) -> Vec<Vec<QemuRequest>> {
        let send = |(index, queue): (usize, &mut QemuQueue)| {
            let requests = Self::requests(kind, index as u64, address);
            self.machine.send(queue, &requests);
            requests
        };
        self.queues.iter_mut().enumerate().map(send).collect()
    }

    #[track_caller]
    fn finish(&mut self, sent: &[Vec<QemuRequest>]) {
        for (queue, requests) in self.queues.iter().zip(sent) {
            self.machine.finish(queue, requests);
        }
    }

    /// Checks that the memory of these reads has the content of the disk.
    #[track_caller]
    fn check(&mut self, sent: &[Vec<QemuRequest>]) {
        for request in sent.iter().flatten() {
            let found = self.machine.read(request.data, LENGTH as usize);
            let start = request.sector as usize * 512;
            assert!(found == self.model[start..start + LENGTH as usize], "{request:?}");
        }
    }

    /// Writes new bytes from memory at `from`, and reads them into memory at `to`.
    #[track_caller]
    fn write_and_read(&mut self, from: u64, to: u64) {
        let mut random = seeded();
        for request in (0..u64::from(QUEUES)).flat_map(|queue| Self::requests(WRITE, queue, from)) {
            let bytes = random_bytes(&mut random, LENGTH as usize);
            self.machine.write(request.data, &bytes);
            let start = request.sector as usize * 512;
            self.model[start..start + LENGTH as usize].copy_from_slice(&bytes);
        }
        let written = self.send(WRITE, from);
        self.finish(&written);
        let read = self.send(READ, to);
        self.finish(&read);
        self.check(&read);
    }
}

/// The addresses of the rings of all queues, from an address on.
fn rings(address: u64) -> Vec<u64> {
    (0..u64::from(QUEUES)).map(|queue| address + queue * 0x4000).collect()
}

/// Uses a disk while memory is plugged and unplugged.
fn use_memory(scratch: &Scratch, socket: &Path, kind: &str, model: Vec<u8>) -> Vec<u8> {
    let backend = |id: &str| format!("{kind},id={id},share=on,size={MEMORY}");
    let mut machine = QemuMachine::start(scratch, &backend("ram"), MEMORY, socket, QUEUES);
    let queues = machine.set_queues(&rings(MIB));
    let mut used = Used { machine, model, queues };
    let own = 2 * HUGE_PAGE - MIB / 2;
    used.write_and_read(own, own + 32 * MIB);

    // Memory is plugged while requests of all queues are in flight.
    let in_flight = used.send(READ, own);
    let mut memory = json!({ "id": "more", "size": MEMORY, "share": true });
    let (name, options) = kind.split_once(',').unwrap_or((kind, ""));
    memory["qom-type"] = name.into();
    if options == "hugetlb=on" {
        memory["hugetlb"] = true.into();
    }
    let qmp = &mut used.machine.qmp;
    qmp.get("object-add", memory);
    qmp.get("device_add", json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }));
    let devices: Value = qmp.get("query-memory-devices", json!({}));
    let plugged = devices[0]["data"]["addr"].as_u64().expect("a place");
    used.finish(&in_flight);
    used.check(&in_flight);
    let new = plugged + own;
    used.write_and_read(new, own);
    used.write_and_read(own, new + 16 * MIB);

    // The rings are in the new memory, too.
    used.queues = used.machine.set_queues(&rings(plugged + MIB));
    used.write_and_read(own, new);
    used.write_and_read(new, new + 16 * MIB);

    // The memory is unplugged while requests with other memory are in flight.
    used.queues = used.machine.set_queues(&rings(MIB));
    let in_flight = used.send(READ, own);
    let qmp = &mut used.machine.qmp;
    qmp.get("device_del", json!({ "id": "dimm" }));
    used.machine.eject_memory(0);
    let left: Value = used.machine.qmp.get("query-memory-devices", json!({}));
    assert_eq!(left, json!([]), "it is gone");
    used.finish(&in_flight);
    used.check(&in_flight);
    used.write_and_read(own + 32 * MIB, own);
    used.model
}

fn serve_with(kind: &str) {
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), SIZE as usize);
    let image = scratch.image_of("disk.img", &content);
    let socket = scratch.socket("disk.vu");
    let serve = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let server = serve.option("--queues", QUEUES.to_string()).start();
    let model = use_memory(&scratch, &socket, kind, content);
    assert_eq!(server.log(), "");
    server.stop();
    assert!(image.content() == model, "the image has what the machine has written");
}

#[test]
fn memory_is_plugged_in_and_out_while_qemu_uses_a_disk() {
    require!(need::tools(&["qemu-system-x86_64"]));
    serve_with("memory-backend-memfd");
}

#[test]
fn huge_pages_are_plugged_in_and_out_while_qemu_uses_a_disk() {
    require!(need::tools(&["qemu-system-x86_64"]));
    let _pages = require!(HugePages::reserve(2 * MEMORY / HUGE_PAGE));
    serve_with("memory-backend-memfd,hugetlb=on");
}
