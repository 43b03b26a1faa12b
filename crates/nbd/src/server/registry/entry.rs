//! One connection in the registry: its origin and its phase.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_engine::Stream;

use crate::server::exports::ExportId;
use crate::server::paused::PausedSession;
use crate::server::peer::Peer;
use crate::session::{Activity, ShutdownSignal};
use crate::tls::Credential;

/// The origin of a connection. Shares of connections are counted per origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The listening socket.
    pub socket: usize,
    /// The client.
    pub peer: Peer,
}

/// The phase of a connection.
enum Phase {
    /// The connection waits for admission, because the limit is reached.
    Waiting,
    /// In the handshake since this time.
    Handshake(Instant),
    /// In the transmission phase since this time.
    Transmission {
        since: Instant,
        shutdown: Arc<ShutdownSignal>,
        activity: Arc<Activity>,
        /// The session to resume, while the connection is paused.
        paused: Option<PausedSession>,
    },
    /// Shutdown was requested at this time; `None` if the connection's stream is shut down.
    Ending(Option<Instant>),
}

/// A connection.
pub struct Entry {
    id: u64,
    stream: Stream,
    origin: Origin,
    phase: Phase,
    /// The export that the client has chosen in the handshake.
    export: Option<ExportId>,
    /// The credential that admitted the client, if TLS is used; known after the handshake.
    credential: Option<Arc<Credential>>,
}

impl Entry {
    /// A connection that waits for admission.
    pub fn new(id: u64, stream: Stream, origin: Origin) -> Self {
        Self { id, stream, origin, phase: Phase::Waiting, export: None, credential: None }
    }

    /// The connection's number, larger than those of earlier connections.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The connection's origin.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether the connection waits for admission.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting)
    }

    /// Whether the connection is admitted, and its handshake is not complete.
    pub fn is_in_handshake(&self) -> bool {
        matches!(self.phase, Phase::Handshake(_))
    }

    /// Whether shutdown was requested, or the client was disconnected.
    pub fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending(_))
    }

    /// Whether the handshake is complete, and no shutdown was requested.
    pub fn is_in_transmission(&self) -> bool {
        matches!(self.phase, Phase::Transmission { .. })
    }

    /// For a client that has sent no request: whether the handshake is complete, and the time since
    /// which the client could have sent one.
    pub fn unused_since(&self) -> Option<(bool, Instant)> {
        match &self.phase {
            Phase::Handshake(since) => Some((false, *since)),
            Phase::Transmission { since, activity, .. } if activity.is_unused() => {
                Some((true, *since))
            }
            _ => None,
        }
    }

    /// The time for which nothing has been in flight in the transmission phase.
    pub fn idle(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Transmission { activity, .. } => activity.idle(),
            _ => None,
        }
    }

    /// The time of the shutdown request, if the stream is not shut down yet.
    pub fn shutdown_requested_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Ending(requested) => requested,
            _ => None,
        }
    }

    /// Admits the connection, which begins its handshake.
    pub fn admit(&mut self) {
        self.phase = Phase::Handshake(Instant::now());
    }

    /// Begins the transmission phase after the handshake.
    pub fn start_transmission(
        &mut self,
        export: ExportId,
        credential: Option<Arc<Credential>>,
        activity: &Arc<Activity>,
    ) -> Arc<ShutdownSignal> {
        (self.export, self.credential) = (Some(export), credential);
        let shutdown = Arc::new(ShutdownSignal::default());
        if self.is_ending() {
            // Shutdown was requested during the reply to the last option.
            shutdown.request();
        } else {
            self.phase = Phase::Transmission {
                since: Instant::now(),
                shutdown: Arc::clone(&shutdown),
                activity: Arc::clone(activity),
                paused: None,
            };
        }
        shutdown
    }

    /// The export that the client has chosen; `None` before the choice.
    pub fn export(&self) -> Option<ExportId> {
        self.export
    }

    /// Whether the connection uses TLS.
    pub fn is_encrypted(&self) -> bool {
        self.credential.is_some()
    }

    /// The credential that admitted the client, if TLS is used.
    pub fn credential(&self) -> Option<&Credential> {
        self.credential.as_deref()
    }

    /// Asks the session to pause.
    pub fn pause(&self) {
        if let Phase::Transmission { shutdown, .. } = &self.phase {
            shutdown.pause();
        }
    }

    /// Resumes the session, or cancels the pause request.
    pub fn resume(&self) {
        if let Phase::Transmission { shutdown, .. } = &self.phase {
            shutdown.resume();
        }
    }

    /// Stores the paused session. Returns the session if shutdown was requested.
    pub fn set_paused(&mut self, session: PausedSession) -> Option<PausedSession> {
        match &mut self.phase {
            Phase::Transmission { paused, .. } => paused.replace(session),
            _ => Some(session),
        }
    }

    /// The session to resume, while the connection is paused.
    pub fn paused(&self) -> Option<&PausedSession> {
        match &self.phase {
            Phase::Transmission { paused, .. } => paused.as_ref(),
            _ => None,
        }
    }

    /// Takes the paused session, to resume it.
    pub fn take_paused(&mut self) -> Option<PausedSession> {
        match &mut self.phase {
            Phase::Transmission { paused, .. } => paused.take(),
            _ => None,
        }
    }

    /// The connection.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Begins the shutdown. The requests that the server has received still complete and get their
    /// replies. A client before the transmission phase is disconnected.
    pub fn end(&mut self) {
        match &self.phase {
            Phase::Transmission { shutdown, .. } => {
                shutdown.request();
                self.phase = Phase::Ending(Some(Instant::now()));
            }
            Phase::Handshake(_) | Phase::Waiting => self.disconnect(),
            Phase::Ending(_) => {}
        }
    }

    /// Disconnects at once. Requests in flight complete without replies.
    pub fn disconnect(&mut self) {
        self.shut_stream_down();
        self.phase = Phase::Ending(None);
    }

    /// Ends all operations on the socket.
    pub fn shut_stream_down(&self) {
        self.stream.shutdown();
    }
}
