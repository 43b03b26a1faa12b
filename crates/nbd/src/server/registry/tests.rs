//! Tests which connections end to make room for others, without a server.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::task::Waker;

use blockhouse_engine::{Engine, EngineChoice, EventLoop, timeout};

use super::*;
use crate::server::exports::ExportId;
use crate::server::peer::Peer;

const HOUR: Duration = Duration::from_secs(3600);

/// A connection in its transmission phase, with its client's end.
struct Connected {
    client: UnixStream,
    shutdown: Arc<ShutdownSignal>,
    activity: Arc<Activity>,
    guard: ConnectionGuard,
}

impl Connected {
    fn new(registry: &Arc<Registry>, socket: usize, process: i32) -> Self {
        let (client, guard) = enter(registry, socket, process);
        let activity = Arc::new(Activity::new());
        activity.set_in_flight(1);
        let shutdown = guard.start_transmission(ExportId::of_test(), None, &activity);
        Self { client, shutdown, activity, guard }
    }

    fn is_asked_to_end(&self) -> bool {
        self.shutdown.poll_requested(&Context::from_waker(Waker::noop()))
    }

    fn is_disconnected(&mut self) -> bool {
        self.client.set_nonblocking(true).unwrap();
        matches!(self.client.read(&mut [0]), Ok(0))
    }
}

fn enter(registry: &Arc<Registry>, socket: usize, process: i32) -> (UnixStream, ConnectionGuard) {
    let (client, server) = UnixStream::pair().unwrap();
    let origin = Origin { socket, peer: Peer::Process(process) };
    (client, registry.enter(&Stream::new(server.into()).unwrap(), origin).unwrap())
}

/// Runs `test` on a loop of its own.
fn run<T>(test: impl Future<Output = T>) -> T {
    EventLoop::new(EngineChoice::Only(Engine::Threads)).unwrap().block_on(test)
}

/// Whether the connection is admitted, without waiting for others to end.
async fn is_admitted(guard: &ConnectionGuard) -> bool {
    timeout(Duration::ZERO, guard.admitted()).await == Some(true)
}

#[test]
fn a_connection_that_is_told_to_end_keeps_its_replies_coming_for_a_time() {
    let registry = Arc::new(Registry::new(2, HOUR));
    let [first, mut second] = [0; 2].map(|_| Connected::new(&registry, 0, 1));
    let (_client, waiting) = enter(&registry, 1, 2);
    run(async {
        assert!(!is_admitted(&waiting).await);
        assert!(second.is_asked_to_end() && !second.is_disconnected() && !first.is_asked_to_end());
        drop(second.guard);
        assert!(is_admitted(&waiting).await);
    });
}

#[test]
fn a_connection_that_does_not_end_is_disconnected_for_the_one_that_waits() {
    let registry = Arc::new(Registry::new(2, Duration::from_millis(20)));
    let [mut first, mut second] = [0; 2].map(|_| Connected::new(&registry, 0, 1));
    let (_client, waiting) = enter(&registry, 1, 2);
    run(async {
        let mut admitted = pin!(waiting.admitted());
        assert_eq!(timeout(Duration::from_millis(300), &mut admitted).await, None);
        assert!(second.is_disconnected() && !first.is_disconnected() && !first.is_asked_to_end());
        drop(second.guard);
        assert!(admitted.await);
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
        assert!(!is_admitted(&same).await);
        assert!(connected.iter().all(|one| !one.is_asked_to_end()), "an idle guest keeps its disk");
        assert!(!is_admitted(&other).await);
        assert_eq!(
            connected.each_ref().map(Connected::is_asked_to_end),
            [false, false, true, false]
        );
        let [_first, _second, idle, _last] = connected;
        drop(idle.guard);
        assert!(is_admitted(&other).await && !is_admitted(&same).await);
    });
}
