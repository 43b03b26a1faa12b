//! The messages of the protocol (vhost-user specification, "Front-end message types").
//!
//! Guarantees: a message takes effect as a whole, or is refused and nothing changed. Exception: a
//! ring keeps its kick, or stays enabled, even if its queue cannot start. A refusal is reported to
//! the front-end if the protocol allows it (by `REPLY_ACK`, or the request's own reply), and the
//! connection continues. The connection ends only if the front-end would otherwise assume that the
//! message took effect.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use blockhouse_core::{Storage, WriteCache};

use super::Frontend;
use super::inflight_area::InflightArea;
use super::memory::MAX_REGIONS;
use crate::block::config;
use crate::protocol::{
    Connection, InflightDescription, Message, Payload, Result, feature, has_own_reply,
    only_descriptor, refused, request,
};
use crate::queue::{Kick, StopMode};

/// The answer to a request.
enum Reply {
    /// Only the acknowledgement that the front-end may have requested.
    Done,
    /// A reply with this payload, and a descriptor if any.
    Payload(Vec<u8>, Option<OwnedFd>),
}

impl Reply {
    fn number(number: u64) -> Self {
        Self::Payload(number.to_ne_bytes().into(), None)
    }
}

/// Executes a message and replies to it.
///
/// # Errors
/// The connection must end: a reply cannot be sent, or a refusal cannot be reported.
pub fn handle<S: Storage + Send + Sync>(
    frontend: &mut Frontend<S>,
    message: Message,
    connection: &Connection,
) -> io::Result<()> {
    let (request, needs_reply) = (message.request, message.needs_reply);
    let outcome = execute(frontend, message);
    let acknowledges = needs_reply && frontend.protocol_features() & feature::REPLY_ACK != 0;
    match outcome {
        Ok(Reply::Payload(payload, descriptor)) => {
            let descriptor = descriptor.as_ref().map(AsFd::as_fd);
            connection.reply(request, &payload, descriptor)
        }
        Ok(Reply::Done) if acknowledges => connection.reply(request, &0u64.to_ne_bytes(), None),
        Ok(Reply::Done) => Ok(()),
        Err(why) => {
            let why = format!("request {request} is refused: {why}");
            if has_own_reply(request) {
                return Err(io::Error::other(why));
            }
            if acknowledges {
                frontend.log_refusal(&why);
                return connection.reply(request, &1u64.to_ne_bytes(), None);
            }
            // The refusal is not reported: the guest has caused its front-end to send this message,
            // and reads the result back.
            if request == request::SET_CONFIG {
                frontend.log_refusal(&why);
                return Ok(());
            }
            Err(io::Error::other(why))
        }
    }
}

fn execute<S: Storage + Send + Sync>(
    frontend: &mut Frontend<S>,
    message: Message,
) -> Result<Reply> {
    let Message { request, payload: bytes, descriptors, .. } = message;
    let mut payload = Payload::new(&bytes);
    match request {
        request::GET_FEATURES => {
            let export = &frontend.device().export;
            return Ok(Reply::number(config::features(&*export.disk, export.access)));
        }
        request::SET_FEATURES => frontend.set_features(payload.only_u64()?)?,
        request::GET_PROTOCOL_FEATURES => return Ok(Reply::number(feature::OFFERED)),
        request::SET_PROTOCOL_FEATURES => {
            let features = payload.only_u64()?;
            let unknown = features & !feature::OFFERED;
            if unknown != 0 {
                return Err(refused(format_args!("unknown protocol features: {unknown:#x}")));
            }
            frontend.set_protocol_features(features);
        }
        request::SET_OWNER => {}
        // Deprecated; old front-ends send it to disable all rings.
        request::RESET_OWNER => frontend.stop_all(StopMode::Graceful),
        request::RESET_DEVICE => frontend.reset(),
        request::GET_QUEUE_NUM => {
            return Ok(Reply::number(frontend.device().export.queues.into()));
        }
        request::GET_MAX_MEM_SLOTS => return Ok(Reply::number(MAX_REGIONS)),
        request::SET_MEM_TABLE => {
            let regions = payload.region_table(descriptors.len())?;
            frontend.replace_memory(regions.into_iter().zip(descriptors))?;
        }
        request::ADD_MEM_REG => {
            frontend.add_memory(payload.single_region()?, only_descriptor(descriptors)?)?;
        }
        // Some front-ends send a descriptor with this message, which was not received.
        request::REM_MEM_REG => frontend.remove_memory(&payload.single_region()?)?,
        request::SET_LOG_BASE => {
            frontend.set_log(payload.log()?, only_descriptor(descriptors)?)?;
            return Ok(Reply::Payload(bytes, None));
        }
        request::SET_LOG_FD => frontend.set_log_call(only_descriptor(descriptors)?)?,
        request::GET_CONFIG => return get_config(frontend, payload),
        request::SET_CONFIG => set_config(frontend, payload)?,
        request::GET_INFLIGHT_FD => return get_inflight(frontend, payload, bytes.len()),
        request::SET_INFLIGHT_FD => {
            frontend.set_inflight(payload.inflight()?, only_descriptor(descriptors)?)?;
        }
        request::SET_BACKEND_REQ_FD => {
            frontend.set_backend_channel(only_descriptor(descriptors)?)?;
        }
        _ => return execute_on_ring(frontend, request, payload, descriptors),
    }
    Ok(Reply::Done)
}

fn execute_on_ring<S: Storage + Send + Sync>(
    frontend: &mut Frontend<S>,
    request: u32,
    payload: Payload<'_>,
    descriptors: Vec<OwnedFd>,
) -> Result<Reply> {
    match request {
        request::SET_VRING_NUM => {
            let (index, count) = payload.ring_state()?;
            frontend.vring(index)?.set_size(count)?;
        }
        request::SET_VRING_BASE => {
            let (index, base) = payload.ring_state()?;
            frontend.vring(index)?.set_base(base)?;
        }
        request::GET_VRING_BASE => {
            let (index, _) = payload.ring_state()?;
            let base = frontend.vring(index)?.stop_and_get_base();
            let state = [index, base.into()];
            return Ok(Reply::Payload(state.map(u32::to_ne_bytes).concat(), None));
        }
        request::SET_VRING_ADDR => {
            let (index, addresses) = payload.ring_addresses()?;
            frontend.set_addresses(index, addresses)?;
        }
        request::SET_VRING_KICK => {
            let (index, descriptor) = payload.ring_descriptor(descriptors)?;
            frontend.vring(index)?.set_kick(descriptor.map_or(Kick::Polled, Kick::Event))?;
            frontend.start_if_complete(index)?;
        }
        request::SET_VRING_CALL => {
            let (index, descriptor) = payload.ring_descriptor(descriptors)?;
            frontend.vring(index)?.set_call(descriptor)?;
        }
        request::SET_VRING_ERR => {
            let (index, descriptor) = payload.ring_descriptor(descriptors)?;
            frontend.vring(index)?.set_error(descriptor)?;
        }
        request::SET_VRING_ENABLE => {
            let (index, enable) = payload.ring_state()?;
            match enable {
                0 => frontend.vring(index)?.disable(),
                1 => {
                    frontend.vring(index)?.enable();
                    frontend.start_if_complete(index)?;
                }
                _ => return Err(refused(format_args!("queue {index} enabled by {enable}"))),
            }
        }
        _ => return Err(refused("a request that is not known, or of a feature not offered")),
    }
    Ok(Reply::Done)
}

/// Bytes of the configuration space; a reply of length 0 if the range is not inside of it.
fn get_config<S: Storage + Send + Sync>(
    frontend: &Frontend<S>,
    mut payload: Payload<'_>,
) -> Result<Reply> {
    let [offset, length, flags] = [payload.u32()?, payload.u32()?, payload.u32()?];
    let export = &frontend.device().export;
    let cache = frontend.reported_cache();
    let bytes = config::read(&*export.disk, export.queues, cache, offset, length);
    let bytes = bytes.unwrap_or_default();
    let mut reply = [offset, bytes.len() as u32, flags].map(u32::to_ne_bytes).concat();
    reply.extend_from_slice(&bytes);
    Ok(Reply::Payload(reply, None))
}

fn set_config<S: Storage + Send + Sync>(
    frontend: &mut Frontend<S>,
    mut payload: Payload<'_>,
) -> Result<()> {
    let [offset, length, _flags] = [payload.u32()?, payload.u32()?, payload.u32()?];
    let bytes = payload.rest();
    if bytes.len() != length as usize {
        return Err(refused("a length that is not that of the payload"));
    }
    let cache = match (offset, bytes) {
        (config::WRITEBACK, [0]) => WriteCache::None,
        (config::WRITEBACK, [1]) => WriteCache::Volatile,
        _ => {
            return Err(refused(format_args!(
                "{bytes:?} at {offset} of the configuration; only the write cache can be changed, \
                 to 0 or 1"
            )));
        }
    };
    frontend.set_write_cache(cache)
}

/// New in-flight memory; a reply with size 0 if it cannot be made.
fn get_inflight<S: Storage + Send + Sync>(
    frontend: &mut Frontend<S>,
    mut payload: Payload<'_>,
    length: usize,
) -> Result<Reply> {
    let wanted = payload.inflight()?;
    let (made, file) = match InflightArea::create(&wanted) {
        Ok((made, file)) => (made, Some(file)),
        Err(why) => {
            frontend.log_refusal(&format!("no in-flight tracking: {why}"));
            (InflightDescription { size: 0, offset: 0, ..wanted }, None)
        }
    };
    let mut reply = [made.size, made.offset].map(u64::to_ne_bytes).concat();
    reply.extend_from_slice(&[made.queues, made.entries].map(u16::to_ne_bytes).concat());
    // The reply is as long as the front-end's payload, with or without padding.
    reply.resize(length, 0);
    Ok(Reply::Payload(reply, file))
}
