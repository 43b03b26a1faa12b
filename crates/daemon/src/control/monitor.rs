//! The place of a second protocol of control. A crate above this one implements it, so that this
//! crate is compiled without it.

use std::sync::Arc;

use anyhow::Result;
use blockhouse_config::control_socket::ControlSocket;
use blockhouse_config::setup::Setup;
use blockhouse_nbd::BoundSocket;

use super::Gate;
use crate::process::workers::Workers;
use crate::running::Running;

/// A protocol of control beside JSON-RPC, for example QMP.
pub trait MonitorProtocol {
    /// Listens at the sockets of a setup.
    ///
    /// # Errors
    /// An address is in use or cannot be bound.
    fn bind_all(&self, setup: &Setup) -> Result<Vec<BoundSocket>>;

    /// Carries out the first commands of a setup, and serves clients at sockets that listen. The
    /// returned monitor must be stopped, whatever the outcome of the first commands.
    ///
    /// # Errors
    /// The connections that the setup passes cannot be used; nothing is started.
    fn start(
        &self,
        setup: &Setup,
        bound: Vec<BoundSocket>,
        workers: Workers,
        running: Arc<Running>,
    ) -> Result<(Box<dyn Monitor>, Result<()>)>;

    /// Serves clients as soon as an address is free: the process that served there before is about
    /// to end.
    fn start_when_free(
        &self,
        socket: ControlSocket,
        workers: Workers,
        running: Arc<Running>,
    ) -> Box<dyn Monitor>;
}

/// A [`MonitorProtocol`] that is served.
pub trait Monitor: Send {
    /// The gate that can hold commands off.
    fn gate(&self) -> &Gate;

    /// Accepts no more commands, completes the commands in progress, and removes the files of the
    /// sockets. Returns the loop, which must run until the disks are closed, because they may have
    /// connections on it.
    fn stop(self: Box<Self>) -> Workers;
}
