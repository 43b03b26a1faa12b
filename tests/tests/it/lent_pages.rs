//! Long reads through the page cache are sent without a copy: replies have the file's content,
//! whatever the client does meanwhile.

use std::path::Path;
use std::time::Duration;

use blockhouse_tests::metrics::Metrics;
use blockhouse_tests::nbd::{Client, Framing, Request, command};
use blockhouse_tests::{
    Cache, Engine, Scratch, Serve, Server, assert_same, eventually, random_bytes, seeded,
};
use fastrand::Rng;
use rustix::fs::{Advice, fadvise};

const SIZE: usize = 20 << 20;
/// The number of reads that are sent before the first reply is received: more than the server has
/// pipes, and more bytes than the socket buffers.
const READS: usize = 60;

fn serve(scratch: &Scratch, image: &Path, engine: Engine) -> Server {
    let metrics = format!("unix:{}", scratch.socket("metrics").display());
    let serve = Serve::new(scratch, image).engine(engine).cache(Cache::Writeback);
    serve.option("--metrics", metrics).flag("--read-only").start()
}

/// The number of reads that the server made from the host file.
fn host_reads(scratch: &Scratch) -> u64 {
    let labels = [("stage", "host"), ("operation", "read")];
    let metrics = Metrics::read(&scratch.socket("metrics"));
    metrics.sum("blockhouse_stage_duration_seconds", &labels)
}

/// Whether the kernel has cachestat (Linux 6.5).
fn has_cachestat() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel");
    let mut numbers = release.split('.').map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(5))
}

/// Reads with many lengths and offsets: most are long enough to be sent without a copy, some do not
/// fit into a pipe.
fn reads(random: &mut Rng) -> Vec<(usize, usize)> {
    let one = |random: &mut Rng| {
        let length = [4 << 10, 64 << 10, 256 << 10, random.usize(1..1_200_000)][random.usize(..4)];
        (random.usize(..SIZE - length), length)
    };
    (0..READS).map(|_| one(random)).collect()
}

fn send(client: &mut Client, reads: &[(usize, usize)]) -> Vec<u64> {
    let send = |&(offset, length): &(usize, usize)| {
        let (offset, length) = (offset as u64, length as u64);
        let request = Request { command: command::READ, offset, length, ..Request::default() };
        client.send(request).expect("a request")
    };
    reads.iter().map(send).collect()
}

fn descriptors(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("a process").count()
}

#[test]
fn a_client_that_receives_late_gets_what_the_file_holds() {
    let mut random = seeded();
    let content = random_bytes(&mut random, SIZE);
    for engine in Engine::ALL {
        let scratch = Scratch::new();
        let image = scratch.image_of("disk.img", &content);
        let server = serve(&scratch, image.path(), engine);
        for framing in Framing::ALL {
            let mut client = Client::open_with(&server.address(), framing);
            for is_cached in [true, false] {
                let file = std::fs::File::open(image.path()).expect("an image");
                file.sync_all().expect("a disk");
                let advice = if is_cached { Advice::WillNeed } else { Advice::DontNeed };
                fadvise(&file, 0, None, advice).expect("advice");
                let reads = reads(&mut random);
                let cookies = send(&mut client, &reads);
                for _ in &cookies {
                    let (cookie, reply) = client.receive().expect("a reply");
                    let index = cookies.iter().position(|one| *one == cookie).expect("a cookie");
                    let (offset, length) = reads[index];
                    assert_same(&reply.data, &content[offset..offset + length], "a read");
                }
            }
            client.disconnect();
        }
        server.stop();
    }
}

#[test]
fn a_cached_read_asks_the_host_for_nothing() {
    if !has_cachestat() {
        return;
    }
    let mut random = seeded();
    let scratch = Scratch::new();
    let content = random_bytes(&mut random, SIZE);
    let image = scratch.image_of("disk.img", &content);
    let server = serve(&scratch, image.path(), Engine::IoUring);
    let mut client = Client::open(&server.address());
    let before = host_reads(&scratch);
    for offset in (0..SIZE).step_by(256 << 10) {
        let bytes = client.read(offset as u64, 256 << 10).expect("a read");
        assert_same(&bytes, &content[offset..offset + (256 << 10)], "a read");
    }
    assert_eq!(host_reads(&scratch), before);
    // A short read is copied.
    client.read(0, 4096).expect("a read");
    assert_eq!(host_reads(&scratch), before + 1);
    client.disconnect();
    server.stop();
}

#[test]
fn clients_that_leave_amid_their_replies_leave_nothing_open() {
    let mut random = seeded();
    let scratch = Scratch::new();
    let content = random_bytes(&mut random, SIZE);
    let image = scratch.image_of("disk.img", &content);
    let server = serve(&scratch, image.path(), Engine::IoUring);
    let mut first = Client::open(&server.address());
    first.read(0, 4096).expect("a read");
    let before = descriptors(&server);
    for received in 0..10 {
        let mut client = Client::open(&server.address());
        send(&mut client, &reads(&mut random));
        for _ in 0..received {
            client.receive().expect("a reply");
        }
        drop(client);
    }
    assert!(eventually(Duration::from_secs(20), || descriptors(&server) == before));
    let bytes = first.read(4096, 1 << 20).expect("a read");
    assert_same(&bytes, &content[4096..][..1 << 20], "a read");
    first.disconnect();
    server.stop();
}
