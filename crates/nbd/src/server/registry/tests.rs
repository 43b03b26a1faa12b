//! Who makes room for whom, without a server around it.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::pin::pin;

use blockhouse_engine::{Engine, EngineChoice, EventLoop};

use super::super::connection::within;
use super::*;

const HOUR: Duration = Duration::from_secs(3600);

/// A connection in its transmission phase, with its client's end.
struct Connected {
    client: UnixStream,
    leave: Arc<Leave>,
    activity: Arc<Activity>,
    seat: Seat,
}

impl Connected {
    fn new(registry: &Arc<Registry>, socket: usize, process: i32) -> Self {
        let (client, seat) = enter(registry, socket, process);
        let activity = Arc::new(Activity::new());
        activity.set_in_flight(1);
        let leave = seat.transmit(&activity);
        Self { client, leave, activity, seat }
    }

    fn is_asked(&self) -> bool {
        self.leave.is_asked(&Context::from_waker(Waker::noop()))
    }

    fn is_cut(&mut self) -> bool {
        self.client.set_nonblocking(true).unwrap();
        matches!(self.client.read(&mut [0]), Ok(0))
    }
}

fn enter(registry: &Arc<Registry>, socket: usize, process: i32) -> (UnixStream, Seat) {
    let (client, server) = UnixStream::pair().unwrap();
    let origin = Origin { socket, peer: Peer::Process(process) };
    (client, registry.enter(&Stream::new(server.into()).unwrap(), origin).unwrap())
}

/// Runs `test` on a loop of its own.
fn run<T>(test: impl Future<Output = T>) -> T {
    EventLoop::new(EngineChoice::Only(Engine::Threads)).unwrap().block_on(test)
}

/// Waits for a seat until nothing more is to be done for it at once.
async fn has_seat(seat: &Seat) -> bool {
    within(Duration::ZERO, seat.taken()).await == Some(true)
}

#[test]
fn a_connection_that_is_asked_to_leave_keeps_its_replies_coming_for_a_time() {
    let registry = Arc::new(Registry::new(2, HOUR));
    let [first, mut second] = [0; 2].map(|_| Connected::new(&registry, 0, 1));
    let (_client, waiting) = enter(&registry, 1, 2);
    run(async {
        assert!(!has_seat(&waiting).await);
        assert!(second.is_asked() && !second.is_cut() && !first.is_asked());
        drop(second.seat);
        assert!(has_seat(&waiting).await);
    });
}

#[test]
fn a_connection_that_does_not_leave_is_cut_off_for_the_one_that_waits() {
    let registry = Arc::new(Registry::new(2, Duration::from_millis(20)));
    let [mut first, mut second] = [0; 2].map(|_| Connected::new(&registry, 0, 1));
    let (_client, waiting) = enter(&registry, 1, 2);
    run(async {
        let mut taken = pin!(waiting.taken());
        assert_eq!(within(Duration::from_millis(300), &mut taken).await, None);
        assert!(second.is_cut() && !first.is_cut() && !first.is_asked());
        drop(second.seat);
        assert!(taken.await);
    });
}

#[test]
fn equals_at_one_socket_make_no_room_for_one_another_but_for_another_socket() {
    let registry = Arc::new(Registry::new(4, HOUR));
    let connected = [1, 2, 3, 4].map(|process| Connected::new(&registry, 0, process));
    connected[2].activity.set_in_flight(0);
    let (_client, same) = enter(&registry, 0, 5);
    let (_client, other) = enter(&registry, 1, 6);
    run(async {
        assert!(!has_seat(&same).await);
        assert!(connected.iter().all(|one| !one.is_asked()), "an idle guest keeps its disk");
        assert!(!has_seat(&other).await);
        assert_eq!(connected.each_ref().map(Connected::is_asked), [false, false, true, false]);
        let [_first, _second, idle, _last] = connected;
        drop(idle.seat);
        assert!(has_seat(&other).await && !has_seat(&same).await);
    });
}
