//! The QMP socket: its clients, on a loop of their own, so that what one asks keeps no guest waiting.
//!
//! A socket is not handed over in an upgrade: its clients end, and connect to the process that goes on as soon as that
//! listens. So what they know of the server is never older than the server.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use blockhouse_engine::{Listener, Submission, sleep};
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use futures_channel::oneshot;
use futures_util::FutureExt;
use futures_util::future::{Either, join, select};

use super::context::{Context, Stopped};
use super::events::forward;
use super::session::serve_client;
use crate::control::{Gate, accept_clients};
use crate::control_socket::{Answers, ControlSocket};
use crate::kept_sockets;
use crate::running::Running;
use crate::workers::Workers;

/// The delay after an address was in use.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A QMP socket that is served.
pub(crate) struct Qmp {
    workers: Workers,
    stop: oneshot::Sender<()>,
    over: Submission<()>,
    gate: Arc<Gate>,
}

/// A socket that listens, or will.
type Bound = std::pin::Pin<Box<dyn Future<Output = Option<BoundSocket>>>>;

impl Qmp {
    /// Listens at a socket.
    ///
    /// # Errors
    /// The address is in use or cannot be had.
    pub(crate) fn bind(socket: &ControlSocket) -> Result<BoundSocket> {
        let bound = kept_sockets::bind(&Address::Unix(socket.path.clone()), socket.permissions);
        bound.with_context(|| format!("--qmp {}", socket.path.display()))
    }

    /// Serves a socket: the commands that need no methods but those of `answers`.
    pub(crate) fn start(
        bound: BoundSocket,
        workers: Workers,
        running: Arc<Running>,
        answers: Answers,
    ) -> Self {
        Self::start_at(workers, running, answers, move |_| async move { Some(bound) }.boxed_local())
    }

    /// As [`start`](Self::start), as soon as the address is free: the process that served there before is about to end.
    pub(crate) fn start_when_free(
        socket: ControlSocket,
        workers: Workers,
        running: Arc<Running>,
    ) -> Self {
        let answers = socket.answers.clone();
        Self::start_at(workers, running, answers, move |stopped| {
            let free = async move {
                loop {
                    match Self::bind(&socket) {
                        Ok(bound) => return bound,
                        Err(error) => tracing::debug!("QMP has to wait: {error:#}"),
                    }
                    kept_sockets::give_up_left(&Address::Unix(socket.path.clone()));
                    sleep(RETRY_DELAY).await;
                }
            };
            let bound = async move {
                match select(free.boxed_local(), stopped).await {
                    Either::Left((bound, _)) => Some(bound),
                    Either::Right(_) => None,
                }
            };
            bound.boxed_local()
        })
    }

    fn start_at(
        workers: Workers,
        running: Arc<Running>,
        answers: Answers,
        bind: impl FnOnce(Stopped) -> Bound + Send + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let gate = Arc::new(Gate::default());
        let own = Arc::clone(&gate);
        let over = workers.first().spawn(move || async move {
            let stopped = stopped.shared();
            let Some(bound) = bind(stopped.clone()).await else { return };
            let happening = running.events().subscribe();
            let context = Rc::new(Context {
                running,
                answers,
                state: Default::default(),
                events: Default::default(),
                happening,
                gate: own,
                stopped,
            });
            serve(bound, context).await;
        });
        Self { workers, stop, over, gate }
    }

    /// Holds commands off.
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Takes no more commands, finishes those that were begun, and removes the socket's file. Gives its loop, on which disks
    /// may have connections that they need until they are closed.
    pub(crate) fn stop(self) -> Workers {
        // It may have ended already.
        let _ = self.stop.send(());
        let _ = self.over.wait();
        self.workers
    }
}

async fn serve(bound: BoundSocket, context: Rc<Context>) {
    let BoundSocket { socket, file, .. } = bound;
    let listener = match Listener::new(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("QMP is not served: {error}"),
    };
    let stopped = context.stopped.clone();
    let serving = accept_clients(listener.clone(), stopped.clone(), |stream| {
        serve_client(Rc::clone(&context), stream).boxed_local()
    });
    let serving = async {
        serving.await;
        // While it still listens: see `SocketFile`.
        drop(file);
    };
    let forwarding = async {
        select(Box::pin(forward(&context)), stopped.clone()).await;
    };
    join(serving, forwarding).await;
    drop(listener);
}
