//! Upgrades that were requested over the control socket, until the main thread executes them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use futures_channel::oneshot;
use parking_lot::Mutex;
use signal_hook::consts::SIGURG;
use signal_hook::low_level::raise;

use super::methods::UpgradeReply;

/// The signal that wakes the main thread for requested upgrades. SIGUSR2 asks for an upgrade
/// without a request. SIGURG from another program has no effect, as in a process without a handler.
pub const REQUESTED: i32 = SIGURG;

/// The treatment of clients with TLS, which cannot be handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncryptedClients {
    /// Clients stay connected, and nothing is handed over while there is such a client.
    #[default]
    Keep,
    /// Clients are disconnected when their requests in flight have completed. They may connect
    /// again.
    Disconnect,
}

/// A requested upgrade.
pub struct UpgradeRequest {
    /// The program to continue with; `None`: the first one of `--upgrade-to`, or else this
    /// process's own program.
    pub binary: Option<PathBuf>,
    /// The treatment of clients with TLS.
    pub encrypted: EncryptedClients,
    /// Receives the result, or the reason of the failure in one line.
    pub reply: oneshot::Sender<Result<UpgradeReply, String>>,
}

/// The requested upgrades. Clones share them.
#[derive(Clone, Default)]
pub struct UpgradeRequests(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    waiting: VecDeque<UpgradeRequest>,
    is_over: bool,
}

impl UpgradeRequests {
    /// Requests an upgrade from the main thread, and wakes that thread. The receiver is cancelled
    /// if the upgrade is not executed.
    pub fn ask(
        &self,
        binary: Option<PathBuf>,
        encrypted: EncryptedClients,
    ) -> oneshot::Receiver<Result<UpgradeReply, String>> {
        let (reply, outcome) = oneshot::channel();
        {
            let mut state = self.0.lock();
            if state.is_over {
                return outcome;
            }
            state.waiting.push_back(UpgradeRequest { binary, encrypted, reply });
        }
        // `raise` fails only for invalid signals.
        let _ = raise(REQUESTED);
        outcome
    }

    /// Removes and returns the next request.
    pub fn take(&self) -> Option<UpgradeRequest> {
        self.0.lock().waiting.pop_front()
    }

    /// Cancels waiting and future requests: this process executes no more upgrades.
    pub fn end(&self) {
        let mut state = self.0.lock();
        state.is_over = true;
        state.waiting.clear();
    }
}
