//! The writer: sends the replies that are there, as many as there are, with one system call.

use std::io;
use std::rc::Rc;

use blockhouse_core::{IoVectorList, Storage};

use super::link::Link;
use super::outbox::{Batch, Errand};
use super::peer_wait::Direction;

/// With this many bytes in one system call, the rest waits for the next one, so that memory comes free
/// while the client still receives.
pub const STEP: usize = 1 << 20;

/// Sends replies until the outbox is closed. `batch` is empty and has room for as many as there can be at
/// once.
pub async fn run<S: Storage>(link: Rc<Link<S>>, mut batch: Batch) {
    let mut list = IoVectorList::new();
    loop {
        match link.outbox.collect(&mut batch).await {
            Errand::Send => {
                if send(&link, &mut batch, &mut list).await.is_err() {
                    link.break_off();
                    discard(&link, &mut batch);
                }
            }
            Errand::Discard => discard(&link, &mut batch),
            Errand::End => return,
        }
    }
}

async fn send<S: Storage>(
    link: &Link<S>,
    batch: &mut Batch,
    list: &mut IoVectorList,
) -> io::Result<()> {
    if batch.bare_count > 0 {
        list.push(batch.bare.lend_range(0, batch.bare_end));
    }
    while !(list.is_empty() && batch.whole.is_empty()) {
        let mut count = 0;
        for whole in &mut batch.whole {
            let length = whole.buffer.len() - whole.start;
            let step = length.min(STEP);
            if !list.is_empty() && list.len() + step > STEP {
                break;
            }
            list.push(whole.buffer.lend_range(whole.start, step));
            if step < length {
                whole.start += step;
                break;
            }
            count += 1;
        }
        link.peer_wait.begin(Direction::Send);
        let result = send_step(link, list).await;
        link.peer_wait.end(Direction::Send);
        list.clear();
        result?;
        leave_bare(link, batch);
        for whole in batch.whole.drain(..count) {
            link.flow.leave(1, whole.footprint);
        }
    }
    Ok(())
}

/// Sends the list. Each part that the socket takes is a step forward of the client.
async fn send_step<S: Storage>(link: &Link<S>, list: &mut IoVectorList) -> io::Result<()> {
    while !list.is_empty() {
        let (result, rest) = link.stream.send_some(std::mem::take(list)).await;
        *list = rest;
        result?;
        link.peer_wait.step(Direction::Send);
    }
    Ok(())
}

fn leave_bare<S: Storage>(link: &Link<S>, batch: &mut Batch) {
    batch.bare_end = 0;
    link.flow.leave(std::mem::take(&mut batch.bare_count), 0);
}

fn discard<S: Storage>(link: &Link<S>, batch: &mut Batch) {
    leave_bare(link, batch);
    for whole in batch.whole.drain(..) {
        link.flow.leave(1, whole.footprint);
    }
}
