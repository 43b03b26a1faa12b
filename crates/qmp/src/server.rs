//! The QMP socket: its clients, on a loop of their own, so that their commands do not delay guests.
//!
//! An upgrade does not hand over connections: it disconnects the clients, which connect to the new
//! process as soon as it listens. So no client relies on state of the old process.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Context as _, Result};
use blockhouse_config::control_socket::{Answers, ControlSocket};
use blockhouse_config::setup::{FirstCommand, Setup};
use blockhouse_daemon::control::{Gate, Monitor, MonitorProtocol, accept_clients};
use blockhouse_daemon::{Running, Workers, kept_sockets};
use blockhouse_engine::{Listener, Stream, Submission, sleep};
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use futures_channel::oneshot;
use futures_util::FutureExt;
use futures_util::future::{Either, join_all, join3, select};

use super::arguments::Arguments;
use super::commands;
use super::context::{Context, Stopped};
use super::events::{catch_up, forward};
use super::session::serve_client;

/// The delay before another attempt to bind an address that was in use.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// QMP as the protocol of control of a server.
pub struct Qmp;

/// A QMP socket that is served.
struct Serving {
    workers: Workers,
    stop: oneshot::Sender<()>,
    over: Submission<()>,
    gate: Arc<Gate>,
}

/// The sockets and connections of a QMP server, and the commands that they may send.
struct Served {
    /// Listening sockets.
    bound: Vec<BoundSocket>,
    /// Clients that are connected already.
    connections: Vec<OwnedFd>,
    /// The control methods that are allowed here. A command exists only if all methods that it
    /// calls are allowed.
    answers: Answers,
    /// The id of the QMP object with the credentials of the server's TLS.
    tls_object: Option<String>,
    /// The commands of a storage daemon that are carried out before any client is served; `None`
    /// for other servers.
    first: Option<Vec<FirstCommand>>,
}

impl Served {
    /// The clients of a server with this setup, at sockets that listen.
    fn new(setup: &Setup, bound: Vec<BoundSocket>) -> Result<Self> {
        let answers =
            setup.server.qmp.as_ref().map(|socket| socket.answers.clone()).unwrap_or_default();
        let daemon = setup.storage_daemon.as_ref();
        let connections = daemon.iter().flat_map(|daemon| &daemon.connections);
        let connections = connections.map(OwnedFd::try_clone).collect::<Result<_, _>>()?;
        Ok(Self {
            bound,
            connections,
            answers,
            tls_object: daemon.and_then(|daemon| daemon.tls_object.clone()),
            first: daemon.map(|daemon| daemon.commands.clone()),
        })
    }
}

/// [`Served`], once the sockets are bound; `None` if QMP is stopped before.
type Later = std::pin::Pin<Box<dyn Future<Output = Option<Served>>>>;

fn bind(socket: &ControlSocket) -> Result<BoundSocket> {
    let bound = kept_sockets::bind(&Address::Unix(socket.path.clone()), socket.permissions);
    bound.with_context(|| format!("--qmp {}", socket.path.display()))
}

impl MonitorProtocol for Qmp {
    fn bind_all(&self, setup: &Setup) -> Result<Vec<BoundSocket>> {
        setup.qmp_sockets().map(bind).collect()
    }

    fn start(
        &self,
        setup: &Setup,
        bound: Vec<BoundSocket>,
        workers: Workers,
        running: Arc<Running>,
    ) -> Result<(Box<dyn Monitor>, Result<()>)> {
        let served = Served::new(setup, bound)?;
        let (told, outcome) = std::sync::mpsc::channel();
        let later = move |_| async move { Some(served) }.boxed_local();
        let serving = Serving::start(workers, running, Some(told), later);
        // There is no answer if the process is ending, because then the loop ends too.
        Ok((Box::new(serving), outcome.recv().unwrap_or(Ok(()))))
    }

    fn start_when_free(
        &self,
        socket: ControlSocket,
        workers: Workers,
        running: Arc<Running>,
    ) -> Box<dyn Monitor> {
        Box::new(Serving::start(workers, running, None, move |stopped| {
            let answers = socket.answers.clone();
            let free = async move {
                loop {
                    match bind(&socket) {
                        Ok(bound) => return bound,
                        Err(error) => tracing::debug!("QMP has to wait: {error:#}"),
                    }
                    kept_sockets::give_up_left(&Address::Unix(socket.path.clone()));
                    sleep(RETRY_DELAY).await;
                }
            };
            let served = async move {
                match select(free.boxed_local(), stopped).await {
                    Either::Left((bound, _)) => Some(Served {
                        bound: vec![bound],
                        connections: Vec::new(),
                        answers,
                        tls_object: None,
                        first: None,
                    }),
                    Either::Right(_) => None,
                }
            };
            served.boxed_local()
        }))
    }
}

impl Serving {
    fn start(
        workers: Workers,
        running: Arc<Running>,
        told: Option<Sender<Result<()>>>,
        later: impl FnOnce(Stopped) -> Later + Send + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let gate = Arc::new(Gate::default());
        let own = Arc::clone(&gate);
        let over = workers.first().spawn(move || async move {
            let stopped = stopped.shared();
            let Some(served) = later(stopped.clone()).await else { return };
            let Served { bound, connections, answers, tls_object, first } = served;
            let happening = running.events().subscribe();
            let context = Rc::new(Context {
                running,
                answers,
                tls_object,
                follows_names: first.is_some(),
                state: Default::default(),
                events: Default::default(),
                happening,
                gate: own,
                stopped,
            });
            let outcome = carry_out_first(&context, first.unwrap_or_default()).await;
            let is_ready = outcome.is_ok();
            // `start_when_free` has no first commands, so no caller waits for their outcome.
            if let Some(told) = told {
                let _ = told.send(outcome);
            }
            if is_ready {
                serve(bound, connections, context).await;
            }
        });
        Self { workers, stop, over, gate }
    }
}

impl Monitor for Serving {
    fn gate(&self) -> &Gate {
        &self.gate
    }

    fn stop(self: Box<Self>) -> Workers {
        // The task may have ended already.
        let _ = self.stop.send(());
        let _ = self.over.wait();
        self.workers
    }
}

/// Executes commands until one fails.
async fn carry_out_first(context: &Rc<Context>, commands: Vec<FirstCommand>) -> Result<()> {
    for FirstCommand { said, name, arguments, are_words } in commands {
        let arguments = Arguments::of_option(arguments, are_words);
        let command = commands::find(&context.answers, name).context("a command of no client")?;
        let returned = (command.run)(context, arguments).await;
        returned.map_err(|error| anyhow::anyhow!("{said}: {}", error.desc()))?;
        catch_up(context);
    }
    Ok(())
}

async fn serve(bound: Vec<BoundSocket>, connections: Vec<OwnedFd>, context: Rc<Context>) {
    let listening = join_all(bound.into_iter().map(|bound| listen(bound, Rc::clone(&context))));
    let connected = join_all(connections.into_iter().map(|connection| {
        let context = Rc::clone(&context);
        async move {
            match Stream::new(connection) {
                Ok(stream) => serve_client(context, stream).await,
                Err(error) => tracing::error!("a client of QMP is not served: {error}"),
            }
        }
    }));
    let forwarding = async {
        select(Box::pin(forward(&context)), context.stopped.clone()).await;
    };
    join3(listening, connected, forwarding).await;
}

/// Serves the clients of a socket until the server ends.
async fn listen(bound: BoundSocket, context: Rc<Context>) {
    let BoundSocket { socket, file, .. } = bound;
    let listener = match Listener::new(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("QMP is not served: {error}"),
    };
    let serve = |stream| serve_client(Rc::clone(&context), stream).boxed_local();
    accept_clients(listener.clone(), context.stopped.clone(), serve).await;
    // The file is removed while the socket still listens: see `SocketFile`.
    drop(file);
    drop(listener);
}
