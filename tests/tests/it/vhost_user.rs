//! `blockhouse serve --vhost-user-blk` with our own driver: the disk is also exported over NBD, the
//! server is killed and restarted under load, and the disk is resized while it is served.

use std::cell::RefCell;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_engine::VolatileSlice;
use blockhouse_tests::guest::{BLOCK, Guest, IN, LONG, OUT, content};
use blockhouse_tests::image_tool::command;
use blockhouse_tests::nbd::{Client, flag};
use blockhouse_tests::{Scratch, Serve, Server, eventually, processor_time};
use blockhouse_vhost_user::driver::{DescriptorSpec, Options, write_chain};
use blockhouse_vhost_user::ring::{INDIRECT, WRITE};
use rustix::process::Signal;

const SIZE: u64 = 8 << 20;

fn serve(scratch: &Scratch, image: &Path, socket: &Path) -> Server {
    Serve::bare(scratch, image).option("--vhost-user-blk", socket).option("--queues", "2").start()
}

fn connect(socket: &Path) -> Guest {
    Guest::connect(socket, Options { queues: 2, ..Options::default() })
}

/// A disk that a guest with one queue and an NBD client use.
fn serve_both_ways(scratch: &Scratch) -> (Server, Guest, Client) {
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let server = Serve::new(scratch, image.path()).option("--vhost-user-blk", &socket).start();
    let guest = Guest::connect(&socket, Options::default());
    let client = Client::open(&server.address());
    (server, guest, client)
}

#[test]
fn the_ready_line_names_the_socket_and_the_end_is_orderly() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let server = serve(&scratch, image.path(), &socket);
    assert_eq!(server.uris(), [socket.display().to_string()]);
    let mut guest = connect(&socket);
    guest.write(1, 5, 77);
    server.stop();
    assert!(!socket.exists(), "the socket's file is removed");
    assert_eq!(image.bytes(5 * BLOCK as u64, BLOCK), content(77));
}

#[test]
fn a_guest_and_an_nbd_client_see_one_disk() {
    let scratch = Scratch::new();
    let (server, mut guest, mut client) = serve_both_ways(&scratch);
    for number in 1..50 {
        guest.write(0, number, number);
        let offset = number * BLOCK as u64;
        assert_eq!(client.read(offset, BLOCK as u64), Ok(content(number)));
        assert_eq!(client.write(offset, &content(number + 1000), 0), 0);
        assert_eq!(guest.read(0, number), content(number + 1000));
    }
    server.stop();
}

#[test]
fn a_device_that_nobody_uses_costs_no_processor_time() {
    let scratch = Scratch::new();
    let (server, mut guest, mut client) = serve_both_ways(&scratch);
    // Makes the adaptive polling expect that the next request comes at once.
    for number in 0..300 {
        guest.write(0, number % 64, number);
        client.read(0, BLOCK as u64).expect("the data");
    }
    std::thread::sleep(Duration::from_millis(100));
    // A busy machine makes single wake-ups cost more; a server that polls does so in every second.
    let used = || {
        let before = processor_time(server.pid());
        std::thread::sleep(Duration::from_secs(1));
        processor_time(server.pid()) - before
    };
    let is_quiet = (0..5).any(|_| used() < Duration::from_millis(5));
    assert!(is_quiet, "processor time in each of five seconds without a request");
    guest.write(0, 1, 1);
    server.stop();
}

/// The peak memory of the process, in bytes.
fn peak_memory(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid().as_raw_nonzero()));
    let status = status.expect("the process runs");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the peak");
    line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") << 10
}

/// Posts up to seven reads, each with `count` buffers of `length` bytes in an indirect table; all
/// buffers are the same memory.
fn post_aliasing(guest: &mut Guest, heads: u16, count: usize, length: u32) {
    const DATA: usize = 512 << 10;
    let (memory, base) = (guest.driver.memory.clone(), guest.driver.requests());
    memory.write(base, &[0; 16]);
    let bytes = 16 * (count + 2);
    let data = DescriptorSpec::at(base + DATA, length, WRITE);
    for head in 0..heads {
        let status = base + 32 + usize::from(head);
        memory.write(status, &[0xee]);
        let mut chain = vec![DescriptorSpec::at(base, 16, 0)];
        chain.extend(std::iter::repeat_n(data, count));
        chain.push(DescriptorSpec::at(status, 1, WRITE));
        let at = base + 4096 + usize::from(head) * (16 << 10);
        let view = VolatileSlice::new(memory.clone(), at, bytes).expect("inside of the memory");
        write_chain(&view, 0, &chain);
        let queue = &mut guest.driver.queues[0];
        queue.chain(head, &[DescriptorSpec::at(at, bytes as u32, INDIRECT)]);
        queue.add_available(head);
    }
    guest.driver.queues[0].publish();
}

fn status_of(guest: &Guest, head: u16) -> u8 {
    let mut status = [0];
    guest.driver.memory.read(guest.driver.requests() + 32 + usize::from(head), &mut status);
    status[0]
}

#[test]
fn a_guest_that_asks_for_too_much_is_refused_and_delays_no_neighbour() {
    const MEMORY: usize = 16 << 20;
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", image.to_str().expect("UTF-8"), "8T"]).success();
    let socket = scratch.socket("vu");
    let server = Serve::new(&scratch, &image).option("--vhost-user-blk", &socket).start();
    // Without `size_max` and `seg_max`: the driver knows no limits.
    let without = Options::default().without | 0b110;
    let mut guest =
        Guest::connect(&socket, Options { memory: MEMORY, without, ..Options::default() });
    let mut client = Client::open(&server.address());
    client.read(0, BLOCK as u64).expect("the data");
    let before = peak_memory(&server);

    // 64 reads of 14 GiB each: every one is refused, and nothing else happens.
    for _ in 0..64 {
        post_aliasing(&mut guest, 1, 1000, 15 << 20);
        let ended = guest.driver.queues[0].wait_used(LONG);
        assert_eq!(ended.map(|(head, _)| head), Some(0));
        assert_eq!(status_of(&guest, 0), 1, "an I/O error");
    }
    // Reads of the maximum size, 4 GiB of zeros from holes. The neighbour is served meanwhile; it
    // may be slow, but a neighbour that waits for each read is not served that often.
    let (mut rounds, mut served) = (0, 0);
    while served < 50 && rounds < 8 {
        post_aliasing(&mut guest, 4, 126, 8 << 20);
        let mut done = 0;
        while done < 4 {
            assert!(client.read(served % 64 * BLOCK as u64, BLOCK as u64).is_ok());
            served += 1;
            while let Some((head, _)) = guest.driver.queues[0].next_used() {
                assert_eq!(status_of(&guest, head), 0);
                done += 1;
            }
        }
        rounds += 1;
    }
    assert!(served >= 50, "{served} reads beside {rounds} times 4 GiB of zeros");
    let more = peak_memory(&server) - before;
    assert!(more <= 64 << 20, "{more} bytes more than before");
    server.stop();
}

/// Writes in all slots of both queues; each slot has its own blocks.
struct Load {
    /// The block and its new content, while the write is in flight.
    under_way: [[Option<(u64, u64)>; 16]; 2],
    /// The number that each block must hold.
    expected: Vec<u64>,
    answered: u64,
    posted: u64,
}

impl Load {
    fn post(&mut self, guest: &mut Guest) {
        for (queue, slots) in self.under_way.iter_mut().enumerate() {
            for (slot, place) in (0..).zip(slots).filter(|(_, place)| place.is_none()) {
                self.posted += 1;
                let number = self.posted;
                let block = (queue as u64 * 16 + u64::from(slot)) * 16 + number % 16;
                *place = Some((block, number));
                guest.fill(queue, slot, number);
                guest.post(queue, slot, OUT, block);
            }
        }
    }

    fn take(&mut self, guest: &mut Guest) {
        for (queue, slots) in self.under_way.iter_mut().enumerate() {
            while let Some(slot) = guest.finish(queue, Duration::ZERO) {
                let (block, number) = slots[usize::from(slot)].take().expect("answered once");
                self.expected[block as usize] = number;
                self.answered += 1;
            }
        }
    }

    fn is_over(&self) -> bool {
        self.under_way.iter().flatten().all(Option::is_none)
    }
}

#[test]
fn a_guest_survives_servers_that_are_killed_under_load() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let mut server = serve(&scratch, image.path(), &socket);
    let mut guest = connect(&socket);
    guest.driver.track().expect("in-flight tracking");
    guest.driver.set_writeback(0).expect("the write cache can be turned off");
    let under_way = [[None; 16]; 2];
    let mut load = Load { under_way, expected: vec![0; 512], answered: 0, posted: 0 };
    for round in 1..=5 {
        // The server is killed under load, with requests in the ring and in flight.
        while load.answered < 300 * round {
            load.post(&mut guest);
            std::thread::sleep(Duration::from_micros(100));
            load.take(&mut guest);
        }
        load.post(&mut guest);
        server.signal(Signal::KILL);
        server.wait(LONG);
        server = serve(&scratch, image.path(), &socket);
        guest.driver.reconnect(&socket).expect("the new server takes over");
        assert!(!guest.driver.writeback().expect("an answer"), "the cache is still off");
    }
    assert!(eventually(LONG, || {
        load.take(&mut guest);
        load.is_over()
    }));
    for (block, &number) in (0..).zip(&load.expected) {
        assert_eq!(guest.read(0, block), content(number), "block {block}");
    }
    server.stop();
}

/// Writes and reads blocks from `first` on, repeatedly, until `stop`; every byte must be right.
/// Returns the number of rounds.
fn verify(
    stop: &AtomicBool,
    first: u64,
    mut write: impl FnMut(u64, u64),
    mut read: impl FnMut(u64) -> Vec<u8>,
) -> u64 {
    let mut number = 0;
    while !stop.load(Relaxed) {
        number += 1;
        let block = first + number % 64;
        write(block, number);
        assert_eq!(read(block), content(number), "block {block}");
    }
    number
}

#[test]
fn a_front_end_whose_memory_vanishes_disturbs_nobody() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let sockets = [scratch.socket("vu1"), scratch.socket("vu2")];
    let server = Serve::new(&scratch, image.path())
        .option("--vhost-user-blk", &sockets[0])
        .option("--vhost-user-blk", &sockets[1])
        .start();
    let stop = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let neighbours: Vec<_> = [512, 1024]
            .map(|first| {
                let (stop, address) = (&stop, server.address());
                scope.spawn(move || {
                    let client = RefCell::new(Client::open(&address));
                    let write = |block, number| {
                        let offset = block * BLOCK as u64;
                        let written =
                            client.borrow_mut().write(offset, &content(number), flag::FUA);
                        assert_eq!(written, 0, "a durable write");
                        assert_eq!(client.borrow_mut().flush(), 0, "a flush");
                    };
                    let read = |block| {
                        let read = client.borrow_mut().read(block * BLOCK as u64, BLOCK as u64);
                        read.expect("a read")
                    };
                    verify(stop, first, write, read)
                })
            })
            .into_iter()
            .chain([{
                let (stop, socket) = (&stop, &sockets[1]);
                scope.spawn(move || {
                    let guest = RefCell::new(Guest::connect(socket, Options::default()));
                    let write = |block, number| guest.borrow_mut().write(0, block, number);
                    verify(stop, 1536, write, |block| guest.borrow_mut().read(0, block))
                })
            }])
            .collect();
        for round in 0..100 {
            let mut guest = Guest::connect(&sockets[0], Options::default());
            guest.driver.set_writeback(0).expect("durable writes");
            for slot in 0..16 {
                guest.fill(0, slot, round);
                guest.post(0, slot, if slot % 4 == 0 { IN } else { OUT }, u64::from(slot));
            }
            // Cuts off everything, everything after the first page of the rings, or only the memory
            // for requests.
            let rest = [0, 4096, guest.driver.requests()][round as usize % 3];
            guest.driver.cut_memory(rest).expect("a memfd can be cut");
            // All requests may have completed by then, so more are sent; no more than the ring has
            // entries.
            let mut more = 16..48;
            while guest.is_connected() {
                more.next().into_iter().for_each(|slot| guest.post(0, slot % 16, OUT, 0));
                guest.driver.queues[0].kick.write(1).expect("a kick");
            }
        }
        stop.store(true, Relaxed);
        let rounds = neighbours.into_iter().map(|neighbour| neighbour.join().expect("no error"));
        rounds.collect::<Vec<_>>()
    });
    assert!(rounds.iter().all(|&rounds| rounds > 10), "{rounds:?}");
    // Repeated warnings are logged a few times, and then only counted.
    let is_told = || server.log().contains("vanished: its file was cut short");
    assert!(eventually(LONG, is_told), "{}", server.log());
    let log = server.log();
    assert!(!log.contains("is broken") && !log.contains("request failed"), "one line each: {log}");
    let mut guest = Guest::connect(&sockets[0], Options::default());
    guest.write(0, 0, 5);
    assert_eq!(guest.read(0, 0), content(5));
    server.stop();
}

#[test]
fn a_signal_that_is_no_fault_of_a_guest_ends_the_server_as_ever() {
    let scratch = Scratch::new();
    let (mut server, mut guest, _client) = serve_both_ways(&scratch);
    guest.write(0, 1, 1);
    server.signal(Signal::BUS);
    assert_eq!(server.wait(LONG).signal(), Some(Signal::BUS.as_raw()));
}

#[test]
fn a_longer_image_is_served_after_sighup() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let server = serve(&scratch, image.path(), &socket);
    let mut guest = connect(&socket);
    let file = std::fs::OpenOptions::new().write(true).open(image.path()).expect("the image");
    file.set_len(2 * SIZE).expect("it can be made longer");
    assert_eq!(guest.driver.capacity().expect("a size"), SIZE, "nobody has told the server");
    server.signal(Signal::HUP);
    assert!(eventually(LONG, || guest.driver.capacity().expect("a size") == 2 * SIZE));
    let last = 2 * SIZE / BLOCK as u64 - 1;
    guest.write(0, last, 9);
    assert_eq!(guest.read(1, last), content(9));
    file.set_len(SIZE).expect("it can be made shorter");
    server.signal(Signal::HUP);
    assert!(eventually(LONG, || server.log().contains("fewer than the disk's")));
    assert_eq!(guest.driver.capacity().expect("a size"), 2 * SIZE);
}

#[test]
fn several_images_need_a_socket_each() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.image("1.img", SIZE), scratch.image("2.img", SIZE));
    let sockets: [PathBuf; 2] = [scratch.socket("vu1"), scratch.socket("vu2")];
    let bare = || Serve::bare(&scratch, one.path()).also(two.path());
    bare()
        .option("--vhost-user-blk", &sockets[0])
        .refused()
        .wrong_usage(&["one --vhost-user-blk socket each"]);
    let server =
        bare().option("--vhost-user-blk", &sockets[0]).option("--vhost-user-blk", &sockets[1]);
    let server = server.start();
    for (number, socket) in (1..).zip(&sockets) {
        let mut guest = Guest::connect(socket, Options::default());
        guest.write(0, 3, number);
    }
    server.stop();
    for (number, image) in (1..).zip([&one, &two]) {
        assert_eq!(image.bytes(3 * BLOCK as u64, BLOCK), content(number));
    }
}
