//! The writer: sends all replies that are ready with one system call.

use std::io;
use std::rc::Rc;

use blockhouse_core::{IoVectorList, Storage};
use blockhouse_engine::Pages;

use super::end::Direction;
use super::reply_queue::{Batch, WriterAction};
use super::state::SessionState;
use crate::tls;

/// Maximum bytes of replies that one system call sends. The rest is sent by later calls, so that
/// memory is freed while the client is still receiving.
pub const SEND_LIMIT: usize = 1 << 20;

/// Sends replies until the queue is closed. `batch` is empty and has capacity for the maximum
/// number of replies.
pub async fn run<S: Storage>(state: Rc<SessionState<S>>, mut batch: Batch) {
    let mut list = IoVectorList::new();
    loop {
        match state.replies.next_batch(&mut batch).await {
            WriterAction::Send => {
                if send(&state, &mut batch, &mut list).await.is_err() {
                    state.abort();
                    batch.clear();
                }
            }
            WriterAction::Discard => batch.clear(),
            WriterAction::End => return,
        }
    }
}

async fn send<S: Storage>(
    state: &SessionState<S>,
    batch: &mut Batch,
    list: &mut IoVectorList,
) -> io::Result<()> {
    while !batch.is_empty() {
        let mut encrypted = None;
        let mut ended = match &state.tls {
            None => batch.lend(list, SEND_LIMIT),
            Some(tls) => {
                let ended = batch.hand_out(tls::SEND_LIMIT, |bytes| tls.encrypt(bytes))?;
                encrypted = tls.take_batch()?;
                encrypted.iter_mut().for_each(|buffer| list.push(buffer.lend()));
                ended
            }
        };
        state.peer_wait.begin(Direction::Send);
        let mut result = send_list(state, list).await;
        if let (Ok(()), Some(pages)) = (&result, batch.next_pages(ended)) {
            result = send_pages(state, pages).await;
            ended += 1;
        }
        state.peer_wait.end(Direction::Send);
        list.clear();
        result?;
        drop(encrypted);
        batch.drop_sent(ended);
    }
    Ok(())
}

/// Sends the list. Each part that the socket takes is progress of the client.
async fn send_list<S: Storage>(state: &SessionState<S>, list: &mut IoVectorList) -> io::Result<()> {
    while !list.is_empty() {
        let (result, rest) = state.stream.send_some(std::mem::take(list)).await;
        *list = rest;
        result?;
        state.peer_wait.step(Direction::Send);
    }
    Ok(())
}

/// Sends the data of a reply from the page cache.
async fn send_pages<S: Storage>(state: &SessionState<S>, pages: &mut Pages) -> io::Result<()> {
    while !pages.is_empty() {
        pages.send_some(&state.stream, &state.pool).await?;
        state.peer_wait.step(Direction::Send);
    }
    Ok(())
}
