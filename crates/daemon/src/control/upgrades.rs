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
    /// They go on, and nothing is handed over while there is one.
    #[default]
    Keep,
    /// They are disconnected, when what they have in flight is done. They may connect again.
    Disconnect,
}

/// An upgrade that was asked for.
pub struct UpgradeRequest {
    /// The program to go on with; left out, the one that this process was started from, as it is
    /// on disk now.
    pub binary: Option<PathBuf>,
    /// The treatment of clients with TLS.
    pub encrypted: EncryptedClients,
    /// Where the outcome goes: why not, in one line.
    pub reply: oneshot::Sender<Result<UpgradeReply, String>>,
}

/// The upgrades that were asked for. Clones are of the same ones.
#[derive(Clone, Default)]
pub struct UpgradeRequests(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    waiting: VecDeque<UpgradeRequest>,
    is_over: bool,
}

impl UpgradeRequests {
    /// Asks the main thread for an upgrade, and wakes it. What it gives is cancelled where none is
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
        // As a person would: the main thread waits for signals. It fails for no signal that exists.
        let _ = raise(SIGUSR2);
        outcome
    }

    /// The next one.
    pub fn take(&self) -> Option<UpgradeRequest> {
        self.0.lock().waiting.pop_front()
    }

    /// Cancels those that wait and those to come: this process carries none out.
    pub fn end(&self) {
        let mut state = self.0.lock();
        state.is_over = true;
        state.waiting.clear();
    }
}
