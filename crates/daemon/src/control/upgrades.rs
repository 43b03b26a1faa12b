//! Requests for upgrades from the control socket, until the main thread carries them out.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use futures_channel::oneshot;
use parking_lot::Mutex;
use signal_hook::consts::SIGUSR2;
use signal_hook::low_level::raise;

use super::methods::UpgradeReply;

/// The treatment of clients with TLS, which cannot be handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncryptedClients {
    /// They continue, and nothing is handed over while there is one.
    #[default]
    Keep,
    /// They are disconnected when their requests in flight have completed. They may connect again.
    Disconnect,
}

/// A requested upgrade.
pub struct UpgradeRequest {
    /// The program to continue with; if left out, this process's own program, as it is on disk now.
    pub binary: Option<PathBuf>,
    /// The treatment of clients with TLS.
    pub encrypted: EncryptedClients,
    /// Receives the outcome: or why not, in one line.
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
    /// Requests an upgrade from the main thread, and wakes it. The result is cancelled if none is
    /// carried out.
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
        // As a user would: the main thread waits for signals. It fails for invalid ones only.
        let _ = raise(SIGUSR2);
        outcome
    }

    /// The next one.
    pub fn take(&self) -> Option<UpgradeRequest> {
        self.0.lock().waiting.pop_front()
    }

    /// Cancels waiting and future requests: this process carries none out.
    pub fn end(&self) {
        let mut state = self.0.lock();
        state.is_over = true;
        state.waiting.clear();
    }
}
