//! A device that another server goes on with, while its front-end stays connected; and one that
//! takes back what it paused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhouse_vhost_user::driver::{GUEST, Options, TestDriver};
use blockhouse_vhost_user::{PauseError, PausedFrontend, PreparedFrontend, RegisteredMemory};
use vhost::vhost_user::{FrontendReqHandler, VhostUserFrontend};

use crate::common::*;

fn soon() -> Instant {
    Instant::now() + LONG
}

#[test]
fn a_guest_under_load_notices_nothing() {
    let mut served = Served::start(2, 2);
    let socket = served.socket.clone();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guests = [false, true].map(|is_tracked| {
            // The device has one front-end at a time, so the second one waits for the first one's
            // end.
            let (socket, stop) = (socket.clone(), &stop);
            move || {
                let options = Options { queues: 2, ..Options::default() };
                let mut guest = Guest::new(TestDriver::connect(&socket, options).unwrap());
                if is_tracked {
                    guest.driver.track().unwrap();
                }
                let mut rounds = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let (queue, byte) = ((rounds % 2) as usize, rounds as u8);
                    assert_eq!(guest.write(queue, rounds % 1000, &[byte; 4096]), OK);
                    assert_eq!(guest.read(1 - queue, rounds % 1000, 4096).unwrap(), [byte; 4096]);
                    rounds += 1;
                }
                assert_eq!(guest.driver.capacity().unwrap(), SIZE);
                rounds
            }
        });
        for guest in guests {
            let running = scope.spawn(guest);
            for round in 0..40 {
                std::thread::sleep(Duration::from_millis(5));
                match round % 4 {
                    // It pauses, and nothing comes of it.
                    0 => {
                        served.server().pause(soon()).wait().unwrap();
                        served.server().resume();
                    }
                    _ => served.hand_over(),
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(running.join().unwrap() > 40);
            stop.store(false, Ordering::Relaxed);
        }
    });
}

#[test]
fn a_device_without_a_front_end_is_handed_over() {
    let mut served = Served::start(1, 1);
    assert!(served.server().pause(soon()).wait().unwrap().is_none());
    // It waits in the backlog of the same socket.
    let socket = served.socket.clone();
    let waiting = std::thread::spawn(move || {
        let driver = TestDriver::connect(&socket, Options::default());
        Guest::new(driver.unwrap()).write(0, 0, &[1; 512])
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished());
    served.hand_over();
    assert_eq!(waiting.join().unwrap(), OK);
}

#[test]
fn what_a_front_end_has_set_stays_set() {
    let mut served = Served::start(1, 1);
    let mut guest = served.connect(Options { without: 0, ..Options::default() });
    let log = guest.log_changes();
    let listener = Arc::new(Listener::default());
    let mut handler = FrontendReqHandler::new(Arc::clone(&listener)).unwrap();
    guest.driver.frontend().set_backend_request_fd(&handler.get_tx_raw_fd()).unwrap();
    guest.driver.set_writeback(0).unwrap();
    assert_eq!(guest.write(0, 0, &[6; 4096]), OK);
    served.hand_over();
    log.write(0, &vec![0; log.len()]);
    assert!(!guest.driver.writeback().unwrap(), "the write cache is still off");
    assert_eq!(guest.read(0, 0, 4096).unwrap(), [6; 4096]);
    let mut marks = vec![0; log.len()];
    log.read(0, &mut marks);
    let page = (GUEST as usize + guest.base() + DATA) / 4096;
    assert!(marks[page / 8] >> (page % 8) & 1 == 1, "changes are still logged");
    served.device().resized();
    handler.handle_request().unwrap();
    assert_eq!(listener.0.load(Ordering::SeqCst), 1, "a resize is still told");
    // A ring that is polled, and one that is disabled.
    let without_descriptor = 0x100u64.to_ne_bytes();
    assert_eq!(exchange(guest.driver.stream(), 12, NEED_REPLY, &without_descriptor), [0; 8]);
    served.hand_over();
    assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
    guest.driver.frontend().set_vring_enable(0, false).unwrap();
    served.hand_over();
    let chain = [guest.header(FLUSH, 0), guest.status()];
    assert_eq!(guest.submit(0, &chain, Duration::from_millis(100)), None, "disabled");
    guest.driver.frontend().set_vring_enable(0, true).unwrap();
    assert!(guest.queue(0).wait_used(LONG).is_some(), "what was offered meanwhile is found");
    // Another driver begins anew.
    guest.driver.frontend().reset_device().unwrap();
    drop(guest);
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[7; 512]), OK);
}

#[test]
fn requests_that_do_not_complete_in_time_keep_the_device_where_it_is() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[1; 512]), OK);
    // A loop that is held up cannot end its queue.
    let release = served.block_loop();
    let begun = Instant::now();
    let outcome = served.server().pause(begun + Duration::from_millis(50)).wait();
    assert!(matches!(outcome, Err(PauseError::Requests)), "{outcome:?}");
    served.server().resume();
    drop(release);
    assert_eq!(guest.write(0, 1, &[2; 512]), OK);
    // A message of which the rest does not come.
    use std::io::Write;
    guest.driver.stream().write_all(&message(1, 0, &[])[..5]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let outcome = served.server().pause(Instant::now()).wait();
    assert!(matches!(outcome, Err(PauseError::Message)), "{outcome:?}");
    served.server().resume();
    guest.driver.stream().write_all(&message(1, 0, &[])[5..]).unwrap();
    assert_eq!(reply(guest.driver.stream(), 1).len(), 8);
    assert_eq!(guest.read(0, 1, 512).unwrap(), [2; 512]);
}

#[test]
fn what_another_process_says_is_checked() {
    let mut served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[1; 512]), OK);
    let mut refused = |change: fn(&mut PausedFrontend), queues: u16| {
        let mut paused = served.server().pause(soon()).wait().unwrap().unwrap();
        change(&mut paused);
        let outcome = PreparedFrontend::new(paused, queues, RegisteredMemory::Off);
        served.server().resume();
        assert_eq!(guest.write(0, 0, &[1; 512]), OK);
        outcome.err().expect("it cannot be gone on with").to_string()
    };
    assert!(refused(|_| (), 2).contains("1 queues"));
    assert!(refused(|paused| paused.memory.clear(), 1).contains("descriptor table"));
    assert!(refused(|paused| paused.protocol_features = 1 << 60, 1).contains("protocol features"));
    assert!(refused(|paused| paused.memory[0].0.offset = 1 << 40, 1).contains("cannot map"));
    assert!(refused(|paused| paused.vrings[0].size = 3, 1).contains('3'));
    let swap = |paused: &mut PausedFrontend| {
        paused.vrings[0].call = Some(paused.connection.try_clone().unwrap());
    };
    assert!(refused(swap, 1).contains("no eventfd"));
    served.stop();
}

#[test]
fn a_server_that_goes_on_ends_in_an_orderly_way() {
    let mut served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[1; 512]), OK);
    served.hand_over();
    let chain = [guest.header(OUT, 0), guest.data(0, 65536, 0), guest.status()];
    guest.queue(0).chain(0, &chain);
    guest.queue(0).add_available(0);
    guest.queue(0).publish();
    served.stop();
    // Taken and done, or not taken at all.
    match guest.queue(0).next_used() {
        Some(_) => assert_eq!(guest.status_byte(), OK),
        None => assert_eq!(guest.status_byte(), UNTOUCHED),
    }
    assert_eq!(served.disk.stats().counters().in_flight, 0);
}
