//! One connection in the registry: its origin and its phase.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_engine::Stream;

use crate::server::exports::ExportId;
use crate::server::paused::PausedSession;
use crate::server::peer::Peer;
use crate::session::{Activity, ShutdownSignal};
use crate::tls::Credential;

/// The origin of a connection, by which the shares of connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The listening socket.
    pub socket: usize,
    /// The client.
    pub peer: Peer,
}

/// How far a connection is.
enum Phase {
    /// It is beyond the limit.
    Waiting,
    /// In the handshake since this time.
    Handshake(Instant),
    /// In the transmission phase since this time.
    Transmission {
        since: Instant,
        shutdown: Arc<ShutdownSignal>,
        activity: Arc<Activity>,
        /// The session from which it resumes, while it is paused.
        paused: Option<PausedSession>,
    },
    /// Shutdown was requested at this time; `None` if its stream is shut down.
    Ending(Option<Instant>),
}

/// A connection.
pub struct Entry {
    id: u64,
    stream: Stream,
    origin: Origin,
    phase: Phase,
    /// The export of its handshake.
    export: Option<ExportId>,
    /// The credential that admitted it, if it uses TLS; known when the handshake is over.
    credential: Option<Arc<Credential>>,
}

impl Entry {
    /// A connection that waits.
    pub fn new(id: u64, stream: Stream, origin: Origin) -> Self {
        Self { id, stream, origin, phase: Phase::Waiting, export: None, credential: None }
    }

    /// Its number, larger than those of earlier connections.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where it comes from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether it waits for its admission.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting)
    }

    /// Whether it may begin its handshake.
    pub fn is_in_handshake(&self) -> bool {
        matches!(self.phase, Phase::Handshake(_))
    }

    /// Whether shutdown was requested, or it was disconnected.
    pub fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending(_))
    }

    /// Whether it has completed its handshake and was not asked to end.
    pub fn is_in_transmission(&self) -> bool {
        matches!(self.phase, Phase::Transmission { .. })
    }

    /// The time since which the client has sent no request, although it could, and whether its
    /// handshake is complete.
    pub fn unused_since(&self) -> Option<(bool, Instant)> {
        match &self.phase {
            Phase::Handshake(since) => Some((false, *since)),
            Phase::Transmission { since, activity, .. } if activity.is_unused() => {
                Some((true, *since))
            }
            _ => None,
        }
    }

    /// For how long nothing has been in flight in the transmission phase.
    pub fn idle(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Transmission { activity, .. } => activity.idle(),
            _ => None,
        }
    }

    /// When shutdown was requested, if its stream is not shut down yet.
    pub fn shutdown_requested_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Ending(requested) => requested,
            _ => None,
        }
    }

    /// It is admitted, and begins its handshake.
    pub fn admit(&mut self) {
        self.phase = Phase::Handshake(Instant::now());
    }

    /// The handshake is over.
    pub fn start_transmission(
        &mut self,
        export: ExportId,
        credential: Option<Arc<Credential>>,
        activity: &Arc<Activity>,
    ) -> Arc<ShutdownSignal> {
        (self.export, self.credential) = (Some(export), credential);
        let shutdown = Arc::new(ShutdownSignal::default());
        if self.is_ending() {
            // It was asked to end while its last option was answered.
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

    /// The export that it uses, from its choice to its end.
    pub fn export(&self) -> Option<ExportId> {
        self.export
    }

    /// Whether it uses TLS.
    pub fn is_encrypted(&self) -> bool {
        self.credential.is_some()
    }

    /// The credential that admitted it, if it uses TLS.
    pub fn credential(&self) -> Option<&Credential> {
        self.credential.as_deref()
    }

    /// Asks the session to pause.
    pub fn pause(&self) {
        if let Phase::Transmission { shutdown, .. } = &self.phase {
            shutdown.pause();
        }
    }

    /// Resumes the session, or takes the request to pause back.
    pub fn resume(&self) {
        if let Phase::Transmission { shutdown, .. } = &self.phase {
            shutdown.resume();
        }
    }

    /// It has paused. Returns the session if it was asked to end.
    pub fn set_paused(&mut self, session: PausedSession) -> Option<PausedSession> {
        match &mut self.phase {
            Phase::Transmission { paused, .. } => paused.replace(session),
            _ => Some(session),
        }
    }

    /// The session from which it resumes, while it is paused.
    pub fn paused(&self) -> Option<&PausedSession> {
        match &self.phase {
            Phase::Transmission { paused, .. } => paused.as_ref(),
            _ => None,
        }
    }

    /// It goes on.
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

    /// Begins its end. Requests that were received already complete and get their replies.
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

    /// Ends it at once. Requests in flight complete without replies.
    pub fn disconnect(&mut self) {
        self.shut_stream_down();
        self.phase = Phase::Ending(None);
    }

    /// Ends all operations on its socket.
    pub fn shut_stream_down(&self) {
        self.stream.shutdown();
    }
}
