//! File operations that the ring has ended without carrying them out.
//!
//! An operation that cannot be done without waiting goes to a worker of the ring, a thread that the
//! kernel starts when it is needed. If the kernel cannot start one (`RLIMIT_NPROC`, `TasksMax=`),
//! the operation ends with ECANCELED, like a cancelled one; but the engine never cancels an
//! operation on a file. So the operation was not carried out, and a thread of the pool makes its
//! system call. The call's result is final.
//!
//! EAGAIN means the same, and ENOMEM means the same for a transfer. Repeating a part of a transfer
//! does no harm, because the range and the data are the same. A *sync* that ends with ENOMEM has
//! run: the kernel reports each failure to write back once, so a second sync would hide the loss.

use std::sync::Arc;

use crate::driver::Completion;
use crate::driver::loop_shared::LoopShared;
use crate::driver::operation::{Operation, OperationTable};
use crate::driver::system_call::FileCall;
use crate::driver::thread_pool::ThreadPool;

/// The message for the log, once for each ring.
pub(super) const REPORT: &str = "io_uring lacks a worker or memory in the kernel: threads carry out what \
    it cannot; raise the limit on processes (ulimit -u, TasksMax= of the service)";

/// Makes threads carry out those operations from `first` on in `done` that were not carried out,
/// and removes them from `done`: the loop gets their results through its mailbox. Returns whether
/// there were any.
pub(super) fn run_elsewhere(
    shared: &Arc<LoopShared>,
    operations: &OperationTable,
    done: &mut Vec<Completion>,
    first: usize,
) -> bool {
    let before = done.len();
    let not_run =
        |completion: &mut Completion| completion.result < 0 && is_unstarted(completion, operations);
    for Completion { token, .. } in done.extract_if(first.., not_run) {
        let call = FileCall::of(operations.operation(token)).expect("an operation on a file");
        // SAFETY: the operation is in flight, because its completion is not reported. So it stays
        // in the loop's table, unmoved, until the loop takes the thread's result from its
        // mailbox.
        unsafe { ThreadPool::shared().run_file(call, token, shared) };
    }
    done.len() < before
}

/// Whether a completion says that nothing, or only a part of a transfer, was carried out.
fn is_unstarted(completion: &Completion, operations: &OperationTable) -> bool {
    let operation = operations.operation(completion.token);
    let is_transfer = matches!(operation, Operation::Read(_) | Operation::Write(..));
    match -completion.result {
        libc::ECANCELED | libc::EAGAIN => FileCall::of(operation).is_some(),
        libc::ENOMEM => is_transfer,
        _ => false,
    }
}
