//! The messages of the protocol (vhost-user specification, "Front-end message types").
//!
//! Guarantees: a message is carried out as a whole, or refused and nothing changed. A front-end that can
//! be told of a refusal is told, and goes on: by `REPLY_ACK`, or in the request's own reply. The connection
//! ends only where the front-end would go on in the belief that the message took effect.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use blockhouse_core::{Storage, WriteCache};

use crate::config;
use crate::connection::{Connection, Message};
use crate::frontend::{Frontend, MAX_REGIONS, Region, Result, Tracked, refused};
use crate::queue::{Kick, Manner};
use crate::vring::UserAddresses;

/// Types of requests (`VHOST_USER_*`). Those that belong to features which are not offered are missing.
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Protocol features (`VHOST_USER_PROTOCOL_F_*`): several queues, a log in shared memory,
/// acknowledgements, messages of ours, the configuration space, in-flight tracking, resets, memory by
/// slots.
const REPLY_ACK: u64 = 1 << 3;
const PROTOCOL_FEATURES: u64 =
    1 << 0 | 1 << 1 | REPLY_ACK | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

/// In the payload of a descriptor for a ring: the ring's number, and that there is no descriptor.
const RING: u64 = 0xff;
const NO_DESCRIPTOR: u64 = 1 << 8;

/// `VHOST_VRING_F_LOG`: changes of the used ring are logged.
const LOG_USED: u32 = 1;

/// What a request is answered by.
enum Reply {
    /// Nothing but the acknowledgement that the front-end may have asked for.
    Done,
    /// This payload, and a descriptor.
    Payload(Vec<u8>, Option<OwnedFd>),
}

impl Reply {
    fn number(number: u64) -> Self {
        Self::Payload(number.to_ne_bytes().into(), None)
    }
}

/// What is left of a payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (field, rest) =
            self.0.split_first_chunk().ok_or_else(|| refused("a payload that is too short"))?;
        self.0 = rest;
        Ok(*field)
    }

    fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// A number that is the whole payload.
    fn only_u64(mut self) -> Result<u64> {
        let number = self.u64()?;
        self.end().map(|()| number)
    }

    /// The state of a ring: its number, and a value.
    fn state(mut self) -> Result<(u32, u32)> {
        let state = (self.u32()?, self.u32()?);
        self.end().map(|()| state)
    }

    fn region(&mut self) -> Result<Region> {
        let (guest, size) = (self.u64()?, self.u64()?);
        Ok(Region { guest, size, user: self.u64()?, offset: self.u64()? })
    }

    /// One region with padding before it.
    fn single_region(mut self) -> Result<Region> {
        self.u64()?;
        let region = self.region()?;
        self.end().map(|()| region)
    }

    /// In-flight memory. Compilers pad it at the end, or do not.
    fn tracked(&mut self) -> Result<Tracked> {
        let (size, offset) = (self.u64()?, self.u64()?);
        Ok(Tracked { size, offset, queues: self.u16()?, entries: self.u16()? })
    }

    fn end(self) -> Result<()> {
        match self.0 {
            [] => Ok(()),
            rest => Err(refused(format_args!("{} bytes too many in a payload", rest.len()))),
        }
    }
}

/// The one descriptor of a message.
fn only(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    let count = descriptors.len();
    let [one]: [OwnedFd; 1] = descriptors
        .try_into()
        .map_err(|_| refused(format_args!("{count} descriptors, not one")))?;
    Ok(one)
}

/// The number of a ring and its descriptor, if it has one.
fn ring_descriptor(
    fields: Fields<'_>,
    descriptors: Vec<OwnedFd>,
) -> Result<(u32, Option<OwnedFd>)> {
    let number = fields.only_u64()?;
    let descriptor = match number & NO_DESCRIPTOR {
        0 => Some(only(descriptors)?),
        _ if descriptors.is_empty() => None,
        _ => return Err(refused("a descriptor that is said not to be there")),
    };
    Ok(((number & RING) as u32, descriptor))
}

impl<S: Storage + Send + Sync> Frontend<S> {
    /// Carries out a message and replies to it.
    ///
    /// # Errors
    /// The connection is to end: a reply cannot be sent, or a refusal cannot be told.
    pub fn handle(&mut self, message: Message, connection: &Connection) -> io::Result<()> {
        let (request, needs_reply) = (message.request, message.needs_reply);
        let outcome = self.carry_out(message);
        let acknowledges = needs_reply && self.protocol_features() & REPLY_ACK != 0;
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
                    self.note_refusal(&why);
                    return connection.reply(request, &1u64.to_ne_bytes(), None);
                }
                // A guest makes its front-end send this one, and finds out by reading what it wrote.
                if request == request::SET_CONFIG {
                    self.note_refusal(&why);
                    return Ok(());
                }
                Err(io::Error::other(why))
            }
        }
    }

    fn carry_out(&mut self, message: Message) -> Result<Reply> {
        let Message { request, payload, descriptors, .. } = message;
        let mut fields = Fields(&payload);
        match request {
            request::GET_FEATURES => {
                return Ok(Reply::number(config::features(&*self.device().export.disk)));
            }
            request::SET_FEATURES => self.take_features(fields.only_u64()?)?,
            request::GET_PROTOCOL_FEATURES => return Ok(Reply::number(PROTOCOL_FEATURES)),
            request::SET_PROTOCOL_FEATURES => {
                let features = fields.only_u64()?;
                let unknown = features & !PROTOCOL_FEATURES;
                if unknown != 0 {
                    return Err(refused(format_args!("unknown protocol features: {unknown:#x}")));
                }
                self.set_protocol_features(features);
            }
            request::SET_OWNER => {}
            // Deprecated, and sent by old front-ends to disable all rings.
            request::RESET_OWNER => self.stop_all(Manner::Orderly),
            request::RESET_DEVICE => self.reset(),
            request::GET_QUEUE_NUM => {
                return Ok(Reply::number(self.device().export.queues.into()));
            }
            request::GET_MAX_MEM_SLOTS => return Ok(Reply::number(MAX_REGIONS)),
            request::SET_MEM_TABLE => {
                let (count, _padding) = (fields.u32()?, fields.u32()?);
                if count as usize != descriptors.len() {
                    let sent = descriptors.len();
                    return Err(refused(format_args!("{count} regions of memory by {sent} files")));
                }
                let regions: Vec<Region> =
                    (0..count).map(|_| fields.region()).collect::<Result<_>>()?;
                fields.end()?;
                self.replace_memory(&regions, &descriptors)?;
            }
            request::ADD_MEM_REG => {
                self.add_memory(&fields.single_region()?, &only(descriptors)?)?;
            }
            // A descriptor that comes with it is closed unused: some front-ends send one.
            request::REM_MEM_REG => self.remove_memory(&fields.single_region()?)?,
            request::SET_LOG_BASE => {
                let (size, offset) = (fields.u64()?, fields.u64()?);
                fields.end()?;
                self.take_log(&only(descriptors)?, offset, size)?;
                return Ok(Reply::Payload(payload, None));
            }
            request::SET_LOG_FD => self.set_log_call(only(descriptors)?)?,
            request::GET_CONFIG => return self.get_config(fields),
            request::SET_CONFIG => self.set_config(fields)?,
            request::GET_INFLIGHT_FD => return self.get_inflight(fields, payload.len()),
            request::SET_INFLIGHT_FD => {
                self.take_tracking(&fields.tracked()?, &only(descriptors)?)?
            }
            request::SET_BACKEND_REQ_FD => self.set_listener(only(descriptors)?)?,
            _ => return self.carry_out_on_ring(request, fields, descriptors),
        }
        Ok(Reply::Done)
    }

    fn carry_out_on_ring(
        &mut self,
        request: u32,
        mut fields: Fields<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply> {
        match request {
            request::SET_VRING_NUM => {
                let (index, count) = fields.state()?;
                self.set_size(index, count)?;
            }
            request::SET_VRING_BASE => {
                let (index, base) = fields.state()?;
                self.set_base(index, base)?;
            }
            request::GET_VRING_BASE => {
                let (index, _) = fields.state()?;
                let vring = self.vring(index)?;
                vring.stop(Manner::Orderly);
                (vring.kick, vring.call) = (None, None);
                let state = [index, vring.next_available.into()];
                return Ok(Reply::Payload(state.map(u32::to_ne_bytes).concat(), None));
            }
            request::SET_VRING_ADDR => {
                let (index, flags) = (fields.u32()?, fields.u32()?);
                let (descriptors, used) = (fields.u64()?, fields.u64()?);
                let (available, log) = (fields.u64()?, fields.u64()?);
                fields.end()?;
                let log = (flags & LOG_USED != 0).then_some(log);
                let addresses = UserAddresses { descriptors, available, used, log };
                self.set_addresses(index, addresses)?;
            }
            request::SET_VRING_KICK => {
                let (index, descriptor) = ring_descriptor(fields, descriptors)?;
                self.set_kick(index, descriptor.map_or(Kick::Polled, Kick::Event))?;
            }
            request::SET_VRING_CALL => {
                let (index, descriptor) = ring_descriptor(fields, descriptors)?;
                self.set_call(index, descriptor)?;
            }
            request::SET_VRING_ERR => {
                let (index, descriptor) = ring_descriptor(fields, descriptors)?;
                self.set_error(index, descriptor)?;
            }
            request::SET_VRING_ENABLE => {
                let (index, enable) = fields.state()?;
                match enable {
                    0 => self.vring(index)?.disable(),
                    1 => self.enable(index)?,
                    _ => return Err(refused(format_args!("queue {index} enabled by {enable}"))),
                }
            }
            _ => return Err(refused("a request that is not known, or of a feature not offered")),
        }
        Ok(Reply::Done)
    }

    /// Bytes of the configuration space; a length of 0 where it does not have them.
    fn get_config(&self, mut fields: Fields<'_>) -> Result<Reply> {
        let [offset, length, flags] = [fields.u32()?, fields.u32()?, fields.u32()?];
        let export = &self.device().export;
        let cache = self.cache.reported();
        let bytes = config::read(&*export.disk, export.queues, cache, offset, length);
        let bytes = bytes.unwrap_or_default();
        let mut payload = [offset, bytes.len() as u32, flags].map(u32::to_ne_bytes).concat();
        payload.extend_from_slice(&bytes);
        Ok(Reply::Payload(payload, None))
    }

    fn set_config(&mut self, mut fields: Fields<'_>) -> Result<()> {
        let [offset, length, _flags] = [fields.u32()?, fields.u32()?, fields.u32()?];
        let bytes = fields.0;
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
        self.change_cache(cache)
    }

    /// New in-flight memory; of a size of 0 if there can be none.
    fn get_inflight(&mut self, mut fields: Fields<'_>, length: usize) -> Result<Reply> {
        let wanted = fields.tracked()?;
        let (made, file) = match self.make_tracking(&wanted) {
            Ok((made, file)) => (made, Some(file)),
            Err(why) => {
                self.note_refusal(&format!("no in-flight tracking: {why}"));
                (Tracked { size: 0, offset: 0, ..wanted }, None)
            }
        };
        let mut payload = [made.size, made.offset].map(u64::to_ne_bytes).concat();
        payload.extend_from_slice(&[made.queues, made.entries].map(u16::to_ne_bytes).concat());
        // As long as the front-end has it, with or without padding.
        payload.resize(length, 0);
        Ok(Reply::Payload(payload, file))
    }
}

/// Whether a request is answered by something that cannot say no.
fn has_own_reply(request: u32) -> bool {
    matches!(
        request,
        request::GET_FEATURES
            | request::GET_PROTOCOL_FEATURES
            | request::GET_QUEUE_NUM
            | request::GET_MAX_MEM_SLOTS
            | request::GET_VRING_BASE
            | request::GET_CONFIG
            | request::GET_INFLIGHT_FD
            | request::SET_LOG_BASE
    )
}
